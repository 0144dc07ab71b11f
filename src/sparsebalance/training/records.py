"""One step's micro-batches as planned and as measured, for metrics.jsonl and the planned-versus-actual page.

In: the plan, what the workers measured and, of a pipeline, its simulated timeline. Out: JSON-compatible records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np

from sparsebalance.planning.coverage import at_budgets, chunk_coverage, plan_coverage
from sparsebalance.planning.latency import LatencyModel, unit_terms
from sparsebalance.planning.plan import MicroBatch, Segment, StepPlan, chain_lengths
from sparsebalance.planning.timeline import Span, Timeline
from sparsebalance.planning.work import key_blocks
from sparsebalance.training.results import Probes, RankResult, UnitTime


def worker_records(
    plan: StepPlan,
    model: LatencyModel,
    workers: Sequence[Sequence[RankResult]],
    timeline: Timeline | None = None,
) -> list[dict[str, Any]]:
    """One JSON-compatible record per data-parallel rank and worker of its pipeline, in this order.

    A worker of a pipeline also has `waiting_ms`, planned and measured: the time before the last worker of all came to
    the all-reduce in which it ran no action; and `actions`, in execution order, those of empty units left out, as
    [kind, unit, stage, planned start, planned end, start, end] in milliseconds since the step began.

    Args:
        model: that the plan was made by, corrections included.
        workers: results, [data-parallel rank][worker], see `sparsebalance.training.results.of_workers`.
        timeline: of the plan's pipelines; None without a pipeline.
    """
    if timeline is None:
        return [
            _worker(rank, 0, plan, model, result, _planned_times(units))
            for rank, (units, (result,)) in enumerate(zip(plan.ranks, workers, strict=True))
        ]
    waited = _waiting_ms([result for own in workers for result in own])
    # The simulation's bubbles reach to the end of the all-reduce.
    idle_ms = np.maximum(timeline.bubble_ms - (timeline.step_ms - timeline.rank_ms.max()), 0.0)
    records: list[dict[str, Any]] = []
    for rank, own in enumerate(workers):
        spans = timeline.spans(rank)
        for place, result in enumerate(own):
            planned = [span for span in spans if span.worker == place]
            record = _worker(rank, place, plan, model, result, _span_times(len(plan.ranks[rank]), planned))
            record["waiting_ms"] = {"planned": float(idle_ms[rank, place]), "measured": waited[len(records)]}
            records.append({**record, "actions": _actions(planned, result)})
    return records


def bubble(workers: Sequence[Mapping[str, Any]], predicted_step_ms: float, step_ms: float) -> dict[str, float] | None:
    """Share of workers x step time that was waited, as planned and as measured; None without a pipeline.

    Args:
        workers: see `worker_records`.
    """
    if "waiting_ms" not in workers[0]:
        return None
    planned, measured = (
        sum(worker["waiting_ms"][side] for worker in workers) / len(workers) for side in ("planned", "measured")
    )
    return {"planned": planned / predicted_step_ms, "measured": measured / step_ms}


def _worker(
    rank: int,
    place: int,
    plan: StepPlan,
    model: LatencyModel,
    result: RankResult,
    planned: Sequence[dict[str, float]],
) -> dict[str, Any]:
    """What every worker's record holds, `planned` times of its units given."""
    layers = result.layers or tuple(range(model.layers))
    factor = model.rank_factor(rank)
    return {
        "rank": rank,
        "stage": place,
        "all_reduce_ms": result.all_reduce_ms,
        "units": [
            _unit(unit, time, times, _terms(model, unit, layers, factor))
            for unit, time, times in zip(plan.ranks[rank], result.units, planned, strict=True)
        ],
    }


def _unit(unit: MicroBatch, time: UnitTime, planned: dict[str, float], terms: dict[str, float]) -> dict[str, Any]:
    return {
        "lengths": [segment.tokens for segment in unit.segments],
        "tokens": unit.tokens,
        "targets": unit.targets,
        **budget_record(unit, time),
        **chunk_record(unit),
        "planned": {**planned, "terms": terms},
        "measured": {
            "start_ms": time.start_ms,
            "backward_start_ms": time.backward_start_ms,
            "forward_ms": time.forward_ms,
            "backward_ms": time.backward_ms,
            "tune_ms": time.tune_ms,
            "terms": time.terms if unit.segments else dict.fromkeys(terms, 0.0),
        },
    }


def _terms(model: LatencyModel, unit: MicroBatch, layers: Sequence[int], factor: float) -> dict[str, float]:
    """Planned milliseconds by term of these layers; the head belongs to the last one."""
    whole = unit_terms(model, unit).total_ms()
    if len(layers) < model.layers and unit.segments:
        own = unit_terms(model, replace(unit, budgets=tuple(unit.budgets[layer] for layer in layers))).total_ms()
        head_ms = whole["head"] if model.layers - 1 in layers else 0.0
        whole = {**own, "linear": whole["linear"] * len(layers) / model.layers, "head": head_ms}
    return {name: ms * factor for name, ms in whole.items()}


