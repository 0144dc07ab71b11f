"""The run in figures: how good the predictions were, where the time went, which steps lost most and why.

In: steps. Out: one JSON-compatible record, which the page, the terminal and other programs read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sparsebalance.reporting.planned.reasons import KINDS, explain
from sparsebalance.reporting.planned.records import TERMS, Record, Step, Unit, Worker, all_workers, signed_error

SCHEMA = 1
WORST = 8


def run_figures(steps: Sequence[Step], notes: Sequence[str]) -> Record:
    """All figures of a run with at least one step. Errors are (predicted - measured) / measured.

    `shares` are of workers x step time and add up to 1: linear, router, attend, head (or compute, where terms were
    not measured), waiting, all_reduce, and outside (step time after the all-reduce).
    `bubble` is the share of workers x step time that was waited, as planned and as measured; None without pipelines.
    `planning_share` is planning time / step time.
    """
    stages = max(step.stages for step in steps)
    step_errors = np.array([step.error for step in steps])
    unit_errors = np.array([signed_error(u.planned.total_ms, u.measured.total_ms) for u in timed_units(steps)])
    workers = [_worker_figures(steps, key) for key in all_workers(steps)]
    total = sum(worker["step_ms"] * worker["steps"] for worker in workers)
    parts = list(workers[0]["parts_ms"])
    shares = {part: sum(w["parts_ms"][part] * w["steps"] for w in workers) / total for part in parts}
    reasons = [explain(step) for step in steps]
    lost_to: dict[str, list[float]] = {}
    for reason in reasons:
        lost_to.setdefault(reason.kind, []).append(reason.lost_ms)
    order = sorted(range(len(steps)), key=lambda i: -steps[i].lost_ms)[:WORST]
    found: Record = {
        "schema": SCHEMA,
        "steps": len(steps),
        "policy": ", ".join(sorted({step.policy for step in steps})),
        "micro_batches": len(unit_errors) // stages,
        "step_ms": float(np.median([step.step_ms for step in steps])),
        "step_error_median": float(np.median(step_errors)),
        "step_error_median_abs": float(np.median(np.abs(step_errors))),
        "unit_error_mean_abs": float(np.abs(unit_errors).mean()) if len(unit_errors) else 0.0,
        "unit_error_median": float(np.median(unit_errors)) if len(unit_errors) else 0.0,
        "shares": shares,
        "bubble": {"planned": _planned_waiting(steps), "measured": shares["waiting"]} if stages > 1 else None,
        "compute_share": sum(w["measured_ms"] * w["steps"] for w in workers) / total,
        "planning_share": sum(step.planning_ms for step in steps) / sum(step.step_ms for step in steps),
        "terms": _term_figures(steps),
        "workers": workers,
        "lost_to": {kind: {"steps": len(lost), "lost_ms": sum(lost)} for kind, lost in lost_to.items()},
        "worst": [
            {
                "step": steps[i].step,
                "step_ms": steps[i].step_ms,
                "predicted_step_ms": steps[i].predicted_step_ms,
                "lost_ms": steps[i].lost_ms,
                "waiting_share": steps[i].mean_waiting_ms / steps[i].step_ms,
                "kind": reasons[i].kind,
                "reason": reasons[i].text,
                "reason_ms": reasons[i].lost_ms,
            }
            for i in order
        ],
        "notes": [*notes, *_term_note(steps)],
    }
    return {**found, "verdict": verdict(found)}


def verdict(found: Record) -> str:
    """How good the plans were, how much time waiting took, and what most time was lost to; in words."""
    error, waiting = found["step_error_median_abs"], found["shares"]["waiting"]
    who = "ranks" if found.get("bubble") is None else "stages"
    plan = _grade(
        error,
        "The plans held",
        "The plans came close",
        "The plans were rough",
        "The plans were wrong",
    )
    waited = _grade(
        waiting,
        f"{who} hardly waited",
        f"{who} waited a little",
        f"{who} waited for a good part of the time",
        f"{who} waited for much of the time",
    )
    lost = {kind: entry for kind, entry in found["lost_to"].items() if kind != "planned"}
    if not lost:
        return f"{plan}, and {waited}; every step went as planned."
    kind, entry = max(lost.items(), key=lambda item: item[1]["lost_ms"])
    steps = "1 step" if entry["steps"] == 1 else f"{entry['steps']} steps"
    return f"{plan}, and {waited}; most time was lost to {KINDS[kind]}, in {steps} of {found['steps']}."


def _grade(value: float, *words: str) -> str:
    return words[int(np.searchsorted((0.05, 0.1, 0.25), value))]


def timed_units(steps: Sequence[Step]) -> list[Unit]:
    """Every unit whose measured time is above 0, so that an error relative to it exists."""
    return [u for step in steps for worker in step.workers for u in worker.units if u.measured.total_ms > 0]


def term_errors(steps: Sequence[Step], term: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Signed errors of one term, one a unit that spent time on it."""
    return np.array(
        [
            signed_error(u.planned.terms[term], u.measured.terms[term])
            for u in timed_units(steps)
            if u.planned.terms is not None and u.measured.terms is not None and u.measured.terms[term] > 0
        ]
    )


