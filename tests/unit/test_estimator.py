"""What is learned of single samples: own coverage curves, budgets given before, bounded memory, exact resume."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebalance.attention.probe import CoverageProbe
from sparsebalance.planning.anchor import Anchor
from sparsebalance.planning.correction import Correction
from sparsebalance.planning.coverage import BUDGET_GRID, CoverageEstimator
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.expected import BudgetEstimator, LayerBudgets, sample_budgets
from sparsebalance.planning.imbalance import imbalance
from sparsebalance.planning.latency import LatencyModel, RooflineModel
from sparsebalance.planning.plan import Latency, MicroBatch, Sample, Segment, StepPlan, Topology
from sparsebalance.planning.policy import named_policy, plan_step
from sparsebalance.planning.sample_memory import SampleMemory
from sparsebalance.training.feedback import Feedback, Learner
from tests.conftest import samples_of
from tests.unit.test_latency import make_table
from tests.unit.tuning_steps import tune

BLOCK = 16
FLAT = [0.5] * len(BUDGET_GRID)
STEEP = np.linspace(0.1, 0.9, len(BUDGET_GRID)).tolist()
AT_2 = np.array([2])
curves_measured = st.lists(st.floats(0, 1), min_size=len(BUDGET_GRID), max_size=len(BUDGET_GRID)).map(sorted)


def plan_of(*units: tuple[tuple[Segment, ...], LayerBudgets], policy: str = "test") -> StepPlan:
    made = tuple(MicroBatch(segments, budgets, Latency(1, 2)) for segments, budgets in units)
    return StepPlan(policy, Topology(), BLOCK, (made,), 0.0)


def planned(sample: Sample, budgets: LayerBudgets) -> StepPlan:
    return plan_of(((Segment.whole(sample),), budgets))


def test_own_curve_then_length_range_then_prior() -> None:
    estimator = CoverageEstimator(BLOCK)
    estimator.update_sample(7, 640, {0: FLAT})
    estimator.update_sample(8, 640, {0: STEEP, 2: STEEP})
    curves = estimator.curves()
    of_range = 0.8 * 0.5 + 0.2 * STEEP[1]
    assert curves.coverage(0, 640, AT_2, sample=7)[0] == pytest.approx(0.5, abs=1e-5)
    assert curves.coverage(0, 640, AT_2, sample=8)[0] == pytest.approx(STEEP[1], abs=1e-5)
    assert curves.coverage(0, 640, AT_2, sample=9)[0] == curves.coverage(0, 640, AT_2)[0] == pytest.approx(of_range)
    # Sample 8 has no curve of layer 1, sample 7 none of layer 2; 640 tokens are 40 blocks.
    assert curves.coverage(1, 640, AT_2, sample=8)[0] == pytest.approx((2 / 40) ** 0.25)
    assert curves.coverage(2, 640, AT_2, sample=7)[0] == pytest.approx(STEEP[1])
    assert curves.coverage(2, 64, AT_2, sample=7)[0] == pytest.approx((2 / 4) ** 0.25)


@settings(max_examples=40, deadline=None)
@given(curve=curves_measured, length=st.integers(1, 4000))
def test_an_own_curve_is_what_was_measured_and_rises_to_one(curve: list[float], length: int) -> None:
    """Stored in steps of 1 / 65534: half a step off at most, monotone, and 1 from the full budget on."""
    estimator = CoverageEstimator(BLOCK)
    estimator.update_sample(3, length, {0: curve})
    blocks = -(-length // BLOCK)
    covered = estimator.curves().coverage(0, 10**6, np.array(BUDGET_GRID), sample=3)
    assert np.abs(covered - curve).max() <= 0.5 / 65534 + 1e-12
    read = estimator.curves().coverage(0, length, np.arange(1, blocks + 3), sample=3)
    assert (np.diff(read) >= 0).all()
    assert (read[blocks - 1 :] == 1).all()


def test_a_dip_in_a_measured_curve_is_filled() -> None:
    estimator = CoverageEstimator(BLOCK)
    estimator.update_sample(3, 4000, {0: [0.5, 0.4, *[0.6] * (len(BUDGET_GRID) - 2)]})
    for sample in (3, None):
        assert estimator.curves().coverage(0, 4000, AT_2, sample)[0] == pytest.approx(0.5, abs=1e-5)


def test_a_sample_seen_again_is_averaged_over_epochs() -> None:
    estimator = CoverageEstimator(BLOCK)
    for value in (0.2, 0.4, 0.8):
        estimator.update_sample(3, 4000, {1: [value] * len(BUDGET_GRID)})
    expected = ((0.2 + 0.4) / 2 + 0.8) / 2
    assert estimator.curves().coverage(1, 4000, AT_2, 3)[0] == pytest.approx(expected, abs=1e-4)


def test_wrong_curves_are_refused_and_change_nothing() -> None:
    estimator = CoverageEstimator(BLOCK)
    with pytest.raises(InputError, match=r"layer 4: coverage must lie in \[0, 1\].*check the attention scores for NaN"):
        estimator.update_sample(1, 100, {0: FLAT, 4: [*FLAT[1:], float("nan")]})
    with pytest.raises(InputError, match="layer 2: a coverage curve has 14 points, but 1 were given"):
        estimator.update_sample(1, 100, {2: [0.5]})
    assert estimator.state_dict() == CoverageEstimator(BLOCK).state_dict()


def test_tuning_reads_the_curve_of_the_sample() -> None:
    """Of two slow samples of equal length, the one whose coverage hardly depends on the budget gives up more."""
    estimator = CoverageEstimator(BLOCK)
    steep = 1 - np.exp(-0.05 * np.array(BUDGET_GRID))
    estimator.update_sample(0, 4000, {0: FLAT, 1: FLAT})
    estimator.update_sample(1, 4000, {0: steep.tolist(), 1: steep.tolist()})
    placement = (tuple((Segment.whole(sample),) for sample in samples_of(4000, 4000, 40)),)
    ((flat, bent, _),) = tune(Anchor(threshold=0.1), placement, make_table(), 8, estimator.curves())
    assert max(flat) < min(bent) < 8


def test_snapshots_stay_as_they_are_and_share_arrays() -> None:
    estimator = CoverageEstimator(BLOCK)
    estimator.update_sample(1, 640, {0: FLAT, 1: FLAT})
    estimator.update_sample(2, 640, {0: FLAT})
    before = estimator.curves()
    estimator.update_sample(1, 640, {1: STEEP})
    after = estimator.curves()
    assert before.coverage(1, 640, AT_2, 1)[0] == pytest.approx(0.5, abs=1e-5)
    assert after.coverage(1, 640, AT_2, 1)[0] == pytest.approx((0.5 + STEEP[1]) / 2, abs=1e-4)
    assert after.samples[2] is before.samples[2]


def test_the_samples_seen_least_recently_are_dropped() -> None:
    memory: SampleMemory[np.ndarray] = SampleMemory(most=6)
    for sample, layers in ((1, 2), (2, 2), (3, 2), (1, 2), (4, 2)):
        memory.put(sample, np.zeros(layers))
    assert list(memory.snapshot()) == [3, 1, 4]
    memory.put(1, np.zeros(4))  # six rows hold it and one more sample
    assert list(memory.snapshot()) == [4, 1]
    memory.put(5, np.zeros(7))
    assert memory.snapshot() == {}
    memory.put(6, np.zeros(6))
    assert list(memory.snapshot()) == [6]
    with pytest.raises(InputError, match="most is -1"):
        SampleMemory(most=-1)


def test_limits_hold_for_both_estimators_and_after_loading() -> None:
    coverage, budgets = CoverageEstimator(BLOCK, most=4), BudgetEstimator(BLOCK, most=4)
    for sample in range(5):
        coverage.update_sample(sample, 640, {0: FLAT, 1: FLAT})
        budgets.update(planned(Sample(sample, 640, 0), (4, 4)))
    assert list(coverage.curves().samples) == list(budgets.given().samples) == [3, 4]
    smaller, few = CoverageEstimator(BLOCK, most=2), BudgetEstimator(BLOCK, most=2)
    smaller.load_state_dict(coverage.state_dict())
    few.load_state_dict(budgets.state_dict())
    assert list(smaller.curves().samples) == list(few.given().samples) == [4]


def test_expected_budgets_are_the_samples_own_then_its_ranges_then_absent() -> None:
    estimator = BudgetEstimator(BLOCK, decay=0.75)
    short, other, again, giant = Sample(0, 640, 0), Sample(1, 700, 0), Sample(2, 1000, 0), Sample(3, 10**5, 0)
    assert estimator.expected([short]) == {}
    estimator.update(planned(short, (4, 10)))
    estimator.update(planned(other, (12, 2)))
    # 33 to 64 blocks are one range: 0.75 * 4 + 0.25 * 12 = 6 and 0.75 * 10 + 0.25 * 2 = 8.
    assert estimator.expected([short, other, again, giant]) == {0: (4, 10), 1: (12, 2), 2: (6, 8)}
    estimator.update(planned(short, (7, 1)))  # means of 5.5, which round to the even number
    assert estimator.expected([short]) == {0: (6, 6)}
    assert all(type(k) is int for k in estimator.expected([short])[0])


def test_a_chunked_samples_budget_is_the_mean_by_tokens() -> None:
    """32, 32 and 16 tokens of 80: (32 * 2 + 32 * 4 + 16 * 10) / 80 = 4.4 and (32 * 1 + 32 * 7 + 16 * 4) / 80 = 4."""
    cut = [Segment(5, 0, 32, 80, 0), Segment(5, 32, 64, 80, 0), Segment(5, 64, 80, 80, 0)]
    packed = (Segment.whole(Sample(6, 16, 0)), Segment.whole(Sample(7, 20, 0)))
    plan = plan_of(((cut[0],), (2, 1)), ((), (99, 99)), ((cut[1],), (4, 7)), (packed, (3, 3)), ((cut[2],), (10, 4)))
    found = {sample: (length, blocks.tolist()) for sample, (length, blocks) in sample_budgets(plan).items()}
    assert found == {5: (80, [4.4, 4.0]), 6: (16, [3.0, 3.0]), 7: (20, [3.0, 3.0])}


def test_budgets_beyond_the_full_one_count_as_full() -> None:
    """Sample 0 has 5 blocks: 100 and 5 both read all of it, so their mean still does. So do others of its range, and
    the mean with a small budget stays small."""
    estimator = BudgetEstimator(BLOCK, decay=0.5)
    five, eight = Sample(0, 80, 0), Sample(1, 128, 0)
    estimator.update(planned(five, (100,)))
    assert estimator.expected([five, eight]) == {0: (5,), 1: (8,)}
    estimator.update(planned(five, (1,)))
    assert estimator.expected([five]) == {0: (3,)}
    assert estimator.expected([eight]) == {1: (round((8 + 1) / 2),)}


@pytest.mark.parametrize("unit_size", [None, 128])
def test_fixed_budgets_are_expected_as_they_are(roofline: RooflineModel, unit_size: int | None) -> None:
    """Knowing what a policy with fixed budgets gives changes none of its plans."""
    step = samples_of(1000, 30, 7, 400, 400, 90, 1)
    models: tuple[LatencyModel, ...] = (roofline, make_table())
    for model in models:
        for name in ("sab", "random", "kk_tokens"):
            policy = named_policy(name, budget=6, token_cap=1024, unit_size=unit_size)
            plan = plan_step(step, model, Topology(dp=2), policy)
            estimator = BudgetEstimator(BLOCK)
            for _ in range(3):
                estimator.update(plan)
            expected = estimator.expected(step)
            assert expected[0] == (6,) * model.layers
            assert plan_step(step, model, Topology(dp=2), policy, expected=expected) == plan


@pytest.mark.parametrize("unit_size", [None, 512])
def test_expected_budgets_balance_samples_of_equal_length(roofline: RooflineModel, unit_size: int | None) -> None:
    """Eight samples of one length, of which some were given 4 blocks and others 16 in an earlier epoch: dealt out by
    length, two ranks get both of their samples with 16; by what they were given, every rank gets one of each."""
    step = samples_of(*[1024] * 8)
    given = {s.id: (4 if s.id in (0, 1, 4, 5) else 16,) * roofline.layers for s in step}
    estimator = BudgetEstimator(BLOCK)
    estimator.update(plan_of(*(((Segment.whole(s),), given[s.id]) for s in step)))
    policy = named_policy("sab", budget=8, token_cap=1024, unit_size=unit_size)

    def rank_imbalance(expected: dict[int, LayerBudgets] | None) -> float:
        plan = plan_step(step, roofline, Topology(dp=4), policy, expected=expected)
        really = [[roofline.latency(u.segments, given[u.segments[0].sample]).total_ms for u in r] for r in plan.ranks]
        return imbalance(really).rank

    assert rank_imbalance(None) == pytest.approx(1.136, abs=0.001)  # a sample takes 286 ms with 4 blocks, 376 with 16
    assert rank_imbalance(estimator.expected(step)) == pytest.approx(1.0, abs=1e-9)


def learned(learner: Learner, epoch: int) -> None:
    """One step's worth of made-up measurements."""
    rng = np.random.default_rng(epoch)
    step = samples_of(640, 640, 80)
    policy = named_policy("sab_dst", budget=4, token_cap=1024)
    plan = plan_step(step, learner.model, Topology(dp=2), policy, learner.feedback().curves)
    probes = {
        (sample.id, layer): CoverageProbe(*(tuple(np.sort(rng.random(len(BUDGET_GRID))).tolist()) for _ in range(3)))
        for sample in reversed(step)
        for layer in range(learner.model.layers)
    }
    learner.learn_coverage(plan, probes)
    learner.learn_budgets(plan)


