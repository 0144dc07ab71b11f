"""One step's micro-batches as planned and as measured, for metrics.jsonl and the planned-versus-actual page."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from sparsebalance.planning.coverage import at_budgets, chunk_coverage, plan_coverage
from sparsebalance.planning.latency import LatencyModel, unit_terms
from sparsebalance.planning.plan import MicroBatch, Segment, StepPlan, chain_lengths
from sparsebalance.planning.work import key_blocks
from sparsebalance.training.engine import Probes, RankResult, UnitTime


def worker_records(
    plan: StepPlan, model: LatencyModel, results: Sequence[RankResult], all_reduce_ms: Sequence[float]
) -> list[dict[str, Any]]:
    """One JSON-compatible record per rank.

    Args:
        model: that the plan was made by, corrections included.
        all_reduce_ms: per rank, after its last unit, waiting for others included.
    """
    return [
        {
            "rank": rank,
            "stage": 0,
            "all_reduce_ms": reduce_ms,
            "units": _units(units, result.units, model, model.rank_factor(rank)),
        }
        for rank, (units, result, reduce_ms) in enumerate(zip(plan.ranks, results, all_reduce_ms, strict=True))
    ]


def _units(
    units: Sequence[MicroBatch], times: Sequence[UnitTime], model: LatencyModel, factor: float
) -> list[dict[str, Any]]:
    records = []
    for unit, time, (start_ms, backward_start_ms) in zip(units, times, planned_starts(units), strict=True):
        predicted = unit.latency
        terms = unit_terms(model, unit).total_ms()
        records.append(
            {
                "lengths": [segment.tokens for segment in unit.segments],
                "tokens": unit.tokens,
                "targets": unit.targets,
                **budget_record(unit, time),
                **chunk_record(unit),
                "planned": {
                    "start_ms": start_ms,
                    "backward_start_ms": backward_start_ms,
                    "forward_ms": predicted.forward_ms,
                    "backward_ms": predicted.backward_ms,
                    "terms": {name: ms * factor for name, ms in terms.items()},
                },
                "measured": {
                    "start_ms": time.start_ms,
                    "backward_start_ms": time.backward_start_ms,
                    "forward_ms": time.forward_ms,
                    "backward_ms": time.backward_ms,
                    "tune_ms": time.tune_ms,
                    "terms": time.terms if unit.segments else dict.fromkeys(terms, 0.0),
                },
            }
        )
    return records


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


def planned_starts(units: Sequence[MicroBatch]) -> list[tuple[float, float]]:
    """Milliseconds at which each unit's forward and backward start on a rank without a pipeline: chunks of a sample
    run forward in order, then backward last to first."""
    starts: list[tuple[float, float]] = []
    now, first = 0.0, 0
    for length in chain_lengths([unit.segments for unit in units]):
        chain = [unit.latency for unit in units[first : first + length]]
        forward = list(accumulate((latency.forward_ms for latency in chain), initial=now))
        backward = list(accumulate((latency.backward_ms for latency in reversed(chain)), initial=forward.pop()))
        now = backward.pop()
        starts += zip(forward, reversed(backward))
        first += length
    return starts
