"""Events of the Chrome trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

In: milliseconds. Out: JSON-compatible events in microseconds: names ("M") and slices ("X") of a process's threads.
"""

from __future__ import annotations

from typing import Any

Event = dict[str, Any]


def named(kind: str, process: int, thread: int, **args: Any) -> Event:
    """A metadata event: process_name or thread_name with `name`, process_ or thread_sort_index with `sort_index`."""
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": args}


def time_slice(name: str, process: int, thread: int, start_ms: float, end_ms: float, details: Event) -> Event:
    start, end = microseconds(start_ms), microseconds(end_ms)
    return {
        "ph": "X",
        "name": name,
        "pid": process,
        "tid": thread,
        "ts": start,
        "dur": round(end - start, 3),
        "args": details,
    }


def microseconds(ms: float) -> float:
    """Whole nanoseconds, so that neighbours still touch after rounding."""
    return round(ms * 1e3, 3)