def step_term_error(step: Step, term: str) -> float | None:
    """Signed error of the step's summed time of one term; None where it was not measured."""
    units = [u for w in step.workers for u in w.units]
    pairs = [
        (u.planned.terms[term], u.measured.terms[term])
        for u in units
        if u.planned.terms is not None and u.measured.terms is not None
    ]
    measured = sum(ms for _, ms in pairs)
    return signed_error(sum(ms for ms, _ in pairs), measured) if measured > 0 else None


def _term_figures(steps: Sequence[Step]) -> Record:
    times = {
        term: sum(u.measured.terms[term] for u in timed_units(steps) if u.measured.terms is not None) for term in TERMS
    }
    total = sum(times.values())
    figures: Record = {}
    for term in TERMS:
        errors = term_errors(steps, term)
        if len(errors):
            figures[term] = {
                "error_median": float(np.median(errors)),
                "error_mean_abs": float(np.abs(errors).mean()),
                "share": times[term] / total,
            }
    return figures


def _term_note(steps: Sequence[Step]) -> list[str]:
    units = timed_units(steps)
    without = sum(unit.measured.terms is None or unit.planned.terms is None for unit in units)
    if not without:
        return []
    if without == len(units):
        return ["no micro-batch had its terms measured, so there are no errors by term"]
    return [f"{without:,} of {len(units):,} micro-batches had no terms measured; errors by term leave them out"]


def _planned_waiting(steps: Sequence[Step], key: Worker | None = None) -> float:
    """Share of the predicted step time that one worker was to wait, or all of them."""
    own = [(step, worker) for step in steps for worker in step.workers if key is None or worker.key == key]
    whole = sum(step.predicted_step_ms for step, _ in own)
    return sum(step.planned_waiting_ms(worker) for step, worker in own) / whole if whole > 0 else 0.0


def _worker_figures(steps: Sequence[Step], key: Worker) -> Record:
    """Means a step of one worker, in milliseconds."""
    parts: dict[str, float] = dict.fromkeys((*TERMS, "compute", "waiting", "all_reduce", "outside"), 0.0)
    planned = measured = step_ms = 0.0
    count = 0
    for step in steps:
        for worker in step.workers:
            if worker.key != key:
                continue
            count += 1
            planned += worker.planned_ms
            measured += worker.measured_ms
            step_ms += step.step_ms
            split = [unit.measured.terms for unit in worker.units if unit.measured.terms is not None]
            for term in TERMS:
                parts[term] += sum(terms[term] for terms in split)
            parts["compute"] += max(0.0, worker.measured_ms - sum(sum(terms.values()) for terms in split))
            parts["waiting"] += step.waiting_ms(worker)
            parts["all_reduce"] += step.exchange_ms
            parts["outside"] += step.outside_ms
    return {
        "rank": key[0],
        "stage": key[1],
        "steps": count,
        "step_ms": step_ms / count,
        "planned_ms": planned / count,
        "measured_ms": measured / count,
        "error": signed_error(planned, measured) if measured > 0 else 0.0,
        "waiting_share": parts["waiting"] / step_ms,
        "planned_waiting_share": _planned_waiting(steps, key),
        "parts_ms": {part: ms / count for part, ms in parts.items()},
    }
