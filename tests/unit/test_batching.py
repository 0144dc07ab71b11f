"""SAB: balance against brute force, packing, and what it never does."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebalance.planning.batching import SparsityAware, cut, largest_first, pack_first_fit, refine, sab
from sparsebalance.planning.correction import CorrectedModel, Correction
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.expected import ExpectedBudgets
from sparsebalance.planning.latency import RooflineModel
from sparsebalance.planning.plan import Sample, Segment, Topology, chain_lengths
from tests.conftest import samples_of, slow_device
from tests.unit.test_latency import make_table

costs = st.lists(st.floats(0.1, 100), min_size=1, max_size=8)


@given(costs, st.integers(1, 4))
def test_largest_first_and_refine_place_every_item_once(values: list[float], ranks: int) -> None:
    array = np.array(values)
    for placed in (
        largest_first(array, np.ones(ranks)),
        refine(largest_first(array, np.ones(ranks)), array, np.ones(ranks)),
    ):
        assert len(placed) == ranks
        assert sorted(itertools.chain(*placed)) == list(range(len(values)))


@given(costs, st.integers(2, 4))
def test_refinement_never_makes_the_slowest_rank_slower(values: list[float], ranks: int) -> None:
    array = np.array(values)
    first = largest_first(array, np.ones(ranks))
    better = refine(first, array, np.ones(ranks))
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
    placed = refine(largest_first(array, np.ones(2)), array, np.ones(2))
    assert max(array[r].sum() for r in placed) <= (4 / 3 - 1 / 6) * best * (1 + 1e-9)


def test_refinement_finds_the_swap_that_greedy_misses() -> None:
    """Greedy gives {5, 4, 3} and {5, 4}... of 5, 5, 4, 4, 3, 3, 3: 14 and 13 is the optimum."""
    values = np.array([5.0, 5, 4, 4, 3, 3, 3])
    placed = refine(largest_first(values, np.ones(2)), values, np.ones(2))
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
    roofline = replace(roofline, decoder=replace(roofline.decoder, vocabulary=8_000))
    placement = sab([heavy, light, *small], roofline, Topology(dp=2), ExpectedBudgets((4, 4, 4)), 4096)
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
    placement = sab(samples_of(*[1000] * 16), table, Topology(dp=2), ExpectedBudgets((4, 4)), 32768)
    assert {sum(s.tokens for s in unit) for rank in placement for unit in rank} == {4000}


def test_packing_saves_fixed_costs_where_there_is_nothing_against_it(roofline: RooflineModel) -> None:
    slow_calls = replace(roofline, device=slow_device(unit_ms=50.0))
    placement = sab(samples_of(*[100] * 16), slow_calls, Topology(dp=2), ExpectedBudgets((4, 4, 4)), 32768)
    assert [len(rank) for rank in placement] == [1, 1]


@settings(max_examples=30)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=12), st.integers(1, 5))
def test_ranks_without_samples_say_so(lengths: list[int], dp: int) -> None:
    placement = sab(samples_of(*lengths), make_table(), Topology(dp=dp), ExpectedBudgets((4, 4)), 4096)
    assert len(placement) == dp
    assert all(rank for rank in placement)
    assert sum(rank == ((),) for rank in placement) == max(0, dp - len(lengths))


@given(costs, st.lists(st.floats(0.5, 3), min_size=2, max_size=3))
def test_placement_on_unequal_ranks_is_near_the_best_there_is(values: list[float], factors: list[float]) -> None:
    """Within twice the optimum, the bound of largest first on ranks of unequal speed (Gonzalez et al. 1977)."""
    array, slow = np.array(values), np.array(factors)
    placed = refine(largest_first(array, slow), array, slow)
    assert sorted(itertools.chain(*placed)) == list(range(len(values)))
    best = min(
        max(float(array[[i for i, r in enumerate(where) if r == rank]].sum() * slow[rank]) for rank in range(len(slow)))
        for where in itertools.product(range(len(slow)), repeat=min(len(values), 6))
    )
    if len(values) <= 6:
        assert max(array[items].sum() * f for items, f in zip(placed, slow)) <= 2 * best * (1 + 1e-9)


def test_a_slow_rank_gets_less_work() -> None:
    table = make_table()
    slow = CorrectedModel(table, Correction(ranks=(1.5**0.5, 1.5**-0.5)))
    placement = sab(samples_of(*[200] * 50), slow, Topology(dp=2), ExpectedBudgets((4, 4)), 32768)
    tokens = [sum(s.tokens for unit in rank for s in unit) for rank in placement]
    assert tokens[1] / tokens[0] == pytest.approx(1.5, rel=0.05)


@given(length=st.integers(1, 5000), targets=st.integers(0, 5000), blocks=st.integers(1, 40))
def test_chunks_are_whole_blocks_of_nearly_equal_size_and_keep_every_token_and_target(
    length: int, targets: int, blocks: int
) -> None:
    targets, unit = min(targets, length), 16 * blocks
    chunks = cut(Sample(7, length, targets), unit, 16)
    assert [c.start for c in chunks] == [0, *[c.end for c in chunks[:-1]]]
    assert chunks[-1].end == length
    assert all(c.tokens <= unit and c.start % 16 == 0 for c in chunks)
    assert sum(c.targets for c in chunks) == targets
    assert all(0 <= c.targets <= c.tokens for c in chunks)
    assert len({c.tokens for c in chunks[:-1]}) <= 1
    assert len(chunks) <= -(-length // unit)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=12), st.integers(1, 3))
def test_units_hold_chunks_or_packs_and_chains_stay_together(lengths: list[int], dp: int) -> None:
    step = samples_of(*lengths)
    placement = SparsityAware(unit_size=256)(step, make_table(), Topology(dp=dp), ExpectedBudgets((4, 4)), 1024)
    found = sorted((s.sample, s.start, s.end) for rank in placement for unit in rank for s in unit)
    assert found == sorted((s.sample, s.start, s.end) for sample in step for s in cut(sample, 256, 16))
    for rank in placement:
        assert sum(chain_lengths(rank)) == len(rank)
        assert all(sum(s.tokens for s in unit) <= 256 for unit in rank)
        assert all(s.is_whole for unit in rank if len(unit) > 1 for s in unit)


def test_wrong_unit_sizes_and_torn_chains_are_refused() -> None:
    for size, message in (
        (100, "no multiple of the block size 16"),
        (0, "no multiple"),
        (2048, "over the cap of 1024"),
    ):
        with pytest.raises(InputError, match=message):
            SparsityAware(unit_size=size)(samples_of(500), make_table(), Topology(), ExpectedBudgets((4, 4)), 1024)
    first, second, third = cut(Sample(3, 48, 0), 16, 16)
    assert chain_lengths([(first,), (second,), (third,)]) == (3,)
    assert chain_lengths([(first,), (second,), (Segment(4, 0, 5, 5, 0),), ()]) == (2, 1, 1)
    with pytest.raises(InputError, match="sample 3: its chunk at token 32 does not follow"):
        chain_lengths([(first,), (third,)])
    with pytest.raises(InputError, match="does not follow"):
        chain_lengths([(second,)])
