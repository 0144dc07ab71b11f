"""Run by forked.py with a folder: several short training runs on two ranks, one after another; JSON on rank 0.

Runs that stop and go on do so in the same processes: what a new process starts with is what `train` reads.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparsebalance.planning.errors import InputError
from sparsebalance.planning.plan import OnlineTuning, StepPlan
from sparsebalance.planning.policy import plan_step
from sparsebalance.training import trainer
from sparsebalance.training.config import ParallelConfig, RunConfig
from sparsebalance.training.metrics import StepRecord
from sparsebalance.training.parallel import Ranks, start, stop
from sparsebalance.training.trainer import train
from tests.models import tiny_config

CHUNKED = {"unit_size": 64, "keep_chunks": 1}
WINDOW = {**CHUNKED, "mode": "window", "window": 2}
LENGTHS = [250 if row % 5 == 0 else 20 + row for row in range(24)]  # words of questions: five long ones
SHORT_TAIL = {"limit": 9, "max_length": 200, "on_long": "drop", "tail": "keep"}  # 2 of 9 rows are dropped: 6 + 1
EPOCHS = {"steps": 8, "checkpoint_every": 3, "keep_last": 9}  # of 4 steps each: step 6 is in the middle of the second
ONLINE = OnlineTuning(default=3, threshold=0.05, min_budget=1, max_budget=12)
FIXED = {"attention": {"probe_every": 0}, "steps": 2, "checkpoint_every": 0}


class Stopped(Exception):
    """What a run that is stopped raises on all ranks."""


def stop_after(step: int) -> Any:
    def on_step(record: StepRecord) -> None:
        if record.step == step:
            raise Stopped

    return on_step


def config(folder: Path, name: str, **changes: Any) -> RunConfig:
    """Of a run in `folder`/`name`; six steps, checkpoints after each third one, one layer."""
    usual = {"steps": 6, "checkpoint_every": 3, "model": {"layers": 1}}
    return tiny_config(folder, out=str(folder / name), **{**usual, **changes})


def stopped_and_resumed(ranks: Ranks, run: RunConfig) -> None:
    """Stopped after its fifth step, it goes on from the third."""
    try:
        train(run, ranks, on_step=stop_after(4))
        raise AssertionError("the run was not stopped")
    except Stopped:
        train(run, ranks, resume=True)


def plan_online(*given: Any) -> StepPlan:
    """The policy's plan, all its micro-batches tuned while they run."""
    plan = plan_step(*given)
    ranks = tuple(tuple(replace(unit, online=ONLINE) for unit in rank) for rank in plan.ranks)
    return replace(plan, ranks=ranks)


def main() -> None:
    folder, ranks = Path(sys.argv[1]), start(ParallelConfig(dp=2, timeout_s=60))
    found: dict[str, Any] = {}

    train(config(folder, "straight", balance=CHUNKED), ranks)
    stopped_and_resumed(ranks, config(folder, "resumed", balance=CHUNKED))
    train(config(folder, "window", balance=WINDOW), ranks)
    stopped_and_resumed(ranks, config(folder, "window_resumed", balance=WINDOW))
    train(config(folder, "two_ranks", balance={**CHUNKED, "policy": "sab"}, **EPOCHS), ranks)
    train(config(folder, "tail", data=SHORT_TAIL, balance={**CHUNKED, "policy": "sab"}, **{"steps": 4}), ranks)

    trainer.plan_step = plan_online
    train(config(folder, "online", balance=CHUNKED), ranks)
    stopped_and_resumed(ranks, config(folder, "online_resumed", balance=CHUNKED))
    trainer.plan_step = plan_step

    kept = {**CHUNKED, "plans": str(folder / "plans.jsonl.gz")}
    first = train(config(folder, "planned", balance=kept, **FIXED), ranks)

    def never(*_: Any) -> Any:
        raise AssertionError("a step was planned that is on file")

    trainer.plan_step = never  # type: ignore[assignment]
    again = train(config(folder, "reused", balance=kept, **FIXED), ranks)
    trainer.plan_step = plan_step
    found["reused losses"] = [[record.loss for record in run.records] for run in (first, again)]
    try:
        train(config(folder, "refused", balance=kept, seed=3, **FIXED), ranks)
    except InputError as error:
        found["refused"] = ranks.gather(str(error))
    try:
        train(config(folder, "two_ranks", balance={**CHUNKED, "policy": "sab"}, seed=3, **EPOCHS), ranks, resume=True)
    except InputError as error:
        found["other batches"] = ranks.gather(str(error))
    if ranks.is_first:
        print(json.dumps(found), file=sys.stdout, flush=True)
    stop()