def test_a_resumed_learner_goes_on_as_if_it_had_not_stopped(roofline: RooflineModel) -> None:
    straight = Learner(roofline, Correction((1.0, 1.0)), correcting=True)
    learned(straight, 0)
    learned(straight, 1)
    resumed = Learner(roofline, Correction((1.0, 1.0)), correcting=True)
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    feedback = Feedback.from_state_dict(json.loads(json.dumps(straight.feedback().state_dict())))
    step = samples_of(640, 640, 80, 600)
    for known in (resumed.feedback(), feedback):
        assert known.state_dict() == straight.feedback().state_dict()
        assert known.expected("sab_dst", step) == straight.feedback().expected("sab_dst", step)
        for sample in (*range(3), None):
            covered = known.curves.coverage(1, 640, np.arange(1, 50), sample)
            assert (covered == straight.feedback().curves.coverage(1, 640, np.arange(1, 50), sample)).all()
    learned(straight, 2)
    learned(resumed, 2)
    assert resumed.state_dict() == straight.state_dict()


def test_feedback_tells_what_each_policy_gave_and_does_not_change(roofline: RooflineModel) -> None:
    learner = Learner(roofline, Correction((1.0,)), correcting=False)
    step, layers = samples_of(640), roofline.layers
    assert learner.feedback().expected("sab_dst", step) == {}
    learner.learn_budgets(plan_of(((Segment.whole(step[0]),), (3,) * layers), policy="sab_dst"))
    learner.learn_budgets(plan_of(((Segment.whole(step[0]),), (9,) * layers), policy="dst"))
    before = learner.feedback()
    learner.learn_budgets(plan_of(((Segment.whole(step[0]),), (20,) * layers), policy="dst"))
    assert before.expected("sab_dst", step) == {0: (3,) * layers}
    assert before.expected("dst", step) == {0: (9,) * layers}
    assert before.expected("sab", step) == {}
    assert learner.feedback().expected("dst", step) == {0: (14,) * layers}  # 14.5, to the even one


def test_the_learner_remembers_each_samples_own_curves(roofline: RooflineModel) -> None:
    learner = Learner(roofline, Correction((1.0,)), correcting=False)
    plan = planned(Sample(4, 640, 0), (4,) * roofline.layers)
    learner.learn_coverage(
        plan, {(4, 2): CoverageProbe(estimated=tuple(FLAT), router=tuple(STEEP), oracle=tuple(FLAT))}
    )
    curves = learner.feedback().curves
    assert curves.coverage(2, 640, AT_2, 4)[0] == pytest.approx(STEEP[1], abs=1e-5)
    assert curves.coverage(0, 640, AT_2, 4)[0] == pytest.approx((2 / 40) ** 0.25)


def test_budgets_saved_under_another_block_size_are_refused() -> None:
    with pytest.raises(InputError, match="block size 16, but the run has 64"):
        BudgetEstimator(64).load_state_dict(BudgetEstimator(16).state_dict())
    with pytest.raises(InputError, match="decay is 1"):
        BudgetEstimator(16, decay=1.0)
