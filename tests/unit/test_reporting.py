"""Tables, pages and traces say what the records hold."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from sparsebalance.comparison.summary import check_strict, in_order, slowest_unit_error, summarise, unit_errors
from sparsebalance.planning.baselines import BASELINES
from sparsebalance.planning.policy import OURS
from sparsebalance.reporting import figures
from sparsebalance.reporting.console import COLUMNS, comparison_notes, print_comparison
from sparsebalance.reporting.html import headline, write_report
from sparsebalance.reporting.lengths import length_statistics, print_lengths, write_lengths_page
from sparsebalance.reporting.trace import trace_events, write_trace

NAMES = ("random", "kk_tokens", "sab", "sab_dst")


def policy_step(units: list[list[float]], loss: float = 2.0, coverage: float = 0.5) -> dict[str, Any]:
    """A policy's part of a record: measured unit times per rank (a third forward); 0 is an empty unit."""
    ranks, predicted = [], []
    for rank in units:
        start, row = 0.0, []
        for ms in rank:
            tokens = int(ms)
            row.append(
                {
                    "lengths": [tokens] if tokens else [],
                    "tokens": tokens,
                    "targets": tokens // 2,
                    "budgets": [4, 4],
                    "predicted_ms": 1.1 * ms,
                    "start_ms": start,
                    "forward_ms": ms / 3,
                    "backward_ms": 2 * ms / 3,
                }
            )
            start += ms
        ranks.append(row)
        predicted.append(1.1 * start)
    busy = [sum(rank) for rank in units]
    return {
        "step_ms": max(busy),
        "rank_busy_ms": busy,
        "all_reduce_ms": [max(busy) - b for b in busy],
        "loss": loss,
        "grad_norm": 1.0,
        "coverage": coverage,
        "oracle_coverage": coverage + 0.1,
        "mean_budget": 4.0,
        "planning_ms": 1.0,
        "predicted_step_ms": max(predicted),
        "peak_memory_mb": 100.0,
        "units": ranks,
    }


def records() -> list[dict[str, Any]]:
    steps = []
    for step in range(3):
        scale = 100.0 * (step + 1)
        steps.append(
            {
                "step": step,
                "learning_rate": 1e-3,
                "tokens": 400,
                "targets": 200,
                "baseline_loss": 2.0 - step / 10,
                "samples": [{"id": i, "length": 100, "targets": 50} for i in range(4)],
                "policies": {
                    "random": policy_step([[3 * scale], [scale, 0]], 2.0 - step / 10),
                    "kk_tokens": policy_step([[2.5 * scale], [1.5 * scale]], 2.0 - step / 10),
                    "sab": policy_step([[2 * scale], [scale, scale]], 2.0 - step / 10),
                    "sab_dst": policy_step([[2 * scale], [2 * scale]], 2.1 - step / 10, 0.6),
                },
            }
        )
    return steps


@pytest.fixture
def summary() -> dict[str, Any]:
    policies, best = summarise(records(), NAMES, ["sab_dst"])
    return {
        "schema": 1,
        "machine": {
            "cpu": "Test <CPU>",
            "cores": 2,
            "torch": "2.13",
            "threads": 1,
            "processes": 2,
            "date": "today",
        },
        "topology": {"dp": 2, "pp": 1, "tp": 1, "sp": 1},
        "settings": {
            "steps": 3,
            "steps_configured": 5,
            "batch_size": 4,
            "granularity": "block",
            "budget": 4,
            "block_size": 16,
            "data": "a&b.jsonl",
            "config": {},
        },
        "baseline": "random",
        "best_baseline": best,
        "policies": policies,
        "predictor": {
            "heldout_mape": 0.1,
            "heldout_mape_at_step_speed": 0.05,
            "step_error_median": 0.1,
            "slowest_unit_error": 0.07,
            "pairs_in_order": 5,
            "pairs": 6,
        },
        "checks": check_strict(records(), "random", ["sab_dst"]).record(),
        "data": {"samples": 4, "tokens": 400, "targets": 200, "lengths": [10, 40, 50, 300]},
    }


