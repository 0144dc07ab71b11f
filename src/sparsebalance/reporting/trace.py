"""One step of a comparison as a Chrome trace: open it in Perfetto (ui.perfetto.dev) or chrome://tracing.

Every policy is a process, every rank (in pipelines: every stage of a rank) a thread, every forward and backward, or
half of one, a slice; times are the measured ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from sparsebalance.reporting.chrome import Event, named, time_slice
from sparsebalance.reporting.planned.records import Record, spans_of, worker_label

DETAILS = ("lengths", "chunk", "tokens", "targets", "budgets", "predicted_ms")  # of a unit; chunk where it is one


def write_trace(path: Path, record: Record) -> None:
    """Args:
    record: of one step, see `sparsebalance.comparison.run`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": trace_events(record), "displayTimeUnit": "ms"}))


def trace_events(record: Record) -> list[Event]:
    """Chrome trace events (microseconds): names first, then complete ("X") events."""
    events: list[Event] = []
    for process, (policy, step) in enumerate(record["policies"].items()):
        events.append(named("process_name", process, 0, name=f"step {record['step']}: {policy}"))
        events.append(named("process_sort_index", process, 0, sort_index=process))
        if "workers" in step:
            for thread, worker in enumerate(step["workers"]):
                events += _stage(process, thread, worker, step["units"][worker["rank"]])
        else:
            for rank, units in enumerate(step["units"]):
                events += _rank(process, rank, units, step["all_reduce_ms"][rank])
    return events


def _rank(process: int, rank: int, units: Sequence[Record], all_reduce_ms: float) -> Iterator[Event]:
    yield named("thread_name", process, rank, name=f"rank {rank}")
    end = 0.0
    for index, unit in enumerate(units):
        start, forward, backward = unit["start_ms"], unit["forward_ms"], unit["backward_ms"]
        backward_start = unit.get("backward_start_ms", start + forward)  # of older runs, right behind
        end = max(end, backward_start + backward)
        if unit["tokens"]:
            details = _details(unit)
            yield time_slice(f"F{index}", process, rank, start, start + forward, details)
            yield time_slice(f"B{index}", process, rank, backward_start, backward_start + backward, details)
    yield time_slice("all-reduce and waiting", process, rank, end, end + all_reduce_ms, {})


def _stage(process: int, thread: int, worker: Record, units: Sequence[Record]) -> Iterator[Event]:
    yield named("thread_name", process, thread, name=worker_label((worker["rank"], worker["stage"]), 2))
    yield named("thread_sort_index", process, thread, sort_index=thread)
    end = 0.0
    for span in spans_of(worker):
        start, took = span.measured
        end = start + took
        details = {"stage": span.stage, "planned_ms": span.planned[1], **_details(units[span.unit])}
        yield time_slice(f"{span.kind}{span.unit}", process, thread, start, end, details)
    yield time_slice("all-reduce and waiting", process, thread, end, end + worker["all_reduce_ms"], {})


def _details(unit: Record) -> Event:
    return {key: unit[key] for key in DETAILS if key in unit}
