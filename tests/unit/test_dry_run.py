"""`train --dry-run`: the largest micro-batches for real, nothing written; and the memory check before a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from sparsebalance.cli import main
from tests.models import tiny_run


def config(folder: Path, **changes: object) -> str:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(tiny_run(folder, **{"parallel": {"dp": 1}, **changes})))
    return str(path)


@pytest.mark.parametrize(("policy", "packed"), [("sab_dst", True), ("random", False)])
def test_a_dry_run_tries_the_largest_units_and_writes_nothing(
    policy: str, packed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config(tmp_path, balance={"policy": policy})
    before = sorted(tmp_path.rglob("*"))
    assert main(["train", "--config", path, "--dry-run", "--json"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert sorted(tmp_path.rglob("*")) == before
    assert result["steps_planned"] == 4
    assert result["available_mb"] > 0
    assert result["static_predicted_mb"] > 0
    assert result["static_measured_mb"] is not None
    units = result["units"]
    assert 1 <= len(units) <= 3
    assert [unit["predicted_mb"] for unit in units] == sorted((unit["predicted_mb"] for unit in units), reverse=True)
    assert any(len(unit["samples"]) > 1 for unit in units) == packed
    for unit in units:
        assert unit["tokens"] <= 1024
        assert unit["ms"] > 0
        assert unit["predicted_mb"] > 0
        assert unit["measured_mb"] is not None
    assert "largest micro-batch, predicted: " in captured.err


def test_more_steps_cannot_have_a_smaller_largest_unit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    largest = []
    for steps in ("1", "4"):
        arguments = ["train", "--config", config(tmp_path, balance={"policy": "random"}), "--dry-run", "--json"]
        assert main([*arguments, "--steps", steps]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["steps_planned"] == int(steps)
        largest.append(result["units"][0]["predicted_mb"])
    assert largest[1] >= largest[0]


@pytest.mark.parametrize("flags", [[], ["--dry-run"]], ids=["train", "dry run"])
def test_too_little_memory_is_refused_before_anything_is_written(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config(tmp_path, parallel={"dp": 1, "memory_gb": 0.001})
    before = sorted(tmp_path.rglob("*"))
    assert main(["train", "--config", path, *flags]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("error: sample ")
    assert "makes a micro-batch that needs about" in error
    assert "raise parallel.memory_gb" in error
    assert sorted(tmp_path.rglob("*")) == before


def test_a_memory_limit_must_be_above_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path, parallel={"dp": 1, "memory_gb": 0.0})
    assert main(["train", "--config", path]) == 2
    assert "parallel.memory_gb is 0.0, but it must be above 0" in capsys.readouterr().err
