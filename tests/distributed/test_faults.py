"""Faults of pipelines and checkpoints across topologies, in real processes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForCausalLM

from sparsebalance.training.parallel import Ranks
from tests.conftest import ROOT
from tests.distributed import forked
from tests.distributed.checkpoint_worker import CHANGES, STEPS, config, leg, record
from tests.distributed.test_training import LIMIT_S, environment, metrics, start, untimed

pytestmark = pytest.mark.distributed

WAIT_S = 8  # parallel.timeout_s where a rank is stuck


def torchrun(folder: Path, processes: int, *arguments: str, fault: str = "") -> str:
    """What it says on standard error."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), *arguments],
        cwd=ROOT, env={**environment(fault), "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")},
        capture_output=True, text=True, timeout=2 * LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stderr


def legs(folder: Path, processes: int, *runs: str) -> None:
    cache = str(folder / "cache")
    forked.run("checkpoint_worker", processes, str(folder), str(processes), *runs, XDG_CACHE_HOME=cache)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an undisturbed run on two data-parallel ranks, "straight", and of one that was moved, "moved": those two,
    first with parameters shared out and then without, two pipeline stages, two tensor-parallel ranks, two pipelines of
    two stages that share parameters out, and one process with everything."""
    folder = tmp_path_factory.mktemp("runs")
    config(folder, "straight", dp=2)  # makes data and table
    moved = ("moved:2:1:1:2:1", "moved:2:1:1:1:2", "moved:1:2:1:1:3", "moved:1:1:2:1:5")
    legs(folder, 2, f"straight:2:1:1:1:{STEPS}", *moved)
    legs(folder, 4, "moved:2:2:1:2:7")
    leg(config(folder, "moved", dp=1), Ranks(0, 1), STEPS)
    return folder


def test_a_run_goes_on_as_any_topology(folder: Path) -> None:
    expected, found = metrics(folder / "straight"), metrics(folder / "moved")
    assert [line["step"] for line in found] == list(range(STEPS))
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in found] == pytest.approx([line[name] for line in expected], rel=1e-12)


def test_checkpoints_are_kept_to_the_last_two_and_read_by_transformers(folder: Path) -> None:
    assert sorted(path.name for path in (folder / "moved").glob("*checkpoint*")) == ["checkpoint-7", "checkpoint-8"]
    cut = folder / "moved" / "checkpoint-7"  # of two stages
    assert len(list(cut.glob("model-*-of-00002.safetensors"))) == 2
    model, loading = AutoModelForCausalLM.from_pretrained(cut, output_loading_info=True)
    assert {name: found for name, found in loading.items() if found} == {}
    assert model.config.num_hidden_layers == 2


def test_torchrun_starts_a_killed_run_again_where_it_was(folder: Path) -> None:
    """Rank 1 is killed in step 5, at least one step after a checkpoint."""
    path = folder / "restarted.yaml"
    path.write_text(yaml.safe_dump(record(folder, "restarted", dp=2)))
    command = ["--max-restarts", "2", "-m", "tests.distributed.launch_worker", "train", "--config", str(path)]
    said = torchrun(folder, 2, *command, fault="kill:1:5")
    assert "error: rank 0: step 5: not all other ranks came to" in said
    expected, found = ([untimed(line) for line in metrics(folder / name)] for name in ("straight", "restarted"))
    assert found == expected
    a, b = (folder / name / "checkpoint-8" / "model.safetensors" for name in ("straight", "restarted"))
    assert a.read_bytes() == b.read_bytes()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("kill", "it was ended by signal 9 (rank 1: step 1: waited"),
        ("hang", f"it is stuck (rank 1: step 1: waited {WAIT_S}."),
    ],
)
def test_a_stage_that_is_killed_or_stuck_is_named(kind: str, reason: str, tmp_path: Path) -> None:
    parallel = {"dp": 1, "pp": 2, "timeout_s": WAIT_S}
    config(tmp_path, "run", **parallel)
    ended = start(tmp_path, fault=f"{kind}:0:1:F1", **_changes(tmp_path, parallel))
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("error: rank 0 failed in step 1")
    assert reason in last
    # What it had sent just before may be lost with it.
    assert re.search(r"s for rank 0 to send F[01] of stage 0", last)
    assert last.endswith("; all ranks were stopped")


@pytest.mark.parametrize(
    ("at", "collective"),
    [("hang:1:1", "an exchange of FlatGradients.reduce"), ("hang:1:1:end", "all_gather_object of finish_step")],
)
def test_a_collective_that_a_rank_never_joins_is_named(at: str, collective: str, tmp_path: Path) -> None:
    parallel = {"dp": 2, "timeout_s": WAIT_S}
    config(tmp_path, "run", **parallel)
    ended = start(tmp_path, fault=at, **_changes(tmp_path, parallel))
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "error: rank 1 failed in step 1: it is stuck (rank 0: step 1: not all other ranks came to "
        f"{collective}: one is stuck, or gone"
    )


def _changes(folder: Path, parallel: dict[str, Any]) -> dict[str, Any]:
    balance = {**CHANGES["balance"], "table": str(folder / "table.json")}
    return {**CHANGES, "balance": balance, "parallel": parallel}
