"""Budgets tuned while a micro-batch runs: choices by hand, limits, recompute, memory, errors, what is learned."""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebalance.attention.interface import PackedLayout
from sparsebalance.attention.moba import MoBARouter
from sparsebalance.attention.online import OnlineBudgets, calibrated
from sparsebalance.attention.probe import CoverageProbe
from sparsebalance.planning.calibration import UNCALIBRATED, Calibration
from sparsebalance.planning.correction import Correction
from sparsebalance.planning.coverage import BUDGET_GRID, at_budgets
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.latency import RooflineModel, unit_terms
from sparsebalance.planning.plan import Latency, MicroBatch, OnlineTuning, Segment, StepPlan, Topology
from sparsebalance.training.feedback import Feedback, Learner
from sparsebalance.training.records import budget_record, probe_record, worker_records
from sparsebalance.training.results import RankResult, UnitTime, as_run
from sparsebalance.training.sparse_attention import SparseContext
from tests.models import engine, example, gradients, largest_difference, tiny_model, unit
from tests.unit.test_attention import inputs
from tests.unit.test_chunks import planned

CPU = torch.device("cpu")
POINTS = len(BUDGET_GRID)
RISING = torch.tensor([1 - 0.9 / k for k in BUDGET_GRID], dtype=torch.float64)  # 0.1, 0.55, 0.7, 0.775, 0.85, ...
LINEAR = tuple(float(k) for k in BUDGET_GRID)  # a millisecond for every block
FREE = OnlineTuning(3, 0.5, 1, 12, 0.0, LINEAR)  # every layer takes what it is allowed to
UNEVEN = (2, 16)  # wishes: the second layer leaves time, with which a second choice of the first would be another
EXAMPLES = [example(30, 9), example(1, 0), example(17, 1), example(70, 33), example(6, 0), example(12, 5)]


def clamp(default: int = 4, threshold: float = 0.1, min_budget: int = 1, max_budget: int = 16) -> OnlineTuning:
    return OnlineTuning(default, threshold, min_budget, max_budget)


def share(
    price: float = 0.01, threshold: float = 0.1, default: int = 4, ms: Sequence[float] = LINEAR, max_budget: int = 16
) -> OnlineTuning:
    return OnlineTuning(default, threshold, 1, max_budget, price, tuple(ms))


def chosen(
    tuning: OnlineTuning, wish: int, curve: torch.Tensor, blocks: int = 1000, calibration: Calibration = UNCALIBRATED
) -> int:
    found = OnlineBudgets(tuning, blocks, calibration, CPU).choose(0, wish, curve.expand(2, -1))
    assert (found.shape, found.dtype) == ((), torch.int64)
    return int(found)


def test_a_wish_is_kept_as_far_as_coverage_allows() -> None:
    """Coverage is 0.1, 0.55, 0.7 and 0.775 at 1 to 4 blocks and 0.85, 0.8875 at 6 and 8: within 0.1 of that at 4 lie
    3, and what is up to 7, the last where it is 0.869."""
    assert [chosen(clamp(), wish, RISING) for wish in (1, 2, 3, 4, 5, 6, 7, 8, 16)] == [3, 3, 3, 4, 5, 6, 7, 7, 7]
    assert chosen(clamp(threshold=0.0), 9, RISING) == 4
    assert chosen(clamp(threshold=1.0), 9, RISING) == 9
    assert chosen(clamp(threshold=1.0, max_budget=8), 9, RISING) == 8
    assert chosen(clamp(threshold=1.0, min_budget=2), 1, RISING) == 2


def test_the_default_is_always_feasible() -> None:
    assert chosen(clamp(default=20, threshold=0.0), 3, RISING) == 20
    assert chosen(clamp(default=1, min_budget=4, threshold=0.0), 9, RISING) == 1


