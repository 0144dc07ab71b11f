"""Training in real processes: faults end every rank with a message, and a resumed run is the same run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from sparsebalance.training.parallel import Ranks
from sparsebalance.training.trainer import train
from tests.conftest import ROOT
from tests.distributed import forked
from tests.distributed.training_worker import CHUNKED, EPOCHS, LENGTHS, SHORT_TAIL, config
from tests.models import question_rows, tiny_run, write_rows

pytestmark = pytest.mark.distributed

WORKER = "tests.distributed.launch_worker"
LIMIT_S = 150  # a hang, not a slow machine


def command(folder: Path, *arguments: str, **changes: Any) -> list[str]:
    """`sparsebalance train` in new interpreters, with two ranks that launch_worker.py stands in for."""
    code = (
        "import sys; from sparsebalance import cli; from sparsebalance.training import launch\n"
        f"launch.WORKER_MODULE = '{WORKER}'\n"
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    return [sys.executable, "-c", code, "train", "--config", written(folder, **changes), *arguments]


def written(folder: Path, **changes: Any) -> str:
    """Path of a config."""
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(tiny_run(folder, **changes)))
    return str(path)


def environment(fault: str = "") -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **({"FAULT": fault} if fault else {})}


def start(folder: Path, *arguments: str, fault: str = "", **changes: Any) -> subprocess.CompletedProcess[str]:
    config = written(folder, **changes)
    return forked.command_line(["train", "--config", config, *arguments], WORKER, **environment(fault))


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def untimed(line: dict[str, Any]) -> dict[str, Any]:
    """A step's record without what clocks said."""
    workers = [[{**unit, "measured": None} for unit in worker["units"]] for worker in line["workers"]]
    timed = {"step_ms", "rank_busy_ms", "imbalance_rank", "bubble", "planning_ms", "tune_ms", "probe_ms"}
    return {**{k: v for k, v in line.items() if k not in timed}, "workers": workers}


@pytest.mark.parametrize("shard", [1, 2])
def test_a_killed_run_resumes_exactly(shard: int, tmp_path: Path) -> None:
    """Rank 1 is killed in step 3 of 4, after the checkpoint of step 2: then on, and the same as never stopped.

    Online correction is off: with it, plans depend on measured times.
    """
    repeatable, parallel = {"correction": False}, {"dp": 2, "shard": shard}
    killed = start(tmp_path, fault="kill:1:3", balance=repeatable, parallel=parallel)
    assert killed.returncode == 1
    assert (
        "error: rank 1 failed in step 3: it was ended by signal 9 (rank 0: step 3: not all other ranks" in killed.stderr
    )
    assert [line["step"] for line in metrics(tmp_path / "run")] == [0, 1, 2]
    resumed = start(tmp_path, "--resume", balance=repeatable, parallel=parallel)
    assert resumed.returncode == 0, resumed.stderr
    table = tmp_path / "run" / "latency_table.json"
    balance = {"table": str(table), **repeatable}
    straight = start(tmp_path, out=str(tmp_path / "straight"), balance=balance, parallel=parallel)
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
    """In the second of two stages; what was being written when it happened is still written."""
    ended = start(tmp_path, fault="raise:1:2:F0", parallel={"dp": 1, "pp": 2})
    assert ended.returncode == 1
    sentence = "F0 of stage 1: ValueError: the disk caught fire; all ranks were stopped"
    assert ended.stderr.strip().splitlines()[-1].startswith("error: rank 1 failed in step 2")
    assert sentence in ended.stderr
    assert (tmp_path / "run" / "checkpoint-2").is_dir()
    assert [p.name for p in (tmp_path / "run").iterdir() if p.name.startswith(".")] == []


def test_a_loss_that_is_no_number_stops_before_the_update(tmp_path: Path) -> None:
    ended = start(tmp_path, fault="nan:0:1", checkpoint_every=1)
    assert ended.returncode == 2
    assert "step 1: loss nan" in ended.stderr
    assert "no update was made" in ended.stderr
    assert [line["step"] for line in metrics(tmp_path / "run")] == [0]
    assert (tmp_path / "run" / "checkpoint-1").is_dir()


