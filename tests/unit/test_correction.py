"""Online correction: it finds the factors that times were made with, and one disturbed unit does not move it."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebalance.planning.correction import CorrectedModel, Correction, Observation
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.latency import TERMS, LatencyModel, RooflineModel
from sparsebalance.planning.plan import Segment, Topology
from sparsebalance.planning.policy import named_policy, plan_step
from tests.conftest import samples_of
from tests.unit.test_latency import make_table

factor = st.floats(0.4, 2.5)


def steps_of(
    ranks: tuple[float, ...], terms: dict[str, float], count: int, noise: float = 0.0
) -> list[list[list[Observation]]]:
    """Units of random composition, whose times are those factors times the prediction, with lognormal noise."""
    rng = np.random.default_rng(0)
    steps = []
    for _ in range(count):
        step = []
        for rank in ranks:
            units = []
            for _ in range(5):
                predicted = dict(zip(TERMS, rng.uniform(1, 10, len(TERMS))))
                slow = rank * math.exp(noise * rng.standard_normal())
                units.append(Observation(predicted, {name: slow * terms[name] * ms for name, ms in predicted.items()}))
            step.append(units)
        steps.append(step)
    return steps


@settings(max_examples=30)
@given(st.tuples(factor, factor), st.tuples(factor, factor, factor, factor))
def test_the_factors_that_times_were_made_with_are_found(ranks: tuple[float, float], terms: tuple[float, ...]) -> None:
    true = dict(zip(TERMS, terms))
    correction = Correction(ranks=(1.0, 1.0))
    for step in steps_of(ranks, true, 40):
        correction = correction.updated(step)
    assert math.prod(correction.ranks) == pytest.approx(1.0)
    for rank in range(2):
        for name in TERMS:
            assert correction.ranks[rank] * correction.terms[name] == pytest.approx(ranks[rank] * true[name], rel=0.02)


def test_a_rank_that_turns_slower_is_known_within_seven_steps() -> None:
    correction = Correction(ranks=(1.0, 1.0))
    for step in steps_of((1.5, 1.0), dict.fromkeys(TERMS, 1.0), 7, noise=0.05):
        correction = correction.updated(step)
    assert correction.ranks[0] / correction.ranks[1] == pytest.approx(1.5, rel=0.06)


def test_one_disturbed_micro_batch_does_not_move_the_factors() -> None:
    correction = Correction(ranks=(1.0, 1.0))
    step = steps_of((1.0, 1.0), dict.fromkeys(TERMS, 1.0), 1)[0]
    disturbed = step[0][2]
    step[0][2] = Observation(disturbed.predicted, {name: 100 * ms for name, ms in disturbed.predicted.items()})
    after = correction.updated(step)
    assert after.ranks == pytest.approx((1.0, 1.0), abs=1e-9)
    assert after.terms == pytest.approx(correction.terms, abs=1e-9)


def test_a_whole_step_that_stood_still_moves_them_by_a_bounded_amount() -> None:
    correction = Correction(ranks=(1.0,)).updated(steps_of((1000.0,), dict.fromkeys(TERMS, 1.0), 1)[0])
    assert max(correction.terms.values()) <= 4**0.3 * (1 + 1e-9)


def test_ranks_and_terms_without_work_keep_their_factors() -> None:
    correction = Correction(ranks=(1.2, 1 / 1.2), terms={**dict.fromkeys(TERMS, 1.0), "head": 1.3})
    nothing = dict.fromkeys(TERMS, 0.0)
    after = correction.updated([[], [Observation(nothing, nothing)]])
    assert (after.ranks, after.terms) == (pytest.approx(correction.ranks), correction.terms)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_broken_times_and_factors_are_refused(bad: float) -> None:
    fine = dict.fromkeys(TERMS, 1.0)
    with pytest.raises(InputError, match="negative or not finite"):
        Correction(ranks=(1.0,)).updated([[Observation(fine, {**fine, "head": bad})]])
    with pytest.raises(InputError, match="finite and above 0"):
        Correction(ranks=(bad,))


def test_the_state_survives_json() -> None:
    correction = Correction(ranks=(1.0, 1.0)).updated(steps_of((1.3, 0.9), dict.fromkeys(TERMS, 1.1), 1)[0])
    assert Correction.from_state_dict(json.loads(json.dumps(correction.state_dict()))) == correction


@pytest.mark.parametrize("kind", ["table", "roofline"])
def test_a_corrected_model_scales_each_term(kind: str, roofline: RooflineModel) -> None:
    base: LatencyModel = make_table() if kind == "table" else roofline
    terms = {"linear": 1.1, "router": 1.2, "attend": 1.3, "head": 1.4}
    model = CorrectedModel(base, Correction(ranks=(2.0, 0.5), terms=terms))
    segments, budgets = [Segment(0, 0, 300, 300, 40)], (3,) * base.layers
    plain, scaled = base.terms(segments, budgets).total_ms(), model.terms(segments, budgets).total_ms()
    assert scaled == pytest.approx({name: terms[name] * ms for name, ms in plain.items()})
    assert model.latency(segments, budgets).total_ms == pytest.approx(sum(scaled.values()))
    layer = model.attention_ms(segments, np.array([3]))[0]
    assert layer * base.layers == pytest.approx(scaled["router"] + scaled["attend"])
    assert (model.rank_factor(0), model.rank_factor(1)) == (2.0, 0.5)
    assert model.latency([], budgets).total_ms == 0.0


def test_a_plan_predicts_times_of_the_rank_that_it_uses() -> None:
    table = make_table()
    slow = CorrectedModel(table, Correction(ranks=(2.0, 0.5)))
    plan = plan_step(samples_of(100, 100), slow, Topology(dp=2), named_policy("random", budget=2, token_cap=200))
    alone = table.latency(plan.ranks[0][0].segments, (2, 2)).total_ms
    assert [rank[0].latency.total_ms for rank in plan.ranks] == pytest.approx([2 * alone, alone / 2])
    assert plan.predicted_step_ms == pytest.approx(2 * alone)
