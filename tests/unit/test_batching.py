"""SAB: balance against brute force, packing, and what it never does."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebalance.planning.batching import (
    EMPTY,
    Placement,
    SparsityAware,
    cut,
    largest_first,
    pack_first_fit,
    refine,
    sab,
)
from sparsebalance.planning.correction import CorrectedModel, Correction
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.expected import ExpectedBudgets
from sparsebalance.planning.latency import RooflineModel
from sparsebalance.planning.plan import Sample, Segment, Topology, chain_lengths
from sparsebalance.planning.units import split_packs
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


steps = st.lists(
    st.tuples(st.one_of(st.integers(1, 40), st.integers(1, 3000)), st.floats(0, 1)), min_size=1, max_size=20
).map(lambda pairs: [Sample(5 * i + 2, n, int(share * n)) for i, (n, share) in enumerate(pairs)])


def planned(
    step: list[Sample], dp: int, unit_size: int | None = None, cap: int = 4096, equal: bool = False, pp: int = 1
) -> Placement:
    rule = SparsityAware(unit_size, equal_counts=equal)
    return rule(step, make_table(), Topology(dp=dp, pp=pp), ExpectedBudgets((4, 4)), cap)


@settings(max_examples=60, deadline=None)
@given(steps, st.integers(1, 6), st.sampled_from([None, 64, 512]), st.booleans(), st.integers(1, 4))
def test_every_token_once_in_whole_blocks_under_the_cap_chains_together_and_always_the_same(
    step: list[Sample], dp: int, unit_size: int | None, equal: bool, pp: int
) -> None:
    placement = planned(step, dp, unit_size, equal=equal, pp=pp)
    found = sorted((s.sample, s.start, s.end, s.targets) for rank in placement for unit in rank for s in unit)
    assert found == sorted((s.sample, s.start, s.end, s.targets) for x in step for s in cut(x, unit_size, 16))
    limit = unit_size or 4096
    for rank in placement:
        assert rank
        assert sum(chain_lengths(rank)) == len(rank)
        assert all(sum(s.tokens for s in unit) <= limit for unit in rank)
        assert all(s.start % 16 == 0 and (s.end % 16 == 0 or s.end == s.sample_length) for unit in rank for s in unit)
    if equal:
        assert len({len(rank) for rank in placement}) == 1
    assert placement == planned(step, dp, unit_size, equal=equal, pp=pp)


@settings(max_examples=40, deadline=None)
@given(steps, st.integers(1, 6), st.sampled_from([None, 64, 512]))
def test_equal_counts_move_no_sample_and_put_empty_units_last(
    step: list[Sample], dp: int, unit_size: int | None
) -> None:
    """No more units than the rank that had most; a rank is padded only once none of its packs can be split."""
    free, equal = planned(step, dp, unit_size), planned(step, dp, unit_size, equal=True)
    assert len(equal[0]) == max(map(len, free))
    for before, after in zip(free, equal):
        assert {s.sample for unit in before for s in unit} == {s.sample for unit in after for s in unit}
        empty = [not unit for unit in after]
        assert empty == sorted(empty)
        if any(empty):
            assert all(len(unit) <= 1 for unit in after)


def test_packs_are_split_largest_first_into_halves() -> None:
    """20 + 10 + 10 tokens and 5 + 5: the larger pack gives its longest sample away, then its other half."""
    a, b = (tuple(Segment.whole(s) for s in samples_of(*lengths)) for lengths in ((20, 10, 10), (5, 5)))
    assert sorted(sorted(s.tokens for s in unit) for unit in split_packs((a, b), 3)) == [[5, 5], [10, 10], [20]]
    assert sorted(sorted(s.tokens for s in unit) for unit in split_packs((a, b), 4)) == [[5, 5], [10], [10], [20]]
    assert [len(unit) for unit in split_packs((a, b), 9)] == [1] * 5
    assert split_packs((a, b), 1) == split_packs((a, b), 2)
    assert split_packs((), 3) == ()


@pytest.mark.parametrize(("count", "dp"), [(206, 4), (9, 4), (3, 8), (1, 1)])
@pytest.mark.parametrize("unit_size", [None, 256])
def test_counts_that_do_not_divide(count: int, dp: int, unit_size: int | None) -> None:
    lengths = (np.random.default_rng(count).lognormal(5, 1, count).astype(int) + 1).tolist()
    placement = planned(samples_of(*lengths), dp, unit_size, cap=int(max(lengths)) + 256)
    assert sorted({s.sample for rank in placement for unit in rank for s in unit}) == list(range(count))
    assert sum(rank == EMPTY for rank in placement) == max(0, dp - count)


def test_206_samples_on_4_ranks_are_balanced() -> None:
    lengths = (np.random.default_rng(0).lognormal(5, 1, 206).astype(int) + 1).tolist()
    rank_ms = [
        sum(make_table().latency(unit, (4, 4)).total_ms for unit in rank)
        for rank in planned(samples_of(*lengths), 4, 256, cap=int(max(lengths)) + 256)
    ]
    assert max(rank_ms) / np.mean(rank_ms) < 1.02  # packing adds what placement cannot see: a fixed cost per unit


def test_equal_samples_are_dealt_evenly() -> None:
    for rank in planned(samples_of(*[100] * 12), 4, 512):
        assert [len(unit) for unit in rank] == [3]


def test_a_giant_has_a_rank_for_itself() -> None:
    step = samples_of(131_072, *[200] * 15)
    for unit_size in (None, 8192):
        placement = planned(step, 4, unit_size, cap=131_072)
        alone = [rank for rank in placement if any(s.sample == 0 for unit in rank for s in unit)]
        assert len(alone) == 1
        assert {s.sample for unit in alone[0] for s in unit} == {0}
        others = [sum(s.tokens for unit in rank for s in unit) for rank in placement if rank != alone[0]]
        assert others == [1000] * 3


def test_items_decide_where_their_sum_alone_would_fit() -> None:
    """3 samples of 600 tokens are as many as 2 rows of 900 hold, but no two fit in one row."""
    assert [len(unit) for unit in planned(samples_of(600, 600, 600), 1, cap=900)[0]] == [1, 1, 1]
    assert [len(unit) for unit in planned(samples_of(480, 480, 480), 1, 720, cap=900)[0]] == [1, 1, 1]


def test_a_cap_below_the_longest_sample_needs_chunks() -> None:
    with pytest.raises(InputError, match=r"sample 0 has 1000 tokens, over the cap of 500.*raise token_cap"):
        planned(samples_of(1000, 20), 2, cap=500)
    units = [unit for rank in planned(samples_of(1000, 20), 2, 256, cap=500) for unit in rank]
    assert sorted(sum(s.tokens for s in unit) for unit in units) == [20, 232, 256, 256, 256]


def test_an_empty_step_is_refused() -> None:
    for unit_size in (None, 256):
        with pytest.raises(InputError, match="no samples"):
            planned([], 2, unit_size)


def test_a_pack_may_end_in_a_sample_without_targets() -> None:
    step = [Sample(0, 90, 90), Sample(1, 60, 30), Sample(2, 40, 0)]
    for unit_size in (None, 256):
        ((unit,),) = planned(step, 1, unit_size)
        assert [(s.sample, s.targets) for s in unit] == [(0, 90), (1, 30), (2, 0)]


def test_twenty_thousand_tiny_samples_are_packed_full() -> None:
    """Quadratic packing would take minutes."""
    placement = planned(samples_of(*[20] * 20_000), 4, 2048)
    assert [len(rank) for rank in placement] == [50] * 4  # 5,000 samples in packs of 102
    assert {len(unit) for rank in placement for unit in rank[:-1]} == {102}


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(20, 60))
def test_the_tree_finds_the_unit_that_a_scan_would(lengths: list[int], cap: int) -> None:
    units: list[list[Segment]] = []
    for segment in sorted((Segment.whole(s) for s in samples_of(*lengths)), key=lambda s: (-s.tokens, s.sample)):
        room = (unit for unit in units if sum(s.tokens for s in unit) + segment.tokens <= cap)
        if (unit := next(room, None)) is None:
            units.append(unit := [])
        unit.append(segment)
    segments = [Segment.whole(s) for s in samples_of(*lengths)]
    assert pack_first_fit(segments, cap) == (tuple(map(tuple, units)) or EMPTY)


@given(st.lists(st.floats(0.1, 100), min_size=2, max_size=9), st.floats(0.5, 2), st.floats(0.5, 2))
def test_two_ranks_with_few_items_are_shared_out_in_the_best_way(values: list[float], slow: float, fast: float) -> None:
    array, factors = np.array(values), np.array([slow, fast])
    best = min(
        max(float(array[list(own)].sum()) * slow, float(array.sum() - array[list(own)].sum()) * fast)
        for n in range(len(values) + 1)
        for own in itertools.combinations(range(len(values)), n)
    )
    placed = refine([list(range(len(values))), []], array, factors)
    assert max(array[r].sum() * f for r, f in zip(placed, factors)) <= max(best, 0.0) * 1.0011 + 1e-9


def test_many_items_are_moved_and_swapped_until_ranks_are_even() -> None:
    """All of 3 ranks' items start on one: more than are shared out anew, so single exchanges have to do it."""
    values = np.random.default_rng(0).lognormal(0, 1, 300)
    placed = refine([list(range(300)), [], []], values, np.ones(3))
    sums = [values[rank].sum() for rank in placed]
    assert sorted(itertools.chain(*placed)) == list(range(300))
    assert max(sums) <= 1.01 * np.mean(sums)


def test_largest_first_takes_the_lowest_rank_among_equals_whether_ranks_are_alike_or_not() -> None:
    values = np.array([4.0, 4.0, 2.0, 2.0, 1.0, 1.0])
    assert largest_first(values, np.ones(2)) == [[0, 2, 4], [1, 3, 5]]
    # 8 and 8 ms, 8 on the slow third; then 12 against 12 and 16, 10, and 12 against 12.
    assert largest_first(values, np.array([2.0, 2.0, 4.0])) == [[0, 3], [1, 4, 5], [2]]


def test_what_is_known_of_a_sample_weighs_it(roofline: RooflineModel) -> None:
    """Of four equal samples the two that will read 16 blocks do not share a rank; chunked or not."""
    known = ExpectedBudgets((1, 1, 1), {0: (64, 64, 64), 1: (64, 64, 64)})
    for unit_size in (None, 512):
        ranks = SparsityAware(unit_size)(samples_of(*[2000] * 4), roofline, Topology(dp=2), known, 4096)
        heavy = [{s.sample for unit in rank for s in unit} & {0, 1} for rank in ranks]
        assert sorted(map(len, heavy)) == [1, 1]