def test_the_summary_by_hand(summary: dict[str, Any]) -> None:
    """Step times are 300, 600, 900 under random and two thirds of that under sab."""
    random, sab = summary["policies"]["random"], summary["policies"]["sab"]
    assert summary["best_baseline"] == "kk_tokens"
    assert (random["step_ms"], sab["step_ms"]) == (600, 400)
    assert (random["step_ms_p10"], random["step_ms_p90"]) == (pytest.approx(360), pytest.approx(840))
    assert sab["speedup_vs_random"] == pytest.approx(1.5)
    assert sab["speedup_vs_best_baseline"] == pytest.approx(1.25)
    assert random["imbalance"]["rank"] == pytest.approx(1.5)
    assert random["imbalance"]["slot"] == pytest.approx(1.25)  # slots (3, 1) and (0, 0)
    assert random["imbalance"]["all"] == pytest.approx(1.5)
    assert random["busy_fraction"] == pytest.approx(4 / 6)
    assert sab["busy_fraction"] == pytest.approx(1.0)
    assert sab["planning_share"] == pytest.approx(3 / 1200)
    assert random["predictor_error"] == pytest.approx(0.1)
    assert [summary["policies"][n]["tuned"] for n in NAMES] == [False, False, False, True]
    assert [summary["policies"][n]["ours"] for n in NAMES] == [False, False, True, True]


def test_prediction_errors_with_and_without_drift() -> None:
    """Every prediction is 10 % over: all of it drift; one unit off by 10 % more is not."""
    assert unit_errors(records()) == (pytest.approx(0.1), pytest.approx(0.0))
    steps = records()
    steps[1]["policies"]["sab"]["units"][0][0]["predicted_ms"] *= 1.1
    units = sum(u["tokens"] > 0 for s in steps for p in s["policies"].values() for rank in p["units"] for u in rank)
    raw, at_step_speed = unit_errors(steps)
    assert raw == pytest.approx(0.1 + 0.11 / units)
    assert at_step_speed == pytest.approx(0.1 / units)


def test_checks_look_at_strict_policies_only() -> None:
    steps = records()
    assert check_strict(steps, "random", ["sab_dst"]).passed
    assert not check_strict(steps, "random", []).passed
    steps[1]["policies"]["sab"]["grad_norm"] = 1.001
    found = check_strict(steps, "random", ["sab_dst"])
    assert not found.passed
    assert found.strict_grad_norm_rel_diff_max == pytest.approx(1e-3)
    steps[1]["policies"]["sab"]["grad_norm"] = float("nan")
    assert not check_strict(steps, "random", ["sab_dst"]).passed


def test_the_terminal_table_fits_80_columns_and_names_the_best_baseline(summary: dict[str, Any]) -> None:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_comparison(console, summary)
    text = console.export_text()
    assert "…" not in text
    assert re.search(r"kk_tokens \*\s+500\s+1\.20x\s+1\.00x", text)
    assert re.search(r"sab\s+400\s+1\.50x\s+1\.25x\s+1\.00\s+100%", text)
    assert "ended the run after 3 of 5 steps" in " ".join(text.split())
    assert "passed" in text


def test_notes_say_when_a_check_failed(summary: dict[str, Any]) -> None:
    summary["checks"]["passed"] = False
    summary["settings"]["steps_configured"] = 3
    notes = " ".join(comparison_notes(summary))
    assert "FAILED" in notes
    assert "time limit" not in notes


def test_the_page_is_self_contained_and_escaped(summary: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "deep" / "report.html"
    write_report(path, summary, records())
    page = path.read_text()
    outside = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"(src|href)=['\"]?http", outside)
    assert page.count("plotly.js v") == 1
    assert page.count('class="plotly-graph-div"') == 7
    assert "Test &lt;CPU&gt;" in outside
    assert "a&amp;b.jsonl" in outside
    assert "sab is 1.50x random order and 1.25x the fastest baseline (kk_tokens)" in outside
    for heading in COLUMNS:
        assert f"<th>{heading}</th>" in outside
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]


