"""Order of the units within each rank, by simulation: what a pipeline runs first and last.

In: a step's micro-batches per rank. Out: the same, the ranks that the step waits for in the fastest of a few orders.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from sparsebalance.planning.latency import LatencyModel
from sparsebalance.planning.pipeline import PipelineModel, simulate_rank
from sparsebalance.planning.plan import MicroBatch, Ranks, Topology, chain_lengths

SIMULATED_UNITS = 1024  # most units in all orders that are tried; a large plan keeps its order

Chain = tuple[MicroBatch, ...]  # the chunks of a sample, or one other unit


def order_by_simulation(
    ranks: Sequence[Sequence[MicroBatch]], model: LatencyModel, topology: Topology, pipeline: PipelineModel
) -> Ranks:
    """Units per rank in the order to run them; chunks of a sample stay together, empty units stay last.

    The slowest rank is simulated alone in a few orders and keeps the fastest of them, the given one among equals; then
    the rank that is slowest now, until one has been tried before. Only the slowest rank holds the step up.

    Raises:
        InputError: see `simulate_plan`.
    """
    ordered = [tuple(rank) for rank in ranks]
    left = SIMULATED_UNITS - sum(map(len, ordered))
    if topology.pp == 1 or left < 0:
        return tuple(ordered)

    def ms(rank: int, units: Sequence[MicroBatch]) -> float:
        return simulate_rank(rank, units, model, topology, pipeline)

    times = [ms(rank, units) for rank, units in enumerate(ordered)]
    untried = set(range(len(ordered)))
    while (slow := max(range(len(times)), key=times.__getitem__)) in untried and left > 0:
        untried.remove(slow)
        for units in _orders(ordered[slow]):
            left -= len(units)
            if (now := ms(slow, units)) < times[slow]:
                times[slow], ordered[slow] = now, units
    return tuple(ordered)


def _orders(units: tuple[MicroBatch, ...]) -> list[tuple[MicroBatch, ...]]:
    """The second or third costliest sample first, and the cheapest at both ends; the rest by falling cost."""
    falling = sorted(_chains([unit for unit in units if unit.segments]), key=_ms, reverse=True)
    rising = falling[::-1]
    orders = [[*falling[n : n + 1], *falling[:n], *falling[n + 1 :]] for n in (1, 2) if n < len(falling)]
    orders.append([*rising[::2], *rising[1::2][::-1]])
    empty = tuple(unit for unit in units if not unit.segments)
    return [(*itertools.chain.from_iterable(order), *empty) for order in orders]


def _chains(units: Sequence[MicroBatch]) -> list[Chain]:
    ends = itertools.accumulate(chain_lengths([unit.segments for unit in units]), initial=0)
    return [tuple(units[start:end]) for start, end in itertools.pairwise(ends)]


def _ms(chain: Chain) -> float:
    return sum(unit.latency.total_ms for unit in chain)
