"""Sparsity-aware batching (SAB): which samples share a micro-batch, and on which rank it runs.

In: the samples of one step and a latency model. Out: a placement, units per rank in execution order. Units are made in
`units.py`, ranks are balanced in `placement.py`; `plan_order.py` orders each rank for a pipeline.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sparsebalance.planning.expected import ExpectedBudgets
from sparsebalance.planning.latency import Floats, LatencyModel
from sparsebalance.planning.placement import largest_first, refine
from sparsebalance.planning.plan import Sample, Segment, Topology
from sparsebalance.planning.units import (
    EMPTY,
    Placement,
    Unit,
    check_cap,
    check_not_empty,
    check_unit_size,
    cut,
    longest_first,
    pack_first_fit,
    pack_sorted,
    split_packs,
)

__all__ = [
    "EMPTY",
    "Batching",
    "Placement",
    "SparsityAware",
    "Unit",
    "check_cap",
    "check_not_empty",
    "check_unit_size",
    "cut",
    "largest_first",
    "pack_first_fit",
    "refine",
    "sab",
]

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


@dataclass(frozen=True)
class SparsityAware:
    """Place samples on ranks by predicted latency, then make units of each rank's samples.

    Placement: largest first on the rank that is done first with it, then exchanges that lower the slowest rank; a
    slow rank (`LatencyModel.rank_factor`) is given less. Units without a unit size: first fit, longest first, up to
    the pack size that is predicted fastest, at most the token cap. With one: samples longer than it are cut in chunks
    of nearly equal size, shorter ones are packed up to it. Units run by falling cost: a pipeline drains on cheap
    ones. A rank without samples gets one empty unit.

    Attributes:
        unit_size: tokens, a multiple of the block size; None leaves samples whole.
        equal_counts: give all ranks equally many units, for back ends that need it: where a rank has fewer than
            another, its packs are split, and where that is not enough, empty units follow at its end.
    """

    unit_size: int | None = None
    equal_counts: bool = False

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
        chains = [tuple([(part,) for part in cut(sample, size, model.block_size)]) for sample in samples]
        costs, alone = _costs(samples, chains, model, budgets)
        factors = np.array([model.rank_factor(rank) for rank in range(topology.dp)])
        ranks = refine(largest_first(costs, factors), costs, factors)
        chunked = [[chains[i] for i in rank if len(chains[i]) > 1] for rank in ranks]
        shorter = [longest_first([chains[i][0][0] for i in rank if len(chains[i]) == 1]) for rank in ranks]
        if size is None:
            packs = _fastest_packs(shorter, model, budgets, token_cap)
        else:
            packs = [pack_sorted(segments, size) for segments in shorter]
        if self.equal_counts:
            chunks = [sum(map(len, own)) for own in chunked]
            most = max(count + len(own) for count, own in zip(chunks, packs))
            packs = [split_packs(own, most - count) for count, own in zip(chunks, packs)]
        of_sample = dict(zip((sample.id for sample in samples), costs.tolist()))
        placed = [_by_falling_cost(*own, of_sample, alone) for own in zip(chunked, packs)]
        count = max(map(len, placed)) if self.equal_counts else 1
        return tuple(units + EMPTY * (count - len(units)) for units in placed)


sab: Batching = SparsityAware()


def _costs(
    samples: Sequence[Sample], chains: Sequence[tuple[Unit, ...]], model: LatencyModel, budgets: ExpectedBudgets
) -> tuple[Floats, float]:
    """[samples] milliseconds of each, and of the shortest one as a unit of its own.

    In a packed unit a sample pays no fixed cost of its own: counted is what it adds to a unit with the shortest one.
    Chunks are units of their own.
    """
    shortest = Segment.whole(min(samples, key=lambda sample: (sample.length, sample.id)))
    units: list[Unit] = [(shortest,)]
    for chain in chains:
        if len(chain) == 1:
            units.append((shortest, *chain[0]))
        else:
            units += chain
    counts = np.array([len(chain) for chain in chains])
    blocks = np.array(budgets.default)
    if not budgets.samples:
        ms = model.many_terms(units, blocks).sum((0, 1))
        alone = ms[:1]
    else:
        each = np.array([budgets.of(sample.id) for sample in samples])
        ms = model.many_terms(units, np.concatenate([blocks[None], np.repeat(each, counts, axis=0)])).sum((0, 1))
        # With the budgets of the sample that it is taken off, or similar lengths would seem to cost nothing alike.
        alone = model.many_terms([units[0]] * len(samples), each).sum((0, 1))
    costs: Floats = np.add.reduceat(ms[1:], np.cumsum(counts) - counts) - np.where(counts == 1, alone, 0.0)
    return costs, float(ms[0])


def _fastest_packs(
    ranks: Sequence[Sequence[Segment]], model: LatencyModel, budgets: ExpectedBudgets, token_cap: int
) -> list[tuple[Unit, ...]]:
    """Pack each rank up to the smallest of a few sizes whose predicted time is within PACK_TOLERANCE of the best one.

    Larger packs save fixed costs but need more memory, and beyond some size they run slower where caches are
    small; the latency model knows both.
    """
    sizes = sorted({min(size, token_cap) for size in (*PACK_SIZES, token_cap)})
    packings = [_packings(rank, sizes) for rank in ranks]
    units = [unit for rank in packings for packing in rank for unit in packing]
    times = iter(model.many_terms(units, np.array(budgets.default)).sum((0, 1)).tolist())
    chosen = []
    for rank in packings:
        ms = [sum(itertools.islice(times, len(packing))) for packing in rank]
        limit = min(ms) * (1 + PACK_TOLERANCE)
        chosen.append(next(packing for packing, predicted in zip(rank, ms) if predicted <= limit))
    return chosen


def _packings(segments: Sequence[Segment], sizes: Sequence[int]) -> list[tuple[Unit, ...]]:
    """Distinct packings up to each of the rising sizes."""
    found = [pack_sorted(segments, sizes[0])]
    for size in sizes[1:]:
        if len(found[-1]) < 2:  # more room changes nothing
            break
        packing = pack_sorted(segments, size)
        if packing != found[-1]:
            found.append(packing)
    return found


def _by_falling_cost(
    chains: Sequence[tuple[Unit, ...]], packs: Sequence[Unit], of_sample: Mapping[int, float], alone: float
) -> tuple[Unit, ...]:
    """The costliest first; `alone` makes up for what samples do not pay in a pack."""
    packed = [alone + sum(of_sample[segment.sample] for segment in pack) for pack in packs]
    ordered = [*chains, *((pack,) for pack in packs)]
    cost = [of_sample[chain[0][0].sample] for chain in chains] + packed
    return tuple(unit for i in sorted(range(len(cost)), key=lambda i: (-cost[i], i)) for unit in ordered[i])
