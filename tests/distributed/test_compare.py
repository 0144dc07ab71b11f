"""The comparison as users start it: two processes of its own, one table, one summary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.distributed import forked
from tests.models import tiny_run

pytestmark = pytest.mark.distributed


def test_compare_on_two_processes(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tiny_run(tmp_path, steps=2)))
    done = forked.command_line(["compare", "--config", str(tmp_path / "config.yaml")])
    assert done.returncode == 0, done.stderr
    assert "vs random" in done.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert list(summary["policies"]) == [
        "random", "batch_rebalance", "kk_quadratic", "kk_tokens", "dense_chunks", "sab", "dst", "sab_dst",
    ]  # fmt: skip
    assert summary["topology"]["dp"] == 2
    assert summary["checks"]["strict_loss_rel_diff_max"] <= 1e-5
    assert summary["checks"]["strict_grad_norm_rel_diff_max"] <= 1e-4
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        for policy in record["policies"].values():
            assert sorted(n for rank in policy["units"] for unit in rank for n in unit["lengths"]) == sorted(
                sample["length"] for sample in record["samples"]
            )
            assert policy["step_ms"] >= max(policy["rank_busy_ms"])