def test_a_run_that_is_asked_to_stop_saves_and_goes_on(tmp_path: Path) -> None:
    """SIGTERM to the launching process, at a moment that no rank chose: all end after the same step, with status 0."""
    launcher = subprocess.Popen(
        command(tmp_path, steps=100_000, checkpoint_every=0),
        cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    ranks = ranks_of_started(launcher, tmp_path / "run" / "metrics.jsonl")
    launcher.send_signal(signal.SIGTERM)
    stdout, stderr = launcher.communicate(timeout=LIMIT_S)
    assert len(ranks) == 2
    assert launcher.returncode == 0, stderr
    lines = metrics(tmp_path / "run")
    done = len(lines)
    assert [line["step"] for line in lines] == list(range(done))
    assert f"stopped as asked after step {done} of 100000, with a checkpoint; --resume goes on" in " ".join(
        stdout.split()
    )
    assert [path.name for path in (tmp_path / "run").glob("*checkpoint*")] == [f"checkpoint-{done}"]
    assert not [pid for pid in ranks if is_running(pid)]


def test_ranks_of_a_killed_launcher_end_with_a_checkpoint(tmp_path: Path) -> None:
    """They must not go on writing where a new run may start."""
    launcher = subprocess.Popen(
        command(tmp_path, steps=100_000, checkpoint_every=0),
        cwd=ROOT,
        env=environment(),
        stderr=subprocess.DEVNULL,
    )
    ranks = ranks_of_started(launcher, tmp_path / "run" / "metrics.jsonl")
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + LIMIT_S
    while any(is_running(pid) for pid in ranks) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert len(ranks) == 2
    assert not [pid for pid in ranks if is_running(pid)]
    assert len(list((tmp_path / "run").glob("checkpoint-*"))) == 1


def ranks_of_started(launcher: subprocess.Popen[Any], written: Path) -> list[int]:
    """Process ids of the ranks, once they have done a step."""
    deadline = time.monotonic() + LIMIT_S
    while not (written.is_file() and written.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.2)
    return ranks_of(launcher.pid)


def is_running(pid: int) -> bool:
    """Whether a process has not ended, be it waited for or not (Linux)."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except OSError:
        return False


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


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """What training_worker.py did on two ranks: the folder of its runs, and what it says itself."""
    folder = tmp_path_factory.mktemp("runs")
    write_rows(folder / "chat.jsonl", question_rows(*LENGTHS))
    return folder, json.loads(forked.run("training_worker", 2, str(folder), XDG_CACHE_HOME=str(folder / "cache")))


def units_of(line: dict[str, Any]) -> list[dict[str, Any]]:
    return [unit for worker in line["workers"] for unit in worker["units"]]


def batch_of(line: dict[str, Any]) -> list[tuple[int, ...]]:
    """Lengths of a step's whole samples, and (id, length) of those in chunks."""
    units = units_of(line)
    whole = [(length,) for unit in units if "chunk" not in unit for length in unit["lengths"]]
    return sorted(whole) + sorted({(u["chunk"]["sample"], u["chunk"]["of"]) for u in units if "chunk" in u})


def data_of(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / "data.json").read_text())
    return record


@pytest.mark.parametrize(("straight", "resumed"), [("straight", "resumed"), ("window", "window_resumed")])
def test_a_run_in_chunks_resumes_exactly(straight: str, resumed: str, runs: tuple[Path, dict[str, Any]]) -> None:
    """From step 3, after it was stopped in step 5; under a window of 2 steps that is inside of one."""
    folder, _ = runs
    expected, found = (metrics(folder / name) for name in (straight, resumed))
    assert [untimed(line) for line in found] == [untimed(line) for line in expected]
    assert [line["step"] for line in found] == list(range(6))
    chunks = [unit["chunk"] for line in found for unit in units_of(line) if "chunk" in unit]
    assert {chunk["recomputed"] for chunk in chunks} == {True, False}
    assert max(unit["tokens"] for line in found for unit in units_of(line)) <= 64
    assert {line["mean_budget"] for line in found} != {3.0}  # tuning was at work
    a, b = (folder / name / "checkpoint-6" / "model.safetensors" for name in (straight, resumed))
    assert a.read_bytes() == b.read_bytes()


