"""Step records of a training run, as the planned-versus-actual views read them.

In: metrics.jsonl, or its lines as dictionaries. Out: frozen dataclasses, all times in milliseconds since the
step began; units without tokens are left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsebalance.planning.errors import InputError
from sparsebalance.planning.latency import TERMS
from sparsebalance.planning.schedule import KINDS

Record = dict[str, Any]
Worker = tuple[int, int]  # (data-parallel rank, pipeline stage)


@dataclass(frozen=True, slots=True)
class Times:
    """When a unit ran, planned or measured; terms are forward + backward together, None where not known."""

    start_ms: float
    forward_ms: float
    backward_start_ms: float
    backward_ms: float
    terms: Mapping[str, float] | None

    @property
    def total_ms(self) -> float:
        return self.forward_ms + self.backward_ms


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, end) of a sample of `of` tokens; `recomputed` where its forward runs again in its backward."""

    sample: int
    start: int
    end: int
    of: int
    recomputed: bool

    def __str__(self) -> str:
        again = ", recomputed in its backward" if self.recomputed else ""
        return f"chunk {self.start:,}..{self.end:,} of sample {self.sample} ({self.of:,} tokens){again}"


@dataclass(frozen=True, slots=True)
class Unit:
    """One micro-batch on one worker; `index` is its place in the worker's list, `chunk` what it is, if that."""

    index: int
    lengths: tuple[int, ...]
    tokens: int
    targets: int
    budgets: tuple[int, ...]
    planned: Times
    measured: Times
    chunk: Chunk | None = None

    @property
    def ratio(self) -> float:
        """Measured over planned time; 1 where nothing was planned (less than a nanosecond is nothing)."""
        return self.measured.total_ms / self.planned.total_ms if self.planned.total_ms > 1e-6 else 1.0


@dataclass(frozen=True, slots=True)
class Span:
    """One action on a unit: F forward, B backward, or its halves, I input gradient and W weight gradient.

    `planned` and `measured` are its start and what it took.
    """

    kind: str
    unit: int
    stage: int
    planned: tuple[float, float]
    measured: tuple[float, float]


@dataclass(frozen=True, slots=True)
class WorkerStep:
    """What one worker did in one step; `all_reduce_ms` follows its last span and includes waiting for others.

    `stage` is its place in the pipeline: the first stage that it holds.
    """

    rank: int
    stage: int
    all_reduce_ms: float
    units: tuple[Unit, ...]
    spans: tuple[Span, ...]

    @property
    def key(self) -> Worker:
        return self.rank, self.stage

    @property
    def planned_ms(self) -> float:
        return sum(span.planned[1] for span in self.spans)

    @property
    def measured_ms(self) -> float:
        return sum(span.measured[1] for span in self.spans)

    @property
    def planned_end_ms(self) -> float:
        return max((sum(span.planned) for span in self.spans), default=0.0)

    @property
    def measured_end_ms(self) -> float:
        return max((sum(span.measured) for span in self.spans), default=0.0)


@dataclass(frozen=True, slots=True)
class Step:
    """One step. `rank_factors` and `term_factors` are the online correction with which it was planned."""

    step: int
    policy: str
    step_ms: float
    predicted_step_ms: float
    planning_ms: float
    workers: tuple[WorkerStep, ...]
    rank_factors: tuple[float, ...]
    term_factors: Mapping[str, float]

    @property
    def error(self) -> float:
        return signed_error(self.predicted_step_ms, self.step_ms)

    @property
    def finished_ms(self) -> float:
        """When the last worker was through its units and the all-reduce."""
        return max(worker.measured_end_ms + worker.all_reduce_ms for worker in self.workers)

    @property
    def exchange_ms(self) -> float:
        """The all-reduce itself: what the worker that came last to it, and so waited for nobody, spent in it."""
        return min(worker.all_reduce_ms for worker in self.workers)

    @property
    def outside_ms(self) -> float:
        """Step time after the all-reduce."""
        return max(0.0, self.step_ms - self.finished_ms)

    def waiting_ms(self, worker: WorkerStep) -> float:
        """Between the worker's units, and until all others had come to the all-reduce."""
        return max(0.0, self.finished_ms - self.exchange_ms - worker.measured_ms)

    @property
    def planned_end_ms(self) -> float:
        """When the last worker was to be through its units."""
        return max(worker.planned_end_ms for worker in self.workers)

    def planned_waiting_ms(self, worker: WorkerStep) -> float:
        """The same as planned."""
        return max(0.0, self.planned_end_ms - worker.planned_ms)

    @property
    def mean_waiting_ms(self) -> float:
        return sum(map(self.waiting_ms, self.workers)) / len(self.workers)

    @property
    def lost_ms(self) -> float:
        """Against the plan, or to waiting, whichever is more."""
        return max(self.step_ms - self.predicted_step_ms, self.mean_waiting_ms)

    @property
    def stages(self) -> int:
        return len({worker.stage for worker in self.workers})


def signed_error(predicted_ms: float, measured_ms: float) -> float:
    """(predicted - measured) / measured: below 0 where it took longer than predicted."""
    return predicted_ms / measured_ms - 1.0


def worker_label(worker: Worker, stages: int) -> str:
    rank, stage = worker
    return f"rank {rank} stage {stage}" if stages > 1 else f"rank {rank}"


