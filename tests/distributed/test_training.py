"""Training in real processes: faults end every rank with a message, and a resumed run is the same run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT
from tests.models import tiny_run

pytestmark = pytest.mark.distributed

LIMIT_S = 150  # a hang, not a slow machine


def command(folder: Path, *arguments: str, **changes: Any) -> list[str]:
    """`sparsebalance train` with two ranks that launch_worker.py stands in for."""
    (folder / "config.yaml").write_text(yaml.safe_dump(tiny_run(folder, **changes)))
    code = (
        "import sys; from sparsebalance import cli; from sparsebalance.training import launch\n"
        "launch.WORKER_MODULE = 'tests.distributed.launch_worker'\n"
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    return [sys.executable, "-c", code, "train", "--config", str(folder / "config.yaml"), *arguments]


def environment(fault: str = "") -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **({"FAULT": fault} if fault else {})}


def start(folder: Path, *arguments: str, fault: str = "", **changes: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(folder, *arguments, **changes),
        cwd=ROOT,
        env=environment(fault),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def untimed(line: dict[str, Any]) -> dict[str, Any]:
    """A step's record without what clocks said."""
    workers = [[{**unit, "measured": None} for unit in worker["units"]] for worker in line["workers"]]
    timed = {"step_ms", "rank_busy_ms", "imbalance_rank", "planning_ms"}
    return {**{k: v for k, v in line.items() if k not in timed}, "workers": workers}


def test_a_killed_run_resumes_exactly(tmp_path: Path) -> None:
    """Rank 1 is killed in step 3 of 4, after the checkpoint of step 2: then on, and the same as never stopped.

    Online correction is off: with it, plans depend on measured times.
    """
    repeatable = {"correction": False}
    killed = start(tmp_path, fault="kill:1:3", balance=repeatable)
    assert killed.returncode == 1
    assert "error: rank 1 failed: it was ended by signal 9; all ranks were stopped" in killed.stderr
    assert [line["step"] for line in metrics(tmp_path / "run")] == [0, 1, 2]
    resumed = start(tmp_path, "--resume", balance=repeatable)
    assert resumed.returncode == 0, resumed.stderr
    table = tmp_path / "run" / "latency_table.json"
    straight = start(tmp_path, out=str(tmp_path / "straight"), balance={"table": str(table), **repeatable})
    assert straight.returncode == 0, straight.stderr

    found, expected = ([untimed(line) for line in metrics(tmp_path / name)] for name in ("run", "straight"))
    assert found == expected
    assert {line["mean_budget"] for line in expected} != {3.0}  # tuning was at work
    a, b = (tmp_path / name / "checkpoint-4" / "model.safetensors" for name in ("run", "straight"))
    assert a.read_bytes() == b.read_bytes()
    assert not [p for p in (tmp_path / "run").iterdir() if p.name.startswith(".")]


def test_a_corrected_run_resumes_with_what_it_had_learned(tmp_path: Path) -> None:
    assert start(tmp_path, steps=2).returncode == 0
    assert start(tmp_path, "--resume", steps=4).returncode == 0
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    state = json.loads((tmp_path / "run" / "checkpoint-4" / "trainer.json").read_text())
    # Step 2 was planned while step 1 ran: with the factors known after step 0, from the checkpoint.
    assert lines[2]["term_factors"] != dict.fromkeys(lines[2]["term_factors"], 1.0)
    assert lines[3]["rank_factors"] != lines[2]["rank_factors"]
    assert set(state["learner"]["correction"]["terms"]) == {"linear", "router", "attend", "head"}


def test_a_rank_that_raises_ends_the_run_with_its_message(tmp_path: Path) -> None:
    ended = start(tmp_path, fault="raise:1:2")
    assert ended.returncode == 1
    assert "error: rank 1 failed: ValueError: the disk caught fire; all ranks were stopped" in ended.stderr
    assert (tmp_path / "run" / "checkpoint-2").is_dir()
    assert [p.name for p in (tmp_path / "run").iterdir() if p.name.startswith(".")] == []


def test_a_loss_that_is_no_number_stops_before_the_update(tmp_path: Path) -> None:
    ended = start(tmp_path, fault="nan:0:1", checkpoint_every=1)
    assert ended.returncode == 2
    assert "step 1: loss nan" in ended.stderr
    assert "no update was made" in ended.stderr
    assert [line["step"] for line in metrics(tmp_path / "run")] == [0]
    assert (tmp_path / "run" / "checkpoint-1").is_dir()


def test_a_stopped_launcher_leaves_no_rank_behind(tmp_path: Path) -> None:
    launcher = subprocess.Popen(
        command(tmp_path, steps=100_000), cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True
    )
    written = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + LIMIT_S
    while not written.is_file() and time.monotonic() < deadline:
        time.sleep(0.2)
    ranks = ranks_of(launcher.pid)
    launcher.send_signal(signal.SIGTERM)
    _, stderr = launcher.communicate(timeout=LIMIT_S)
    assert len(ranks) == 2
    assert launcher.returncode == 128 + signal.SIGTERM
    assert "stopped by SIGTERM; all ranks were stopped" in stderr
    assert not [pid for pid in ranks if Path(f"/proc/{pid}/stat").exists()]


def ranks_of(launcher: int) -> list[int]:
    """Children that run the worker module (Linux)."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rsplit(")", 1)[1].split()[1])
            if parent == launcher and "launch_worker" in (stat.parent / "cmdline").read_text():
                found.append(int(stat.parent.name))
        except (OSError, IndexError):
            continue  # ended in between
    return found
