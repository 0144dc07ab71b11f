"""The peers' balancers, written from their descriptions, as batching rules of the same signature as ours.

In: the samples of one step. Out: a placement, as from ours. All run padding-free here, also those that pad at home,
and inside one step, also those that pack a whole data set, so that a comparison measures balance and nothing else.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sparsebalance.planning.batching import EMPTY, Batching, Placement, SparsityAware, Unit, check_cap, pack_first_fit
from sparsebalance.planning.expected import ExpectedBudgets
from sparsebalance.planning.latency import NOTHING, Floats, FromTerms, LatencyModel, Terms
from sparsebalance.planning.plan import Latency, Sample, Segment, Topology

VERL_LINEAR = 24576
"""Cost of a token besides attention, where attention over L tokens costs L^2: six times a hidden size of 4096."""


def dense_cost(start: int, end: int) -> int:
    """Tokens [start, end) of a sample under dense causal attention, as verl weighs whole samples of L tokens:
    24576 L + L^2 (calculate_workload, made for a model of 7 billion parameters). Chunks of a sample add up to it."""
    return VERL_LINEAR * (end - start) + end**2 - start**2


def random_order(
    samples: Sequence[Sample], model: LatencyModel, topology: Topology, budgets: ExpectedBudgets, token_cap: int
) -> Placement:
    """Data order dealt round-robin, one sample a micro-batch: what torch's DistributedSampler does."""
    check_cap(samples, token_cap)
    return deal([(Segment.whole(sample),) for sample in samples], topology.dp)


def deal(units: Sequence[Unit], ranks: int) -> Placement:
    """Units round-robin, in the given order; one empty unit for a rank that gets none."""
    return tuple(tuple(units[rank::ranks]) or EMPTY for rank in range(ranks))


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
        for place, group in enumerate(groups):  # one unit each, more where padding-free rows would pass the cap
            ranks[place % topology.dp] += pack_in_order([Segment.whole(sample) for sample in group], token_cap)
        return tuple(tuple(rank) or EMPTY for rank in ranks)


def _padded_cost(count: int, longest: int) -> int:
    """In thousandths, so that it is whole."""
    return count * longest * (1000 + longest)


def cut_sorted(ordered: Sequence[Sample], groups: int) -> list[list[Sample]]:
    """Cut samples sorted by falling length into exactly `groups` runs whose largest padded cost is least."""
    low, high = (_padded_cost(count, ordered[0].length) for count in (1, len(ordered)))
    while low < high:  # the least limit under which greedy filling needs no more than `groups` runs
        middle = (low + high) // 2
        if len(_fill(ordered, middle)) <= groups:
            high = middle
        else:
            low = middle + 1
    runs = _fill(ordered, low)
    while len(runs) < groups:  # splitting a run never raises a cost
        widest = max(range(len(runs)), key=lambda i: (len(runs[i]) > 1, _padded_cost(len(runs[i]), runs[i][0].length)))
        half = len(runs[widest]) // 2
        runs[widest : widest + 1] = [runs[widest][:half], runs[widest][half:]]
    return runs


def _fill(ordered: Sequence[Sample], limit: int) -> list[list[Sample]]:
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
        quadratic: `dense_cost`, with equal counts on all ranks and small samples at both ends of a rank's order,
            as verl does; else cost L and any counts, the strongest simple rule under sparse attention.
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
        costs = [float(dense_cost(0, s.length) if self.quadratic else s.length) for s in samples]
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
    """Order-preserving packing to a token cap, packs dealt round-robin.

    Their number becomes a multiple of the ranks: the last samples of the last packs that hold several leave them,
    one by one, for packs of their own at the end. Where none holds several, ranks get unequal counts.
    Source: Megatron-LM's dp_balanced packing of variable-length samples (which stops a run in that last case).
    """
    check_cap(samples, token_cap)
    packs = pack_in_order([Segment.whole(sample) for sample in samples], token_cap)
    place = len(packs) - 1
    while len(packs) % topology.dp and place >= 0:
        if len(packs[place]) > 1:
            packs.append(packs[place][-1:])
            packs[place] = packs[place][:-1]
        else:
            place -= 1
    return deal(packs, topology.dp)


def binpack(
    samples: Sequence[Sample], model: LatencyModel, topology: Topology, budgets: ExpectedBudgets, token_cap: int
) -> Placement:
    """Best-fit-decreasing packing of the global batch to the token cap, packs dealt round-robin as they were opened.

    Source: ms-swift's packing, with the binpacking library's to_constant_volume; it packs a thousand samples at a
    time and, when streaming, hands the packs to the ranks in turn.
    """
    check_cap(samples, token_cap)
    return deal(pack_best_fit([Segment.whole(sample) for sample in samples], token_cap), topology.dp)


def pack_best_fit(segments: Sequence[Segment], token_cap: int) -> list[Unit]:
    """Longest first, each into the fullest unit with room (the first among equals), else into a new one."""
    units: list[list[Segment]] = []
    room: list[int] = []
    for segment in sorted(segments, key=lambda s: (-s.tokens, s.sample)):
        fitting = [i for i, free in enumerate(room) if segment.tokens <= free]
        index = min(fitting, key=lambda i: room[i], default=len(units))
        if index == len(units):
            units.append([])
            room.append(token_cap)
        units[index].append(segment)
        room[index] -= segment.tokens
    return [tuple(unit) for unit in units]


@dataclass(frozen=True)
class DenseView(FromTerms):
    """Time as a balancer made for dense attention sees it: `dense_cost`, whatever the budgets, on equal ranks.

    A latency model whose milliseconds are relative costs: good for comparing units, not for predicting a step.
    """

    block_size: int
    layers: int

    def terms(self, segments: Sequence[Segment], budgets: Sequence[int]) -> Terms:
        linear = float(VERL_LINEAR * sum(s.tokens for s in segments))
        attend = float(sum(dense_cost(s.start, s.end) for s in segments)) - linear
        return replace(NOTHING, linear=Latency(linear, 0.0), attend=Latency(attend, 0.0))

    def layer_attention(self, segments: Sequence[Segment], budgets: Sequence[int]) -> Floats:
        attend = self.terms(segments, ()).attend.forward_ms / self.layers
        return np.outer([0.0, attend, 0.0], np.ones(len(budgets)))


@dataclass(frozen=True)
class DenseChunks:
    """Our own units, weighed as under dense attention: `SparsityAware` with a `DenseView`.

    Source: ChunkFlow (arXiv 2503.02356): short samples packed up to a chunk size, longer ones cut into chunks of it.

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
        InputError: see `SparsityAware`.
        """
        dense = DenseView(model.block_size, model.layers)
        return SparsityAware(self.unit_size)(samples, dense, topology, budgets, token_cap)


BASELINES: dict[str, Batching] = {
    "random": random_order,
    "batch_rebalance": BatchRebalance(),
    "kk_quadratic": KarmarkarKarp(quadratic=True),
    "kk_tokens": KarmarkarKarp(quadratic=False),
    "kk_tokens_packed": KarmarkarKarp(quadratic=False, packed=True),
    "nextfit_packing": nextfit_packing,
    "binpack": binpack,
    "dense_chunks": DenseChunks(),
}
