"""Placements as steps to be tuned."""

from __future__ import annotations

from sparsebalance.planning.budgets import Tuning, TuningStep, UnitBudgets
from sparsebalance.planning.coverage import CoverageCurves
from sparsebalance.planning.latency import LatencyModel
from sparsebalance.planning.micro_batches import micro_batches
from sparsebalance.planning.pipeline import PipelineModel
from sparsebalance.planning.plan import Topology
from sparsebalance.planning.units import Placement


def step_of(
    placement: Placement,
    model: LatencyModel,
    default: int,
    coverage: CoverageCurves,
    pp: int = 1,
    pipeline: PipelineModel | None = None,
) -> TuningStep:
    """The placement's micro-batches at the default budget."""
    budgets = [[(default,) * model.layers] * len(rank) for rank in placement]
    ranks = micro_batches(placement, budgets, model, None)
    return TuningStep(ranks, model, Topology(len(placement), pp), pipeline or PipelineModel(), default, coverage)


def tune(
    tuning: Tuning, placement: Placement, model: LatencyModel, default: int, coverage: CoverageCurves, pp: int = 1
) -> UnitBudgets:
    return tuning(step_of(placement, model, default, coverage, pp))
