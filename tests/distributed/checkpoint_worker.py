"""Run by forked.py with a folder and legs NAME:DP:PP:TP:SHARD:UNTIL: runs that go on, one after another, elsewhere.

A leg begins the run NAME, or goes on from its last checkpoint, and is asked to stop when UNTIL steps are done.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from sparsebalance.planning.plan import Topology
from sparsebalance.training import checkpoint
from sparsebalance.training.config import ParallelConfig, RunConfig
from sparsebalance.training.metrics import StepRecord
from sparsebalance.training.parallel import Ranks, joined_ranks, start, stop
from sparsebalance.training.trainer import Trained, train
from tests.models import tiny_config, tiny_run

STEPS = 8
CHANGES: dict[str, Any] = {
    "steps": STEPS,
    "model": {"dtype": "float64", "heads": 4, "kv_heads": 2},
    "data": {"batch_size": 4},
    "attention": {"probe_every": 0},
    "balance": {"policy": "sab", "unit_size": 64, "correction": False},
}


def config(folder: Path, name: str, **parallel: Any) -> RunConfig:
    return tiny_config(folder, out=str(folder / name), parallel=parallel, **CHANGES)


def record(folder: Path, name: str, **parallel: Any) -> dict[str, Any]:
    """The same as a YAML record, once `config` has made the table."""
    balance = {**CHANGES["balance"], "table": str(folder / "table.json")}
    return tiny_run(folder, **{**CHANGES, "out": str(folder / name), "parallel": parallel, "balance": balance})


def leg(run: RunConfig, ranks: Ranks, until: int) -> Trained:
    done = 0

    def on_step(step: StepRecord) -> None:
        nonlocal done
        done = step.step + 1

    resume = ranks.from_first(checkpoint.latest(run.out) is not None)
    # Asked on one rank alone: all end after the same step.
    return train(run, ranks, resume, on_step, stop=lambda: ranks.is_first and done == until)


def main() -> None:
    folder = Path(sys.argv[1])
    world = int(sys.argv[2])
    base = start(ParallelConfig(dp=world, timeout_s=60))
    for one in sys.argv[3:]:
        name, *numbers = one.split(":")
        dp, pp, tp, shard, until = map(int, numbers)
        ranks = joined_ranks(base.rank, Topology(dp=dp, pp=pp, tp=tp), 60, shard)
        leg(config(folder, name, dp=dp, pp=pp, tp=tp, shard=shard), ranks, until)
    stop()
