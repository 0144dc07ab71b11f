"""Run by forked.py with a folder, on two processes: a training run and a comparison, as pipelines of two stages."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from rich.console import Console

from sparsebalance.comparison.command import compare
from sparsebalance.training.config import CompareConfig, ParallelConfig
from sparsebalance.training.parallel import start, stop
from sparsebalance.training.trainer import train
from tests.models import tiny_config, tiny_run

LENGTHS = [150 if row % 5 == 0 else 20 + row for row in range(24)]  # words of questions; the long ones run in chunks
STEPS = 2


def changes(folder: Path, name: str, schedule: str) -> dict[str, Any]:
    return {
        "out": str(folder / name),
        "model": {"heads": 4, "kv_heads": 2},
        "parallel": {"dp": 1, "pp": 2, "schedule": schedule},
        "balance": {"unit_size": 64, "table": str(folder / "table.json"), "correction": False},
        "checkpoint_every": 0,
    }


def main() -> None:
    folder, ranks = Path(sys.argv[1]), start(ParallelConfig(dp=1, pp=2, timeout_s=60))
    train(tiny_config(folder, **changes(folder, "run", "zero_bubble"), steps=STEPS), ranks)
    record = tiny_run(folder, **changes(folder, "comparison", "auto"), steps=1)
    config = TypeAdapter(CompareConfig).validate_python({**record, "policies": ["random", "sab"]})
    compare(config, ranks, Console(file=open(os.devnull, "w")))  # noqa: SIM115
    stop()
