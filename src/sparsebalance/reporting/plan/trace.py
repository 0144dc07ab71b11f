"""The simulated example step as a Chrome trace: open it in Perfetto (ui.perfetto.dev) or chrome://tracing.

In: a forecast and its recommendation. Out: trace events in microseconds. Every rank of the recommended plan, of
`random` and of the fastest baseline is a process with a thread per worker, one per all-reduce, and memory counters.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparsebalance.planner.forecast import Forecast, Recommendation
from sparsebalance.planning.files import write_whole
from sparsebalance.planning.plan import MicroBatch, StepPlan
from sparsebalance.planning.timeline import Timeline
from sparsebalance.reporting.chrome import Event, microseconds, named, time_slice
from sparsebalance.reporting.plan.timeline import all_reduces, chosen_ranks, shown_plans, stages_of, worker_spans

RANKS = 8  # of one plan, at most


def write_plan_trace(path: Path, settings: dict[str, Any], result: Forecast, advice: Recommendation) -> None:
    """Write atomically; at most 8 ranks of a plan, the slowest and the fastest among them.

    Args:
        settings: kept beside the events, with where the times come from.
    """
    document = {
        "traceEvents": trace_events(result, advice),
        "displayTimeUnit": "ms",
        "otherData": {**settings, "kind": "simulated", "step": result.example_step},
    }
    write_whole(path, json.dumps(document))


def trace_events(result: Forecast, advice: Recommendation) -> list[Event]:
    """Names ("M") of each process first, then its slices ("X") and counters ("C")."""
    events: list[Event] = []
    process = 0
    for place in reversed(shown_plans(result, advice)):  # the recommended plan on top
        plan, timeline = result.examples[place]
        for rank in chosen_ranks(timeline, RANKS):
            process += 1
            events += _process(process, f"{result.rows[place].name}, rank {rank}", plan, timeline, rank)
    return events


def _process(number: int, title: str, plan: StepPlan, timeline: Timeline, rank: int) -> Iterator[Event]:
    workers, stages = len(timeline.bubble_ms[rank]), len(timeline.all_reduce_ms)
    yield named("process_name", number, 0, name=title)
    yield named("process_sort_index", number, 0, sort_index=number)
    for worker, held in enumerate(stages_of(timeline)):
        yield from _thread(number, worker, f"stage {', '.join(map(str, held))}")
    for span in worker_spans(plan, timeline, rank):
        unit = plan.ranks[rank][span.unit]
        name = f"{span.kind}{span.unit}"
        yield time_slice(name, number, span.worker, span.start_ms, span.end_ms, {"stage": span.stage, **_details(unit)})
    reduces = all_reduces(timeline)
    for stage in range(stages if reduces else 0):
        yield from _thread(number, workers + stage, f"all-reduce of stage {stage}")
    for stage, start_ms, end_ms in reduces:
        yield time_slice("all-reduce", number, workers + stage, start_ms, end_ms, {"stage": stage})
    for worker, (times, mb) in enumerate(timeline.memory_mb(rank)):
        counts = {0.0: 0.0} | dict(zip(times.tolist(), mb.tolist()))  # of two values at one time, the later one
        for at_ms, value in counts.items():
            yield {
                "ph": "C",
                "name": f"activations MB, worker {worker}",
                "pid": number,
                "tid": worker,
                "ts": microseconds(at_ms),
                "args": {"MB": round(max(value, 0.0), 3)},
            }


def _details(unit: MicroBatch) -> Event:
    budgets = sorted(set(unit.budgets))
    return {
        "tokens": unit.tokens,
        "samples": [f"{s.sample}[{s.start}:{s.end}] of {s.sample_length}" for s in unit.segments],
        "budgets": budgets[0] if len(budgets) == 1 else list(unit.budgets),
    }


def _thread(process: int, thread: int, name: str) -> Iterator[Event]:
    yield named("thread_name", process, thread, name=name)
    yield named("thread_sort_index", process, thread, sort_index=thread)
