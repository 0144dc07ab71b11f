"""Planned and actual steps as a Chrome trace: open it in Perfetto (ui.perfetto.dev) or chrome://tracing.

In: steps. Out: trace events in microseconds; steps follow each other on one time axis, every rank is a process with
a planned and an actual thread a stage, and one more process names the steps and counts their milliseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from sparsebalance.planning.files import write_whole
from sparsebalance.reporting.chrome import microseconds, named, time_slice
from sparsebalance.reporting.planned.reasons import explain
from sparsebalance.reporting.planned.records import Record, Step, all_workers
from sparsebalance.reporting.planned.timeline import Bar, measured_bars, planned_bars

STEPS = 20
GAP = 1.02  # a step's place on the axis over its length, so that steps do not touch


def write_trace(path: Path, steps: Sequence[Step]) -> None:
    """Write up to 20 evenly chosen steps, the first, the last and the one that lost most among them."""
    write_whole(path, json.dumps({"traceEvents": trace_events(chosen(steps)), "displayTimeUnit": "ms"}))


def chosen(steps: Sequence[Step]) -> list[Step]:
    """At most `STEPS` steps, in order."""
    count = min(STEPS, len(steps))
    places = {round(i * (len(steps) - 1) / max(1, count - 1)) for i in range(count)}
    worst = max(range(len(steps)), key=lambda i: steps[i].lost_ms)
    if worst not in places:
        nearest = min(places - {0, len(steps) - 1}, key=lambda place: abs(place - worst))
        places = places - {nearest} | {worst}
    return [steps[place] for place in sorted(places)]


def trace_events(steps: Sequence[Step]) -> list[Record]:
    """Names ("M") first, then slices ("X") and counters ("C")."""
    overview = max(rank for rank, _ in all_workers(steps)) + 1
    events = [
        named("process_name", overview, 0, name="steps"),
        named("process_sort_index", overview, 0, sort_index=-1),
        named("thread_name", overview, 0, name="steps and why they lost time"),
    ]
    for rank in sorted({rank for rank, _ in all_workers(steps)}):
        events.append(named("process_name", rank, 0, name=f"rank {rank}"))
        events.append(named("process_sort_index", rank, 0, sort_index=rank))
    for rank, stage in all_workers(steps):
        for actual, word in enumerate(("planned", "actual")):
            events.append(named("thread_name", rank, 2 * stage + actual, name=f"{word} stage {stage}"))
            events.append(named("thread_sort_index", rank, 2 * stage + actual, sort_index=2 * stage + actual))
    offset = 0.0
    for step in steps:
        reason = explain(step)
        details = {"planned_ms": step.predicted_step_ms, "actual_ms": step.step_ms, "lost_ms": step.lost_ms}
        events.append(
            time_slice(f"step {step.step}: {reason.text}", overview, 0, offset, offset + step.step_ms, details)
        )
        counts = {"predicted": step.predicted_step_ms, "actual": step.step_ms}
        events.append(
            {"ph": "C", "name": "step ms", "pid": overview, "tid": 0, "ts": microseconds(offset), "args": counts}
        )
        length = step.step_ms
        for worker in step.workers:
            for actual, bars in enumerate((planned_bars(step, worker), measured_bars(step, worker))):
                lane = _slices(bars, worker.rank, 2 * worker.stage + actual, offset, step.step)
                events += lane
                length = max(length, *((slice_["ts"] + slice_["dur"]) / 1e3 - offset for slice_ in lane), 0.0)
        offset += GAP * length
    return events


def _slices(bars: Iterable[Bar], process: int, thread: int, offset_ms: float, step: int) -> list[Record]:
    """One lane of one step. A slice that ends after the next begins, by a clock's rounding, is cut there."""
    ordered = sorted(bars, key=lambda bar: (bar.start_ms, bar.took_ms))
    following = [bar.start_ms for bar in ordered[1:]] + [float("inf")]
    return [
        time_slice(
            bar.text or bar.kind,
            process,
            thread,
            offset_ms + bar.start_ms,
            offset_ms + min(bar.start_ms + bar.took_ms, next_start),
            {"step": step, "what": bar.hover.replace("<br>", "; ")},
        )
        for bar, next_start in zip(ordered, following)
    ]
