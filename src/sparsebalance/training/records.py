"""One step's micro-batches as planned and as measured, for metrics.jsonl and the planned-versus-actual page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparsebalance.planning.latency import LatencyModel
from sparsebalance.planning.plan import MicroBatch, StepPlan
from sparsebalance.training.engine import RankResult, UnitTime


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
    records, start_ms = [], 0.0
    for unit, time in zip(units, times, strict=True):
        predicted = unit.latency
        terms = model.terms(unit.segments, unit.budgets).total_ms()
        records.append(
            {
                "lengths": [segment.tokens for segment in unit.segments],
                "tokens": unit.tokens,
                "targets": unit.targets,
                "budgets": list(unit.budgets),
                "planned": {
                    "start_ms": start_ms,
                    "forward_ms": predicted.forward_ms,
                    "backward_ms": predicted.backward_ms,
                    "terms": {name: ms * factor for name, ms in terms.items()},
                },
                "measured": {
                    "start_ms": time.start_ms,
                    "forward_ms": time.forward_ms,
                    "backward_ms": time.backward_ms,
                    "terms": time.terms if unit.segments else dict.fromkeys(terms, 0.0),
                },
            }
        )
        start_ms += predicted.total_ms
    return records
