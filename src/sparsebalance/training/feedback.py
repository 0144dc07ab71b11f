"""What earlier steps taught, for planning later ones: coverage curves, and how far the latency table is off.

In: plans with what was measured under them, the same on every rank. Out: `Feedback`, frozen, which together with
the step number is all that a plan depends on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from sparsebalance.planning.correction import CorrectedModel, Correction, Observation
from sparsebalance.planning.coverage import CoverageCurves, CoverageEstimator
from sparsebalance.planning.latency import LatencyModel
from sparsebalance.planning.plan import MicroBatch, StepPlan
from sparsebalance.training.engine import Probes, UnitTime


@dataclass(frozen=True)
class Feedback:
    """Attributes:
    curves: coverage over budget, as measured so far.
    correction: factors of the latency table's terms and of the ranks.
    """

    curves: CoverageCurves
    correction: Correction

    def state_dict(self) -> dict[str, Any]:
        return {"curves": self.curves.state_dict(), "correction": self.correction.state_dict()}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        return cls(CoverageCurves.from_state_dict(state["curves"]), Correction.from_state_dict(state["correction"]))


class Learner:
    """Collects measurements step by step; every rank feeds it the same and so keeps the same state."""

    def __init__(self, model: LatencyModel, correction: Correction, correcting: bool) -> None:
        """Args:
        model: uncorrected.
        correction: to start from.
        correcting: whether measured times change it; where they may not, all factors stay 1.
        """
        self.model = model
        self._estimator = CoverageEstimator(model.block_size)
        self._correction = correction if correcting else Correction((1.0,) * len(correction.ranks))
        self._correcting = correcting

    def feedback(self) -> Feedback:
        return Feedback(self._estimator.curves(), self._correction)

    def corrected(self, feedback: Feedback) -> LatencyModel:
        """The model that a plan with this feedback is made by."""
        return CorrectedModel(self.model, feedback.correction)

    def learn_coverage(self, plan: StepPlan, probes: Probes) -> None:
        """In an order that is the same on every rank."""
        lengths = {s.sample: s.sample_length for unit in plan.micro_batches for s in unit.segments}
        for (sample, layer), probe in sorted(probes.items()):
            self._estimator.update(layer, lengths[sample], probe.router)

    def learn_times(self, step: Sequence[Sequence[tuple[MicroBatch, UnitTime]]]) -> None:
        """Args:
        step: per rank, its micro-batches and what they took.
        """
        if self._correcting:
            self._correction = self._correction.updated(
                [
                    [
                        Observation(self.model.terms(unit.segments, unit.budgets).total_ms(), time.terms)
                        for unit, time in units
                        if unit.segments
                    ]
                    for units in step
                ]
            )

    def state_dict(self) -> dict[str, Any]:
        return {"estimator": self._estimator.state_dict(), "correction": self._correction.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._estimator.load_state_dict(state["estimator"])
        self._correction = Correction.from_state_dict(state["correction"])
