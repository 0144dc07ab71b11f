"""The anchor rule of dynamic sparsity tuning: every unit is moved towards one latency.

Source: SparseBalance (arXiv 2604.13847), dynamic sparsity tuning; the feasible set here always holds the default
budget, so it is never empty.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from sparsebalance.planning.budgets import SLOP, Choices, Floats, Limits, OnlineRanks, TuningStep, UnitBudgets
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.plan import OnlineTuning

AnchorKind = Literal["mean", "min", "max"]
AnchorScope = Literal["micro_batch", "rank"]
AnchorLevel = Literal["layer", "global"]


@dataclass(frozen=True, kw_only=True)
class Anchor(Limits):
    """Units slower than the anchor lose budget and faster ones gain it, within a bound on coverage change.

    For unit i and layer l with default budget k0, K = {k : |coverage(i, l, k) - coverage(i, l, k0)| <= threshold}
    within the limits, together with k0; the budget is the k of K whose predicted latency is nearest to the unit's
    target (the smaller k among equals).

    Attributes:
        kind: mean, min or max of the latencies that `scope` compares, at the default budget.
        scope: "micro_batch" is the published rule: every unit's target is the anchor over all units. "rank" compares
            the ranks' sums instead, for plans whose units are unequal by design: a unit's target is its latency times
            anchor / its rank's sum.
        level: "layer" bounds and chooses layer by layer, as published; "global" bounds the mean over the layers, which
            all get one budget.
    """

    kind: AnchorKind = "mean"
    scope: AnchorScope = "micro_batch"
    level: AnchorLevel = "layer"

    def __post_init__(self) -> None:
        Limits.__post_init__(self)
        if self.kind not in get_args(AnchorKind):
            raise InputError(f"anchor is {self.kind!r}; choose one of {', '.join(get_args(AnchorKind))}")
        if self.scope not in get_args(AnchorScope):
            raise InputError(f"anchor scope is {self.scope!r}; choose one of {', '.join(get_args(AnchorScope))}")
        if self.level not in get_args(AnchorLevel):
            raise InputError(f"anchor level is {self.level!r}; choose one of {', '.join(get_args(AnchorLevel))}")

    def __call__(self, step: TuningStep) -> UnitBudgets:
        if not step.units:
            return step.budgets(np.zeros((0, step.model.layers), dtype=np.int64))
        choices = Choices.of(step, self)
        # A layer's share of the whole unit: its attention, and an equal part of everything else.
        rest = choices.rest_ms / choices.layers
        at_default = choices.attention_ms[:, choices.default]
        wanted = self._target_ratios(step) * (rest + at_default)
        distance = np.abs((rest - wanted)[:, None] + choices.attention_ms)
        change = choices.change if self.level == "layer" else choices.change.mean(1, keepdims=True)
        feasible = choices.possible[:, None] & (np.abs(change) <= self.threshold + SLOP)
        nearest = np.where(feasible, distance[:, None], np.inf).argmin(2)  # the first, smallest, of equals
        chosen = np.broadcast_to(choices.budgets[nearest], choices.coverage.shape[:2])
        return step.budgets(chosen)

    def online(self, step: TuningStep) -> tuple[UnitBudgets, UnitBudgets, OnlineRanks]:
        """Wishes that no coverage bounds: each layer's own scores do while it runs."""
        follow = self.online_tuning(step.default)
        return self(step), replace(self, threshold=1.0)(step), same_for_all(step, follow)

    def _target_ratios(self, step: TuningStep) -> Floats:
        """[units] target latency / predicted latency at the default budget."""
        own = np.array([unit.latency.total_ms for unit in step.units])
        if self.scope == "rank":
            sums = np.bincount(step.rank_of, weights=own, minlength=len(step.ranks))
            own, compared = sums[step.rank_of], sums
        else:
            compared = own
        anchor = {"mean": compared.mean(), "min": compared.min(), "max": compared.max()}[self.kind]
        ratios: Floats = anchor / own
        return ratios


def same_for_all(step: TuningStep, follow: OnlineTuning) -> OnlineRanks:
    """One way to follow scores for every unit that has something to compute."""
    return tuple(tuple(follow if unit.segments else None for unit in rank) for rank in step.ranks)