def test_a_run_tuned_online_resumes_exactly(runs: tuple[Path, dict[str, Any]]) -> None:
    """Two ranks with equal plans (every step compares digests), budgets that follow each unit's own scores, and a
    calibration that the checkpoint restores: it decides the budgets after the resume."""
    folder, _ = runs
    expected, found = (metrics(folder / name) for name in ("online", "online_resumed"))
    assert [untimed(line) for line in found] == [untimed(line) for line in expected]
    moved = [unit["budgets"] != unit["planned_budgets"] for line in found for unit in units_of(line) if unit["tokens"]]
    assert set(moved) == {True, False}
    assert all(line["tune_ms"] > 0 for line in found)
    assert all(set(line["probe"]) == {"estimated", "router", "oracle", "regret"} for line in found)
    a, b = (folder / name / "checkpoint-6" for name in ("online", "online_resumed"))
    assert (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()
    states = [json.loads((path / "trainer.json").read_text()) for path in (a, b)]
    assert states[0]["learner"]["calibration"] == states[1]["learner"]["calibration"]
    assert states[0]["next_feedback"]["calibration"]["offsets"] != []
    assert {line["tune_ms"] for line in metrics(folder / "straight")} == {0.0}


def test_a_run_goes_on_on_half_of_its_ranks(runs: tuple[Path, dict[str, Any]]) -> None:
    """In the middle of the second epoch: the same global batches, and the losses that two ranks would have had."""
    folder, _ = runs
    shutil.copytree(folder / "two_ranks", folder / "one_rank", ignore=shutil.ignore_patterns("checkpoint-8"))
    balance = {**CHUNKED, "policy": "sab"}
    trained = train(config(folder, "one_rank", balance=balance, parallel={"dp": 1}, **EPOCHS), Ranks(0, 1), resume=True)
    assert [record.step for record in trained.records] == [6, 7]
    two, one = metrics(folder / "two_ranks"), metrics(folder / "one_rank")
    assert [len(line["workers"]) for line in one] == [2] * 6 + [1] * 2
    assert [batch_of(line) for line in one] == [batch_of(line) for line in two]
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in one] == pytest.approx([line[name] for line in two], rel=1e-5)
    # Of its own two steps; what was seen is that of the whole run.
    assert data_of(folder / "one_rank")["account"]["steps"] == 2
    assert data_of(folder / "one_rank")["seen"] == data_of(folder / "two_ranks")["seen"]


def test_a_last_batch_with_fewer_samples_than_ranks(runs: tuple[Path, dict[str, Any]]) -> None:
    """7 samples in batches of 6: in every second step one rank has nothing to do, and the loss is that of one rank."""
    folder, _ = runs
    lines = metrics(folder / "tail")
    assert [len(batch_of(line)) for line in lines] == [6, 1, 6, 1]
    for line in lines[1::2]:
        assert sorted(any(unit["lengths"] for unit in worker["units"]) for worker in line["workers"]) == [False, True]
    changes = {"data": SHORT_TAIL, "balance": {**CHUNKED, "policy": "sab"}, "parallel": {"dp": 1}, "steps": 4}
    alone = train(config(folder, "tail_alone", **changes), Ranks(0, 1)).records
    assert [line["loss"] for line in lines] == pytest.approx([record.loss for record in alone], rel=1e-5)
    account = data_of(folder / "tail")["account"]
    assert (account["rows_read"], account["dropped"], account["samples"], account["repeats"]) == (9, 2, 7, 7)
    assert account["dropped_tokens"] > 2 * 250
    assert account["empty"] == 2


def test_two_epochs_are_accounted_for(runs: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = runs
    record, lines = data_of(folder / "two_ranks"), metrics(folder / "two_ranks")
    account, seen = record["account"], record["seen"]
    assert (account["samples"], account["repeats"], account["not_used"], account["steps"]) == (24, 24, 0, 8)
    assert seen["tokens"] == sum(line["tokens"] for line in lines) == account["tokens"] + account["repeated_tokens"]
    assert seen["targets"] == sum(line["targets"] for line in lines)
    assert (seen["samples"], seen["unique_samples"], seen["epochs"]) == (48, 24, 2.0)
    assert seen["tokens"] == 2 * seen["unique_tokens"]
    chunks = [unit for line in lines for unit in units_of(line) if "chunk" in unit]
    assert account["chunks"] == len(chunks)
    assert account["cut"]["tokens"] == sum(unit["tokens"] for unit in chunks)
    assert account["capacity"] == 64


@pytest.mark.parametrize("name", ["window", "window_resumed"])
def test_a_window_moves_samples_by_less_than_itself(name: str, runs: tuple[Path, dict[str, Any]]) -> None:
    batches = data_of(runs[0] / name)["batches"]
    assert batches["name"] == "window"
    assert 0 < batches["moved"] < 1
    assert batches["max_displacement"] == 1
    assert data_of(runs[0] / "straight")["batches"]["moved"] == 0


def test_plans_on_file_are_reused_and_refused_for_another_seed(runs: tuple[Path, dict[str, Any]]) -> None:
    folder, found = runs
    first, again = found["reused losses"]
    assert first == again
    assert [untimed(line) for line in metrics(folder / "planned")] == [
        untimed(line) for line in metrics(folder / "reused")
    ]
    for message in found["refused"]:
        assert "plans that were made for something else: seed (was 0, is 3); delete it or name another" in message
    assert not list((folder / "refused").glob("checkpoint-*"))


def test_other_batches_than_the_checkpoints_are_refused(runs: tuple[Path, dict[str, Any]]) -> None:
    for message in runs[1]["other batches"]:
        assert "the checkpoint was written for other batches: seed (was 0, is 3); go on with the same" in message