def test_where_all_budgets_cover_the_same_the_wish_is_kept() -> None:
    flat = torch.full((POINTS,), 0.5, dtype=torch.float64)
    assert [chosen(clamp(threshold=0.0), wish, flat) for wish in (1, 4, 16)] == [1, 4, 16]
    assert chosen(clamp(threshold=0.0), 40, flat) == 16
    # Of two feasible budgets equally near to an infeasible wish: 3 and 5 cover the same, 4 does not.
    assert chosen(clamp(default=3, max_budget=3), 4, flat) == 3


def test_from_the_full_budget_on_coverage_is_one() -> None:
    """Five blocks: 5 and more read everything, whatever the curve says; 4 covers 0.775."""
    assert chosen(clamp(), 16, RISING, blocks=5) == 4  # 1 is more than 0.1 away
    assert chosen(clamp(threshold=0.3), 16, RISING, blocks=5) == 16
    assert chosen(clamp(default=8), 2, RISING, blocks=5) == 5


def test_the_best_bargain_is_bought() -> None:
    """1 ms a block at a price of 0.03: 6 blocks are worth 0.67, and 4, 5 and 7 of them 0.655, 0.666 and 0.660."""
    assert chosen(share(price=0.03), 16, RISING) == 6
    assert chosen(share(price=0.0), 16, RISING) == 16
    assert chosen(share(price=1.0), 16, RISING) == 3  # coverage may not fall by more than 0.1
    assert chosen(share(price=1.0, threshold=1.0), 16, RISING) == 1
    flat = torch.full((POINTS,), 0.5, dtype=torch.float64)
    assert chosen(share(price=0.0), 16, flat) == 1  # the smallest among equals
    assert chosen(share(price=0.0), 9, RISING, blocks=5) == 5


def test_no_layer_takes_more_than_the_plan_gave_and_earlier_ones_left() -> None:
    """Wishes of 4 blocks each. A flat layer leaves 3 ms, the next one uses 7, and then there are 4 again."""
    flat = torch.full((1, POINTS), 0.5, dtype=torch.float64)
    tuner = OnlineBudgets(share(price=0.001), 1000, UNCALIBRATED, CPU)
    assert int(tuner.choose(0, 4, flat)) == 1
    assert float(tuner.unspent_ms) == pytest.approx(3.0)
    assert int(tuner.choose(1, 4, RISING[None])) == 7
    assert float(tuner.unspent_ms) == 0.0
    assert int(tuner.choose(2, 4, RISING[None])) == 4


def test_coverage_that_cannot_be_afforded_is_kept_as_far_as_it_can() -> None:
    """A wish of 2 blocks buys 0.55, though 0.675 is asked for: the most coverage for the time, not the best bargain."""
    assert chosen(share(price=10.0), 2, RISING) == 2
    assert chosen(replace(share(), min_budget=3), 1, RISING) == 3  # nothing is cheap enough: the cheapest


def test_milliseconds_go_on_beyond_the_grid_as_long_as_there_are_blocks() -> None:
    tuner = OnlineBudgets(share(max_budget=300), 200, UNCALIBRATED, CPU)
    assert [tuner._attention_ms(k) for k in (1, 5, 128, 160, 200, 300)] == [1, 5, 128, 160, 200, 200]


@settings(deadline=None, max_examples=60)
@given(
    curves=st.lists(st.lists(st.floats(0.01, 1), min_size=POINTS, max_size=POINTS).map(sorted), min_size=1, max_size=6),
    wish=st.integers(1, 16),
    price=st.one_of(st.none(), st.floats(0, 1)),
    threshold=st.floats(0, 1),
    blocks=st.integers(1, 200),
)
def test_promises_hold_for_any_curve(
    curves: list[list[float]], wish: int, price: float | None, threshold: float, blocks: int
) -> None:
    ms = np.cumsum(np.linspace(1, 2, POINTS))
    tuning = OnlineTuning(4, threshold, 1, 16, price, () if price is None else tuple(ms.tolist()))
    tuner = OnlineBudgets(tuning, blocks, UNCALIBRATED, CPU)
    taken = 0.0
    for layer, curve in enumerate(curves):
        budget = int(tuner.choose(layer, wish, torch.tensor([curve], dtype=torch.float64)))
        assert 1 <= budget <= 16
        tried = np.array([budget, 4, wish])
        covered, default, at_wish = at_budgets(UNCALIBRATED.apply(layer, curve), blocks, tried)
        if price is None:
            assert abs(covered - default) <= threshold + 1e-6
            if abs(at_wish - default) <= threshold - 1e-6:
                assert budget == wish
        else:
            taken += tuner._attention_ms(budget)
            assert taken <= (layer + 1) * tuner._attention_ms(wish) + 1e-9
            if at_wish >= default - threshold + 1e-6:
                assert covered >= default - threshold - 1e-6