def _waiting_ms(workers: Sequence[RankResult]) -> list[float]:
    """Measured, of each worker; what the one that came last to the all-reduce spent there is the exchange itself."""
    exchange = min(worker.all_reduce_ms for worker in workers)
    together = max(worker.end_ms + worker.all_reduce_ms for worker in workers) - exchange
    return [max(0.0, together - worker.action_ms) for worker in workers]


def _actions(planned: Sequence[Span], result: RankResult) -> list[list[str | int | float]]:
    spans = {(span.kind, span.unit, span.stage): span for span in planned}
    rows: list[list[str | int | float]] = []
    for one in result.actions:
        action = one.action
        span = spans[action.kind, action.unit, action.stage]
        times = (span.start_ms, span.end_ms, one.start_ms, one.start_ms + one.ms)
        rows.append([action.kind, action.unit, action.stage, *(round(ms, 3) for ms in times)])
    return rows


def budget_record(unit: MicroBatch, time: UnitTime) -> dict[str, Any]:
    """Budgets per layer that the unit really used, and what the plan wished where they were tuned online."""
    wishes = {} if unit.online is None else {"planned_budgets": list(unit.budgets)}
    return {"budgets": list(time.budgets), **wishes}


def measured_coverage(curve: Sequence[float], segment: Segment, budget: int, block_size: int) -> float:
    """Of a segment at a budget, by the curve measured on its sample."""
    blocks, budgets = key_blocks(segment.sample_length, block_size), np.array([budget])
    return float(chunk_coverage(at_budgets(curve, blocks, budgets), segment, budgets, block_size)[0])


def probe_record(plan: StepPlan, probes: Probes) -> dict[str, float] | None:
    """Coverage measured in a step, at the plan's budgets, mean over tokens and layers; None where nothing was probed.

    Returns:
        `estimated`: by the router's scores alone, not calibrated; `router`: by its choice; `oracle`: by the best
        choice; `regret`: oracle - router.
    """
    if not probes:
        return None

    def covered(segment: Segment, layer: int, budget: int) -> list[float]:
        probe = probes[segment.sample, layer]
        return [
            measured_coverage(curve, segment, budget, plan.block_size)
            for curve in (probe.estimated, probe.router, probe.oracle)
        ]

    estimated, router, oracle = plan_coverage(plan, covered).tolist()
    return {"estimated": estimated, "router": router, "oracle": oracle, "regret": oracle - router}


def chunk_record(unit: MicroBatch) -> dict[str, Any]:
    """Which part of which sample the unit is, where it is one."""
    segment = unit.segments[0] if unit.segments else None
    if segment is None or segment.is_whole:
        return {}
    part = {"sample": segment.sample, "start": segment.start, "of": segment.sample_length}
    return {"chunk": {**part, "recomputed": unit.recompute}}


def _span_times(units: int, spans: Sequence[Span]) -> list[dict[str, float]]:
    """What a worker's actions come to for each unit; of several stages on one worker, from the first start on."""
    by_unit: list[tuple[list[Span], list[Span]]] = [([], []) for _ in range(units)]
    for span in spans:
        by_unit[span.unit][span.kind != "F"].append(span)
    found = []
    for forward, backward in by_unit:
        found.append(
            {
                "start_ms": min(span.start_ms for span in forward),
                "backward_start_ms": min(span.start_ms for span in backward),
                "forward_ms": sum(span.end_ms - span.start_ms for span in forward),
                "backward_ms": sum(span.end_ms - span.start_ms for span in backward),
            }
        )
    return found


def _planned_times(units: Sequence[MicroBatch]) -> list[dict[str, float]]:
    """The same on a rank without a pipeline: chunks of a sample run forward in order, then backward last to first."""
    found: list[dict[str, float]] = []
    now, first = 0.0, 0
    for length in chain_lengths([unit.segments for unit in units]):
        chain = [unit.latency for unit in units[first : first + length]]
        forward = list(accumulate((latency.forward_ms for latency in chain), initial=now))
        backward = list(accumulate((latency.backward_ms for latency in reversed(chain)), initial=forward.pop()))
        now = backward.pop()
        found += [
            {
                "start_ms": start_ms,
                "backward_start_ms": backward_start_ms,
                "forward_ms": latency.forward_ms,
                "backward_ms": latency.backward_ms,
            }
            for start_ms, backward_start_ms, latency in zip(forward, reversed(backward), chain)
        ]
        first += length
    return found
