"""The peers' balancers, written from their descriptions, as batching rules of the same signature as ours.

All run padding-free here, also those that pad at home, so that a comparison measures balance and not padding.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from sparsebalance.planning.batching import EMPTY, Batching, Placement, Unit, check_cap, pack_first_fit
from sparsebalance.planning.expected import ExpectedBudgets
from sparsebalance.planning.latency import LatencyModel
from sparsebalance.planning.plan import Sample, Segment, Topology


def random_order(
    samples: Sequence[Sample], model: LatencyModel, topology: Topology, budgets: ExpectedBudgets, token_cap: int
) -> Placement:
    """Data order dealt round-robin, one sample a micro-batch: what torch's DistributedSampler does."""
    check_cap(samples, token_cap)
    return tuple(_alone(samples[rank :: topology.dp]) for rank in range(topology.dp))


def _alone(samples: Sequence[Sample]) -> tuple[Unit, ...]:
    return tuple((Segment.whole(sample),) for sample in samples) or EMPTY


@dataclass(frozen=True)
class BatchRebalance:
    """Trainer(train_sampling_strategy="batch_rebalance") of Hugging Face transformers 5, from its documentation.

    The step's samples, sorted by length, are cut into ranks x slots groups of nearly equal cost
    n * longest + 0.001 * n * longest^2; the groups, by falling cost, fill slot after slot across the ranks.
    The cut here is the one with the least largest cost, at least as good as the hill climbing of the original.

    Attributes:
        samples_per_unit: `per_device_train_batch_size`, the mean number of samples in a group.
    """

    samples_per_unit: int = 4

    def __call__(
        self,
        samples: Sequence[Sample],
        model: LatencyModel,
        topology: Topology,
        budgets: ExpectedBudgets,
        token_cap: int,
    ) -> Placement:
        check_cap(samples, token_cap)
        ordered = sorted(samples, key=lambda s: (-s.length, s.id))
        slots = max(1, round(len(samples) / (topology.dp * self.samples_per_unit)))
        groups = cut_sorted(ordered, min(slots * topology.dp, len(samples)))
        groups.sort(key=lambda group: -_padded_cost(len(group), group[0].length))
        ranks: list[list[Unit]] = [[] for _ in range(topology.dp)]
        for place, group in enumerate(groups):
            segments = [Segment.whole(sample) for sample in group]
            ranks[place % topology.dp] += pack_in_order(segments, token_cap)
        return tuple(tuple(rank) or EMPTY for rank in ranks)


def _padded_cost(count: int, longest: int) -> float:
    return count * longest + 0.001 * count * longest**2


def cut_sorted(ordered: Sequence[Sample], groups: int) -> list[list[Sample]]:
    """Cut samples sorted by falling length into exactly `groups` runs whose largest padded cost is least."""
    costs = sorted({_padded_cost(n + 1, s.length) for s in ordered for n in range(len(ordered))})
    low, high = 0, len(costs) - 1
    while low < high:  # the least limit under which greedy filling needs no more than `groups` runs
        middle = (low + high) // 2
        if len(_fill(ordered, costs[middle])) <= groups:
            high = middle
        else:
            low = middle + 1
    runs = _fill(ordered, costs[low])
    while len(runs) < groups:  # splitting a run never raises a cost
        widest = max(range(len(runs)), key=lambda i: (len(runs[i]) > 1, _padded_cost(len(runs[i]), runs[i][0].length)))
        half = len(runs[widest]) // 2
        runs[widest : widest + 1] = [runs[widest][:half], runs[widest][half:]]
    return runs


def _fill(ordered: Sequence[Sample], limit: float) -> list[list[Sample]]:
    runs: list[list[Sample]] = []
    for sample in ordered:
        if runs and _padded_cost(len(runs[-1]) + 1, runs[-1][0].length) <= limit:
            runs[-1].append(sample)
        else:
            runs.append([sample])
    return runs


def pack_in_order(segments: Sequence[Segment], token_cap: int) -> list[Unit]:
    """Next-fit: fill a unit in the given order, open the next one when the cap is reached."""
    units: list[list[Segment]] = []
    free = 0
    for segment in segments:
        if segment.tokens > free:
            units.append([])
            free = token_cap
        units[-1].append(segment)
        free -= segment.tokens
    return [tuple(unit) for unit in units]


