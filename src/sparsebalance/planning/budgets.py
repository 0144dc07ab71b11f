"""Dynamic sparsity tuning (DST): which attention budget each micro-batch and layer gets in a step.

In: a step's micro-batches at the default budget, a latency model, coverage curves. Out: one budget per unit and layer.
The rules are in `anchor.py` (the published one), `waterfill.py` and `slack.py`; here are their common signature,
their limits, and what they choose from, as arrays over all units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from sparsebalance.planning.coverage import CoverageCurves
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.expected import LayerBudgets
from sparsebalance.planning.latency import TERMS, LatencyModel
from sparsebalance.planning.micro_batches import timed
from sparsebalance.planning.pipeline import PipelineModel
from sparsebalance.planning.plan import MicroBatch, OnlineTuning, Ranks, Topology
from sparsebalance.planning.work import key_blocks

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
Timing = Literal["planned", "online"]
UnitBudgets = tuple[tuple[LayerBudgets, ...], ...]  # [rank][unit][layer]
OnlineRanks = tuple[tuple[OnlineTuning | None, ...], ...]  # [rank][unit]

EVERY = 16  # budgets up to here are all tried, larger ones in steps of about 1/12
SLOP = 1e-12  # rounding of coverage sums


@dataclass(frozen=True)
class TuningStep:
    """A step before tuning.

    Attributes:
        ranks: micro-batches in execution order, all at the default budget, with their predicted times.
        model, topology, pipeline: what times are predicted by.
        default: budget in blocks.
        coverage: measured curves, or a prior.
    """

    ranks: Ranks
    model: LatencyModel
    topology: Topology
    pipeline: PipelineModel
    default: int
    coverage: CoverageCurves

    @cached_property
    def units(self) -> tuple[MicroBatch, ...]:
        """Of all ranks, those that have something to compute."""
        return tuple(unit for rank in self.ranks for unit in rank if unit.segments)

    @cached_property
    def rank_of(self) -> Ints:
        """[units] data-parallel rank of each."""
        return np.array([r for r, rank in enumerate(self.ranks) for unit in rank if unit.segments], dtype=np.int64)

    def budgets(self, chosen: NDArray[np.int64]) -> UnitBudgets:
        """[units, layers] blocks in the form of a plan; empty units keep the default."""
        rows = iter(map(tuple, chosen.tolist()))
        kept = (self.default,) * self.model.layers
        return tuple(tuple(next(rows) if unit.segments else kept for unit in rank) for rank in self.ranks)


class Tuning(Protocol):
    """A step -> budgets. Pure and deterministic: every rank gets the same."""

    def __call__(self, step: TuningStep) -> UnitBudgets: ...

    def online(self, step: TuningStep) -> tuple[UnitBudgets, UnitBudgets, OnlineRanks]:
        """For units that are tuned while they run: the budgets that are expected, as planned ones would be, the units'
        wishes, and how they follow their own scores."""
        ...


@dataclass(frozen=True)
class Fixed:
    """Every unit and layer keeps the default budget."""

    def __call__(self, step: TuningStep) -> UnitBudgets:
        return tuple(tuple(unit.budgets for unit in rank) for rank in step.ranks)

    def online(self, step: TuningStep) -> tuple[UnitBudgets, UnitBudgets, OnlineRanks]:
        budgets = self(step)
        return budgets, budgets, tuple((None,) * len(rank) for rank in step.ranks)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How far tuning may go.

    Attributes:
        threshold: most that a layer's coverage of a unit may change; the published p, 0.1 is its recommendation.
        min_budget, max_budget: limits in blocks; max_budget None is 4 times the default. The default itself is
            always allowed.
    """

    threshold: float = 0.1
    min_budget: int = 1
    max_budget: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise InputError(f"coverage threshold is {self.threshold}, but it must lie in [0, 1]")
        if self.min_budget < 1:
            raise InputError(f"min_budget is {self.min_budget}, but the own block is always read: at least 1")
        if self.max_budget is not None and self.max_budget < self.min_budget:
            raise InputError(f"max_budget {self.max_budget} is below min_budget {self.min_budget}")

    def highest(self, default: int) -> int:
        return self.max_budget or 4 * default

    def online_tuning(
        self, default: int, price: float | None = None, attention_ms: Sequence[float] = ()
    ) -> OnlineTuning:
        highest = max(self.highest(default), self.min_budget)
        return OnlineTuning(default, self.threshold, self.min_budget, highest, price, tuple(attention_ms))


