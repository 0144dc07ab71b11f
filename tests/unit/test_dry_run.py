"""`train --dry-run`: what needs most memory for real, nothing written; and the memory check before a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from sparsebalance.cli import main
from tests.models import document_rows, tiny_run, write_rows


def config(folder: Path, **changes: object) -> str:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(tiny_run(folder, **{"parallel": {"dp": 1}, **changes})))
    return str(path)


def dry_run(path: str, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[dict[str, Any], str]:
    """Figures, and what was printed for people, on one line."""
    assert main(["train", "--config", path, "--dry-run", "--json", *options]) == 0
    captured = capsys.readouterr()
    return json.loads(captured.out), " ".join(captured.err.split())


@pytest.mark.parametrize(("policy", "packed"), [("sab_dst", True), ("random", False), ("kk_tokens_packed", True)])
def test_a_dry_run_tries_the_largest_units_and_writes_nothing(
    policy: str, packed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config(tmp_path, balance={"policy": policy})
    before = sorted(tmp_path.rglob("*"))
    result, printed = dry_run(path, capsys)
    assert sorted(tmp_path.rglob("*")) == before
    assert result["steps_planned"] == 4
    assert result["unit_size"] is None
    assert result["available_mb"] > 0
    assert result["static_predicted_mb"] > 0
    assert result["static_measured_mb"] is not None
    units = result["units"]
    assert 1 <= len(units) <= 3
    assert [unit["predicted_mb"] for unit in units] == sorted((unit["predicted_mb"] for unit in units), reverse=True)
    assert any(len(unit["samples"]) > 1 for unit in units) == packed
    for unit in units:
        assert unit["tokens"] <= 1024
        assert unit["chunks"] == 1
        assert unit["ms"] > 0
        assert unit["predicted_mb"] > 0
        assert unit["measured_mb"] is not None
    assert "the largest, predicted: " in printed
    assert ("unit size: whole samples, the largest that fits" in printed) == (policy == "sab_dst")


@pytest.mark.parametrize("policy", ["sab", "sab_dst", "dense_chunks"])
def test_a_long_sample_is_tried_with_all_its_chunks(
    policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path / "chat.jsonl", document_rows(40, 400, 30, 50, 20, 30))
    balance = {"policy": policy, "unit_size": 64, "token_cap": 256, "max_budget": 3}
    result, printed = dry_run(config(tmp_path, balance=balance), capsys)
    assert result["unit_size"] == 64
    assert "unit size" not in printed  # it was configured
    largest = result["units"][0]
    assert largest["samples"] == [1]
    assert largest["chunks"] == 7
    assert largest["tokens"] == 402
    assert largest["targets"] == largest["tokens"] - 1
    assert max(unit["tokens"] for unit in result["units"] if unit["chunks"] == 1) <= 64
    # Activations of one chunk in place of all: the whole sample needs less, packed units need the same.
    lean, _ = dry_run(config(tmp_path, balance={**balance, "keep_chunks": 1}), capsys)
    assert lean["units"][0]["chunks"] == 7
    assert lean["units"][0]["predicted_mb"] < largest["predicted_mb"]


def test_the_largest_size_that_fits_is_taken_where_the_run_will_choose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """4,002 tokens are over the cap, so the run has to cut: in 1,024 or 2,048 at most."""
    write_rows(tmp_path / "chat.jsonl", document_rows(40, 4000, 30, 50, 20, 30))
    changes = {"data": {"max_length": 5000}, "balance": {"token_cap": 2048, "keep_chunks": 1, "max_budget": 3}}
    path = config(tmp_path, **changes)
    result, printed = dry_run(path, capsys)
    assert result["unit_size"] == 2048
    assert "unit size: 2,048 tokens, the largest that fits; the run takes the fastest of it and smaller" in printed
    assert result["units"][0]["chunks"] == 2
    needed = result["static_predicted_mb"] + result["units"][0]["predicted_mb"]
    tight = config(tmp_path, **changes, parallel={"dp": 1, "memory_gb": needed * 0.995 / 1e3})
    result, _ = dry_run(tight, capsys)
    assert result["unit_size"] == 1024
    assert result["units"][0]["chunks"] == 4


def test_a_packed_unit_over_the_memory_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every sample fits alone, but the cap lets too many of them share a micro-batch."""
    write_rows(tmp_path / "chat.jsonl", document_rows(*(100,) * 12))
    changes = {"balance": {"policy": "kk_tokens_packed"}, "model": {"checkpointing": False}}
    result, printed = dry_run(config(tmp_path, **changes), capsys)
    assert "more than is there" not in printed
    needed = result["static_predicted_mb"] + result["units"][0]["predicted_mb"]
    assert result["units"][0]["tokens"] > 600
    path = config(tmp_path, **changes, parallel={"dp": 1, "memory_gb": needed * 0.99 / 1e3})
    _, printed = dry_run(path, capsys)
    assert "that is more than is there: lower balance.unit_size or balance.token_cap" in printed


def test_more_steps_cannot_have_a_smaller_largest_unit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    largest = []
    for steps in ("1", "4"):
        result, _ = dry_run(config(tmp_path, balance={"policy": "random"}), capsys, "--steps", steps)
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
    assert "needs about" in error
    assert "raise parallel.memory_gb" in error
    assert sorted(tmp_path.rglob("*")) == before


def test_a_memory_limit_must_be_above_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path, parallel={"dp": 1, "memory_gb": 0.0})
    assert main(["train", "--config", path]) == 2
    assert "parallel.memory_gb is 0.0, but it must be above 0" in capsys.readouterr().err
