"""Schedules and the event simulator against closed forms and a naive replay."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebalance.planning.errors import InputError
from sparsebalance.planning.plan import Latency
from sparsebalance.planning.schedule import Action, check_schedule, one_forward_one_backward
from sparsebalance.planning.simulator import imbalance, simulate

times = st.floats(0.01, 10)
rank_of_units = st.lists(st.tuples(times, times), min_size=1, max_size=7)


def naive_step_ms(units: list[tuple[float, float]], stages: int) -> float:
    """Ask every stage, again and again, whether its next action can run; slow and obvious."""
    schedule = one_forward_one_backward(len(units), stages)
    end: dict[tuple[str, int, int], float] = {}
    position, free = [0] * stages, [0.0] * stages
    while any(p < len(a) for p, a in zip(position, schedule)):
        for stage, actions in enumerate(schedule):
            if position[stage] == len(actions):
                continue
            action = actions[position[stage]]
            needs = []
            if action.kind == "F" and stage > 0:
                needs.append(("F", stage - 1, action.unit))
            if action.kind == "B":
                needs.append(("F", stage, action.unit))
                if stage < stages - 1:
                    needs.append(("B", stage + 1, action.unit))
            if all(need in end for need in needs):
                took = units[action.unit][0 if action.kind == "F" else 1] / stages
                free[stage] = max([free[stage], *(end[need] for need in needs)]) + took
                end[action.kind, stage, action.unit] = free[stage]
                position[stage] += 1
    return max(free)


@given(rank_of_units, st.integers(1, 5))
def test_the_simulator_equals_the_naive_replay(units: list[tuple[float, float]], stages: int) -> None:
    timeline = simulate([[Latency(f, b) for f, b in units]], stages)
    assert timeline.step_ms == pytest.approx(naive_step_ms(units, stages))


@pytest.mark.parametrize("stages", [1, 2, 4, 7])
@pytest.mark.parametrize("units", [1, 3, 8])
def test_equal_units_take_the_closed_form(units: int, stages: int) -> None:
    """1F1B with m equal units on p stages: (m + p - 1) (f + b)."""
    timeline = simulate([[Latency(stages * 1.0, stages * 2.0)] * units], stages)
    assert timeline.step_ms == pytest.approx((units + stages - 1) * 3.0)
    assert timeline.busy_fraction == pytest.approx(units / (units + stages - 1))
    assert timeline.bubble_ms == pytest.approx(np.full((1, stages), (stages - 1) * 3.0))


@given(rank_of_units, st.integers(1, 4), st.data())
def test_more_work_never_shortens_a_step(units: list[tuple[float, float]], stages: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(units) - 1))
    more = [(f + (i == index), b) for i, (f, b) in enumerate(units)]
    before = simulate([[Latency(f, b) for f, b in units]], stages).step_ms
    assert simulate([[Latency(f, b) for f, b in more]], stages).step_ms >= before - 1e-9


@given(st.lists(rank_of_units, min_size=1, max_size=3), st.integers(1, 4))
def test_a_step_is_no_shorter_than_its_bounds(ranks: list[list[tuple[float, float]]], stages: int) -> None:
    timeline = simulate([[Latency(f, b) for f, b in rank] for rank in ranks], stages)
    for rank in ranks:
        assert timeline.step_ms >= sum(f + b for f, b in rank) / stages - 1e-9  # a stage's own work
        assert timeline.step_ms >= max(f + b for f, b in rank) - 1e-9  # one unit through all stages
    assert 0 < timeline.busy_fraction <= 1 + 1e-9


@settings(max_examples=30)
@given(st.lists(rank_of_units, min_size=1, max_size=3), st.integers(1, 4))
def test_the_critical_path_is_an_unbroken_chain(ranks: list[list[tuple[float, float]]], stages: int) -> None:
    timeline = simulate([[Latency(f, b) for f, b in rank] for rank in ranks], stages)
    path = timeline.critical_path()
    assert path[0].start_ms == 0
    assert path[-1].end_ms == pytest.approx(timeline.step_ms)
    for a, b in itertools.pairwise(path):
        assert b.start_ms == pytest.approx(a.end_ms)


def test_the_slowest_rank_sets_the_step_and_the_all_reduce_comes_on_top() -> None:
    timeline = simulate([[Latency(1, 2)], [Latency(2, 3), Latency(1, 1)]], all_reduce_ms=0.5)
    assert timeline.step_ms == 7.5
    assert timeline.rank_ms.tolist() == [3.0, 7.0]
    assert timeline.busy_fraction == pytest.approx(10 / 15)


def test_the_three_imbalances_by_hand() -> None:
    """Units 1, 3 and 4, 2: all 4 / 2.5; slots (1, 4) -> 1.6 and (3, 2) -> 1.2; ranks 4 and 6 -> 1.2."""
    found = imbalance([[1, 3], [4, 2]])
    assert (found.all, found.slot, found.rank) == (pytest.approx(1.6), pytest.approx(1.4), pytest.approx(1.2))


def test_a_missing_slot_counts_zero_and_empty_units_are_no_micro_batches() -> None:
    found = imbalance([[2, 2], [0]])
    assert (found.all, found.slot, found.rank) == (1.0, 2.0, 2.0)
    nothing = imbalance([[0], [0]])
    assert (nothing.all, nothing.slot, nothing.rank) == (1.0, 1.0, 1.0)
    for wrong in ([], [[1.0], []]):
        with pytest.raises(InputError, match="at least one unit"):
            imbalance(wrong)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_wrong_latencies_are_refused(bad: float) -> None:
    with pytest.raises(InputError, match="rank 0"):
        simulate([[Latency(bad, 1.0)]])
    with pytest.raises(InputError, match="at least one unit"):
        simulate([[]])


@given(st.integers(1, 9), st.integers(1, 6))
def test_every_schedule_replays(units: int, stages: int) -> None:
    schedule = one_forward_one_backward(units, stages)
    check_schedule(schedule, units)
    for stage, actions in enumerate(schedule):
        in_flight = np.cumsum([1 if action.kind == "F" else -1 for action in actions])
        assert in_flight.max() <= min(units, stages - stage)  # the memory promise of 1F1B


def test_deadlocks_and_wrong_lists_are_named() -> None:
    with pytest.raises(InputError, match="stage 0: F0 must appear exactly once"):
        check_schedule(((Action("B", 0),),), 1)
    with pytest.raises(InputError, match="stage 0 waits at B0; stage 1 waits at F0"):
        check_schedule(
            (
                (Action("B", 0), Action("F", 0)),
                (Action("F", 0), Action("B", 0)),
            ),
            1,
        )
    with pytest.raises(InputError, match="at least one of each"):
        one_forward_one_backward(0, 2)


def test_a_large_plan_is_simulated_quickly() -> None:
    """Not a timing: 4 ranks x 16 units x 4 stages must stay one pass, not a search."""
    timeline = simulate([[Latency(1, 2)] * 16] * 4, 4)
    assert len(timeline.spans(0)) == 4 * 32
