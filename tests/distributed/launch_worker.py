"""Stands in for `python -m sparsebalance` in a rank, with a fault that the environment describes.

FAULT is KIND:RANK:STEP or KIND:RANK:STEP:ACTION; KIND is raise, kill, hang or nan. With an action, e.g. F1, it happens
when the rank computes that, with "end" after all of them, else before. A run that torchrun has started again is a
normal one, as is one without FAULT.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from sparsebalance.cli import main
from sparsebalance.training import engine, trainer

kind, rank, step, *action = os.environ.get("FAULT", "none:0:0").split(":")
faulty = os.environ["RANK"] == rank and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
run_plan, compute = trainer.run_plan, engine._Step._compute
current = -1


def fail() -> None:
    if kind == "raise":
        raise ValueError("the disk caught fire")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hang":
        time.sleep(3600)


def faulty_run(session: Any, plan: Any, at: int, *more: Any) -> Any:
    global current
    current = at
    if faulty and at == int(step) and not action:
        fail()
    result, *milliseconds = run_plan(session, plan, at, *more)
    if faulty and at == int(step) and action == ["end"]:
        fail()
    if faulty and at == int(step) and kind == "nan":
        result.loss = float("nan")
    return result, *milliseconds


def faulty_compute(self: Any, done: Any, *received: Any) -> Any:
    if faulty and current == int(step) and action == [f"{done.kind}{done.unit}"]:
        fail()
    return compute(self, done, *received)


trainer.run_plan = faulty_run
engine._Step._compute = faulty_compute  # type: ignore[method-assign]

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
