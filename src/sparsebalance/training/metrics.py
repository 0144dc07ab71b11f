"""metrics.jsonl: one line a step, readable while the run goes on, without repeated steps after a resume."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsebalance.planning.files import write_whole


@dataclass(frozen=True)
class StepRecord:
    """One training step, the same on every rank. Times in milliseconds, all measured but the predicted ones.

    Attributes:
        rank_busy_ms: of every data-parallel rank, over all workers of its pipeline.
        bubble: share of workers x step time that pipelines waited, `planned` and `measured`, see
            `sparsebalance.training.records.bubble`; None without pipelines.
        tune_ms: of the rank that spent most on tuning budgets online.
        probe_ms: of the rank that spent most on measuring coverage; 0 in steps without a probe.
        mean_budget, coverage: at the budgets that were really used, coverage by the estimator's curves.
        probe: measured coverage at the budgets really used, see `sparsebalance.training.records.probe_record`; None
            in steps without a probe.
        rank_factors, term_factors: online correction with which the step was planned.
        workers: every micro-batch and action as planned and as measured, see `sparsebalance.training.records`.
    """

    step: int
    policy: str
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    targets: int
    step_ms: float
    rank_busy_ms: list[float]
    imbalance_rank: float
    predicted_step_ms: float
    bubble: dict[str, float] | None
    planning_ms: float
    tune_ms: float
    probe_ms: float
    mean_budget: float
    coverage: float | None
    probe: dict[str, float] | None
    rank_factors: list[float]
    term_factors: dict[str, float]
    workers: list[dict[str, Any]]


class MetricsFile:
    """Appends records on the writing rank; lines of steps from `first_step` on are dropped at the start."""

    def __init__(self, path: Path, writes: bool, first_step: int = 0) -> None:
        self._file = None
        if writes:
            path.parent.mkdir(parents=True, exist_ok=True)
            _truncate(path, first_step)
            self._file = path.open("a", buffering=1)

    def write(self, record: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _truncate(path: Path, first_step: int) -> None:
    if not path.is_file():
        return
    # A killed run may leave half a last line: only whole lines, those that end in a newline, are kept.
    lines = path.read_text().splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] < first_step]
    write_whole(path, "".join(kept))
