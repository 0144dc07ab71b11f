"""Sparsity-aware batching (SAB): which samples share a micro-batch, and on which rank it runs.

In: the samples of one step and a latency model. Out: a placement, units per rank in execution order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sparsebalance.planning.errors import InputError
from sparsebalance.planning.expected import ExpectedBudgets
from sparsebalance.planning.latency import Floats, LatencyModel
from sparsebalance.planning.plan import Sample, Segment, Topology

Unit = tuple[Segment, ...]
Placement = tuple[tuple[Unit, ...], ...]  # [data-parallel rank][execution order]

EMPTY: tuple[Unit, ...] = ((),)  # a rank without samples says so with one empty unit
PACK_SIZES = (1024, 4096, 16384)  # tokens, below the cap
PACK_TOLERANCE = 0.01


class Batching(Protocol):
    """Samples of one step -> placement. Pure and deterministic: every rank calls it and gets the same answer."""

    def __call__(
        self,
        samples: Sequence[Sample],
        model: LatencyModel,
        topology: Topology,
        budgets: ExpectedBudgets,
        token_cap: int,
    ) -> Placement: ...


def check_not_empty(samples: Sequence[Sample]) -> None:
    """Raises:
    InputError: no samples.
    """
    if not samples:
        raise InputError("the step has no samples; a global batch needs at least one")


def check_cap(samples: Sequence[Sample], token_cap: int) -> None:
    """Raises:
    InputError: no samples, or a sample that alone is over the cap of a micro-batch.
    """
    check_not_empty(samples)
    longest = max(samples, key=lambda sample: (sample.length, -sample.id))
    if longest.length > token_cap:
        raise InputError(
            f"sample {longest.id} has {longest.length} tokens, over the cap of {token_cap} tokens per "
            "micro-batch; raise token_cap, or truncate or drop longer samples"
        )


@dataclass(frozen=True)
class SparsityAware:
    """Place samples on ranks by predicted latency, then make units of each rank's samples.

    Placement: largest first on the rank that is done first with it, then moves and swaps that lower the slowest
    rank; a slow rank (`LatencyModel.rank_factor`) is given less. Units without a unit size: first fit, longest
    first, up to the pack size that is predicted fastest, at most the token cap. With one: samples longer than it
    are cut in chunks of nearly equal size, shorter ones are packed up to it, and units run by falling cost.
    A rank without samples gets one empty unit.

    Attributes:
        unit_size: tokens, a multiple of the block size; None leaves samples whole.
    """

    unit_size: int | None = None

    def __call__(
        self,
        samples: Sequence[Sample],
        model: LatencyModel,
        topology: Topology,
        budgets: ExpectedBudgets,
        token_cap: int,
    ) -> Placement:
        """Raises:
        InputError: see `check_cap`; or a unit size that is no multiple of the block size, or over the cap.
        """
        size = self.unit_size
        if size is None:
            check_cap(samples, token_cap)
        else:
            check_not_empty(samples)
            check_unit_size(size, model.block_size, token_cap)
        pieces = [cut(sample, size, model.block_size) for sample in samples]
        shortest = [Segment.whole(min(samples, key=lambda sample: (sample.length, sample.id)))]
        default = budgets.default
        alone = model.latency(shortest, default).total_ms
        # In a packed unit a sample pays no fixed cost of its own: count what it adds to a unit with another one.
        costs = np.array(
            [
                model.latency((*shortest, *parts), budgets.of(sample.id)).total_ms - alone
                if len(parts) == 1
                else sum(model.latency((part,), budgets.of(sample.id)).total_ms for part in parts)
                for sample, parts in zip(samples, pieces)
            ]
        )
        factors = np.array([model.rank_factor(rank) for rank in range(topology.dp)])
        ranks = refine(largest_first(costs, factors), costs, factors)
        return tuple(
            _pack_fastest([pieces[i][0] for i in rank], model, default, token_cap)
            if size is None
            else _units([pieces[i] for i in rank], size, model, default)
            for rank in ranks
        )


sab: Batching = SparsityAware()


def check_unit_size(size: int, block_size: int, token_cap: int) -> None:
    """Raises:
    InputError: a unit size that is no multiple of the block size, or over the cap.
    """
    if size < block_size or size % block_size:
        raise InputError(f"unit size {size} is no multiple of the block size {block_size}; chunks are whole blocks")
    if size > token_cap:
        raise InputError(f"unit size {size} is over the cap of {token_cap} tokens per micro-batch; lower it")


def cut(sample: Sample, unit_size: int | None, block_size: int) -> tuple[Segment, ...]:
    """The sample whole, or in the fewest chunks of at most `unit_size` tokens, as equal as whole blocks allow.

    Where its target tokens lie is not known to a plan made of lengths alone: they are taken to be its last ones,
    as in instruction data.
    """
    if unit_size is None or sample.length <= unit_size:
        return (Segment.whole(sample),)
    count = -(-sample.length // unit_size)
    size = -(-sample.length // (count * block_size)) * block_size
    first_target = sample.length - sample.targets
    return tuple(
        Segment(
            sample.id,
            start,
            min(start + size, sample.length),
            sample.length,
            max(0, min(start + size, sample.length) - max(start, first_target)),
        )
        for start in range(0, sample.length, size)
    )


def _units(
    pieces: Sequence[tuple[Segment, ...]], size: int, model: LatencyModel, budgets: Sequence[int]
) -> tuple[Unit, ...]:
    """Chunks as units of their own, packs of short samples, the costliest first: a pipeline drains on cheap ones."""
    chains: list[tuple[Unit, ...]] = [tuple((part,) for part in parts) for parts in pieces if len(parts) > 1]
    whole = [parts[0] for parts in pieces if len(parts) == 1]
    if whole:
        chains += [(unit,) for unit in pack_first_fit(whole, size)]
    cost = [sum(model.latency(unit, budgets).total_ms for unit in chain) for chain in chains]
    order = sorted(range(len(chains)), key=lambda i: (-cost[i], i))
    return tuple(unit for i in order for unit in chains[i]) or EMPTY


def _pack_fastest(
    segments: Sequence[Segment], model: LatencyModel, budgets: Sequence[int], token_cap: int
) -> tuple[Unit, ...]:
    """Pack up to the smallest of a few sizes whose predicted time is within PACK_TOLERANCE of the best one.

    Larger packs save fixed costs but need more memory, and beyond some size they run slower where caches are
    small; the latency model knows both.
    """
    packings: dict[tuple[Unit, ...], float] = {}
    for size in (*PACK_SIZES, token_cap):
        units = pack_first_fit(segments, min(size, token_cap))
        if units not in packings:
            packings[units] = sum(model.latency(unit, budgets).total_ms for unit in units)
    limit = min(packings.values()) * (1 + PACK_TOLERANCE)
    return next(units for units, ms in packings.items() if ms <= limit)


def largest_first(costs: Floats, factors: Floats) -> list[list[int]]:
    """Deal items by falling cost, each to the rank that is then done first (the lowest rank among equals).

    Args:
        costs: [items] milliseconds on a rank of factor 1. factors: [ranks], how much slower each rank is.
    """
    placed: list[list[int]] = [[] for _ in factors]
    loads = np.zeros(len(factors))
    for item in np.lexsort((np.arange(len(costs)), -costs)).tolist():
        done = loads + costs[item] * factors
        rank = int(np.argmin(done))
        placed[rank].append(item)
        loads[rank] = done[rank]
    return placed


def refine(ranks: list[list[int]], costs: Floats, factors: Floats, rounds: int = 100) -> list[list[int]]:
    """Lower the slowest rank by moving one of its items to another rank, or swapping it for a cheaper one.

    Each round takes the change that leaves the slower of the two ranks fastest, and stops when none helps.
    """
    placed = [list(rank) for rank in ranks]
    loads = np.array([costs[rank].sum() for rank in placed]) * factors
    for _ in range(rounds):
        slow = int(np.argmax(loads))
        for fast in np.argsort(loads, kind="stable").tolist():
            if fast == slow or loads[slow] <= loads[fast]:
                continue
            give = costs[placed[slow]]
            take = np.append(costs[placed[fast]], 0.0)  # taking "nothing" makes the swap a move
            change = give[:, None] - take[None, :]
            later = np.maximum(loads[slow] - change * factors[slow], loads[fast] + change * factors[fast])
            best = int(np.argmin(later))
            if later.size == 0 or later.flat[best] > loads[slow] * (1 - 1e-9):
                continue
            x, y = divmod(best, len(take))
            item = placed[slow].pop(x)
            if y < len(placed[fast]):
                placed[slow].append(placed[fast].pop(y))
            placed[fast].append(item)
            loads[slow] -= change[x, y] * factors[slow]
            loads[fast] += change[x, y] * factors[fast]
            break
        else:
            break
    return placed


def pack_first_fit(segments: Sequence[Segment], token_cap: int) -> tuple[Unit, ...]:
    """Longest first into the first unit with room; one empty unit where there is nothing to pack.

    A segment over the cap gets a unit of its own.
    """
    units: list[list[Segment]] = []
    room: list[int] = []
    for segment in sorted(segments, key=lambda s: (-s.tokens, s.sample)):
        index = next((i for i, free in enumerate(room) if segment.tokens <= free), len(units))
        if index == len(units):
            units.append([])
            room.append(token_cap)
        units[index].append(segment)
        room[index] -= segment.tokens
    return tuple(tuple(unit) for unit in units) or EMPTY
