"""SAB: balance against brute force, packing, and what it never does."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebalance.planning.batching import largest_first, pack_first_fit, refine, sab
from sparsebalance.planning.latency import RooflineModel
from sparsebalance.planning.plan import Sample, Segment, Topology
from tests.conftest import samples_of
from tests.unit.test_latency import make_table

costs = st.lists(st.floats(0.1, 100), min_size=1, max_size=8)


@given(costs, st.integers(1, 4))
def test_largest_first_and_refine_place_every_item_once(values: list[float], ranks: int) -> None:
    array = np.array(values)
    for placed in (largest_first(array, ranks), refine(largest_first(array, ranks), array)):
        assert len(placed) == ranks
        assert sorted(itertools.chain(*placed)) == list(range(len(values)))


@given(costs, st.integers(2, 4))
def test_refinement_never_makes_the_slowest_rank_slower(values: list[float], ranks: int) -> None:
    array = np.array(values)
    first = largest_first(array, ranks)
    better = refine(first, array)
    assert max(array[r].sum() for r in better) <= max(array[r].sum() for r in first) * (1 + 1e-12)


@given(costs)
def test_two_ranks_end_within_the_bound_of_largest_first(values: list[float]) -> None:
    """At most 4/3 - 1/(3 m) of the optimum (Graham 1969); refinement only improves on it."""
    array = np.array(values)
    best = min(
        max(array[list(signs)].sum(), array.sum() - array[list(signs)].sum())
        for n in range(len(values) + 1)
        for signs in itertools.combinations(range(len(values)), n)
    )
    placed = refine(largest_first(array, 2), array)
    assert max(array[r].sum() for r in placed) <= (4 / 3 - 1 / 6) * best * (1 + 1e-9)


def test_refinement_finds_the_swap_that_greedy_misses() -> None:
    """Greedy gives {5, 4, 3} and {5, 4}... of 5, 5, 4, 4, 3, 3, 3: 14 and 13 is the optimum."""
    values = np.array([5.0, 5, 4, 4, 3, 3, 3])
    placed = refine(largest_first(values, 2), values)
    assert sorted(values[r].sum() for r in placed) == [13, 14]


@given(st.lists(st.integers(1, 100), min_size=1, max_size=12), st.integers(100, 300))
def test_first_fit_keeps_the_cap_and_every_segment(lengths: list[int], cap: int) -> None:
    segments = [Segment.whole(s) for s in samples_of(*lengths)]
    units = pack_first_fit(segments, cap)
    assert sorted(s.sample for unit in units for s in unit) == list(range(len(lengths)))
    assert all(sum(s.tokens for s in unit) <= cap for unit in units)
    # At most one unit is half empty or more: first fit would have merged two such.
    assert sum(2 * sum(s.tokens for s in unit) <= cap for unit in units) <= 1


def test_a_segment_over_the_pack_size_stays_alone() -> None:
    segments = [Segment.whole(s) for s in samples_of(50, 10, 10)]
    assert [[s.sample for s in unit] for unit in pack_first_fit(segments, 20)] == [[0], [1, 2]]
    assert pack_first_fit([], 20) == ((),)


def test_balance_is_by_predicted_time_not_by_tokens(roofline: RooflineModel) -> None:
    """Two samples of equal length, one with a target on every token: tokens balance them, time does not."""
    heavy, light = Sample(0, 400, 399), Sample(1, 400, 0)
    small = [Sample(i, 100, 0) for i in range(2, 8)]
    roofline = replace(roofline, vocabulary=8_000)
    placement = sab([heavy, light, *small], roofline, Topology(dp=2), (4, 4, 4), 4096)
    times = [sum(roofline.latency(unit, (4, 4, 4)).total_ms for unit in rank) for rank in placement]
    alone = roofline.latency([Segment.whole(heavy)], (4, 4, 4)).total_ms
    assert alone > 1.2 * roofline.latency([Segment.whole(light)], (4, 4, 4)).total_ms
    assert max(times) / np.mean(times) < 1.1


def test_packing_stops_where_longer_rows_run_slower() -> None:
    """A machine on which rows over 4,096 tokens take twice as long a token: SAB packs no further."""
    table = make_table()
    slow = type(table.linear[0])
    points = tuple(slow(n, ms, 2 * ms) for n, ms in ((1, 5.0), (4096, 45.0), (8192, 170.0), (32768, 700.0)))
    table = replace(table, linear=points)
    placement = sab(samples_of(*[1000] * 16), table, Topology(dp=2), (4, 4), 32768)
    assert {sum(s.tokens for s in unit) for rank in placement for unit in rank} == {4000}


def test_packing_saves_fixed_costs_where_there_is_nothing_against_it(roofline: RooflineModel) -> None:
    placement = sab(samples_of(*[100] * 16), replace(roofline, unit_ms=50.0), Topology(dp=2), (4, 4, 4), 32768)
    assert [len(rank) for rank in placement] == [1, 1]


@settings(max_examples=30)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=12), st.integers(1, 5))
def test_ranks_without_samples_say_so(lengths: list[int], dp: int) -> None:
    placement = sab(samples_of(*lengths), make_table(), Topology(dp=dp), (4, 4), 4096)
    assert len(placement) == dp
    assert all(rank for rank in placement)
    assert sum(rank == ((),) for rank in placement) == max(0, dp - len(lengths))