def karmarkar_karp(costs: Sequence[float], parts: int, equal_counts: bool = False) -> list[list[int]]:
    """Largest differencing: items -> `parts` lists of indices with nearly equal sums.

    Every item starts as a partition of its own (or, with `equal_counts`, `parts` items by falling cost do,
    one in each part); the two partitions of the largest spread are merged, heaviest part to lightest, until
    one is left. Ties go to the partition with the lowest item. With `equal_counts` the counts differ by at most one.
    Source: Karmarkar and Karp 1982; as used for sequence lengths by verl (utils/seqlen_balancing).
    """
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    size = parts if equal_counts else 1
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for start in range(0, len(order), size):
        members: list[tuple[float, list[int]]] = [(costs[i], [i]) for i in order[start : start + size]]
        members += [(0.0, [])] * (parts - len(members))
        heap.append((members[-1][0] - members[0][0], order[start], members))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, first, a = heapq.heappop(heap)
        _, second, b = heapq.heappop(heap)
        merged = [(x + y, left + right) for (x, left), (y, right) in zip(a, reversed(b))]
        merged.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], min(first, second), merged))
    return [sorted(part) for _, part in heap[0][2]]


@dataclass(frozen=True)
class KarmarkarKarp:
    """Karmarkar-Karp over ranks, one sample a micro-batch unless packed.

    Attributes:
        quadratic: cost 24576 L + L^2, as verl weighs a sequence of L tokens (calculate_workload), with equal
            counts on all ranks and small samples at both ends of a rank's order, as verl does; else cost L and
            any counts, the strongest simple rule under sparse attention.
        packed: pack each rank's samples first-fit, longest first, up to the token cap.
    """

    quadratic: bool
    packed: bool = False

    def __call__(
        self,
        samples: Sequence[Sample],
        model: LatencyModel,
        topology: Topology,
        budgets: ExpectedBudgets,
        token_cap: int,
    ) -> Placement:
        check_cap(samples, token_cap)
        costs = [float(s.length * (24576 + s.length) if self.quadratic else s.length) for s in samples]
        parts = karmarkar_karp(costs, topology.dp, equal_counts=self.quadratic)
        ranks = []
        for part in parts:
            members = [samples[i] for i in part]
            if self.packed:
                ranks.append(pack_first_fit([Segment.whole(sample) for sample in members], token_cap))
            else:
                ranks.append(_alone(small_at_both_ends(members) if self.quadratic else members))
        return tuple(ranks)


def small_at_both_ends(samples: Sequence[Sample]) -> list[Sample]:
    """Rising, then falling lengths: a pipeline fills and drains with the cheap ones."""
    rising = sorted(samples, key=lambda s: (s.length, s.id))
    return rising[::2] + rising[1::2][::-1]


def nextfit_packing(
    samples: Sequence[Sample], model: LatencyModel, topology: Topology, budgets: ExpectedBudgets, token_cap: int
) -> Placement:
    """Order-preserving packing to a token cap, packs dealt to the rank with the fewest tokens so far.

    Source: Megatron-LM's dp_balanced packing of variable-length samples, from its manual.
    """
    check_cap(samples, token_cap)
    ranks: list[list[Unit]] = [[] for _ in range(topology.dp)]
    tokens = [0] * topology.dp
    for unit in pack_in_order([Segment.whole(sample) for sample in samples], token_cap):
        rank = tokens.index(min(tokens))
        ranks[rank].append(unit)
        tokens[rank] += sum(segment.tokens for segment in unit)
    return tuple(tuple(rank) or EMPTY for rank in ranks)


BASELINES: dict[str, Batching] = {
    "random": random_order,
    "batch_rebalance": BatchRebalance(),
    "kk_quadratic": KarmarkarKarp(quadratic=True),
    "kk_tokens": KarmarkarKarp(quadratic=False),
    "kk_tokens_packed": KarmarkarKarp(quadratic=False, packed=True),
    "nextfit_packing": nextfit_packing,
}
