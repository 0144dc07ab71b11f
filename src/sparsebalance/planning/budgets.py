"""Dynamic sparsity tuning (DST): which attention budget each micro-batch and layer gets in a step.

In: placed units, a latency model, coverage curves. Out: one budget per unit and layer. Source of the anchor
rule: SparseBalance (arXiv 2604.13847), dynamic sparsity tuning; the feasible set here always holds the
default budget, so it is never empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from sparsebalance.planning.batching import Placement, Unit
from sparsebalance.planning.coverage import CoverageCurves
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.expected import LayerBudgets
from sparsebalance.planning.latency import LatencyModel
from sparsebalance.planning.work import key_blocks

UnitBudgets = tuple[tuple[LayerBudgets, ...], ...]  # [rank][unit][layer]
AnchorKind = Literal["mean", "min", "max"]
AnchorScope = Literal["micro_batch", "rank"]


class Tuning(Protocol):
    """Placement -> budgets. Pure and deterministic."""

    def __call__(
        self, placement: Placement, model: LatencyModel, default: int, coverage: CoverageCurves
    ) -> UnitBudgets: ...


@dataclass(frozen=True)
class Fixed:
    """Every unit and layer keeps the default budget."""

    def __call__(
        self, placement: Placement, model: LatencyModel, default: int, coverage: CoverageCurves
    ) -> UnitBudgets:
        return tuple(tuple((default,) * model.layers for _ in rank) for rank in placement)


@dataclass(frozen=True)
class Anchor:
    """Units slower than the anchor lose budget and faster ones gain it, within a bound on coverage change.

    For unit i and layer l with default budget k0, K = {k : |coverage(i, l, k) - coverage(i, l, k0)| <=
    threshold} inside [min_budget, max_budget], together with k0; the budget is the k of K whose predicted
    latency is nearest to the unit's target (the smaller k among equals).

    Attributes:
        kind: mean, min or max of the latencies that `scope` compares, at the default budget.
        threshold: the published p; 0.1 is its recommendation.
        scope: "micro_batch" is the published rule: every unit's target is the anchor over all units. "rank"
            compares the ranks' sums instead, for plans whose units are unequal by design: a unit's target is
            its latency times anchor / its rank's sum.
        min_budget, max_budget: limits in blocks; max_budget None is 4 times the default.
    """

    kind: AnchorKind = "mean"
    threshold: float = 0.1
    scope: AnchorScope = "micro_batch"
    min_budget: int = 1
    max_budget: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(AnchorKind):
            raise InputError(f"anchor is {self.kind!r}; choose one of {', '.join(get_args(AnchorKind))}")
        if self.scope not in get_args(AnchorScope):
            raise InputError(f"anchor scope is {self.scope!r}; choose one of {', '.join(get_args(AnchorScope))}")
        if not 0 <= self.threshold <= 1:
            raise InputError(f"coverage threshold is {self.threshold}, but it must lie in [0, 1]")
        if self.min_budget < 1:
            raise InputError(f"min_budget is {self.min_budget}, but the own block is always read: at least 1")
        if self.max_budget is not None and self.max_budget < self.min_budget:
            raise InputError(f"max_budget {self.max_budget} is below min_budget {self.min_budget}")

    def __call__(
        self, placement: Placement, model: LatencyModel, default: int, coverage: CoverageCurves
    ) -> UnitBudgets:
        targets = self._target_ratios(placement, model, default)
        return tuple(
            tuple(self._tune_unit(unit, ratio, model, default, coverage) for unit, ratio in zip(units, ratios))
            for units, ratios in zip(placement, targets)
        )

    def _target_ratios(self, placement: Placement, model: LatencyModel, default: int) -> list[list[float]]:
        """Per rank and unit: target latency / predicted latency at the default budget; empty units get 1."""
        budgets = (default,) * model.layers
        ranks = [
            [model.latency(unit, budgets).total_ms * model.rank_factor(rank) for unit in units]
            for rank, units in enumerate(placement)
        ]
        if self.scope == "rank":
            compared = [sum(rank) for rank in ranks]
        else:
            compared = [ms for rank in ranks for ms in rank if ms > 0]
        anchor = {"mean": float(np.mean(compared)), "min": min(compared), "max": max(compared)}[self.kind]
        whole = [[sum(rank) if self.scope == "rank" else ms for ms in rank] for rank in ranks]
        return [[anchor / ms if ms > 0 else 1.0 for ms in row] for row in whole]

    def _tune_unit(
        self, unit: Unit, ratio: float, model: LatencyModel, default: int, coverage: CoverageCurves
    ) -> LayerBudgets:
        if not unit:
            return (default,) * model.layers
        candidates = self._candidates(unit, model.block_size, default)
        full = max(key_blocks(segment.end, model.block_size) for segment in unit)
        attention = model.attention_ms(unit, candidates)
        at_default = float(attention[candidates == default][0])
        total = model.latency(unit, (default,) * model.layers).total_ms
        # A layer's share of the whole unit: its attention, and an equal part of everything else.
        rest = total / model.layers - at_default
        distance = np.abs(rest + attention - ratio * (rest + at_default))
        chosen: dict[tuple[int, ...], int] = {}  # layers with the same curves get the same budget
        budgets = []
        for layer in range(model.layers):
            curves = coverage.curve_ids(layer, unit)
            if curves not in chosen:
                covered = coverage.unit_coverage(layer, unit, candidates)
                change = np.abs(covered - covered[candidates == default])
                feasible = (change <= self.threshold + 1e-12) | (candidates == default)
                best = int(candidates[np.argmin(np.where(feasible, distance, np.inf))])
                # From the full budget on all budgets read the same: then keep the default.
                chosen[curves] = default if min(best, default) >= full else best
            budgets.append(chosen[curves])
        return tuple(budgets)

    def _candidates(self, unit: Unit, block_size: int, default: int) -> NDArray[np.int64]:
        """Budgets worth trying, ascending: no more than the longest segment has blocks, and the default."""
        most = max(key_blocks(segment.end, block_size) for segment in unit)
        highest = min(self.max_budget or 4 * default, max(most, self.min_budget))
        return np.union1d(np.arange(self.min_budget, highest + 1), [default])
