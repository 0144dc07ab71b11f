"""Online correction: measured times of a step correct the latency model, by term and by rank.

In: predicted and measured terms of every micro-batch of a step. Out: factors, and a latency model that applies
them, so that a machine that got slower is seen, and a slow rank is given less work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from sparsebalance.planning.errors import InputError
from sparsebalance.planning.latency import NOTHING, TERMS, Floats, FromTerms, Ints, LatencyModel, Terms
from sparsebalance.planning.plan import Segment

RATE = 0.3  # weight of the newest step: a rank that turns 1.5x slower is known within 4 % after 7 steps
LARGEST_CHANGE = math.log(4)  # of a factor in one step, before RATE; a suspended process is not a new machine


@dataclass(frozen=True, slots=True)
class Observation:
    """One micro-batch: milliseconds by term as the uncorrected model predicts them, and as measured."""

    predicted: Mapping[str, float]
    measured: Mapping[str, float]


@dataclass(frozen=True)
class Correction:
    """Measured time is modelled as rank factor x sum over terms of term factor x predicted milliseconds.

    Every step, each factor moves by `RATE` towards what the step says, in logarithms: an exponential moving
    average of medians over micro-batches weighted by time, which one disturbed micro-batch does not move.

    Attributes:
        terms: factor of each of `TERMS`.
        ranks: factor of each data-parallel rank, their geometric mean 1.
    """

    ranks: tuple[float, ...]
    terms: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(TERMS, 1.0))

    def __post_init__(self) -> None:
        for value in (*self.ranks, *self.terms.values()):
            if not (math.isfinite(value) and value > 0):
                raise InputError(f"a correction factor is {value}, but factors are finite and above 0")

    def on_ranks(self, count: int) -> Correction:
        """For a run that goes on with another number of ranks: other processes, of which nothing is known."""
        return self if len(self.ranks) == count else replace(self, ranks=(1.0,) * count)

    def updated(self, step: Sequence[Sequence[Observation]]) -> Correction:
        """The correction after one more step.

        Args:
            step: per rank, its micro-batches; empty ones may be left out, and a rank without any keeps its factor.

        Raises:
            InputError: a measured time that is negative or not finite.
        """
        if any(
            not (math.isfinite(ms) and ms >= 0) for units in step for unit in units for ms in unit.measured.values()
        ):
            raise InputError("a measured time is negative or not finite; the clock or the record is broken")
        ranks = [self._rank(factor, units) for factor, units in zip(self.ranks, step, strict=True)]
        mean = math.exp(sum(map(math.log, ranks)) / len(ranks))
        everything = [(self.ranks[rank], unit) for rank, units in enumerate(step) for unit in units]
        terms = {name: self._term(name, factor, everything) for name, factor in self.terms.items()}
        return Correction(tuple(factor / mean for factor in ranks), terms)

    def _rank(self, factor: float, units: Sequence[Observation]) -> float:
        expected = [sum(self.terms[name] * unit.predicted[name] for name in self.terms) for unit in units]
        measured = [sum(unit.measured[name] for name in self.terms) for unit in units]
        return _moved(factor, measured, expected)

    def _term(self, name: str, factor: float, units: Sequence[tuple[float, Observation]]) -> float:
        expected = [rank * unit.predicted[name] for rank, unit in units]
        return _moved(factor, [unit.measured[name] for _, unit in units], expected)

    def state_dict(self) -> dict[str, Any]:
        """JSON-compatible."""
        return {"ranks": list(self.ranks), "terms": dict(self.terms)}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        return cls(tuple(state["ranks"]), dict(state["terms"]))


def _moved(factor: float, measured: Sequence[float], expected: Sequence[float]) -> float:
    """`factor` moved by RATE towards the median of measured / expected, in logarithms."""
    pairs = [(m / e, e) for m, e in zip(measured, expected) if e > 0 and m > 0]
    if not pairs:
        return factor
    change = math.log(_weighted_median(pairs) / factor)
    return factor * math.exp(RATE * min(max(change, -LARGEST_CHANGE), LARGEST_CHANGE))


def _weighted_median(pairs: Sequence[tuple[float, float]]) -> float:
    """Of (value, weight) pairs: the value at half of the weight, between two values their geometric mean."""
    ordered = sorted(pairs)
    values = np.log([value for value, _ in ordered])
    weights = np.array([weight for _, weight in ordered])
    centres = (np.cumsum(weights) - weights / 2) / weights.sum()
    return float(np.exp(np.interp(0.5, centres, values)))


@dataclass(frozen=True)
class CorrectedModel(FromTerms):
    """`base` with the factors of `correction` applied; rank factors are told by `rank_factor`."""

    base: LatencyModel
    correction: Correction

    @property
    def block_size(self) -> int:
        return self.base.block_size

    @property
    def layers(self) -> int:
        return self.base.layers

    def terms(self, segments: Sequence[Segment], budgets: Sequence[int]) -> Terms:
        if not segments:
            return NOTHING
        found = self.base.terms(segments, budgets)
        return Terms(*(getattr(found, name).scaled(self.correction.terms[name]) for name in TERMS))

    def many_terms(self, units: Sequence[Sequence[Segment]], budgets: Ints) -> Floats:
        factors = np.array([self.correction.terms[name] for name in TERMS])
        corrected: Floats = self.base.many_terms(units, budgets) * factors[:, None, None]
        return corrected

    def layer_attention(self, segments: Sequence[Segment], budgets: Sequence[int]) -> Floats:
        router, attend = self.correction.terms["router"], self.correction.terms["attend"]
        corrected: Floats = self.base.layer_attention(segments, budgets) * np.array([[router], [attend], [attend]])
        return corrected

    def rank_factor(self, rank: int) -> float:
        return self.correction.ranks[rank]