@dataclass(frozen=True, eq=False)
class Choices:
    """What tuning can choose from, for all units at once.

    Attributes:
        budgets: [choices] blocks, ascending. default: place of the default budget among them.
        forward_ms, backward_ms: [units, choices] of one attention layer, router included; where a chunk is recomputed,
            its backward holds the second forward.
        rest_ms: [units] everything else that a unit takes.
        coverage: [units, layers, choices].
        possible: [units, choices] within the limits, and no more blocks than the unit has.
        tokens: [units] float64.
    """

    budgets: Ints
    default: int
    forward_ms: Floats
    backward_ms: Floats
    rest_ms: Floats
    coverage: Floats
    possible: Flags
    tokens: Floats

    @classmethod
    def of(cls, step: TuningStep, limits: Limits) -> Choices:
        model, units, default = step.model, step.units, step.default
        segments = [unit.segments for unit in units]
        full = np.array([max(key_blocks(s.end, model.block_size) for s in unit) for unit in segments])
        highest = min(limits.highest(default), max(int(full.max()), limits.min_budget))
        budgets = np.union1d(_worth_trying(limits.min_budget, highest), [default])
        place = int(np.searchsorted(budgets, default))
        forward, backward = attention_ms(step, budgets)
        at_default = (forward + backward)[:, place]
        inside = (budgets >= limits.min_budget) & (budgets <= highest)
        possible = inside & (budgets <= np.maximum(full, limits.min_budget)[:, None])
        # From the full budget on all budgets read the same: then the default stays.
        possible &= (budgets < full[:, None]) | (default < full[:, None])
        possible[:, place] = True
        return cls(
            budgets=budgets,
            default=place,
            forward_ms=forward,
            backward_ms=backward,
            rest_ms=np.array([unit.latency.total_ms for unit in units]) - model.layers * at_default,
            coverage=step.coverage.of_units(model.layers, segments, budgets),
            possible=possible,
            tokens=np.array([unit.tokens for unit in units], dtype=np.float64),
        )

    @property
    def layers(self) -> int:
        return int(self.coverage.shape[1])

    @cached_property
    def attention_ms(self) -> Floats:
        """[units, choices] forward and backward."""
        return self.forward_ms + self.backward_ms

    @cached_property
    def change(self) -> Floats:
        """[units, layers, choices] coverage less that of the default budget."""
        return self.coverage - self.coverage[:, :, self.default, None]

    def attention_of(self, chosen: Ints) -> Floats:
        """[units] ms of all attention layers at the chosen places [units, layers]."""
        total: Floats = np.take_along_axis(self.attention_ms, chosen, 1).sum(1)
        return total

    def worth_of(self, chosen: Ints) -> float:
        """Coverage x tokens, summed over units and layers, at the chosen places [units, layers]."""
        covered = np.take_along_axis(self.coverage, chosen[:, :, None], 2)[:, :, 0]
        return float((covered.sum(1) * self.tokens).sum())

    def defaults(self) -> Ints:
        """[units, layers] places of the default budget."""
        return np.full(self.coverage.shape[:2], self.default)


def attention_ms(step: TuningStep, budgets: Ints) -> Floats:
    """[2, units, len(budgets)] ms of one attention layer of each unit: forward and backward, as in `Choices`."""
    units = [unit.segments for unit in step.units for _ in budgets]
    terms = step.model.many_terms(units, np.tile(budgets, len(step.units))[:, None])  # as if there were one layer
    router, attend = (terms[TERMS.index(name)].reshape(2, -1, len(budgets)) for name in ("router", "attend"))
    again = np.array([unit.recompute for unit in step.units])[:, None]
    found = router + attend
    found[1] += np.where(again, attend[0], 0.0)
    factors = np.array([step.model.rank_factor(rank) for rank in range(len(step.ranks))])
    slowed: Floats = found * factors[step.rank_of][:, None]
    return slowed


def with_budgets(step: TuningStep, chosen: UnitBudgets) -> Ranks:
    """The step's micro-batches with other budgets, and the times that follow."""
    return timed(
        [[replace(unit, budgets=budgets) for unit, budgets in zip(*row)] for row in zip(step.ranks, chosen)], step.model
    )


def tuned(step: TuningStep, tuning: Tuning, timing: Timing) -> Ranks:
    """The step's micro-batches as `tuning` wants them: predicted times are those of the budgets that it expects, also
    where units find their budgets while they run."""
    if timing == "planned":
        return with_budgets(step, tuning(step))
    expected, wishes, follow = tuning.online(step)
    ranks = with_budgets(step, expected)
    return tuple(
        tuple(replace(unit, budgets=wish, online=how) for unit, wish, how in zip(*rank, strict=True))
        for rank in zip(ranks, wishes, follow, strict=True)
    )


def _worth_trying(lowest: int, highest: int) -> Ints:
    found = [*range(lowest, min(highest, EVERY) + 1)]
    k = max(lowest, EVERY + 1)
    while k < highest:
        found.append(k)
        k += max(1, k // 12)
    return np.array([*found, highest] if highest >= lowest else found, dtype=np.int64)