def test_estimates_are_read_calibrated() -> None:
    """The tensor's way is numpy's way; and what probes taught changes the choice."""
    rng = np.random.default_rng(3)
    curve = np.sort(rng.random(POINTS))
    curve[-2:] = 1.0
    calibration = Calibration({0: rng.normal(size=POINTS), 2: np.full(POINTS, np.nan)})
    for layer in (0, 1, 2):
        found = calibrated(torch.from_numpy(curve), calibration, layer).numpy()
        assert found == pytest.approx(calibration.apply(layer, curve), abs=1e-12)
    steeper = Calibration({0: np.linspace(-6, 6, POINTS)})
    assert chosen(clamp(), 6, RISING, calibration=steeper) == 4
    assert chosen(clamp(), 6, RISING) == 6


def test_a_price_needs_times() -> None:
    with pytest.raises(InputError, match="a price and 3 attention times, but it needs 14"):
        OnlineBudgets(share(ms=(1.0, 2.0, 3.0)), 9, UNCALIBRATED, CPU)


@pytest.mark.parametrize("tuning", [clamp(), share()])
def test_nothing_is_read_back_from_the_device(tuning: OnlineTuning) -> None:
    """Meta tensors have no values: whatever asked for one would fail."""
    tuner = OnlineBudgets(tuning, 9, UNCALIBRATED, torch.device("meta"))
    for layer in range(3):
        budget = tuner.choose(layer, 4, torch.empty(2, POINTS, device="meta"))
        assert (budget.shape, budget.dtype, budget.device.type) == ((), torch.int64, "meta")


def online(made: MicroBatch, tuning: OnlineTuning | None = None, budgets: tuple[int, ...] = (1, 9)) -> MicroBatch:
    """With wishes that the tuning below moves in both layers, differently."""
    return replace(made, budgets=budgets, online=tuning or OnlineTuning(3, 0.15, 1, 12))


def attended(layout: PackedLayout, budget: int, tuning: OnlineTuning | None) -> tuple[torch.Tensor, int]:
    q, k, v = (x.detach() for x in inputs(layout, 4, 2, torch.float64))
    context = SparseContext(layout, [budget], MoBARouter("token"), online=tuning)
    out = context.attend(0, q, k, v, None)
    return out, int(context.used[0])


@pytest.mark.parametrize(
    "tuning", [clamp(threshold=1.0, max_budget=40), share(price=0.0, threshold=1.0, max_budget=40)]
)
def test_one_block_is_sparse_and_all_blocks_are_dense(tuning: OnlineTuning) -> None:
    """Chosen online, they are what they are when planned: 1 reads the own block alone, and more than all is dense."""
    layout = PackedLayout.from_lengths([37, 1, 3], 4)
    q, k, v = (x.detach() for x in inputs(layout, 4, 2, torch.float64))
    out, used = attended(layout, 30, tuning)
    assert used >= 10
    dense = torch.cat([
        torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in parts), is_causal=True, enable_gqa=True
        )[0].transpose(0, 1)
        for parts in zip(*(x.split([37, 1, 3]) for x in (q, k, v)))
    ])  # fmt: skip
    assert float((out - dense).abs().max()) < 1e-12
    out, used = attended(layout, 1, tuning)
    assert used == 1
    assert torch.equal(out, attended(layout, 1, None)[0])
    alone = PackedLayout.from_lengths([*[4] * 9, 1, 1, 3], 4)  # every block a document of its own
    assert float((out - attended(alone, 1, None)[0]).abs().max()) < 1e-12


