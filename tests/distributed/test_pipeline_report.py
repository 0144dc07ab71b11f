"""Pipelines in the books: metrics, pages and traces of a training run and a comparison on two processes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sparsebalance.reporting.planned.command import report
from sparsebalance.reporting.planned.records import parse_step
from tests.distributed import forked
from tests.distributed.report_worker import LENGTHS, STEPS
from tests.models import question_rows, write_rows

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds what report_worker.py left: a run and a comparison."""
    folder = tmp_path_factory.mktemp("pipelines")
    write_rows(folder / "chat.jsonl", question_rows(*LENGTHS))
    forked.run("report_worker", 2, str(folder))
    return folder


def names(trace: Path, process: int) -> list[str]:
    events = json.loads(trace.read_text())["traceEvents"]
    return [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == process]


def records_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_of_two_stages_is_reported_stage_by_stage(folder: Path) -> None:
    run = folder / "run"
    records = records_of(run)
    assert len(records) == STEPS
    for record in records:
        step = parse_step(record, "it")
        first, last = record["workers"]
        assert [(worker["rank"], worker["stage"]) for worker in (first, last)] == [(0, 0), (0, 1)]
        for worker in (first, last):
            assert {row[0] for row in worker["actions"]} == {"F", "I", "W"}
            assert len(worker["actions"]) == 3 * len(worker["units"])
        for side in ("planned", "measured"):
            assert 0 < record["bubble"][side] < 1
            waited = sum(worker["waiting_ms"][side] for worker in (first, last)) / 2
            total = record["predicted_step_ms" if side == "planned" else "step_ms"]
            assert record["bubble"][side] == pytest.approx(waited / total)
        assert [step.waiting_ms(worker) for worker in step.workers] == pytest.approx(
            [worker["waiting_ms"]["measured"] for worker in (first, last)], abs=0.1
        )
        # On one clock: no unit is on the second stage before it left the first one, nor back before it was sent.
        ends = {(row[0], row[1]): row[6] for row in first["actions"]}
        sent = {(row[0], row[1]): row for row in last["actions"]}
        for row in first["actions"]:
            if row[0] == "F":
                assert ends["F", row[1]] <= sent["F", row[1]][5] + 0.01
            if row[0] == "I":
                assert sent["I", row[1]][6] <= row[5] + 0.01
        for worker in step.workers:
            for unit in worker.units:
                assert sum(unit.planned.terms.values()) == pytest.approx(unit.planned.total_ms)
    found = report(run, Console(file=open(os.devnull, "w")))  # noqa: SIM115
    assert found["bubble"]["measured"] == pytest.approx(
        sum(r["bubble"]["measured"] * r["step_ms"] for r in records) / sum(r["step_ms"] for r in records), abs=1e-3
    )
    assert "Bubbles, stage by stage" in (run / "report.html").read_text()
    expected = ["planned stage 0", "actual stage 0", "planned stage 1", "actual stage 1"]
    assert names(run / "trace.json", 0) == expected


def test_a_comparison_of_pipelines_shows_their_stages(folder: Path) -> None:
    out = folder / "comparison"
    summary = json.loads((out / "summary.json").read_text())
    (record,) = records_of(out)
    for name in ("random", "sab"):
        policy = record["policies"][name]
        assert summary["policies"][name]["bubble"] == policy["bubble"]
        assert 0 < summary["policies"][name]["busy_fraction"] < 1
        assert [(worker["rank"], worker["stage"]) for worker in policy["workers"]] == [(0, 0), (0, 1)]
        assert {row[1] for row in policy["workers"][1]["actions"]} == set(range(len(policy["units"][0])))
    assert names(out / "trace.json", 1) == ["rank 0 stage 0", "rank 0 stage 1"]
    assert "planned stage 1" in names(out / "planned_trace.json", 0)
    assert "Bubbles, stage by stage" in (out / "planned.html").read_text()
    assert "stage by stage" in (out / "report.html").read_text()
