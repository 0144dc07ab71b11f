"""Why a step took longer than planned, or why its ranks waited: pure rules, each with a price in milliseconds.

In: one step. Out: reasons, each with the time by which the step would have been shorter without it; the dearest
is the step's reason. A rule takes its cause out of the measured times and looks at how much earlier the slowest
worker ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sparsebalance.reporting.planned.records import TERMS, Step, Unit, Worker, WorkerStep, worker_label

NOTICEABLE = 0.05  # share of the step time from which on a loss is worth a reason
SLOW_RANK = 1.08  # pace of a worker over the pace that all workers share
SLOW_UNIT = 1.25  # time of a unit over what its worker's pace explains
FAST_RANK = 0.9  # pace of a worker that the plan took for a slower one

KINDS = {
    "drift": "the whole machine running slower than planned",
    "rank": "ranks that ran slower than planned",
    "fast": "ranks that ran faster than planned and waited",
    "unit": "single micro-batches that took longer than predicted",
    "plan": "waiting that the plans contained themselves",
    "gap": "pauses between micro-batches",
    "all_reduce": "the all-reduce",
    "outside": "time outside the micro-batches",
    "planned": "nothing: steps went as planned",
}
"""Kind of a reason -> what time was lost to."""


@dataclass(frozen=True, slots=True)
class Reason:
    """`lost_ms`: by how much the step would have been shorter without it."""

    kind: str
    lost_ms: float
    text: str


def explain(step: Step) -> Reason:
    """The dearest reason, or that there is none worth a word."""
    worst = max(candidates(step), key=lambda reason: reason.lost_ms)
    if worst.lost_ms >= NOTICEABLE * step.step_ms:
        return worst
    if step.lost_ms >= NOTICEABLE * step.step_ms and worst.lost_ms > 0:
        return Reason(worst.kind, worst.lost_ms, f"several small causes, the largest: {worst.text}")
    ratio = step.step_ms / step.predicted_step_ms if step.predicted_step_ms > 0 else 1.0
    if ratio < FAST_RANK:
        return Reason("planned", 0.0, f"nothing lost: it took {ratio:.2f}x the planned time")
    return Reason("planned", 0.0, f"as planned, to within {max(1, math.ceil(100 * abs(step.error)))}%")


def candidates(step: Step) -> list[Reason]:
    """What every rule finds, prices of 0 included."""
    return [reason for rule in RULES if (reason := rule(step)) is not None]


def machine_drift(step: Step) -> Reason | None:
    """Every worker is slower than planned, by at least the same factor."""
    drift = _drift(step)
    lost = _saved(step, {worker.key: worker.measured_ms * (1 - 1 / drift) for worker in step.workers})
    where = "on all ranks (machine drift)" if len(step.workers) > 1 else "than planned"
    return Reason("drift", lost, f"everything ran {drift:.2f}x slower {where}")


def slow_ranks(step: Step) -> Reason | None:
    """Some workers are slower than planned in most of their units, beyond what all share."""
    drift = _drift(step)
    slow = {w.key: w for w in step.workers if (_pace(w) or 0.0) >= SLOW_RANK * drift}
    if not slow:
        return None
    lost = _saved(step, {key: w.measured_ms * (1 - drift / (_pace(w) or drift)) for key, w in slow.items()})
    worst = max(slow.values(), key=lambda worker: worker.measured_ms / worker.planned_ms)
    factor = worst.measured_ms / worst.planned_ms
    names = _names(list(slow), step)
    if len(slow) > 1:
        return Reason("rank", lost, f"{names} ran up to {factor:.2f}x slower than planned")
    every = all(unit.ratio >= 1 + (factor - 1) / 2 for unit in worst.units)
    which = "all its units" if every else "most of its units"
    return Reason("rank", lost, f"{names} ran {factor:.2f}x slower than planned in {which}")


def fast_ranks(step: Step) -> Reason | None:
    """Some workers are faster than planned while others are not: the plan gave them too little."""
    paces = {w.key: pace for w in step.workers if (pace := _pace(w)) is not None}
    usual = min(1.0, max(paces.values(), default=1.0))
    fast = {w.key: w for w in step.workers if w.key in paces and paces[w.key] < FAST_RANK * usual}
    if not fast:
        return None
    idle = sum(max(0.0, usual * worker.planned_ms - worker.measured_ms) for worker in fast.values())
    lost = idle / len(step.workers)
    factor = min(worker.measured_ms / worker.planned_ms for worker in fast.values())
    return Reason("fast", lost, f"{_names(list(fast), step)} took only {factor:.2f}x the planned time, then waited")


def outlier_units(step: Step) -> Reason | None:
    """Single units took longer than their worker's pace explains."""
    drift = _drift(step)
    saved: dict[Worker, float] = {}
    found: list[tuple[float, WorkerStep, Unit]] = []
    for worker in step.workers:
        pace = max(_pace(worker) or drift, drift)
        for unit in worker.units:
            if unit.ratio >= SLOW_UNIT * pace:
                excess = unit.measured.total_ms - pace * unit.planned.total_ms
                saved[worker.key] = saved.get(worker.key, 0.0) + excess
                found.append((excess, worker, unit))
    if not found:
        return None
    _, worker, unit = max(found, key=lambda entry: entry[0])
    name = _names([worker.key], step)
    if len(found) == 1:
        what = f"one unit of {name}" if len(worker.units) > 1 else f"the only unit of {name}"
    else:
        what = f"{len(found)} units took longer than predicted; the worst, of {name},"
    chunk = "" if unit.chunk is None else f", a chunk of sample {unit.chunk.sample}"
    text = f"{what} ({unit.tokens:,} tokens{chunk}) took {unit.ratio:.1f}x its prediction{_worst_term(unit)}"
    return Reason("unit", _saved(step, saved), text)


