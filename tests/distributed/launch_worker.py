"""Stands in for `python -m sparsebalance` in a rank, with a fault that the environment describes.

FAULT is KIND:RANK:STEP; KIND is raise, kill or nan. Without it the rank is a normal one.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from sparsebalance.cli import main
from sparsebalance.training import trainer

kind, rank, step = os.environ.get("FAULT", "none:0:0").split(":")
honest = trainer.run_plan


def faulty(session: Any, plan: Any, at: int) -> Any:
    if at == int(step) and os.environ["RANK"] == rank:
        if kind == "raise":
            raise ValueError("the disk caught fire")
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    result, *milliseconds = honest(session, plan, at)
    if at == int(step) and os.environ["RANK"] == rank and kind == "nan":
        result.loss = float("nan")
    return result, *milliseconds


trainer.run_plan = faulty

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
