"""Step records of pipelines: every worker's actions as planned and as measured, and the time that it waited."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sparsebalance.planning.latency import TERMS, LatencyModel, RooflineModel
from sparsebalance.planning.micro_batches import micro_batches
from sparsebalance.planning.pipeline import PipelineModel, ScheduleName, simulate_plan
from sparsebalance.planning.plan import Segment, StepPlan, Topology
from sparsebalance.planning.schedule import Action
from sparsebalance.planning.simulator import Network
from sparsebalance.planning.timeline import Timeline
from sparsebalance.reporting.planned.records import parse_step
from sparsebalance.training.records import bubble, worker_records
from sparsebalance.training.results import ActionTime, RankResult, UnitTime, of_replica, of_workers, on_one_clock

LATE_MS = 4.0  # every measured action against its plan


def segments(sample: int, length: int, *cuts: int) -> list[tuple[Segment, ...]]:
    """One sample whole, or in chunks up to each of `cuts`."""
    edges = [0, *cuts, length]
    return [(Segment(sample, a, b, length, (b - a) // 4),) for a, b in zip(edges, edges[1:])]  # noqa: RUF007


def planned(
    model: LatencyModel, schedule: ScheduleName, placement: list[list[tuple[Segment, ...]]], keep: int | None = None
) -> tuple[StepPlan, Timeline]:
    """Two stages of two and one layers; budgets of the layers differ."""
    topology = Topology(dp=len(placement), pp=2)
    budgets = [[(4, 6, 9)] * len(units) for units in placement]
    ranks = micro_batches(placement, budgets, model, keep)
    layers = (2, 1) if schedule != "interleaved" else None
    pipeline = PipelineModel(schedule, Network(all_reduce_ms=5.0 if len(placement) > 1 else 0.0), layers=layers)
    timeline = simulate_plan(ranks, model, topology, pipeline)
    return StepPlan("sab", topology, model.block_size, ranks, timeline.step_ms), timeline


def measured(
    plan: StepPlan, timeline: Timeline, held: Sequence[tuple[int, ...]], slower: float = 1.0
) -> list[list[RankResult]]:
    """Every action `slower` times as late and long as planned, and `LATE_MS` later; the all-reduce as if all waited."""
    workers = []
    for rank, units in enumerate(plan.ranks):
        own = []
        for place, layers in enumerate(held):
            spans = [s for s in timeline.spans(rank) if s.worker == place and units[s.unit].segments]
            actions = [
                ActionTime(
                    Action(s.kind, s.unit, s.stage),
                    LATE_MS + slower * s.start_ms,
                    slower * (s.end_ms - s.start_ms),
                    0.0,
                )
                for s in spans
            ]
            times = []
            for index, unit in enumerate(units):
                forward = sum(one.ms for one in actions if one.action.unit == index and one.action.kind == "F")
                total = sum(one.ms for one in actions if one.action.unit == index)
                half = dict.fromkeys(TERMS, total / 8) if unit.segments else {}
                times.append(UnitTime(1.0, 2.0, forward, total - forward, half, half, unit.budgets))
            result = RankResult(0.5, times, {}, layers, actions)
            own.append(replace(result, all_reduce_ms=LATE_MS + slower * timeline.rank_ms.max() - result.end_ms + 6.0))
        workers.append(own)
    return workers


def step_of(plan: StepPlan, records: list[dict[str, Any]], step_ms: float) -> dict[str, Any]:
    return {
        "step": 0,
        "policy": plan.policy,
        "step_ms": step_ms,
        "predicted_step_ms": plan.predicted_step_ms,
        "planning_ms": 1.0,
        "rank_factors": [1.0],
        "term_factors": {},
        "workers": records,
    }


PLACEMENT = [
    [*segments(0, 600, 256, 512), *segments(1, 90), ()],
    [*segments(2, 400), *segments(3, 48)],
]
HELD = ((0, 1), (2,))


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("keep", [None, 1])
def test_every_worker_of_every_rank_has_a_record(roofline: RooflineModel, schedule: ScheduleName, keep: Any) -> None:
    plan, timeline = planned(roofline, schedule, PLACEMENT, keep)
    records = worker_records(plan, roofline, measured(plan, timeline, HELD, 1.5), timeline)
    assert [(record["rank"], record["stage"]) for record in records] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert json.loads(json.dumps(records)) == records
    for record in records:
        spans = [s for s in timeline.spans(record["rank"]) if s.worker == record["stage"]]
        wanted = [s for s in spans if plan.ranks[record["rank"]][s.unit].segments]
        assert [row[:3] for row in record["actions"]] == [[s.kind, s.unit, s.stage] for s in wanted]
        for (*_, start, end, really, until), span in zip(record["actions"], wanted):
            assert (start, end) == (pytest.approx(span.start_ms, abs=1e-3), pytest.approx(span.end_ms, abs=1e-3))
            assert really == pytest.approx(LATE_MS + 1.5 * span.start_ms, abs=1e-3)
            assert until == pytest.approx(LATE_MS + 1.5 * span.end_ms, abs=1e-3)
        assert {row[0] for row in record["actions"]} == ({"F", "B"} if schedule == "1f1b" else {"F", "I", "W"})


@pytest.mark.parametrize("keep", [None, 1])
def test_planned_units_and_terms_add_up_over_stages(roofline: RooflineModel, keep: int | None) -> None:
    """Unequal budgets, a head on the last stage, recomputed chunks: by unit and stage, terms are what actions take."""
    plan, timeline = planned(roofline, "zero_bubble", PLACEMENT, keep)
    records = worker_records(plan, roofline, measured(plan, timeline, HELD), timeline)
    for rank, units in enumerate(plan.ranks):
        first, last = (record["units"] for record in records if record["rank"] == rank)
        for unit, *stages in zip(units, first, last):
            for stage in stages:
                times = stage["planned"]
                # A ratio of one layer's time shares recomputed attention too, hence the tolerance.
                total = times["forward_ms"] + times["backward_ms"]
                assert sum(times["terms"].values()) == pytest.approx(total, rel=0.02 if unit.recompute else 1e-9)
                assert times["start_ms"] <= times["backward_start_ms"]
            whole = sum(stage["planned"]["forward_ms"] + stage["planned"]["backward_ms"] for stage in stages)
            assert whole == pytest.approx(unit.latency.total_ms)
            assert stages[0]["planned"]["terms"]["head"] == 0
            assert (stages[1]["planned"]["terms"]["head"] > 0) == bool(unit.targets)


def test_waiting_is_what_the_page_finds(roofline: RooflineModel) -> None:
    plan, timeline = planned(roofline, "1f1b", PLACEMENT)
    records = worker_records(plan, roofline, measured(plan, timeline, HELD, 1.5), timeline)
    step = parse_step(step_of(plan, records, 2000.0), "it")
    for record, worker in zip(records, step.workers):
        busy = timeline.step_ms - timeline.bubble_ms[worker.rank, worker.stage]
        last = timeline.rank_ms.max()
        assert record["waiting_ms"]["planned"] == pytest.approx(last - busy)
        assert record["waiting_ms"]["measured"] == pytest.approx(LATE_MS + 1.5 * (last - busy))
        assert step.waiting_ms(worker) == pytest.approx(record["waiting_ms"]["measured"], abs=0.05)
        assert step.planned_waiting_ms(worker) == pytest.approx(record["waiting_ms"]["planned"], abs=0.05)
    found = bubble(records, plan.predicted_step_ms, 2000.0)
    assert found is not None
    # The simulation counts its all-reduce of 5 ms as a bubble too.
    assert found["planned"] == pytest.approx(1 - timeline.busy_fraction - 5.0 / timeline.step_ms)
    assert found["measured"] == pytest.approx(sum(map(step.waiting_ms, step.workers)) / 4 / 2000.0, abs=1e-4)


def test_a_rank_without_work_waits_all_the_time(roofline: RooflineModel) -> None:
    plan, timeline = planned(roofline, "1f1b", [PLACEMENT[0], [()]])
    records = worker_records(plan, roofline, measured(plan, timeline, HELD), timeline)
    for idle in records[2:]:
        assert idle["actions"] == []
        assert idle["waiting_ms"]["planned"] == pytest.approx(timeline.rank_ms.max())
        assert [unit["tokens"] for unit in idle["units"]] == [0]
    parse_step(step_of(plan, records, 100.0), "it")


def test_a_worker_of_two_stages_has_one_record(roofline: RooflineModel) -> None:
    """Four stages on two workers, a layer each: the model has three, so it is made of four here."""
    model = RooflineModel(replace(roofline.decoder, layers=4), roofline.device, block_size=16)
    placement = [[*segments(0, 90), *segments(1, 64), *segments(2, 128), *segments(3, 33)]]
    ranks = micro_batches(placement, [[(4, 6, 9, 2)] * 4], model, None)
    topology = Topology(pp=2)
    timeline = simulate_plan(ranks, model, topology, PipelineModel("interleaved"))
    plan = StepPlan("random", topology, 16, ranks, timeline.step_ms)
    first, last = worker_records(plan, model, measured(plan, timeline, ((0, 2), (1, 3))), timeline)
    assert {row[2] for row in first["actions"]} == {0, 2}
    assert {row[2] for row in last["actions"]} == {1, 3}
    assert len(first["actions"]) == 16  # forward and backward of 4 units on 2 stages
    for unit in (*first["units"], *last["units"]):
        times = unit["planned"]
        assert sum(times["terms"].values()) == pytest.approx(times["forward_ms"] + times["backward_ms"])


def test_without_a_pipeline_records_hold_no_actions(roofline: RooflineModel) -> None:
    units = micro_batches([[*segments(0, 90)]], [[(4, 4, 4)]], roofline, None)
    plan = StepPlan("sab", Topology(), 16, units, 3.0)
    result = RankResult(0.0, [UnitTime(0.0, 1.0, 1.0, 2.0, dict.fromkeys(TERMS, 0.25), dict.fromkeys(TERMS, 0.5))])
    records = worker_records(plan, roofline, [[replace(result, all_reduce_ms=7.0)]])
    assert [list(record) for record in records] == [["rank", "stage", "all_reduce_ms", "units"]]
    assert records[0]["all_reduce_ms"] == 7.0
    assert sum(records[0]["units"][0]["planned"]["terms"].values()) == pytest.approx(units[0][0].latency.total_ms)
    assert bubble(records, 3.0, 3.0) is None


def action(kind: Any, unit: int, stage: int, start: float, end: float) -> ActionTime:
    return ActionTime(Action(kind, unit, stage), start, end - start, 0.0)


def worker(*actions: ActionTime, starts: tuple[float, float] = (0.0, 0.0)) -> RankResult:
    return RankResult(units=[UnitTime(*starts, 1.0, 1.0)], actions=list(actions))


def test_a_clock_that_is_ahead_is_set_back_until_messages_arrive_after_they_were_sent() -> None:
    """The second worker began 3 ms after the first one and counts from there."""
    first = worker(action("F", 0, 0, 0, 10), action("I", 0, 0, 22, 30), action("W", 0, 0, 30, 31))
    second = worker(action("F", 0, 1, 7, 12), action("I", 0, 1, 12, 18), starts=(7.0, 12.0))
    kept, moved = on_one_clock([first, second])
    assert kept is first
    assert [one.start_ms for one in moved.actions] == [10, 15]
    assert (moved.units[0].start_ms, moved.units[0].backward_start_ms) == (10, 15)


def test_a_clock_that_is_behind_is_set_forward_and_a_good_one_is_left() -> None:
    first = worker(action("F", 0, 0, 0, 10), action("B", 0, 0, 22, 30))
    late = worker(action("F", 0, 1, 16, 20), action("B", 0, 1, 20, 25))
    assert [one.start_ms for one in on_one_clock([first, late])[1].actions] == [13, 17]
    good = worker(action("F", 0, 1, 11, 15), action("B", 0, 1, 15, 21))
    assert on_one_clock([first, good])[1] == good
    assert on_one_clock([first, worker()])[1].actions == []


def test_a_third_worker_is_moved_with_the_second() -> None:
    first = worker(action("F", 0, 0, 0, 10))
    second, third = worker(action("F", 0, 1, 4, 9)), worker(action("F", 0, 2, 9, 12))
    moved = on_one_clock([first, second, third])
    assert [one.actions[0].start_ms for one in moved] == [0, 10, 15]


def test_of_processes_that_share_a_workers_tokens_the_slowest_counts() -> None:
    """Two sequence-parallel processes with two tensor-parallel ones each: a loss per pair, tokens shared out."""

    def process(ms: float, loss: float, wait: float) -> tuple[RankResult, float]:
        return RankResult(loss, [UnitTime(0.0, ms, ms, ms)], layers=(0,)), wait

    processes = [process(4.0, 1.0, 9.0), process(5.0, 1.0, 7.0), process(6.0, 0.5, 5.0), process(5.5, 0.5, 6.0)]
    ((found,),) = of_workers([[processes]], tensor=2)
    assert (found.loss, found.busy_ms, found.all_reduce_ms) == (1.5, 12.0, 5.0)


def test_a_replica_is_the_sum_of_its_workers() -> None:
    budgets = [(4, 1), (1, 6)]
    workers = [
        RankResult(loss, [UnitTime(start, start + 9, 1.0, 2.0, budgets=own)], {}, (layer,), [], wait)
        for layer, (loss, start, own, wait) in enumerate(((0.0, 0.0, budgets[0], 3.0), (2.0, 1.0, budgets[1], 8.0)))
    ]
    found = of_replica(workers)
    assert (found.loss, found.busy_ms, found.layers, found.all_reduce_ms) == (2.0, 6.0, (0, 1), 8.0)
    assert found.units[0].budgets == (4, 6)
    assert found.actions == []


def test_rank_factors_slow_every_action(roofline: RooflineModel) -> None:
    """The planned terms of a rank that is twice as slow are twice as long, like its spans."""

    class Slow(RooflineModel):
        def rank_factor(self, rank: int) -> float:
            return 1.0 + rank

    model = Slow(roofline.decoder, roofline.device, block_size=16)
    plan, timeline = planned(model, "1f1b", [segments(0, 200), segments(1, 200)])
    records = worker_records(plan, model, measured(plan, timeline, HELD), timeline)
    for fast, slow in zip(records[:2], records[2:]):
        a, b = (record["units"][0]["planned"] for record in (fast, slow))
        assert b["forward_ms"] == pytest.approx(2 * a["forward_ms"])
        assert np.array(list(b["terms"].values())) == pytest.approx(2 * np.array(list(a["terms"].values())))
