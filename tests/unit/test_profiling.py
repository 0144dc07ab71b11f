"""Profiling: speeds of a moment, the grid and its refinement, whole measurements of a tiny model, held-out work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsebalance.planning.decoder import Decoder, decoder_from_config
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.table import Identity
from sparsebalance.planning.work import computed_scores
from sparsebalance.profiling.check import (
    CheckPoint,
    check_points,
    held_out_work,
    mean_absolute_error,
    raw_error,
    share_within,
)
from sparsebalance.profiling.measure import Measurement, _geometric, _Grid, measure
from sparsebalance.profiling.network import measure_network
from sparsebalance.profiling.points import MEASURED, Point, Run, Timing, Work, _spread_out, random_example, work_of
from sparsebalance.training.data import IGNORE
from sparsebalance.training.parallel import Ranks
from tests.models import VOCABULARY, tiny_model
from tests.unit.test_latency import make_table

DECODER = Decoder(2, 32, 48, 4, 2, 8, VOCABULARY, tied=True)
IDENTITY = Identity(DECODER, block_size=16, granularity="token", device="cpu", dtype="float64", threads=1)


def run(whole_ms: float, reference_ms: float = 1.0, place: int = 0) -> Run:
    return Run((whole_ms / len(MEASURED),) * len(MEASURED), whole_ms, reference_ms, place)


def point(calls: Sequence[list[Run]], lengths: tuple[int, ...] = (16,)) -> Point:
    return Point(work_of(lengths, 1, 2, VOCABULARY), list(calls))


def timed_alike(slowness: Sequence[float], references: Sequence[float] | None = None) -> list[Point]:
    """One point that always takes 10 ms at the usual speed, in calls under this slowness."""
    references = references or slowness
    calls = [[run(10 * slow, ms, place)] for place, (slow, ms) in enumerate(zip(slowness, references))]
    return [point(calls)]


def wholes(points: Sequence[Point]) -> list[float]:
    return [ranks[0].whole_ms for ranks in points[0].calls]


@pytest.mark.parametrize("slow", [0.5, 2.0, 7.0])
def test_a_slow_spell_is_undone(slow: float) -> None:
    spell = [1.0] * 8 + [slow] * 6 + [1.0] * 8
    steady = Timing.at_usual_speed(timed_alike(spell))
    assert wholes(steady) == pytest.approx([10.0] * len(spell))
    assert all(sum(ranks[0].terms) == pytest.approx(10.0) for ranks in steady[0].calls)


@pytest.mark.parametrize("place", [0, 5, 10])
def test_a_single_disturbed_reference_does_no_harm(place: int) -> None:
    references = [1.0] * 11
    references[place] = 50.0
    assert wholes(Timing.at_usual_speed(timed_alike([1.0] * 11, references))) == pytest.approx([10.0] * 11)


def test_a_single_slow_run_stays_slow() -> None:
    """It is the run that was disturbed, not the machine: the median over runs deals with it."""
    slowness = [1.0] * 5 + [3.0] + [1.0] * 5
    steady = Timing.at_usual_speed(timed_alike(slowness, [1.0] * 11))
    assert wholes(steady) == pytest.approx([10.0 * slow for slow in slowness])
    assert steady[0].whole_ms() == pytest.approx(10.0)


def test_every_rank_is_scaled_by_its_own_references_and_points_share_the_order_of_calls() -> None:
    """Two points in turn; rank 1 is always slower, and slow for a while besides."""
    spell = [1.0] * 6 + [2.0] * 6 + [1.0] * 8
    calls = [[run(10, 1, i), run(30 * slow, 4 * slow, i)] for i, slow in enumerate(spell)]
    steady = Timing.at_usual_speed([point(calls[::2]), point(calls[1::2])])
    for found in steady:
        assert [[r.whole_ms for r in ranks] for ranks in found.calls] == [pytest.approx([10.0, 30.0])] * 10
    assert Timing.at_usual_speed([]) == []


def test_the_first_call_counts_only_until_there_is_another() -> None:
    cold = point([[run(70)]])
    assert cold.whole_ms() == 70
    assert cold.spread() == 0.05
    warm = point([[run(70)], [run(10)], [run(12)], [run(11)]])
    assert warm.whole_ms() == 11
    assert warm.median()["attend", "forward"] == pytest.approx(11 / len(MEASURED))
    assert warm.spread() == pytest.approx(1.0 / 3**0.5 / 11)


def test_ranks_count_as_their_mean() -> None:
    both = point([[run(999), run(999)], [run(10), run(20)], [run(12), run(22)], [run(11), run(99)]])
    assert both.whole_ms() == 17
    assert both.median()["head", "backward"] == pytest.approx(17 / len(MEASURED))


@given(copies=st.integers(1, 9), length=st.integers(2, 50), wanted=st.integers(0, 400))
def test_targets_are_spread_evenly_and_never_exceed_what_a_sample_has(copies: int, length: int, wanted: int) -> None:
    given_out = _spread_out(wanted, [length] * copies)
    assert sum(given_out) == min(wanted, copies * (length - 1))
    assert max(given_out) <= length - 1
    assert max(given_out) - min(given_out) <= 1


def test_work_is_packed_samples_of_random_tokens_whose_last_ones_are_targets() -> None:
    unit, examples = work_of((30, 7, 12000), 3, 2, VOCABULARY)
    assert [segment.tokens for segment in unit.segments] == [30, 7, 12000]
    assert [example.target_count for example in examples] == [3, 0, 1024]
    assert unit.targets == 1027
    assert unit.budgets == (3, 3)
    assert work_of((40, 40), 1, 2, VOCABULARY, targets=5)[0].targets == 5
    again = work_of((30, 7, 12000), 3, 2, VOCABULARY)[1]
    assert all((a.input_ids == b.input_ids).all() for a, b in zip(examples, again))


def test_a_random_example_predicts_the_token_that_follows() -> None:
    example = random_example(10, 4, VOCABULARY, np.random.default_rng(0))
    assert (example.targets[:5] == IGNORE).all()
    assert (example.targets[5:9] == example.input_ids[6:]).all()
    assert example.targets[9] == IGNORE


@pytest.mark.parametrize("max_length", [32, 100, 1024, 5000])
@pytest.mark.parametrize("max_budget", [1, 3, 8, 1000])
def test_the_coarse_grid_covers_lengths_and_budgets(max_length: int, max_budget: int) -> None:
    grid = _Grid(IDENTITY, max_length, max_budget)
    assert grid.lengths[-1] == max_length
    assert grid.lengths[0] == 16
    assert all(b / a <= 8 * 8**0.5 for a, b in zip(grid.lengths, grid.lengths[1:]))
    blocks = -(-max_length // 16)
    assert grid.budgets[0] == 1
    assert grid.budgets[-1] == min(max_budget, blocks)
    for (length, budget), planned in grid.attention.items():
        assert budget <= -(-length // 16)
        assert {segment.tokens for segment in planned.unit.segments} == {length - 1}  # the last block is not full
        assert set(planned.unit.budgets) == {budget}
    for length in grid.lengths:
        for budget in grid.budgets:
            assert (length, min(budget, -(-length // 16))) in grid.attention


def test_short_samples_are_measured_packed_and_several_target_counts_twice() -> None:
    grid = _Grid(IDENTITY, 1024, 8)
    assert {p.length + 1: p.copies for p in grid.attention.values()} == {16: 128, 128: 16, 1024: 2}
    assert [p.unit.tokens for p in grid.small] == [1, 64, 512]
    targets = [p.unit.targets for p in grid.points]
    assert targets[0] == 0  # a sample of one token predicts nothing
    for count in (32, 256):
        assert targets.count(count) == 2
    assert grid.reference().unit.targets == 8


def test_geometric_lengths() -> None:
    assert _geometric(16, 1024, 8) == [16, 128, 1024]
    assert _geometric(16, 32, 8) == [16, 32]
    assert _geometric(16, 400, 8) == [16, 128, 400]
    assert _geometric(16, 300, 8) == [16, 300]


def measured_grid(rate: Callable[[int, int], float], linear_ms: float = 1e-3) -> _Grid:
    """Every point with one made-up run: attention costs `rate(length, budget)` microseconds per score."""
    grid = _Grid(IDENTITY, 1024, 8)
    fill(grid, rate, linear_ms)
    return grid


def fill(grid: _Grid, rate: Callable[[int, int], float], linear_ms: float = 1e-3) -> None:
    for planned in grid.points:
        budget = planned.unit.budgets[0]
        scores = float(computed_scores(0, planned.length, budget, 16, "token")) * planned.copies
        if planned.length == 1:
            scores = 1.0  # nearly nothing but a call, whose fixed cost is taken from it
        ms = rate(planned.length, budget) * scores * 1e-3 * DECODER.layers
        linear, head = linear_ms * planned.unit.tokens, 1e-3 * planned.unit.targets
        terms = (0.1 * ms, ms, 2 * ms, linear, 2 * linear, head, 2 * head)
        planned.calls = [[Run(terms, sum(terms), 1.0, 0)]]


def test_a_constant_rate_needs_no_more_points() -> None:
    assert measured_grid(lambda length, budget: 1.0).refine() == []


def test_new_points_go_where_the_rate_changes_with_the_length() -> None:
    grid = measured_grid(lambda length, budget: 8.0 if length == 1023 else 1.0)
    new = grid.refine()
    assert grid.lengths == [16, 128, 368, 1024]  # the middle of 128 and 1024, in whole blocks
    assert {(p.length + 1, p.unit.budgets[0]) for p in new} == {(368, 1), (368, 4), (368, 8)}
    assert grid.budgets == [1, 4, 8]
    short = measured_grid(lambda length, budget: 8.0 if length <= 16 else 1.0)
    assert {p.length + 1 for p in short.refine()} == {48}


def test_new_points_go_where_the_rate_changes_with_the_budget() -> None:
    """The gap in lengths before 128 is as wide, but there attention has a smaller share of the whole."""
    grid = measured_grid(lambda length, budget: 3.0 if budget == 8 else 1.0, linear_ms=0.2)
    new = grid.refine()
    assert grid.budgets == [1, 4, 6, 8]
    assert {(p.length + 1, p.unit.budgets[0]) for p in new} == {(128, 6), (1024, 6)}
    assert grid.lengths == [16, 128, 1024]


def test_a_gap_counts_by_the_share_that_attention_has() -> None:
    def rate(length: int, budget: int) -> float:
        return 2.0 if length == 1023 else 1.0

    assert measured_grid(rate, linear_ms=1e-3).refine()
    assert measured_grid(rate, linear_ms=10.0).refine() == []


def test_refinement_ends_where_rates_settle() -> None:
    grid = measured_grid(lambda length, budget: float(length) ** 0.5)
    for _ in range(100):
        if not grid.refine():
            break
        fill(grid, lambda length, budget: float(length) ** 0.5)
    else:
        pytest.fail("still new points after 100 refinements")
    assert len(grid.lengths) > 5


def test_a_table_of_made_up_runs_gives_them_back() -> None:
    grid = measured_grid(lambda length, budget: 1.0)
    table = grid.table(grid.points, {})
    for planned in grid.attention.values():
        predicted = table.latency(planned.unit.segments, planned.unit.budgets).total_ms
        assert predicted == pytest.approx(planned.whole_ms())
    assert table.residual == pytest.approx(0.0)  # a median: single points between the grid's may be off


def measured(held_out: Sequence[Work] = (), **options: Any) -> Measurement:
    model = tiny_model()
    decoder = decoder_from_config(model.config.to_dict(), "tiny")
    identity = Identity(decoder, block_size=4, granularity="token", device="cpu", dtype="float64", threads=1)
    return measure(model, identity, 60, 6, held_out=held_out, **options)


def test_without_time_one_coarse_table_is_finished() -> None:
    seen: list[tuple[int, int]] = []
    works = [work_of((13,), 2, 2, VOCABULARY), work_of((7, 9), 3, 2, VOCABULARY)]
    found = measured(works, limit_s=0.0, rounds=5, progress=lambda done, most: seen.append((done, most)))
    table = found.table
    coarse = _Grid(table.identity, 60, 6)
    # Measured one token below the grid's lengths: a last block that is not full.
    assert [(p.length + 1, p.budget) for p in table.attention] == sorted(coarse.attention)
    assert max(p.length for p in table.attention) == 59
    assert {"points": len(coarse.points), "rounds": 1, "processes": 1}.items() <= table.provenance.items()
    assert all(min(p.router_ms, p.forward_ms, p.backward_ms) > 0 for p in table.attention)
    assert all(min(p.forward_ms, p.backward_ms) > 0 for p in (*table.linear, *table.head))
    assert found.rank_factors == (1.0,)
    assert len(found.held_out_ms) == len(found.held_out_raw_ms) == 2
    assert min(found.held_out_ms) > 0
    # A first call of everything, one round, and the end.
    assert len(seen) == 2 * (len(coarse.points) + len(works)) + 1
    assert seen[-1] == (0, 0)


def test_with_time_all_rounds_run_and_a_slower_rank_is_told() -> None:
    """A made-up second rank does everything at half the speed."""

    def gather(value: Any) -> list[Any]:
        if not isinstance(value, Run):
            return [value, value]
        slower = replace(value, terms=tuple(2 * ms for ms in value.terms), whole_ms=2 * value.whole_ms)
        return [value, slower]

    found = measured(gather=gather, rounds=2, limit_s=60.0)
    assert found.rank_factors == pytest.approx((2 / 3, 4 / 3))
    assert {"rounds": 2, "processes": 2}.items() <= found.table.provenance.items()
    assert max(p.length for p in found.table.attention) == 59


def test_a_sample_below_two_blocks_leaves_nothing_to_interpolate() -> None:
    with pytest.raises(InputError, match="max_length 7 is below two blocks of 4"):
        measure(tiny_model(), replace(IDENTITY, block_size=4), 7, 2)


def test_one_process_has_no_network() -> None:
    assert measure_network(Ranks(0, 1)) is None


@pytest.mark.parametrize("max_length", [256, 1001, 1024, 8192])
@pytest.mark.parametrize("max_budget", [1, 16])
def test_held_out_work_is_off_the_grid_and_begins_with_the_largest(max_length: int, max_budget: int) -> None:
    works = held_out_work(IDENTITY, max_length, max_budget)
    assert len(works) == 12
    grid = _Grid(IDENTITY, max_length, max_budget)
    units = [unit for unit, _ in works]
    first = units[0]
    assert len(first.segments) == 1
    assert max_length - 3 <= first.tokens <= max_length
    assert first.tokens == max(unit.tokens for unit in units)
    assert first.budgets == (max(max_budget // 2, 1),) * 2
    lengths = [segment.tokens for unit in units for segment in unit.segments]
    assert all(length % 2 == 1 for length in lengths)
    assert not set(lengths) & {*grid.lengths, *(p.length for p in grid.small)}
    assert all(1 <= unit.budgets[0] <= max_budget for unit in units)
    assert sum(len(unit.segments) == 1 for unit in units) >= 6
    assert any(len(unit.segments) > 1 for unit in units)
    assert held_out_work(IDENTITY, max_length, max_budget)[3][0] == works[3][0]


def test_errors_of_a_check_by_hand() -> None:
    def checked(predicted: float, error: float, real: float) -> CheckPoint:
        return CheckPoint((5,), 1, predicted, error, real, real / 2, attention_error=0.5)

    points = [checked(11, 1.0, 10), checked(9, 0.4, 10), checked(10, 0.0, 10), checked(30, 5.0, 10)]
    assert [p.error for p in points] == pytest.approx([0.1, -0.1, 0.0, 2.0])
    assert mean_absolute_error(points) == pytest.approx(2.2 / 4)
    assert raw_error(points) == pytest.approx((1.2 + 0.8 + 1.0 + 5.0) / 4)
    assert share_within(points, 1) == 0.5
    assert share_within(points, 2.5) == 0.75
    assert share_within(points, 4) == 1.0


def test_checking_sets_predictions_beside_their_own_measurements() -> None:
    table = make_table()
    works = [work_of((33,), 2, 2, 100), work_of((21, 55), 3, 2, 100)]
    found = check_points(Measurement(table, (1.0,), (4.0, 5.0), (9.0, 8.0), (1.0, 2.0)), works)
    shown = [(p.lengths, p.budget, p.measured_ms, p.raw_ms) for p in found]
    assert shown == [((33,), 2, 4.0, 9.0), ((21, 55), 3, 5.0, 8.0)]
    for checked, (unit, _) in zip(found, works):
        assert checked.predicted_ms == pytest.approx(table.latency(unit.segments, unit.budgets).total_ms)
    with pytest.raises(ValueError, match="shorter"):
        check_points(Measurement(table, (1.0,), (4.0,), (9.0,), (1.0,)), works)