@pytest.mark.parametrize("lengths", [[1], [3], [1, 2, 3]])
def test_rows_shorter_than_a_block(lengths: list[int]) -> None:
    """There is one block: every budget is the full one, and the wish is kept."""
    assert attended(PackedLayout.from_lengths(lengths, 4), 7, clamp())[1] == 7
    assert attended(PackedLayout.from_lengths(lengths, 4), 7, share())[1] == 1


@pytest.mark.parametrize("tuning", [clamp(), share()])
def test_equal_scores_take_the_first_blocks(tuning: OnlineTuning) -> None:
    """All queries and keys alike: budgets are well defined, and ties go to the lowest blocks, as when planned."""
    layout = PackedLayout.from_lengths([40], 4)
    one, v = torch.ones(40, 2, 8), torch.arange(40.0)[:, None, None].expand(40, 2, 8).contiguous()
    context = SparseContext(layout, [6], MoBARouter("token"), online=tuning)
    out = context.attend(0, one, one, v, None)
    # 40 equal keys: budgets differ by more than 0.1 in coverage only if more than a block apart from the default.
    again = SparseContext(layout, [int(context.used[0])], MoBARouter("token")).attend(0, one, one, v, None)
    assert torch.equal(out, again)
    assert 1 < int(context.used[0]) < 10


def test_budgets_follow_the_scores_and_are_reported() -> None:
    model = tiny_model()
    made = [online(unit(EXAMPLES, 3)), unit(EXAMPLES, 0, budgets=(2, 5)), MicroBatch((), (3, 3), Latency(0, 0))]
    result = engine(model).run(made, EXAMPLES, 43)
    first, second, empty = result.units
    assert first.budgets != (1, 9)
    assert (second.budgets, empty.budgets) == ((2, 5), (3, 3))
    assert all(type(budget) is int for budget in first.budgets)
    assert first.tune_ms > 0 == second.tune_ms == empty.tune_ms
    assert result.tune_ms == first.tune_ms
    assert first.forward_ms == pytest.approx(sum(first.forward.values()) + first.tune_ms)
    assert set(first.forward) == set(second.forward) == {"linear", "router", "attend", "head"}
    assert first.total_ms == pytest.approx(sum(first.terms.values()) + first.tune_ms)
    # The same as if these budgets had been planned.
    loss, grads = result.loss, gradients(model)
    fixed = engine(model).run([unit(EXAMPLES, 3, budgets=first.budgets), made[1]], EXAMPLES, 43)
    assert (fixed.loss, largest_difference(grads, gradients(model))) == (loss, 0.0)


@pytest.mark.parametrize("tuning", [None, FREE])
@pytest.mark.parametrize("granularity", ["token", "block"])
def test_recompute_under_checkpointing_attends_the_same_blocks(granularity: str, tuning: OnlineTuning | None) -> None:
    results = []
    made = online(unit(EXAMPLES, 0, 3), tuning, budgets=UNEVEN)
    for checkpointing in (False, True):
        model = tiny_model(granularity=granularity, checkpointing=checkpointing)  # type: ignore[arg-type]
        # Without being told of checkpointing: tuning online must keep what it chose by itself.
        result = engine(model, granularity).run([made], EXAMPLES, 48)  # type: ignore[arg-type]
        results.append((result.loss, result.units[0].budgets, gradients(model)))
    (loss, budgets, grads), (again, same, found) = results
    assert (loss, budgets) == (again, same)
    assert largest_difference(grads, found) < 1e-12


