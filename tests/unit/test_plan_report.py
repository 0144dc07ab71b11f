"""What `sparsebalance plan` shows: tables, pages and trace say what the forecast holds, and say where it comes from."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from sparsebalance.planner.command import plan, scenario_of
from sparsebalance.planner.config import PlanConfig
from sparsebalance.planner.forecast import Forecast, Recommendation, forecast, global_batches, recommend, variants_of
from sparsebalance.planner.sweep import Choice
from sparsebalance.planning.accounting import account
from sparsebalance.planning.lengths import Lengths
from sparsebalance.planning.plan import Latency, MicroBatch, Segment, StepPlan, Topology
from sparsebalance.reporting.plan import figures
from sparsebalance.reporting.plan.console import COLUMNS, TOO_LARGE, print_choices, print_forecast, skipped_groups
from sparsebalance.reporting.plan.page import headline, write_plan_page, write_sweep_page
from sparsebalance.reporting.plan.timeline import (
    all_reduces,
    chosen_ranks,
    plan_timelines,
    shown_plans,
    worker_spans,
)
from sparsebalance.reporting.plan.trace import RANKS, trace_events, write_plan_trace

Made = tuple[dict[str, Any], Forecast, Recommendation]
LENGTHS = np.random.default_rng(7).integers(200, 9000, 96)
ACCOUNT = account(
    [StepPlan("made up", Topology(), 16, ((MicroBatch((Segment(0, 0, 70, 70, 7),), (4,), Latency(1.0, 2.0)),),), 3.0)],
    capacity=100,
    rows_read=96,
    not_used=95,
)


def made(policies: Sequence[str], sizes: Sequence[int | None], **config: Any) -> Made:
    """The real planner on three global batches."""
    settings = {
        "model": "qwen2.5-0.5b",
        "lengths": "some lengths",
        "provenance": "drawn at random",
        "samples": len(LENGTHS),
        "steps": 3,
        "batches": len(LENGTHS) // 12,
        "batch_size": 12,
        "budget": 8,
        "block_size": 256,
        "seed": 0,
    }
    scenario = scenario_of(PlanConfig("-", model="qwen2.5-0.5b", budget=8, **config))
    data = Lengths(LENGTHS, None, "some lengths", "drawn at random")
    batches = global_batches(data, 12, scenario.topology.dp, 3, 0)
    result = forecast(batches, variants_of(scenario, policies, sizes), int(LENGTHS.max()))
    settings |= {
        "source": scenario.source,
        "topology": asdict(scenario.topology),
        "capacity_mb": scenario.capacity_mb,
    }
    return settings, result, recommend(result.rows, scenario.capacity_mb)


@pytest.fixture(scope="module")
def small() -> Made:
    return made(("random", "kk_tokens", "kk_tokens_packed", "dense_chunks", "sab", "dst"), (None, 2048), dp=2, pp=2)


@pytest.fixture(scope="module")
def wide() -> Made:
    """More ranks than a trace shows."""
    return made(("random", "sab"), (2048,), dp=12, pp=2)


@pytest.fixture(scope="module")
def alone() -> Made:
    """One device, one policy."""
    return made(("random",), (None,), dp=1)


def shown(made_: Made, width: int = 100) -> str:
    console = Console(width=width, record=True, file=StringIO())
    print_forecast(console, *made_)
    return console.export_text()


def choices() -> list[Choice]:
    """Made up: three on the front of five, and two reasons to skip."""
    row = made(("random",), (None,), dp=1)[1].rows[0]
    found = [
        Choice(
            Topology(dp, 2),
            replace(row, step_ms=ms, peak_memory_mb=mb, fits=True),
            1e6 / ms,
            "",
            pareto=front,
        )
        for dp, ms, mb, front in (
            (1, 300.0, 4000.0, True),
            (2, 200.0, 8000.0, True),
            (4, 100.0, 90_000.0, True),
            (8, 310.0, 9000.0, False),
            (16, 220.0, 95_000.0, False),
        )
    ]
    node = "tp {} x sp 1 does not fit in a node of 8 devices"
    return [
        *found,
        Choice(Topology(1, 1, 16), None, 0.0, node.format(16)),
        Choice(Topology(1, 1, 32), None, 0.0, node.format(32)),
        Choice(Topology(32), None, 0.0, "dp 32 is more than the 16 samples of a global batch"),
    ]


def sweep_settings() -> dict[str, Any]:
    return {**made(("random",), (None,), dp=1)[0], "devices": 32}


# Terminal


@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_table_fits_and_shows_every_plan_with_its_figures(small: Made, width: int) -> None:
    _, result, advice = small
    lines = shown(small, width).splitlines()
    assert all(len(line) <= width for line in lines if not line.startswith("recommended:"))
    for row in result.rows:
        (line,) = (line for line in lines if line.removeprefix(" ->").split("  ")[0].strip(" *") == row.name)
        assert COLUMNS["step ms"](row) in line
        assert COLUMNS["vs random"](row) in line
        assert line.lstrip().startswith("->") == (row == advice.row)
        assert ("*" in line) == (row.name == result.best_baseline)
        assert (f" {COLUMNS['cover'](row)}" == line[-len(COLUMNS["cover"](row)) - 1 :]) or width < 96


def test_without_a_plan_that_can_be_recommended_none_is_marked(small: Made) -> None:
    settings, result, advice = small
    text = shown((settings, result, None))  # type: ignore[arg-type]
    assert "->" not in text
    assert "recommended" not in text
    marked = shown(small).replace(f" -> {advice.row.name}", f" {advice.row.name}")
    assert [line.split() for line in text.splitlines()] == [line.split() for line in marked.splitlines()][:-1]


def test_one_row_of_the_fastest_baseline_is_marked(small: Made) -> None:
    """Its policy has three: two unit sizes, and split backwards."""
    _, result, _ = small
    assert sum(row.policy == "dense_chunks" for row in result.rows) == 3
    assert result.best_baseline == "dense_chunks 2,048 zero_bubble"
    assert shown(small).count(" * ") == 1
    assert f"* fastest baseline: {result.best_baseline}." in shown(small)


def test_the_terminal_says_where_the_times_come_from_and_what_to_choose(small: Made) -> None:
    _, _, advice = small
    text = shown(small)
    assert "h200, analytic, not measured" in text
    assert "qwen2.5-0.5b on some lengths, DP2 PP2" in text
    (line,) = (line for line in text.splitlines() if line.startswith("recommended:"))
    assert line.rstrip() == f"recommended: {advice.row.name}: {advice.reason}"


def test_a_plan_that_is_too_large_is_marked(small: Made) -> None:
    settings, result, advice = small
    assert TOO_LARGE not in shown(small)
    rows = tuple(replace(row, fits=row == advice.row) for row in result.rows)
    text = shown((settings, replace(result, rows=rows), replace(advice, row=rows[result.rows.index(advice.row)])))
    assert text.count(f" {TOO_LARGE}") == len(rows) - 1
    assert f"{TOO_LARGE} too large" in text
    assert f"{settings['capacity_mb'] / 1e3:,.1f} GB that can be used" in text


def test_extrapolated_times_and_unknown_memory_are_told(small: Made) -> None:
    settings, result, advice = small
    assert "extrapolated" not in shown(small)
    rows = (replace(result.rows[0], extrapolated=0.25), *result.rows[1:])
    text = shown(({**settings, "capacity_mb": None}, replace(result, rows=rows), advice))
    assert "at most 25.0% of them (random)" in " ".join(text.split())
    assert "memory is not known" in text


def test_text_in_brackets_is_no_markup(small: Made) -> None:
    settings, result, advice = small
    assert "[bold]x" in shown(({**settings, "lengths": "[bold]x"}, result, advice))


@pytest.mark.parametrize("width", [80, 100])
def test_a_sweep_shows_topologies_and_each_reason_once(width: int) -> None:
    console = Console(width=width, record=True, file=StringIO())
    print_choices(console, sweep_settings(), choices())
    text = console.export_text()
    assert all(len(line) <= width for line in text.splitlines())
    order = [line.split()[0] for line in text.splitlines() if "PP2" in line and "random" in line and "with" not in line]
    assert order == ["DP4", "DP2", "DP16", "DP1", "DP8"]  # the fastest first
    assert text.count("does not fit in a node") == 1
    assert "2 x for instance tp 16 x sp 1 does not fit in a node of 8 devices" in text
    assert "DP1 TP16, DP1 TP32" in text
    assert "1 x dp 32 is more than the 16 samples of a global batch" in text
    assert "analytic, not measured" in text


def test_skipped_topologies_are_grouped_by_kind_of_reason() -> None:
    assert [len(group) for group in skipped_groups(choices())] == [2, 1]


# Page


def test_the_page_holds_every_section_and_its_claim(small: Made, tmp_path: Path) -> None:
    settings, result, advice = small
    path = tmp_path / "plan.html"
    write_plan_page(path, {**settings, "provenance": "<b>from a file"}, result, advice, LENGTHS.tolist(), ACCOUNT)
    text = path.read_text(encoding="utf-8")
    for heading in (
        "The step, worker by worker",
        "The recommended plan, close up",
        "Where the time goes",
        "Latencies of micro-batches",
        "Activations over time",
        "What became of the samples",
        "The data",
        "Words",
        "Settings",
    ):
        assert f"<h2>{heading}" in text
    assert headline(settings, result, advice) in text
    assert "<script src" not in text
    assert "<b>from" not in text
    table = text[text.index("<table>") : text.index("</table>")]
    assert table.count("<tr class=") == len(result.rows)
    assert table.count("chosen") == 1
    assert table.count("class='best") == 1
    assert f"Under the recommended plan, {advice.row.name}:<br>1 sample became 1 micro-batch: 1 alone" in text


def test_the_headline_has_the_figures_and_their_source(small: Made) -> None:
    settings, result, advice = small
    best = next(row for row in result.rows if row.name == result.best_baseline)
    sentence = headline(settings, result, advice)
    for part in (
        advice.row.name,
        best.name,
        f"({advice.row.speedup:.2f}x)",
        f"({advice.row.speedup_vs_best:.2f}x)",
        "h200, analytic, not measured",
    ):
        assert part in sentence


def test_a_recommended_baseline_is_not_compared_with_itself(small: Made) -> None:
    settings, result, _ = small
    best = next(row for row in result.rows if row.name == result.best_baseline)
    sentence = headline(settings, result, Recommendation(best, ""))
    assert sentence.count(best.name) == 1
    assert "no baseline is faster" in sentence


def test_one_device_and_one_policy_make_a_page_and_a_trace(alone: Made, tmp_path: Path) -> None:
    settings, result, advice = alone
    assert shown_plans(result, advice) == [0]
    write_plan_page(tmp_path / "plan.html", settings, result, advice, LENGTHS.tolist(), ACCOUNT)
    check_trace(trace_events(result, advice))
    assert "recommended: random" in shown(alone)
    assert "no other plan that fits" in headline(settings, result, advice)
    assert "close up" not in (tmp_path / "plan.html").read_text(encoding="utf-8")


def test_the_sweep_page_shows_all_topologies_and_why_others_are_not_there(tmp_path: Path) -> None:
    path = tmp_path / "sweep.html"
    write_sweep_page(path, sweep_settings(), choices())
    text = path.read_text(encoding="utf-8")
    for part in ("DP4 PP2 with random is the fastest", "Step time and memory", "All topologies", "Skipped: 3 of 8"):
        assert part in text
    for choice in choices():
        assert choice.row is not None or choice.skipped in text
    assert "analytic, not measured" in text


# Figures


def test_the_timeline_draws_every_action_of_every_shown_plan(small: Made) -> None:
    _, result, advice = small
    places = shown_plans(result, advice)
    assert places[0] == 0
    assert result.rows[places[-1]] == advice.row
    figure = plan_timelines(result, advice, places)
    drawn = Counter(bar.name for bar in figure.data if bar.type == "bar" for _ in bar.x)
    names = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
    expected = Counter(
        names[span.kind]
        for plan_, timeline in (result.examples[place] for place in places)
        for rank in range(2)
        for span in worker_spans(plan_, timeline, rank)
    )
    del drawn["all-reduce"]
    assert drawn == expected
    ends = [base + took for bar in figure.data if bar.type == "bar" for base, took in zip(bar.base, bar.x)]
    assert max(ends) == pytest.approx(max(result.examples[place][1].step_ms for place in places), abs=1e-3)


def test_the_critical_path_is_drawn_on_the_recommended_plan(small: Made) -> None:
    _, result, advice = small
    place = result.rows.index(advice.row)
    figure = plan_timelines(result, advice, shown_plans(result, advice))
    (line,) = (trace for trace in figure.data if trace.name == "critical path")
    timeline = result.examples[place][1]
    assert line.x[0] == 0
    assert line.x[-1] == pytest.approx(timeline.rank_ms.max(), abs=1e-3)
    assert list(line.x) == sorted(line.x)


def test_of_many_workers_the_slowest_and_the_fastest_rank_are_drawn(wide: Made) -> None:
    _, result, advice = wide
    timeline = result.examples[0][1]
    ranks = chosen_ranks(timeline, 2)
    assert sorted(timeline.rank_ms[ranks]) == [timeline.rank_ms.min(), timeline.rank_ms.max()]
    labels = plan_timelines(result, advice, [0]).layout.yaxis.ticktext
    assert len(labels) == 2 * 2
    assert [f"rank {rank}<" in "".join(labels) for rank in range(12)] == [rank in ranks for rank in range(12)]


def test_time_spent_adds_up_to_the_step(small: Made) -> None:
    _, result, _ = small
    figure = figures.time_spent(result)
    totals = np.sum([bar.x for bar in figure.data], axis=0)
    assert totals == pytest.approx([timeline.step_ms for _, timeline in result.examples])
    assert min(min(bar.x) for bar in figure.data) >= -1e-9


def test_memory_curves_reach_the_peak_and_end_empty(small: Made) -> None:
    settings, result, advice = small
    figure = figures.memory_curves(result, advice, settings["capacity_mb"])
    for place, curves in zip((0, result.rows.index(advice.row)), (figure.data[:2], figure.data[2:])):
        timeline = result.examples[place][1]
        peaks = timeline.peak_memory_mb[int(np.argmax(timeline.rank_ms))] / 1e3
        assert [max(curve.y) for curve in curves] == pytest.approx(peaks, abs=1e-5)
        assert [curve.y[-1] for curve in curves] == [0, 0]
    tight = figures.memory_curves(result, advice, 1.1e3 * max(max(curve.y) for curve in figure.data))
    assert len(tight.layout.shapes) > len(figure.layout.shapes) == 0  # a limit that is near is drawn


def test_boxes_and_slowest_micro_batches_are_those_of_the_example(small: Made) -> None:
    _, result, _ = small
    figure = figures.unit_latencies(result)
    assert sum(len(box.y) for box in figure.data if box.type == "box") == len(result.rows)
    slowest = [max(unit.latency.total_ms for unit in plan_.micro_batches) for plan_, _ in result.examples]
    assert list(figure.data[-1].x) == pytest.approx(slowest)


def test_the_front_is_joined_and_named() -> None:
    figure = figures.pareto(choices(), 100_000.0)
    front = next(trace for trace in figure.data if trace.name == "on the front")
    assert list(front.text) == ["DP4 PP2", "DP2 PP2", "DP1 PP2"]
    assert list(front.x) == [90, 8, 4]
    assert "lines" in front.mode
    assert len(figure.layout.shapes) == 1  # the device's limit


# Trace


def check_trace(events: Sequence[dict[str, Any]]) -> None:
    """The rules of the Chrome trace format that Perfetto relies on."""
    json.dumps(events, allow_nan=False)
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = {}
    counters: dict[tuple[int, str], list[float]] = {}
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    processes = [e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name"]
    assert len(processes) == len(set(processes))
    for event in events:
        assert {"ph", "name", "pid", "tid", "args"} <= event.keys()
        assert event["pid"] in processes
        if event["ph"] == "M":
            continue
        assert event["ts"] >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, float) for value in event["args"].values())
            counters.setdefault((event["pid"], event["name"]), []).append(event["ts"])
        else:
            assert event["ph"] == "X"
            assert event["dur"] >= 0
            assert (event["pid"], event["tid"]) in named
            lanes.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["dur"]))
    for slices in lanes.values():
        for (start, took), (following, _) in pairwise(sorted(slices)):
            assert start + took <= following + 1e-6
    for times in counters.values():
        assert times == sorted(times)
        assert len(times) == len(set(times))


def test_the_trace_is_valid_and_holds_every_action(small: Made, tmp_path: Path) -> None:
    settings, result, advice = small
    path = tmp_path / "trace.json"
    write_plan_trace(path, settings, result, advice)
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["otherData"]["source"] == "h200, analytic, not measured"
    assert document["otherData"]["kind"] == "simulated"
    events = document["traceEvents"]
    check_trace(events)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    places = shown_plans(result, advice)
    assert set(names.values()) == {f"{result.rows[place].name}, rank {rank}" for place in places for rank in (0, 1)}
    assert names[1].startswith(advice.row.name)
    slices = [event for event in events if event["ph"] == "X"]
    for place in places:
        plan_, timeline = result.examples[place]
        for rank in (0, 1):
            pid = next(pid for pid, name in names.items() if name == f"{result.rows[place].name}, rank {rank}")
            own = [event for event in slices if event["pid"] == pid]
            spans = worker_spans(plan_, timeline, rank)
            expected = [(f"{span.kind}{span.unit}", span.stage) for span in spans]
            found = [(e["name"], e["args"]["stage"]) for e in own if e["name"] != "all-reduce"]
            assert sorted(found) == sorted(expected)
            first = next(e for e in own if e["name"] == "F0" and e["args"]["stage"] == 0)
            unit = plan_.ranks[rank][0]
            assert first["args"]["tokens"] == unit.tokens
            assert len(first["args"]["samples"]) == len(unit.segments)
            assert first["args"]["budgets"] == unit.budgets[0]
            reduces = [(e["args"]["stage"], e["ts"] + e["dur"]) for e in own if e["name"] == "all-reduce"]
            assert len(reduces) == len(all_reduces(timeline)) == 2
            for stage, end in reduces:
                assert end == pytest.approx(1e3 * timeline.all_reduce_end_ms[stage], abs=1e-2)


def test_memory_counters_peak_where_the_simulation_does_and_end_at_zero(small: Made) -> None:
    _, result, advice = small
    events = trace_events(result, advice)
    counts = [e["args"]["MB"] for e in events if e["ph"] == "C" and e["pid"] == 1 and e["name"].endswith("worker 0")]
    timeline = result.examples[result.rows.index(advice.row)][1]
    assert max(counts) == pytest.approx(timeline.peak_memory_mb[0, 0], abs=1e-2)
    assert counts[-1] == pytest.approx(0, abs=1e-2)


def test_a_trace_shows_at_most_eight_ranks_and_the_slowest_is_there(wide: Made) -> None:
    _, result, advice = wide
    events = trace_events(result, advice)
    check_trace(events)
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    for place in shown_plans(result, advice):
        own = [name for name in names if name.startswith(f"{result.rows[place].name}, rank")]
        assert len(own) == RANKS
        slowest = int(np.argmax(result.examples[place][1].rank_ms))
        assert f"{result.rows[place].name}, rank {slowest}" in own


def test_workers_with_several_stages_are_named_by_them() -> None:
    _, result, advice = made(("random",), (None,), dp=2, pp=2, schedule="interleaved")
    events = trace_events(result, advice)
    check_trace(events)
    names = {(e["tid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert {(0, "stage 0, 2"), (1, "stage 1, 3")} <= names
    assert len(plan_timelines(result, advice, [0]).layout.yaxis.ticktext) == 4


# Command


def test_the_command_writes_page_and_trace_and_prints_the_table(tmp_path: Path) -> None:
    source = tmp_path / "lengths.txt"
    source.write_text("\n".join(map(str, LENGTHS.tolist())), encoding="utf-8")
    page, trace = tmp_path / "out" / "plan.html", tmp_path / "out" / "trace.json"
    console = Console(width=100, record=True, file=StringIO())
    config = PlanConfig(
        str(source), model="qwen2.5-0.5b", dp=2, pp=2, batch_size=8, steps=2, budget=8, unit_size=2048,
        policies=("random", "sab"), html=page, trace=trace,
    )  # fmt: skip
    record = plan(config, console)
    text = console.export_text()
    assert f"recommended: {record['recommendation']['name']}" in text
    assert text.index("recommended: ") < text.index("What became of the samples")
    assert f"{record['account']['not_used']:,} samples not used" in text
    assert "<h2>What became of the samples</h2>" in page.read_text(encoding="utf-8")
    assert "<h2>The data</h2>" in page.read_text(encoding="utf-8")
    check_trace(json.loads(trace.read_text(encoding="utf-8"))["traceEvents"])
