"""Profiling on two processes at once: one table, with what messages between them cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from sparsebalance.planning.table_file import load_table
from tests.distributed import forked
from tests.models import tiny_run

pytestmark = pytest.mark.distributed


def test_profile_on_two_processes(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tiny_run(tmp_path)))
    path = tmp_path / "tables" / "table.json"
    config = str(tmp_path / "config.yaml")
    done = forked.command_line(["profile", "--config", config, "--table", str(path), "--check", "--json"])
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)  # rank 0 alone prints, and only this
    table = load_table(path)
    assert [p.name for p in path.parent.iterdir()] == ["table.json"]
    assert not (tmp_path / "run").exists()
    assert result["table"] == str(path)
    assert result["provenance"] == dict(table.provenance)
    assert result["provenance"]["processes"] == 2
    assert table.network is not None
    assert table.network.ranks == 2
    for link in (table.network.point_to_point, table.network.all_reduce):
        assert min(link.latency_ms, link.ms_per_mb) >= 0
        assert link.ms(1.0) > 0
    factors = result["rank_factors"]
    assert len(factors) == 2
    assert min(factors) > 0
    assert sum(factors) == pytest.approx(2.0)
    assert len(result["heldout"]) >= 8
    assert all(point["measured_ms"] > 0 for point in result["heldout"])
    assert "2 processes: message" in done.stderr
    assert "ranks against their mean, above 1 is slower" in done.stderr
