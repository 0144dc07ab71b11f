"""Each peer's balancer against an example worked by hand."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsebalance.planning.baselines import (
    BASELINES,
    BatchRebalance,
    KarmarkarKarp,
    cut_sorted,
    karmarkar_karp,
    nextfit_packing,
    random_order,
    small_at_both_ends,
)
from sparsebalance.planning.batching import Placement
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.expected import ExpectedBudgets
from sparsebalance.planning.latency import RooflineModel
from sparsebalance.planning.plan import Topology
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
    """8 samples, 2 ranks, 2 a unit: 2 slots, 4 groups; the two costliest groups form the first slot."""
    samples = samples_of(100, 90, 80, 70, 60, 50, 40, 30)
    placement = BatchRebalance(samples_per_unit=2)(samples, roofline, Topology(dp=2), ExpectedBudgets((2, 2, 2)), 400)
    assert [len(rank) for rank in placement] == [2, 2]
    costs = [[len(unit) * unit[0].tokens * (1 + unit[0].tokens / 1000) for unit in rank] for rank in placement]
    assert min(costs[0][0], costs[1][0]) >= max(costs[0][1], costs[1][1])


def test_nextfit_keeps_the_order_and_opens_a_unit_at_the_cap(roofline: RooflineModel) -> None:
    samples = samples_of(60, 30, 20, 90, 10)
    placement = nextfit_packing(samples, roofline, Topology(dp=2), ExpectedBudgets((2, 2, 2)), 100)
    # Units [60, 30], [20], [90, 10] go to the rank with the fewest tokens so far: rank 0, 1, 1.
    assert ids(placement) == [[[0, 1]], [[2], [3, 4]]]


@pytest.mark.parametrize("name", sorted(BASELINES))
def test_every_rule_refuses_a_sample_over_the_cap_and_an_empty_step(name: str, roofline: RooflineModel) -> None:
    with pytest.raises(InputError, match="sample 1 has 50 tokens, over the cap of 20"):
        BASELINES[name](samples_of(10, 50), roofline, Topology(dp=2), ExpectedBudgets((2, 2, 2)), 20)
    with pytest.raises(InputError, match="no samples"):
        BASELINES[name]([], roofline, Topology(dp=2), ExpectedBudgets((2, 2, 2)), 20)
