"""Waterfill: nothing covers more in the time that it spends, and it never spends more than it may."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebalance.planning.budgets import Choices, Floats
from sparsebalance.planning.coverage import BUDGET_GRID, CoverageCurves
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.waterfill import Ladder, Waterfill, least_time, upper_hull
from tests.unit.test_budgets import TABLE, curves, place
from tests.unit.tuning_steps import step_of, tune

numbers = st.integers(0, 8).map(float)


def choices_of(worths: list[list[list[float]]], costs: list[list[float]], tokens: list[float]) -> Choices:
    """Small made-up choices; `worths` are of [units, layers, choices], in any unit."""
    attention = np.array(costs)
    return Choices(
        budgets=np.arange(1, attention.shape[1] + 1),
        default=0,
        forward_ms=attention,
        backward_ms=np.zeros_like(attention),
        rest_ms=np.zeros(len(attention)),
        coverage=np.array(worths),
        possible=np.ones_like(attention, dtype=bool),
        tokens=np.array(tokens),
    )


def rising(values: list[float]) -> list[float]:
    return np.cumsum(values).tolist()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.lists(numbers, min_size=4, max_size=4).map(rising), min_size=2, max_size=2), min_size=2, max_size=2
    ),
    st.lists(st.lists(st.integers(1, 5).map(float), min_size=4, max_size=4).map(rising), min_size=2, max_size=2),
    st.lists(st.integers(1, 3).map(float), min_size=2, max_size=2),
    st.floats(0, 1),
)
def test_nothing_covers_more_in_the_time_that_is_spent(
    worths: list[list[list[float]]], costs: list[list[float]], tokens: list[float], share: float
) -> None:
    """Against all 256 ways to choose."""
    choices = choices_of(worths, costs, tokens)
    group = np.zeros((2, 2), dtype=np.int64)
    ladder = Ladder.of(choices, np.ones((2, 2, 4), dtype=bool), group, 1)
    ways = [np.array(each).reshape(2, 2) for each in itertools.product(range(4), repeat=4)]
    values = [(choices.attention_of(way).sum(), choices.worth_of(way)) for way in ways]
    for total in ladder.spent[0]:  # after each step nothing is left over
        won = choices.worth_of(ladder.within(np.array([total]))[0])
        assert max(worth for ms, worth in values if ms <= total + 1e-9) <= won + 1e-6
    least, most = min(values)[0], max(values)[0]
    total = least + share * (most - least)
    places, price = ladder.within(np.array([total]))
    assert choices.attention_of(places).sum() <= total * (1 + 1e-6)
    missed = max(worth for ms, worth in values if ms <= total) - choices.worth_of(places)
    assert missed <= price[0] * ladder.ms.max(initial=0.0) + 1e-6  # less than the step that did not fit


def test_groups_spend_their_own_time() -> None:
    """By hand: each of two units has two layers, of which one wins 4 and one 1 for the next millisecond."""
    worths = [[[0.0, 4.0, 5.0], [0.0, 1.0, 1.5]]] * 2
    choices = choices_of(worths, [[1.0, 2.0, 3.0]] * 2, [1.0, 1.0])
    group = np.array([[0, 0], [1, 1]])
    ladder = Ladder.of(choices, np.ones((2, 2, 3), dtype=bool), group, 2)
    places, price = ladder.within(np.array([3.0, 5.0]))
    assert places.tolist() == [[1, 0], [2, 1]]
    assert price.tolist() == [1.0, 0.5]
    assert ladder.within(np.array([0.5, 99.0]))[0].tolist() == [[0, 0], [2, 2]]


def test_the_least_time_for_a_coverage() -> None:
    worths = [[[0.0, 4.0, 5.0], [0.0, 1.0, 1.5]]]
    choices = choices_of(worths, [[1.0, 2.0, 3.0]], [1.0])
    ladder = Ladder.of(choices, np.ones((1, 2, 3), dtype=bool), np.zeros((1, 2), dtype=np.int64), 1)
    assert [least_time(choices, ladder, goal)[0].tolist() for goal in (0.0, 3.9, 4.0, 4.5, 6.5)] == [
        [[0, 0]],
        [[1, 0]],
        [[1, 0]],
        [[2, 0]],
        [[2, 2]],
    ]


@settings(max_examples=80, deadline=None)
@given(st.lists(numbers, min_size=5, max_size=5).map(rising), st.lists(st.booleans(), min_size=5, max_size=5))
def test_the_hull_leaves_no_allowed_point_above_it_and_none_below(worth: list[float], allowed: list[bool]) -> None:
    cost = np.array([[1.0, 2.0, 4.0, 5.0, 7.0]])
    flags = np.array([allowed])
    kept = upper_hull(cost, np.array([worth]), flags)
    assert not (kept & ~flags).any()
    corners, points = np.flatnonzero(kept[0]), np.flatnonzero(flags[0])
    if not len(points):
        return
    assert (corners[0], corners[-1]) == (points[0], points[-1])
    hull: Floats = np.interp(cost[0], cost[0, corners], np.array(worth)[corners])
    assert (np.array(worth)[points] <= hull[points] + 1e-6).all()
    slopes = np.diff(np.array(worth)[corners]) / np.diff(cost[0, corners])
    assert (np.diff(slopes) <= 1e-6).all()


def mixed(*steepness: float) -> CoverageCurves:
    """Coverage 1 - exp(-steepness x budget), one steepness a layer."""
    return CoverageCurves(
        16,
        {
            (layer, bucket): 1 - np.exp(-s * np.array(BUDGET_GRID))
            for layer, s in enumerate(steepness)
            for bucket in range(20)
        },
    )


@pytest.mark.parametrize("aim", ["coverage", "time"])
@pytest.mark.parametrize("lengths", [[(4000,), (600,)], [(1, 17, 900), (16,), (2500,)]])
def test_both_aims_keep_what_they_promise(aim: str, lengths: list[tuple[int, ...]]) -> None:
    step = step_of(place(lengths, [(1500,), ()]), TABLE, 8, mixed(0.4, 0.05))
    rule = Waterfill(aim=aim, threshold=0.3)  # type: ignore[arg-type]
    choices = Choices.of(step, rule)
    budgets = np.array([b for rank, units in zip(rule(step), step.ranks) for b, u in zip(rank, units) if u.segments])
    places = np.searchsorted(choices.budgets, budgets)
    defaults = choices.defaults()
    before, after = (choices.attention_of(at).sum() for at in (defaults, places))
    worse, better = (choices.worth_of(at) for at in (defaults, places))
    assert after <= before * (1 + 1e-9)
    assert better >= worse - 1e-9
    assert after < before * 0.99 if aim == "time" else better > worse
    lost = np.take_along_axis(choices.change, places[..., None], 2)
    assert lost.min() >= -0.3 - 1e-9


def test_the_layer_that_gains_most_from_a_block_gets_it() -> None:
    ((steep, flat),) = (units[0] for units in tune(Waterfill(), place([(3000,)]), TABLE, 8, mixed(0.05, 5.0)))
    assert flat < 8 < steep


def test_while_it_runs_a_unit_shares_out_its_time_at_the_price() -> None:
    step = step_of(place([(3000,), ()]), TABLE, 8, mixed(0.05, 0.5))
    rule = Waterfill(min_budget=2, max_budget=30)
    expected, budgets, ((follow, nothing),) = rule.online(step)
    assert expected == budgets == rule(step)
    assert nothing is None
    assert follow is not None
    assert (follow.default, follow.min_budget, follow.max_budget) == (8, 2, 30)
    assert len(follow.attention_ms) == len(BUDGET_GRID)
    assert follow.price is not None
    assert follow.price > 0


def test_a_wrong_aim_is_refused() -> None:
    with pytest.raises(InputError, match="waterfill aim is 'both'"):
        Waterfill(aim="both")  # type: ignore[arg-type]


def test_curves_alike_leave_nothing_to_move() -> None:
    """Equal units and layers: the default is as good as anything, whatever the aim."""
    step = step_of(place([(2048,), (2048,)]), TABLE, 8, curves(0.05))
    choices = Choices.of(step, Waterfill())
    for rule in (Waterfill(), Waterfill(aim="time")):
        flat = np.array([budgets for rank in rule(step) for budgets in rank])
        places = np.searchsorted(choices.budgets, flat)
        assert choices.worth_of(places) == pytest.approx(choices.worth_of(choices.defaults()), rel=0.01)
    assert replace(Waterfill(), threshold=0.0)(step) == step.budgets(np.full((2, 2), 8))