def test_the_headline_without_our_policies(summary: dict[str, Any]) -> None:
    for name in ("sab", "sab_dst"):
        del summary["policies"][name]
    assert headline(summary) == "the fastest policy is kk_tokens"


def test_the_trace_follows_the_chrome_format(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", records()[0])
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    for event in events:
        assert {"name", "pid", "tid"} <= set(event)
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
    sab = next(e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"].endswith(": sab"))
    slices = sorted(
        (e["tid"], e["ts"], e["name"], e["dur"]) for e in events if e["ph"] == "X" and e["pid"] == sab and e["dur"]
    )
    assert [(tid, name) for tid, _, name, _ in slices] == [
        (0, "F0"),
        (0, "B0"),
        (1, "F0"),
        (1, "B0"),
        (1, "F1"),
        (1, "B1"),
    ]
    for (tid, ts, _, dur), (next_tid, next_ts, _, _) in zip(slices, slices[1:]):  # noqa: RUF007
        assert next_tid != tid or next_ts == pytest.approx(ts + dur)
    assert sum(e["name"] in ("F1", "B1") for e in trace_events(records()[0])) == 2  # the empty unit has no slice


def chained() -> dict[str, Any]:
    """A record of one policy: rank 0 runs two chunks of sample 7 (F0 F1, 4 ms of nothing, B1 B0), then a whole one."""
    step = policy_step([[30.0, 60.0, 15.0], [90.0]])
    first, second, third = step["units"][0]
    for unit, start, forward, back in ((first, 0, 0.0, 74.0), (second, 30, 10.0, 34.0), (third, None, 94.0, 99.0)):
        unit |= {"start_ms": forward, "backward_start_ms": back}
        if start is not None:
            unit["chunk"] = {"sample": 7, "start": start, "of": 90, "recomputed": start == 0}
    step["units"][1][0]["backward_start_ms"] = 30.0
    return {"step": 0, "policies": {"random": step | {"all_reduce_ms": [1.0, 20.0]}}}


def test_the_trace_of_a_comparison_shows_chunks_where_they_ran() -> None:
    events = [e for e in trace_events(chained()) if e["ph"] == "X" and e["tid"] == 0]
    slices = sorted((e["ts"] / 1e3, e["dur"] / 1e3, e["name"]) for e in events)
    assert slices == [
        (0, 10, "F0"),
        (10, 20, "F1"),
        (34, 40, "B1"),
        (74, 20, "B0"),
        (94, 5, "F2"),
        (99, 10, "B2"),
        (109, 1, "all-reduce and waiting"),
    ]
    details = {e["name"]: e["args"] for e in events}
    assert details["B1"]["chunk"] == {"sample": 7, "start": 30, "of": 90, "recomputed": False}
    assert "chunk" not in details["F2"]


def test_the_timeline_of_a_comparison_shows_chunks_where_they_ran() -> None:
    bars = {bar.name: bar for bar in figures.timeline(chained(), ["random"]).data}
    assert list(zip(bars["forward"].base, bars["forward"].x)) == [(0, 10), (10, 20), (94, 5), (0, 30)]
    assert list(zip(bars["backward"].base, bars["backward"].x)) == [(74, 20), (34, 40), (99, 10), (30, 60)]
    assert list(zip(bars["waiting"].base, bars["waiting"].x)) == [(109, 1), (90, 20)]
    texts = bars["backward"].hovertext
    assert "30 tokens, 15 targets, chunk 0..30 of sample 7 (90 tokens), recomputed in its backward<br>" in texts[0]
    assert "samples 15<br>" in texts[2]


def test_waiting_before_the_all_reduce_begins_where_the_last_backward_ends() -> None:
    """The first chunk's backward is the last of a rank that runs nothing else."""
    record = chained()
    del record["policies"]["random"]["units"][0][2]
    bars = {bar.name: bar for bar in figures.timeline(record, ["random"]).data}
    assert bars["waiting"].base[0] == 94
    (wait,) = (e for e in trace_events(record) if e["name"].startswith("all-reduce") and e["tid"] == 0)
    assert wait["ts"] == 94_000


def pipelined(step: dict[str, Any]) -> dict[str, Any]:
    """A policy's step on one rank with two stages and one unit of 30 ms; stage 1 waits for stage 0 and it for 1."""
    rows = [
        [["F", 0, 0, 0, 5, 0, 5], ["I", 0, 0, 15, 20, 17, 22], ["W", 0, 0, 20, 24, 22, 26]],
        [["F", 0, 1, 5, 10, 5, 11], ["I", 0, 1, 10, 15, 11, 17], ["W", 0, 1, 15, 19, 17, 21]],
    ]
    workers = [
        {"rank": 0, "stage": stage, "all_reduce_ms": wait, "waiting_ms": {}, "actions": actions}
        for stage, (actions, wait) in enumerate(zip(rows, (1.0, 6.0)))
    ]
    return step | {"workers": workers, "bubble": {"planned": 0.25, "measured": 0.5}, "step_ms": 28.0}


def piped() -> dict[str, Any]:
    return {"step": 0, "policies": {name: pipelined(policy_step([[30.0]])) for name in NAMES}}


def test_the_timeline_of_a_comparison_shows_stages_and_what_they_wait() -> None:
    figure = figures.timeline(piped(), ["random", "sab"])
    bars = [bar for bar in figure.data if bar.xaxis == "x2"]
    assert [bar.name for bar in bars] == ["forward", "input gradient", "weight gradient", "waiting"]
    found = {bar.name: list(zip(bar.y, bar.base, bar.x)) for bar in bars}
    one, two = "rank 0 stage 0", "rank 0 stage 1"
    assert found["forward"] == [(one, 0, 5), (two, 5, 6)]
    assert found["weight gradient"] == [(one, 22, 4), (two, 17, 4)]
    assert found["waiting"] == [(one, 5, 12), (one, 26, 1), (two, 0, 5), (two, 21, 6)]
    assert "W0 on stage 1: 4.0 ms, planned 4.0<br>30 tokens, 15 targets, samples 30<br>" in bars[2].hovertext[1]
    assert [a.text for a in figure.layout.annotations] == [
        "random: 28 ms, 50% waiting, 25% as planned",
        "sab: 28 ms, 50% waiting, 25% as planned",
    ]
    plain = figures.timeline(records()[0], ["random", "sab"])
    assert [bar.name for bar in plain.data] == ["forward", "backward", "waiting"] * 2
    assert [a.text for a in plain.layout.annotations] == ["random", "sab"]


def test_the_trace_of_a_comparison_has_a_track_a_stage() -> None:
    events = [event for event in trace_events(piped()) if event["pid"] == 0]
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == ["rank 0 stage 0", "rank 0 stage 1"]
    slices = [(e["tid"], e["name"], e["ts"] / 1e3, e["dur"] / 1e3) for e in events if e["ph"] == "X"]
    assert slices == [
        (0, "F0", 0, 5),
        (0, "I0", 17, 5),
        (0, "W0", 22, 4),
        (0, "all-reduce and waiting", 26, 1),
        (1, "F0", 5, 6),
        (1, "I0", 11, 6),
        (1, "W0", 17, 4),
        (1, "all-reduce and waiting", 21, 6),
    ]


def test_the_summary_of_pipelines_counts_all_their_workers() -> None:
    """30 ms of one rank are 15 of each stage, of 28."""
    policies, _ = summarise([piped() | {"targets": 15}] * 2, NAMES, ["sab_dst"])
    assert policies["sab"]["busy_fraction"] == pytest.approx(30 / (2 * 28))
    assert policies["sab"]["bubble"] == {"planned": 0.25, "measured": 0.5}
    assert summarise(records(), NAMES, ["sab_dst"])[0]["sab"]["bubble"] is None


def test_the_page_of_pipelines_goes_stage_by_stage(summary: dict[str, Any], tmp_path: Path) -> None:
    write_report(tmp_path / "report.html", summary, [piped()])
    page = (tmp_path / "report.html").read_text()
    assert "Where the time goes: step 0, stage by stage" in page
    write_report(tmp_path / "report.html", summary, records())
    assert "rank by rank" in (tmp_path / "report.html").read_text()


def test_dense_chunks_is_a_baseline_however_fast_it_is() -> None:
    steps = records()
    for step in steps:
        step["policies"]["dense_chunks"] = step["policies"]["sab"] | {
            "step_ms": 0.5 * step["policies"]["sab"]["step_ms"]
        }
    policies, best = summarise(steps, (*NAMES, "dense_chunks"), ["sab_dst"])
    assert best == "dense_chunks"
    assert not policies["dense_chunks"]["ours"]
    assert policies["sab"]["speedup_vs_best_baseline"] == pytest.approx(0.5)
    colors = list(figures.policy_colors((*BASELINES, *OURS)).values())
    assert len(set(colors)) == len(colors)


def test_length_statistics_by_hand() -> None:
    found = length_statistics([1, 2, 3, 4, 1000], [0, 1, 1, 1, 10])
    assert (found["samples"], found["tokens"], found["targets"], found["without_targets"]) == (5, 1010, 13, 1)
    assert (found["min"], found["p50"], found["max"], found["mean"]) == (1, 3, 1000, 202)
    bins = {entry["from"]: (entry["samples"], entry["tokens"]) for entry in found["bins"]}
    assert bins == {1: (1, 1), 2: (2, 5), 4: (1, 4), **{2**i: (0, 0) for i in range(3, 9)}, 512: (1, 1000)}
    assert json.loads(json.dumps(found)) == found
    powers = length_statistics([2**i for i in range(20)], [0] * 20)
    assert all(entry["samples"] == 1 for entry in powers["bins"])


def test_lengths_are_printed_and_plotted(tmp_path: Path) -> None:
    lengths = [*np.random.default_rng(0).integers(10, 5000, 199).tolist(), 1_000_000]
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_lengths(console, length_statistics(lengths, [0] * 200), "test.jsonl")
    text = console.export_text()
    assert "…" not in text
    assert "200 samples" in text
    write_lengths_page(tmp_path / "lengths.html", lengths, "<test>")
    assert "Lengths of &lt;test&gt;" in (tmp_path / "lengths.html").read_text()
    write_lengths_page(tmp_path / "one.html", [7], "one sample")


def test_policies_far_enough_apart_are_checked_for_their_order() -> None:
    steps = records()
    policies = {name: {} for name in NAMES}
    for step in steps:
        for name, predicted in (("random", 4.0), ("kk_tokens", 3.0), ("sab", 1.0), ("sab_dst", 2.0)):
            step["policies"][name]["predicted_step_ms"] = predicted
    measured = {name: sum(step["policies"][name]["step_ms"] for step in steps) for name in NAMES}
    apart = sum(measured[a] < 0.98 * measured[b] for a in NAMES for b in NAMES)
    assert in_order(policies, steps) == (apart, apart)
    for step in steps:
        step["policies"]["random"]["predicted_step_ms"] = 0.5  # the slowest, predicted fastest
    right, pairs = in_order(policies, steps)
    assert pairs == apart
    assert right < pairs


def test_the_slowest_unit_of_a_plan_has_an_error_of_its_own() -> None:
    steps = records()
    assert slowest_unit_error(steps) == pytest.approx(0.1)
    for step in steps:
        for policy in step["policies"].values():
            units = [unit for rank in policy["units"] for unit in rank]
            slowest = max(units, key=lambda unit: unit["forward_ms"] + unit["backward_ms"])
            slowest["predicted_ms"] = 2 * (slowest["forward_ms"] + slowest["backward_ms"])
    assert slowest_unit_error(steps) == pytest.approx(1.0)
