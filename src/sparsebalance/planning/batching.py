"""Sparsity-aware batching (SAB): which samples share a micro-batch, and on which rank it runs.

In: the samples of one step and a latency model. Out: a placement, units per rank in execution order.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sparsebalance.planning.errors import InputError
from sparsebalance.planning.latency import LatencyModel
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
        budgets: Sequence[int],
        token_cap: int,
    ) -> Placement: ...


def check_cap(samples: Sequence[Sample], token_cap: int) -> None:
    """Raises:
    InputError: no samples, or a sample that alone is over the cap of a micro-batch.
    """
    if not samples:
        raise InputError("the step has no samples; a global batch needs at least one")
    longest = max(samples, key=lambda sample: (sample.length, -sample.id))
    if longest.length > token_cap:
        raise InputError(
            f"sample {longest.id} has {longest.length} tokens, over the cap of {token_cap} tokens per "
            "micro-batch; raise token_cap, or truncate or drop longer samples"
        )


def sab(
    samples: Sequence[Sample],
    model: LatencyModel,
    topology: Topology,
    budgets: Sequence[int],
    token_cap: int,
) -> Placement:
    """Place samples on ranks by predicted latency, then pack each rank's samples.

    Placement: largest first on the least loaded rank, then moves and swaps that lower the slowest rank.
    Packing: first fit, longest first, up to the pack size that is predicted fastest, at most the token cap. A
    rank without samples gets one empty unit.

    Raises:
        InputError: see `check_cap`.
    """
    check_cap(samples, token_cap)
    segments = [Segment.whole(sample) for sample in samples]
    # In a packed unit a sample pays no fixed cost of its own: count what it adds to a unit with another one.
    other = min(segments, key=lambda s: (s.tokens, s.sample))
    alone = model.latency((other,), budgets).total_ms
    costs = np.array([model.latency((other, s), budgets).total_ms for s in segments]) - alone
    ranks = refine(largest_first(costs, topology.dp), costs)
    return tuple(_pack_fastest([segments[i] for i in rank], model, budgets, token_cap) for rank in ranks)


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


def largest_first(costs: NDArray[np.float64], ranks: int) -> list[list[int]]:
    """Deal items by falling cost, each to the rank with the least so far (the lowest rank among equals)."""
    placed: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0.0, rank) for rank in range(ranks)]
    for item in np.lexsort((np.arange(len(costs)), -costs)).tolist():
        load, rank = heapq.heappop(loads)
        placed[rank].append(item)
        heapq.heappush(loads, (load + float(costs[item]), rank))
    return placed


def refine(ranks: list[list[int]], costs: NDArray[np.float64], rounds: int = 100) -> list[list[int]]:
    """Lower the slowest rank by moving one of its items to another rank, or swapping it for a cheaper one.

    Each round takes the change that leaves the slower of the two ranks fastest, and stops when none helps.
    """
    placed = [list(rank) for rank in ranks]
    loads = np.array([costs[rank].sum() for rank in placed])
    for _ in range(rounds):
        slow = int(np.argmax(loads))
        for fast in np.argsort(loads, kind="stable").tolist():
            gap = loads[slow] - loads[fast]
            if fast == slow or gap <= 0:
                continue
            give = costs[placed[slow]]
            take = np.append(costs[placed[fast]], 0.0)  # taking "nothing" makes the swap a move
            change = give[:, None] - take[None, :]
            better = np.where((change > 0) & (change < gap), np.abs(change - gap / 2), np.inf)
            best = int(np.argmin(better))
            x, y = divmod(best, len(take))
            if not np.isfinite(better.flat[best]) or change[x, y] < 1e-9 * loads[slow]:
                continue
            item = placed[slow].pop(x)
            if y < len(placed[fast]):
                placed[slow].append(placed[fast].pop(y))
            placed[fast].append(item)
            loads[slow] -= change[x, y]
            loads[fast] += change[x, y]
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
