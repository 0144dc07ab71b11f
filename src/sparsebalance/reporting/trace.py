"""One step of a comparison as a Chrome trace: open it in Perfetto (ui.perfetto.dev) or chrome://tracing.

Every policy is a process, every rank a thread, every forward and backward a slice; times are the measured ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sparsebalance.reporting.chrome import named, time_slice

DETAILS = ("lengths", "chunk", "tokens", "targets", "budgets", "predicted_ms")  # of a unit; chunk where it is one


def write_trace(path: Path, record: dict[str, Any]) -> None:
    """Args:
    record: of one step, see `sparsebalance.comparison.run`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": trace_events(record), "displayTimeUnit": "ms"}))


def trace_events(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Chrome trace events (microseconds): names first, then complete ("X") events."""
    events: list[dict[str, Any]] = []
    for process, (policy, step) in enumerate(record["policies"].items()):
        events.append(named("process_name", process, 0, name=f"step {record['step']}: {policy}"))
        events.append(named("process_sort_index", process, 0, sort_index=process))
        for rank, units in enumerate(step["units"]):
            events.append(named("thread_name", process, rank, name=f"rank {rank}"))
            end = 0.0
            for index, unit in enumerate(units):
                start, forward, backward = unit["start_ms"], unit["forward_ms"], unit["backward_ms"]
                backward_start = unit.get("backward_start_ms", start + forward)  # of older runs, right behind
                end = max(end, backward_start + backward)
                if unit["tokens"]:
                    details = {key: unit[key] for key in DETAILS if key in unit}
                    events.append(time_slice(f"F{index}", process, rank, start, start + forward, details))
                    events.append(
                        time_slice(f"B{index}", process, rank, backward_start, backward_start + backward, details)
                    )
            events.append(
                time_slice("all-reduce and waiting", process, rank, end, end + step["all_reduce_ms"][rank], {})
            )
    return events
