"""A pipeline's planned-versus-actual page, trace and table: actions and bubbles, stage by stage."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sparsebalance.planning.errors import InputError
from sparsebalance.reporting.planned.command import report
from sparsebalance.reporting.planned.reasons import candidates
from sparsebalance.reporting.planned.records import parse_step
from sparsebalance.reporting.planned.timeline import measured_bars, planned_bars, timeline
from sparsebalance.reporting.planned.totals import run_figures
from sparsebalance.reporting.planned.trace import trace_events
from tests.unit.test_planned import parsed, placed, quiet, run_of, step_record, unit, validate_trace, write_run


def split_record(step: int = 0) -> dict[str, Any]:
    """One rank, two stages, one unit: F, I and W of 10 ms each as planned, all of stage 1's 2 ms slower.

    As planned, stage 1 waits 10 ms and then 10 at the end, stage 0 waits 20 in the middle. As measured, stage 0 waits
    24 and stage 1 10 and then, after its part of an all-reduce of 3 ms, 8.
    """
    actions = [
        [
            ["F", 0, 0, 0.0, 10.0, 0.0, 10.0],
            ["I", 0, 0, 30.0, 40.0, 34.0, 44.0],
            ["W", 0, 0, 40.0, 50.0, 44.0, 54.0],
        ],
        [["F", 0, 1, 10.0, 20.0, 10.0, 22.0], ["I", 0, 1, 20.0, 30.0, 22.0, 34.0], ["W", 0, 1, 30.0, 40.0, 34.0, 46.0]],
    ]
    workers = []
    for stage, (rows, took) in enumerate(zip(actions, (30.0, 36.0))):
        entry = unit(30.0, took, [100])
        entry["planned"] |= {"start_ms": rows[0][3], "backward_start_ms": rows[1][3]}
        entry["measured"] |= {"start_ms": rows[0][5], "backward_start_ms": rows[1][5]}
        workers.append({"rank": 0, "stage": stage, "all_reduce_ms": 3.0, "units": [entry], "actions": rows})
    base = step_record([[unit(1, 1)]], step)
    return base | {"workers": workers, "step_ms": 60.0, "predicted_step_ms": 50.0}


def test_bars_of_a_pipeline_are_its_actions() -> None:
    step = parse_step(split_record(), "it")
    first, second = step.workers
    assert placed(planned_bars(step, first)) == [("F0", 0, 10), ("waiting", 10, 20), ("I0", 30, 10), ("W0", 40, 10)]
    assert placed(planned_bars(step, second)) == [
        ("waiting", 0, 10),
        ("F0", 10, 10),
        ("I0", 20, 10),
        ("W0", 30, 10),
        ("waiting", 40, 10),
    ]
    assert placed(measured_bars(step, first))[1:] == [
        ("waiting", 10, 24),
        ("I0", 34, 10),
        ("W0", 44, 10),
        ("all-reduce", 54, 3),
    ]
    assert placed(measured_bars(step, second)) == [
        ("waiting", 0, 10),
        ("F0", 10, 12),
        ("I0", 22, 12),
        ("W0", 34, 12),
        ("all-reduce", 46, 3),
        ("waiting", 49, 8),
    ]
    hovers = {bar.text: bar.hover for bar in measured_bars(step, second)}
    assert hovers["I0"].startswith("input gradient of unit 0, stage 1: 12.0 ms<br>100 tokens, 10 targets, samples 100")


def test_a_stage_reduces_once_its_slowest_rank_is_done() -> None:
    """As planned: rank 1 is 5 ms later on stage 1, the all-reduce takes 4 ms, and stage 0 is the last to begin its."""
    record = split_record()
    late = json.loads(json.dumps(record["workers"]))
    for worker in late:
        worker["rank"] = 1
    late[1]["actions"][2][4] += 5.0
    record = record | {"workers": record["workers"] + late, "predicted_step_ms": 54.0}
    step = parse_step(record, "it")
    bars = {worker.key: placed(planned_bars(step, worker)) for worker in step.workers}
    assert bars[0, 0][-1] == ("all-reduce", 50, 4)
    assert bars[0, 1][-3:] == [("waiting", 40, 5), ("all-reduce", 45, 4), ("waiting", 49, 5)]
    assert bars[1, 1][-2:] == [("all-reduce", 45, 4), ("waiting", 49, 5)]


def test_lanes_of_a_pipeline_say_how_much_their_stage_waits() -> None:
    figure = timeline(parse_step(split_record(), "it"))
    assert [text.strip() for text in figure.layout.yaxis.ticktext] == [
        "<b>rank 0 stage 0</b>  planned, waits 40%",
        "actual, waits 40%",  # 24 of 60 ms
        "<b>rank 0 stage 1</b>  planned, waits 40%",
        "actual, waits 30%",
    ]
    bars = {trace.name: trace for trace in figure.data}
    assert (bars["weight gradient"].y, bars["weight gradient"].base) == ((1.0, 3.5), (44.0, 34.0))
    assert bars["input gradient, planned"].text == ("I0", "I0")


def test_bubbles_by_hand() -> None:
    found = run_figures([parse_step(split_record(), "it")] * 2, [])
    assert found["bubble"] == {"planned": pytest.approx(40 / 100), "measured": pytest.approx(42 / 120)}
    assert [worker["waiting_share"] for worker in found["workers"]] == pytest.approx([24 / 60, 18 / 60])
    assert [worker["planned_waiting_share"] for worker in found["workers"]] == pytest.approx([20 / 50, 20 / 50])
    assert found["micro_batches"] == 2
    for worker in found["workers"]:
        assert sum(worker["parts_ms"].values()) == pytest.approx(60)
    assert run_figures([parsed([[unit(5, 5)], [unit(5, 6)]])], [])["bubble"] is None


def test_a_stage_that_waits_longer_than_planned_is_a_reason() -> None:
    """Stage 0, the last to end, was to wait 20 ms between its actions, and waits 45."""
    record = split_record()
    for row in record["workers"][0]["actions"][1:]:
        row[5], row[6] = row[5] + 21.0, row[6] + 21.0
    step = parse_step(record | {"step_ms": 81.0}, "it")
    prices = {reason.kind: reason for reason in candidates(step)}
    assert prices["gap"].text == "rank 0 stage 0 waited 25 ms longer for other stages than planned"
    assert prices["gap"].lost_ms == pytest.approx(25)


def test_the_page_of_a_pipeline_shows_its_bubbles(tmp_path: Path) -> None:
    console = quiet()
    report(write_run(tmp_path, [split_record(step) for step in range(3)]), console)
    text = " ".join(console.export_text().split())
    assert "Bubbles: stages waited 35.0% of the time, 40.0% as planned." in text
    page = (tmp_path / "report.html").read_text()
    outside = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert "<h2>Bubbles, stage by stage</h2>" in outside
    assert "waiting (40% planned), and 5% in the all-reduce" in outside
    assert "I and W are the halves of a split backward" in outside
    assert "<dt>bubble</dt>" in outside
    report(write_run(tmp_path, run_of(2, 2)), quiet())
    plain = (tmp_path / "report.html").read_text()
    assert "ubble" not in re.sub(r"<script.*?</script>", "", plain, flags=re.DOTALL)


def test_the_trace_of_a_pipeline_holds_the_halves_of_a_backward() -> None:
    events = trace_events([parse_step(split_record(), "it")])
    validate_trace({"traceEvents": events, "displayTimeUnit": "ms"})
    lanes = {
        thread: [e["name"] for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (0, thread)]
        for thread in range(4)
    }
    assert lanes[0] == ["F0", "waiting", "I0", "W0"]  # stage 0 as planned; then as measured
    assert lanes[1] == ["F0", "waiting", "I0", "W0", "all-reduce"]
    assert lanes[3] == ["waiting", "F0", "I0", "W0", "all-reduce", "waiting"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (["X", 0, 0, 0.0, 1.0, 0.0, 1.0], r"an action is \['X', 0, 0, 0\.0, 1\.0, 0\.0, 1\.0\]"),
        (["F", 0, 0, 0.0, 1.0, 2.0, 1.0], "an action is"),
        (["F", 0, 0, -1.0, 1.0, 0.0, 1.0], "an action is"),
        (["F", 0, 0, 0.0, float("inf"), 0.0, 1.0], "an action is"),
        (["F", 0, 0, 0.0, 1.0], "not enough values"),
        (["F", 7, 0, 0.0, 1.0, 0.0, 1.0], r"there are actions on units \[7\], which hold no tokens"),
    ],
)
def test_bad_actions_end_in_one_sentence(row: list[Any], message: str) -> None:
    record = split_record()
    record["workers"][0]["actions"][0] = row
    with pytest.raises(InputError, match=f"it is not a step record: .*{message}.*; train again to get whole ones"):
        parse_step(record, "it")