@pytest.mark.parametrize("tuning", [None, FREE])
@pytest.mark.parametrize("granularity", ["token", "block"])
def test_recomputed_chunks_attend_the_same_blocks(granularity: str, tuning: OnlineTuning | None) -> None:
    examples = [example(n, n - 1, seed=i) for i, n in enumerate((64, 30))]
    results = []
    for keep in (9, 1):
        model = tiny_model(granularity=granularity)  # type: ignore[arg-type]
        units = [online(made, tuning, budgets=UNEVEN) for made in planned([64, 30], 16, keep)]
        result = engine(model, granularity).run(units, examples, 92)  # type: ignore[arg-type]
        results.append((result.loss, [time.budgets for time in result.units], gradients(model)))
        assert any(made.recompute for made in units) == (keep == 1)
        assert any(time.budgets != UNEVEN for time in result.units[:4])
    (loss, budgets, grads), (again, same, found) = results
    assert budgets == same
    assert again == pytest.approx(loss, rel=1e-12)
    assert largest_difference(grads, found) < 1e-12


def test_calibration_reaches_the_units() -> None:
    made = online(unit(EXAMPLES, 3), OnlineTuning(3, 0.15, 1, 12), budgets=(1, 1))
    steep = Calibration({0: np.linspace(-9, 9, POINTS)})
    run = engine(tiny_model())
    plain = run.run([made], EXAMPLES, 33).units[0].budgets
    taught = replace(run, calibration=steep).run([made], EXAMPLES, 33).units[0].budgets
    assert taught != plain


def test_memory_stays_flat_over_steps_with_changing_budgets() -> None:
    model = tiny_model()
    run = engine(model)
    alive = []
    for step in range(100):
        budgets = (1 + step % 7, 12 - step % 11)
        tuning = OnlineTuning(3, 0.5, 1, 12, *((0.02, LINEAR) if step % 2 else ()))
        run.run([online(unit(EXAMPLES, 0, 5), tuning, budgets)], EXAMPLES, 14, probe_rows=2)
        model.zero_grad(set_to_none=False)
        if step % 20 == 19:
            gc.collect()
            alive.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
    assert len(set(alive)) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_no_numbers_are_named(value: float) -> None:
    model = tiny_model()
    weight = model.get_parameter("model.layers.1.self_attn.k_proj.weight")
    with torch.no_grad():
        weight[0, 0] = value
    units = [MicroBatch((), (3, 3), Latency(0, 0)), unit(EXAMPLES, 3)]
    with pytest.raises(
        InputError,
        match=r"layer 1 of micro-batch 1 \(sample 3, tokens 0 to 70\): .* values of the keys are NaN or infinite",
    ):
        engine(model).run(units, EXAMPLES, 33)


def test_packs_and_chunks_are_named_by_their_samples() -> None:
    layout = PackedLayout.from_lengths([6], 4)
    q, k, v = (x.detach() for x in inputs(layout, 2, 1, torch.float64))
    q[2, 1, 3] = float("nan")
    context = SparseContext(layout, [2], MoBARouter("token"), name="micro-batch 7 (samples 1, 2)")
    with pytest.raises(InputError, match=r"^layer 0 of micro-batch 7 \(samples 1, 2\): 1 of 96 values of the queries"):
        context.attend(0, q, k, v, None)


def test_a_sum_that_overflows_is_no_error() -> None:
    """Finite values of 3e38 sum up to infinity: only then every value is looked at, and all are finite."""
    layout = PackedLayout.from_lengths([6], 4)
    q, k, v = (torch.zeros(6, 1, 2) for _ in range(3))
    q[:, :, 0] = 3e38
    assert torch.isfinite(SparseContext(layout, [2], MoBARouter("token")).attend(0, q, k, v, None)).all()


def used_step(roofline: RooflineModel) -> tuple[StepPlan, list[RankResult]]:
    """Two ranks, one unit each; the first was tuned from 4 to 9 blocks and took what the model says of these."""
    segments = (Segment(0, 0, 640, 640, 639),), (Segment(1, 0, 80, 80, 79),)
    four, nine = (4,) * roofline.layers, (9,) * roofline.layers
    first = MicroBatch(segments[0], four, roofline.latency(segments[0], four), online=clamp())
    second = MicroBatch(segments[1], four, roofline.latency(segments[1], four))
    plan = StepPlan("dst", Topology(dp=2), 16, ((first,), (second,)), 1.0)
    results = []
    for made, budgets, tune in ((first, nine, 2.5), (second, four, 0.0)):
        terms = unit_terms(roofline, replace(made, budgets=budgets)).total_ms()
        time = UnitTime(0.0, 1.0, 1.0, 2.0, terms, dict.fromkeys(terms, 0.0), budgets, tune)
        results.append(RankResult(0.0, [time]))
    return plan, results


