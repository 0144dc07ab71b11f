"""One step of a comparison as a Chrome trace: open it in Perfetto (ui.perfetto.dev) or chrome://tracing.

Every policy is a process, every rank a thread, every forward and backward a slice; times are the measured ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


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
        events.append(_name("process_name", process, 0, f"step {record['step']}: {policy}"))
        events.append({**_name("process_sort_index", process, 0, ""), "args": {"sort_index": process}})
        for rank, units in enumerate(step["units"]):
            events.append(_name("thread_name", process, rank, f"rank {rank}"))
            end = 0.0
            for index, unit in enumerate(units):
                start, forward, backward = unit["start_ms"], unit["forward_ms"], unit["backward_ms"]
                end = start + forward + backward
                if unit["tokens"]:
                    details = {key: unit[key] for key in ("lengths", "tokens", "targets", "budgets", "predicted_ms")}
                    events.append(_slice(f"F{index}", process, rank, start, forward, details))
                    events.append(_slice(f"B{index}", process, rank, start + forward, backward, details))
            events.append(_slice("all-reduce and waiting", process, rank, end, step["all_reduce_ms"][rank], {}))
    return events


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _slice(
    name: str, process: int, thread: int, start_ms: float, took_ms: float, details: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "pid": process,
        "tid": thread,
        "ts": start_ms * 1e3,
        "dur": took_ms * 1e3,
        "args": details,
    }
