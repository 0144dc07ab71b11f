"""Each peer's balancer against an example worked by hand."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsebalance.planning.baselines import (
    BASELINES,
    BatchRebalance,
    DenseChunks,
    DenseView,
    KarmarkarKarp,
    binpack,
    cut_sorted,
    dense_cost,
    karmarkar_karp,
    nextfit_packing,
    pack_best_fit,
    random_order,
    small_at_both_ends,
)
from sparsebalance.planning.batching import Placement, cut, sab
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.expected import ExpectedBudgets
from sparsebalance.planning.latency import RooflineModel
from sparsebalance.planning.plan import Sample, Segment, Topology
from sparsebalance.planning.policy import named_policy, plan_step
from tests.conftest import samples_of


def ids(placement: Placement) -> list[list[list[int]]]:
    """Sample ids per rank and unit."""
    return [[[segment.sample for segment in unit] for unit in rank] for rank in placement]


def test_random_deals_the_data_order(roofline: RooflineModel) -> None:
    placement = random_order(samples_of(9, 8, 7, 6, 5), roofline, Topology(dp=2), ExpectedBudgets((2, 2, 2)), 10)
    assert ids(placement) == [[[0], [2], [4]], [[1], [3]]]


def test_random_gives_a_rank_without_samples_one_empty_unit(roofline: RooflineModel) -> None:
    placement = random_order(samples_of(9), roofline, Topology(dp=3), ExpectedBudgets((2, 2, 2)), 10)
    assert placement[1:] == (((),), ((),))


def test_karmarkar_karp_on_the_textbook_example() -> None:
    """Differencing 8, 7, 6, 5, 4 ends with a difference of 2: sums 16 and 14 (the optimum is 15, 15)."""
    parts = karmarkar_karp([8, 7, 6, 5, 4], 2)
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in part) for part in parts) == [14, 16]


def test_karmarkar_karp_with_equal_counts() -> None:
    """Pairs by falling cost are (8, 7), (6, 5), (4, 3), spread 1 each; merging gives sums 17 and 16."""
    costs = [8, 7, 6, 5, 4, 3]
    parts = karmarkar_karp(costs, 2, equal_counts=True)
    assert [len(part) for part in parts] == [3, 3]
    assert sorted(sum(costs[i] for i in part) for part in parts) == [16, 17]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=9), st.integers(1, 4), st.booleans())
def test_karmarkar_karp_keeps_every_item(costs: list[int], parts: int, equal: bool) -> None:
    found = karmarkar_karp([float(c) for c in costs], parts, equal)
    assert len(found) == parts
    assert sorted(itertools.chain(*found)) == list(range(len(costs)))
    if equal:
        assert max(map(len, found)) - min(map(len, found)) <= 1


@given(st.lists(st.integers(1, 100), min_size=2, max_size=8))
def test_karmarkar_karp_is_at_most_the_known_bound_from_optimal(costs: list[int]) -> None:
    """For two parts the largest sum is at most 7/6 of the optimum (Fischetti and Martello 1987)."""
    best = min(
        max(sum(c for c, s in zip(costs, signs) if s), sum(c for c, s in zip(costs, signs) if not s))
        for signs in itertools.product((0, 1), repeat=len(costs))
    )
    found = max(sum(costs[i] for i in part) for part in karmarkar_karp([float(c) for c in costs], 2))
    assert found <= 7 / 6 * best + 1e-9


def test_kk_quadratic_weighs_as_verl_does(roofline: RooflineModel) -> None:
    """24576 L + L^2 at 24,576 and twice 16,384 tokens: 1,208 M against 671 M each, so the long one is not alone
    with equal counts: {long, shortest} and the two middle ones."""
    samples = samples_of(24576, 16384, 16384, 100)
    placement = KarmarkarKarp(quadratic=True)(samples, roofline, Topology(dp=2), ExpectedBudgets((2, 2, 2)), 30000)
    assert sorted(sorted(i for unit in rank for i in unit) for rank in ids(placement)) == [[0, 3], [1, 2]]


def test_small_ones_stand_at_both_ends() -> None:
    lengths = [s.length for s in small_at_both_ends(samples_of(50, 10, 40, 20, 30))]
    assert lengths == [10, 30, 50, 40, 20]


def test_kk_tokens_balances_tokens_and_packs_where_asked(roofline: RooflineModel) -> None:
    samples = samples_of(100, 60, 40, 30, 30)
    placement = KarmarkarKarp(quadratic=False)(samples, roofline, Topology(dp=2), ExpectedBudgets((2, 2, 2)), 100)
    tokens = [sum(segment.tokens for unit in rank for segment in unit) for rank in placement]
    assert sorted(tokens) == [130, 130]
    packed = KarmarkarKarp(quadratic=False, packed=True)(
        samples, roofline, Topology(dp=2), ExpectedBudgets((2, 2, 2)), 100
    )
    assert max(len(rank) for rank in packed) == 2
    assert all(sum(s.tokens for s in unit) <= 100 for rank in packed for unit in rank)


def test_cut_sorted_takes_the_least_largest_cost() -> None:
    """Padded costs n L (1 + L / 1000): {100} 110, {60, 50} 127.2, {40, 30, 20} 124.8; no cut of 3 is below 127.2."""
    groups = cut_sorted(samples_of(100, 60, 50, 40, 30, 20), 3)
    assert [[s.length for s in group] for group in groups] == [[100], [60, 50], [40, 30, 20]]


@given(st.lists(st.integers(1, 500), min_size=1, max_size=8), st.integers(1, 8))
def test_cut_sorted_is_optimal(lengths: list[int], count: int) -> None:
    ordered = samples_of(*sorted(lengths, reverse=True))
    count = min(count, len(ordered))

    def largest(edges: tuple[int, ...]) -> float:
        runs = [ordered[a:b] for a, b in itertools.pairwise((0, *edges, len(ordered)))]
        return max(len(run) * run[0].length * (1 + run[0].length / 1000) for run in runs)

    best = min(largest(edges) for edges in itertools.combinations(range(1, len(ordered)), count - 1))
    groups = cut_sorted(ordered, count)
    assert len(groups) == count
    assert [s for group in groups for s in group] == ordered
    assert max(len(g) * g[0].length * (1 + g[0].length / 1000) for g in groups) == pytest.approx(best)


def test_batch_rebalance_fills_slots_by_falling_cost(roofline: RooflineModel) -> None:
    """8 samples, 2 ranks, 2 a unit: 2 slots, 4 groups. A sample alone costs 110, 98.1, 86.4, 74.9, 63.6, 52.5, ...

    {100, 90} would cost 220; {100}, {90} leaves six samples for two groups, of which one costs 254.4 or more. So the
    least largest cost is that of {90, 80}, 196.2; filled up to it: {100} 110, {90, 80}, {70, 60} 149.8, {50, 40, 30}
    157.5. By falling cost, the first slot is {90, 80} and {50, 40, 30}, the second {70, 60} and {100}.
    """
    samples = samples_of(100, 90, 80, 70, 60, 50, 40, 30)
    placement = BatchRebalance(samples_per_unit=2)(samples, roofline, Topology(dp=2), ExpectedBudgets((2, 2, 2)), 400)
    assert ids(placement) == [[[1, 2], [3, 4]], [[5, 6, 7], [0]]]


def test_batch_rebalance_splits_a_group_that_does_not_fit_in_a_unit(roofline: RooflineModel) -> None:
    """One group of 40, 30, 30 tokens on one rank, at most 70 tokens a unit."""
    placement = BatchRebalance()(samples_of(30, 40, 30), roofline, Topology(), ExpectedBudgets((2, 2, 2)), 70)
    assert ids(placement) == [[[1, 0], [2]]]


@pytest.mark.parametrize(
    ("lengths", "dp", "expected"),
    [
        # Packs [60, 30], [20], [90, 10] are one short of a multiple of 2: 10 leaves the last pack, and all are dealt.
        ((60, 30, 20, 90, 10), 2, [[[0, 1], [3]], [[2], [4]]]),
        # Packs [10, 10], [90]: the last one has nothing to give, the one before it gives its last sample.
        ((10, 10, 90), 3, [[[0]], [[2]], [[1]]]),
        # Packs [60], [60], [60]: none holds several.
        ((60, 60, 60), 2, [[[0], [2]], [[1]]]),
        ((60, 40), 3, [[[0]], [[1]], [[]]]),
    ],
)
def test_nextfit_keeps_the_order_and_deals_a_multiple_of_the_ranks(
    lengths: tuple[int, ...], dp: int, expected: list[list[list[int]]], roofline: RooflineModel
) -> None:
    placement = nextfit_packing(samples_of(*lengths), roofline, Topology(dp=dp), ExpectedBudgets((2, 2, 2)), 100)
    assert ids(placement) == expected


def test_binpack_fills_the_fullest_unit_with_room_and_deals_units_as_opened(roofline: RooflineModel) -> None:
    """100 and 60 open units with 0 and 40 left; 55 opens one with 45 left, which 42 narrows to 3. There the 3 goes,
    though the unit of 60 has room and came first."""
    samples = samples_of(3, 42, 55, 60, 100)
    placement = binpack(samples, roofline, Topology(dp=2), ExpectedBudgets((2, 2, 2)), 100)
    assert ids(placement) == [[[4], [2, 1, 0]], [[3]]]


def test_best_fit_takes_the_first_of_equally_full_units() -> None:
    """60, 60 open a unit each; 30 goes to the first, the next 30 to the second, for the first has 10 left."""
    units = pack_best_fit([Segment.whole(sample) for sample in samples_of(60, 30, 60, 30)], 100)
    assert ids((tuple(units),)) == [[[0, 1], [2, 3]]]


@given(st.lists(st.integers(1, 100), min_size=1, max_size=12), st.integers(100, 300))
def test_best_fit_keeps_the_cap_and_every_sample(lengths: list[int], cap: int) -> None:
    units = pack_best_fit([Segment.whole(sample) for sample in samples_of(*lengths)], cap)
    assert sorted(s.sample for unit in units for s in unit) == list(range(len(lengths)))
    totals = [sum(s.tokens for s in unit) for unit in units]
    assert max(totals) <= cap
    # A unit's longest opened it because no earlier one had room, and they have only got fuller since.
    assert all(totals[i] + units[j][0].tokens > cap for j in range(len(units)) for i in range(j))


def test_dense_chunks_weigh_a_long_sample_by_its_square(roofline: RooflineModel) -> None:
    """With a = 24,576 tokens, a sample of a costs a * a + a^2 = 2 a^2 and one of 4 a costs 4 a^2 + 16 a^2 = 20 a^2.

    So the long one, in 4 chunks of a, balances the ten short ones. By tokens it would share its rank with three.
    """
    samples = samples_of(4 * 24576, *[24576] * 10)
    topology, budgets = Topology(dp=2), ExpectedBudgets((4, 4, 4))
    placement = DenseChunks(24576)(samples, roofline, topology, budgets, 24576)
    assert [(s.sample, s.start) for (s,) in placement[0]] == [(0, 0), (0, 24576), (0, 49152), (0, 73728)]
    assert ids(placement)[1] == [[i] for i in range(1, 11)]
    with_the_long_one = next(rank for rank in ids(sab(samples, roofline, topology, budgets, 2**17)) if [0] in rank)
    assert len(with_the_long_one) >= 3


def test_dense_chunks_pack_short_samples_and_leave_all_whole_without_a_unit_size(roofline: RooflineModel) -> None:
    samples = samples_of(100, 20, 30, 40)
    topology, budgets = Topology(), ExpectedBudgets((4, 4, 4))
    cut_up = DenseChunks(64)(samples, roofline, topology, budgets, 1000)
    # 100 in two chunks of whole blocks of 16: 64 and 36 tokens; 40 and 20 fill a unit, 30 is left.
    assert [[(s.sample, s.tokens) for s in unit] for unit in cut_up[0]] == [
        [(0, 64)],
        [(0, 36)],
        [(3, 40), (1, 20)],
        [(2, 30)],
    ]
    (whole,) = DenseChunks()(samples, roofline, topology, budgets, 1000)
    assert all(segment.is_whole for unit in whole for segment in unit)


def test_chunks_of_a_sample_cost_what_the_whole_sample_costs_densely() -> None:
    sample = Sample(0, 5000, 0)
    chunks = cut(sample, 1024, 16)
    assert len(chunks) == 5
    view = DenseView(block_size=16, layers=3)
    total = sum(view.latency([chunk], (4, 4, 4)).total_ms for chunk in chunks)
    assert total == dense_cost(0, 5000) == 24576 * 5000 + 5000**2
    assert view.latency([Segment.whole(sample)], (1, 1, 1)).total_ms == total
    assert view.latency((), (1, 1, 1)).total_ms == 0
    attend = view.terms(chunks, (4, 4, 4)).attend.total_ms
    assert view.attention_ms(chunks, np.array([1, 9])) * 3 == pytest.approx([attend, attend])


def test_dense_chunks_get_the_unit_size_by_name(roofline: RooflineModel) -> None:
    assert named_policy("dense_chunks", budget=4, token_cap=512, unit_size=256).batching == DenseChunks(256)
    assert named_policy("dense_chunks", budget=4, token_cap=512).batching == BASELINES["dense_chunks"]
    with pytest.raises(InputError, match="unit size 1024 is over the cap of 512"):
        plan_step(
            samples_of(9), roofline, Topology(), named_policy("dense_chunks", budget=4, token_cap=512, unit_size=1024)
        )


@pytest.mark.parametrize("name", sorted(BASELINES))
def test_every_rule_refuses_a_sample_over_the_cap_and_an_empty_step(name: str, roofline: RooflineModel) -> None:
    with pytest.raises(InputError, match="sample 1 has 50 tokens, over the cap of 20"):
        BASELINES[name](samples_of(10, 50), roofline, Topology(dp=2), ExpectedBudgets((2, 2, 2)), 20)
    with pytest.raises(InputError, match="no samples"):
        BASELINES[name]([], roofline, Topology(dp=2), ExpectedBudgets((2, 2, 2)), 20)


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    cap: int
    unit_size: int
    dp: int = 4


PRACTICE = {
    "206 samples": Case(tuple(20 + 37 * i % 900 for i in range(206)), 1024, 256),
    "9 samples": Case((700, 20, 300, 41, 900, 5, 64, 64, 511), 1024, 256),
    "fewer samples than ranks": Case((300, 20), 304, 304),
    "rows do not fit though their sum does": Case((60, 60, 60, 60, 60), 100, 64),
    "all equal": Case((128,) * 24, 512, 256),
    "one giant": Case((200,) * 7 + (131_072,) + (200,) * 8, 131_072, 4096),
    "2,000 short samples": Case((20,) * 2000, 4096, 1024),
}
RULES = [*((name, False) for name in BASELINES), ("dense_chunks", True)]


@pytest.mark.parametrize("case", PRACTICE)
@pytest.mark.parametrize(("name", "chunked"), RULES)
def test_practice_cases(name: str, chunked: bool, case: str, roofline: RooflineModel) -> None:
    lengths, cap, size, dp = (given := PRACTICE[case]).lengths, given.cap, given.unit_size, given.dp
    samples = samples_of(*lengths)
    policy = named_policy(name, budget=4, token_cap=cap, unit_size=size if chunked else None)
    plan = plan_step(samples, roofline, Topology(dp=dp), policy)
    plan.validate(samples, size if chunked else cap)
    units = [unit for unit in plan.micro_batches if unit.segments]
    empty = [rank for rank in plan.ranks if not any(unit.segments for unit in rank)]
    assert all(len(rank) == 1 for rank in empty)
    assert len(plan.micro_batches) == len(units) + len(empty)  # only a rank without samples holds an empty unit
    if not chunked:
        assert all(segment.is_whole for unit in units for segment in unit.segments)
    if case == "fewer samples than ranks":
        assert len(empty) == dp - len(lengths)
    elif name not in ("nextfit_packing", "binpack"):  # packed before they are placed: few rows for many ranks
        assert not empty
    if case == "rows do not fit though their sum does":
        assert len(units) == 5
    if case == "one giant":
        (giant,) = [rank for rank in plan.ranks if any(s.sample == 7 for unit in rank for s in unit.segments)]
        assert sum(unit.segments[0].sample == 7 for unit in giant) == (32 if chunked else 1)


def test_binpack_gives_a_giant_a_pack_of_its_own_and_2000_short_samples_few(roofline: RooflineModel) -> None:
    """15 samples of 200 fill one more pack beside the giant's. 4,096 tokens hold 204 samples of 20: 9 packs and 164
    samples more."""
    budgets = ExpectedBudgets((4, 4, 4))
    giant = PRACTICE["one giant"]
    placement = binpack(samples_of(*giant.lengths), roofline, Topology(dp=4), budgets, giant.cap)
    assert [[len(unit) for unit in rank] for rank in placement] == [[1], [15], [0], [0]]
    placement = binpack(samples_of(*[20] * 2000), roofline, Topology(dp=4), budgets, 4096)
    assert [[len(unit) for unit in rank] for rank in placement] == [
        [204, 204, 204],
        [204, 204, 164],
        [204, 204],
        [204, 204],
    ]