def read_run(run: Path) -> tuple[list[Step], list[str]]:
    """The steps in RUN/metrics.jsonl, and notes on the lines that were left out.

    Raises:
        InputError: no such run, a comparison instead of a run, a broken line, or no step with planned times.
    """
    path = run / "metrics.jsonl"
    if not run.is_dir():
        raise InputError(f"{run} is not a directory; give the `out` directory of a training run")
    if not path.is_file():
        raise InputError(f"{run} holds no metrics.jsonl; give the `out` directory of a training run")
    steps, old, notes = [], 0, []
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            where = f"line {number} of {path}"
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                if not line.endswith("\n"):
                    notes.append(f"the last line of {path.name} is not whole yet and was left out")
                    break
                raise InputError(f"{where} is not JSON ({error.msg}); delete the line or run again") from error
            if isinstance(record, dict) and "policies" in record:
                raise InputError(f"{run} holds a comparison, not a training run; its own page is {run / 'report.html'}")
            if isinstance(record, dict) and "workers" not in record:
                old += 1
            else:
                steps.append(parse_step(record, where))
    if not steps:
        raise InputError(
            f"no line of {path} holds planned and measured times: the run was made before they were recorded, "
            "or it is broken; train again to get them"
        )
    if old:
        notes.insert(0, f"{old} {'step' if old == 1 else 'steps'} without planned and measured times left out")
    return steps, notes


def parse_step(record: Any, where: str) -> Step:
    """Args:
    where: what to call the record in an error.

    Raises:
        InputError: a key is missing or a value is not what it should be.
    """
    try:
        step_ms = _ms(record, "step_ms")
        workers = tuple(_worker(worker) for worker in record["workers"])
        if not workers or step_ms == 0:
            raise ValueError("no workers" if not workers else "step_ms is 0")
        return Step(
            step=int(record["step"]),
            policy=str(record["policy"]),
            step_ms=step_ms,
            predicted_step_ms=_ms(record, "predicted_step_ms"),
            planning_ms=_ms(record, "planning_ms"),
            workers=tuple(sorted(workers, key=lambda worker: worker.key)),
            rank_factors=tuple(map(float, record["rank_factors"])),
            term_factors={str(name): float(factor) for name, factor in record["term_factors"].items()},
        )
    except KeyError as error:
        raise InputError(f"{where} is not a step record: {error} is missing; train again to get whole ones") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{where} is not a step record: {error}; train again to get whole ones") from error


def _worker(record: Record) -> WorkerStep:
    stage = int(record["stage"])
    units = tuple(
        Unit(
            index=index,
            lengths=tuple(map(int, unit["lengths"])),
            tokens=int(unit["tokens"]),
            targets=int(unit["targets"]),
            budgets=tuple(map(int, unit["budgets"])),
            planned=_times(unit["planned"]),
            measured=_times(unit["measured"]),
            chunk=chunk_of(unit),
        )
        for index, unit in enumerate(record["units"])
        if unit["tokens"]
    )
    spans = spans_of(record) if "actions" in record else _whole_spans(units, stage)
    if unknown := {span.unit for span in spans} - {unit.index for unit in units}:
        raise ValueError(f"there are actions on units {sorted(unknown)}, which hold no tokens")
    return WorkerStep(int(record["rank"]), stage, _ms(record, "all_reduce_ms"), units, spans)


def spans_of(worker: Record) -> tuple[Span, ...]:
    """The recorded actions of a pipeline's worker, see `sparsebalance.training.records.worker_records`.

    Raises:
        ValueError: an action that is not F, B, I or W, or that ends before it starts.
    """
    spans = []
    for kind, unit, stage, *times in worker["actions"]:
        planned_start, planned_end, start, end = map(float, times)
        if kind not in KINDS or not (0 <= planned_start <= planned_end < math.inf and 0 <= start <= end < math.inf):
            raise ValueError(f"an action is {[kind, unit, stage, *times]}")
        planned, measured = (planned_start, planned_end - planned_start), (start, end - start)
        spans.append(Span(kind, int(unit), int(stage), planned, measured))
    return tuple(spans)


def _whole_spans(units: Sequence[Unit], stage: int) -> tuple[Span, ...]:
    """Of a worker without a pipeline: forward and backward of each unit."""
    spans = []
    for unit in units:
        a, b = unit.planned, unit.measured
        spans.append(Span("F", unit.index, stage, (a.start_ms, a.forward_ms), (b.start_ms, b.forward_ms)))
        backward = (a.backward_start_ms, a.backward_ms), (b.backward_start_ms, b.backward_ms)
        spans.append(Span("B", unit.index, stage, *backward))
    return tuple(spans)


def chunk_of(unit: Record) -> Chunk | None:
    """What part of a sample a recorded unit is; None where it holds whole samples.

    Raises:
        ValueError: tokens outside of the sample.
    """
    if "chunk" not in unit:
        return None
    record, tokens = unit["chunk"], int(unit["tokens"])
    start, of = int(record["start"]), int(record["of"])
    if not 0 <= start < start + tokens <= of:
        raise ValueError(f"a chunk holds tokens {start} to {start + tokens} of {of}")
    return Chunk(int(record["sample"]), start, start + tokens, of, bool(record["recomputed"]))


def _times(record: Record) -> Times:
    start, forward = _ms(record, "start_ms"), _ms(record, "forward_ms")
    backward_start = _ms(record, "backward_start_ms") if "backward_start_ms" in record else start + forward
    terms = record["terms"]
    return Times(
        start_ms=start,
        forward_ms=forward,
        backward_start_ms=backward_start,
        backward_ms=_ms(record, "backward_ms"),
        terms=None if terms is None else {name: _ms(terms, name) for name in TERMS},
    )


def _ms(record: Mapping[str, Any], key: str) -> float:
    value = float(record[key])
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{key} is {value}, but a time is at least 0")
    return value


def all_workers(steps: Sequence[Step]) -> list[Worker]:
    """Every (rank, stage) of the run, in order."""
    return sorted({worker.key for step in steps for worker in step.workers})