def test_what_was_used_is_what_is_learned_and_recorded(roofline: RooflineModel) -> None:
    plan, results = used_step(roofline)
    nine = (9,) * roofline.layers
    used = as_run(plan, results)
    assert used.ranks[0][0].budgets == nine
    assert used.ranks[1] == plan.ranks[1]
    learner = Learner(roofline, Correction((1.0, 1.0)), correcting=True)
    learner.learn_times([list(zip(units, result.units)) for units, result in zip(plan.ranks, results)])
    # Times as predicted at the budgets really used: nothing to correct. At the planned ones there would be.
    assert list(learner.feedback().correction.terms.values()) == pytest.approx([1.0] * 4)
    learner.learn_budgets(used)
    assert learner.feedback().budgets["dst"].samples[0].tolist() == list(nine)
    record = worker_records(plan, roofline, [[result] for result in results])[0]["units"][0]
    assert (record["budgets"], record["planned_budgets"]) == (list(nine), [4] * roofline.layers)
    assert record["measured"]["tune_ms"] == 2.5
    assert budget_record(plan.ranks[1][0], results[1].units[0]) == {"budgets": [4] * roofline.layers}


def probe_of(seed: int) -> CoverageProbe:
    return CoverageProbe(*(tuple(np.sort(np.random.default_rng(seed + i).random(POINTS)).tolist()) for i in range(3)))


def test_probes_are_recorded_at_the_budgets_really_used(roofline: RooflineModel) -> None:
    """640 tokens are 40 blocks, of which 9 are read; 80 are 5 blocks, of which 4 are."""
    plan, results = used_step(roofline)
    used, layers = as_run(plan, results), roofline.layers
    probes = {(sample, layer): probe_of(3 * layer + sample) for sample in (0, 1) for layer in range(layers)}
    found = probe_record(used, probes)
    assert found is not None
    for name in ("estimated", "router", "oracle"):
        cells = [
            weight * float(at_budgets(getattr(probes[sample, layer], name), full, np.array([k]))[0])
            for sample, weight, full, k in ((0, 640, 40, 9), (1, 80, 5, 4))
            for layer in range(layers)
        ]
        assert found[name] == pytest.approx(sum(cells) / 720 / layers)
    assert found["regret"] == found["oracle"] - found["router"]
    assert probe_record(used, {}) is None


def test_a_resumed_learner_has_the_same_calibration(roofline: RooflineModel) -> None:
    """And so has the feedback that the next step was planned with."""
    plan, _ = used_step(roofline)

    def taught(learner: Learner, seed: int) -> None:
        probes = {(sample, layer): probe_of(seed + layer + 9 * sample) for sample in (1, 0) for layer in range(2)}
        learner.learn_coverage(plan, probes)

    straight, resumed = (Learner(roofline, Correction((1.0, 1.0)), correcting=True) for _ in range(2))
    taught(straight, 0)
    taught(straight, 100)
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    feedback = Feedback.from_state_dict(json.loads(json.dumps(straight.feedback().state_dict())))
    before = straight.feedback().calibration
    assert (before.offset(0) != before.offset(1)).any()
    for layer in range(3):
        assert (resumed.feedback().calibration.offset(layer) == before.offset(layer)).all()
        assert (feedback.calibration.offset(layer) == before.offset(layer)).all()
    for learner in (straight, resumed):
        taught(learner, 200)
    assert resumed.state_dict() == straight.state_dict()
    assert (straight.feedback().calibration.offset(0) != before.offset(0)).any()