def uneven_plan(step: Step) -> Reason | None:
    """The planned times differ between workers already, or leave bubbles in the pipeline."""
    busy = [worker for worker in step.workers if worker.planned_ms > 0]
    if not busy:
        return None
    mean = sum(worker.planned_ms for worker in busy) / len(step.workers)
    top = max(busy, key=lambda worker: worker.planned_end_ms)
    lost = _drift(step) * max(0.0, top.planned_end_ms - mean)
    return Reason("plan", lost, _uneven(step, top, mean))


def _uneven(step: Step, top: WorkerStep, mean: float) -> str:
    largest = max(_alone(top), key=_planned_ms, default=[])
    same_stage = [worker.planned_ms for worker in step.workers if worker.stage == top.stage]
    if _planned_ms(largest) > sum(same_stage) / len(same_stage):
        tokens = sum(unit.tokens for unit in largest)
        cut = f" in {len(largest)} chunks" if len(largest) > 1 else ""
        share = f"{_planned_ms(largest) / top.planned_ms:.0%} of {_names([top.key], step)}'s time"
        return f"one sample of {tokens:,} tokens{cut} is {share}: no placement can balance it"
    idle = [worker.key for worker in step.workers if not worker.units]
    if idle:
        return f"{_names(idle, step)} had no work: the plan gave everything to the others"
    if step.stages > 1:
        return f"the plan itself keeps ranks and stages waiting for {1 - mean / top.planned_end_ms:.0%} of its time"
    return (
        f"the plan itself was uneven: {_names([top.key], step)} had {top.planned_ms / mean:.2f}x the mean rank's time"
    )


def _alone(worker: WorkerStep) -> list[list[Unit]]:
    """Units of samples that share none: a sample's chunks, which all run on one rank, or its only unit."""
    samples: dict[tuple[str, int], list[Unit]] = {}
    for unit in worker.units:
        if len(unit.lengths) == 1:
            key = ("unit", unit.index) if unit.chunk is None else ("sample", unit.chunk.sample)
            samples.setdefault(key, []).append(unit)
    return list(samples.values())


def _planned_ms(units: Sequence[Unit]) -> float:
    return sum(unit.planned.total_ms for unit in units)


def pauses(step: Step) -> Reason | None:
    """The worker that ended last stood still between its units for longer than planned."""
    last = max(step.workers, key=lambda worker: worker.measured_end_ms)
    planned = _drift(step) * max(0.0, last.planned_end_ms - last.planned_ms)
    pause = last.measured_end_ms - last.measured_ms - planned
    if pause <= 0:
        return None
    name, lost = _names([last.key], step), _saved(step, {last.key: pause})
    if step.stages > 1:
        return Reason("gap", lost, f"{name} waited {pause:,.0f} ms longer for other stages than planned")
    return Reason("gap", lost, f"{name} paused for {pause:,.0f} ms between its units")


def all_reduce(step: Step) -> Reason | None:
    """The exchange of gradients itself, without the waiting before it."""
    lost = step.exchange_ms
    return Reason("all_reduce", lost, f"all-reduce took {lost / step.step_ms:.0%} of the step")


def outside_units(step: Step) -> Reason | None:
    """Step time that no worker's units and all-reduce account for."""
    share = step.outside_ms / step.step_ms
    return Reason("outside", step.outside_ms, f"{share:.0%} of the step passed outside micro-batches and all-reduce")


RULES: tuple[Callable[[Step], Reason | None], ...] = (
    machine_drift,
    slow_ranks,
    fast_ranks,
    outlier_units,
    uneven_plan,
    pauses,
    all_reduce,
    outside_units,
)


def _saved(step: Step, saved_ms: Mapping[Worker, float]) -> float:
    """How much earlier the slowest worker ends when workers save this much; never below 0."""
    now = max(worker.measured_end_ms for worker in step.workers)
    then = max(worker.measured_end_ms - saved_ms.get(worker.key, 0.0) for worker in step.workers)
    return max(0.0, now - then)


def _pace(worker: WorkerStep) -> float | None:
    """Measured over planned time of the worker's middle unit, by planned time: one odd unit does not move it.

    None with fewer than two units: a slow unit and a slow worker look the same then.
    """
    if len(worker.units) < 2 or worker.planned_ms == 0:
        return None
    passed = 0.0
    for unit in sorted(worker.units, key=lambda unit: unit.ratio):
        passed += unit.planned.total_ms
        if passed >= worker.planned_ms / 2:
            return unit.ratio
    return None


def _drift(step: Step) -> float:
    """The slow-down that all workers share, at least 1."""
    paces = [pace for worker in step.workers if (pace := _pace(worker)) is not None]
    return max(1.0, min(paces or [unit.ratio for worker in step.workers for unit in worker.units] or [1.0]))


def _worst_term(unit: Unit) -> str:
    planned, measured = unit.planned.terms, unit.measured.terms
    if planned is None or measured is None:
        return ""
    name = max(TERMS, key=lambda term: measured[term] - planned[term])
    if planned[name] <= 0 or measured[name] / planned[name] <= unit.ratio * 1.05:
        return ""
    return f", {name} {measured[name] / planned[name]:.1f}x"


def _names(workers: list[Worker], step: Step) -> str:
    if len(workers) == 1:
        return worker_label(workers[0], step.stages)
    if step.stages > 1:
        return ", ".join(worker_label(worker, step.stages) for worker in workers)
    return "ranks " + ", ".join(str(rank) for rank, _ in workers)
