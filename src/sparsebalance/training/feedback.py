"""What earlier steps taught, for planning later ones: coverage curves, budgets given, how far the table is off.

In: plans with what was measured under them, the same on every rank. Out: `Feedback`, frozen, which together with
the step number is all that a plan and its tuning online depend on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from sparsebalance.attention.probe import CoverageProbe
from sparsebalance.planning.calibration import UNCALIBRATED, Calibration, Calibrator
from sparsebalance.planning.correction import CorrectedModel, Correction, Observation
from sparsebalance.planning.coverage import CoverageCurves, CoverageEstimator
from sparsebalance.planning.expected import BudgetEstimator, GivenBudgets, LayerBudgets
from sparsebalance.planning.latency import LatencyModel, unit_terms
from sparsebalance.planning.plan import MicroBatch, Sample, StepPlan
from sparsebalance.training.results import Probes, UnitTime


@dataclass(frozen=True)
class Feedback:
    """Attributes:
    curves: coverage over budget, as measured so far.
    correction: factors of the latency table's terms and of the ranks.
    budgets: policy name -> what its plans gave so far; policies place and tune differently, so each learns alone.
    calibration: from coverage as estimated while a step runs to measured coverage.
    """

    curves: CoverageCurves
    correction: Correction
    budgets: Mapping[str, GivenBudgets] = field(default_factory=dict)
    calibration: Calibration = UNCALIBRATED

    def expected(self, policy: str, samples: Sequence[Sample]) -> dict[int, LayerBudgets]:
        """Sample id -> blocks per layer that the policy is expected to give it, where anything is known of that."""
        given = self.budgets.get(policy)
        return {} if given is None else given.expected(samples)

    def on_ranks(self, count: int) -> Self:
        """For a run that goes on with `count` ranks."""
        return replace(self, correction=self.correction.on_ranks(count))

    def state_dict(self) -> dict[str, Any]:
        return {
            "curves": self.curves.state_dict(),
            "correction": self.correction.state_dict(),
            "budgets": {policy: given.state_dict() for policy, given in self.budgets.items()},
            "calibration": self.calibration.state_dict(),
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        return cls(
            CoverageCurves.from_state_dict(state["curves"]),
            Correction.from_state_dict(state["correction"]),
            {policy: GivenBudgets.from_state_dict(given) for policy, given in state["budgets"].items()},
            Calibration.from_state_dict(state["calibration"]),
        )


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
        self._calibrator = Calibrator()
        self._budgets: dict[str, BudgetEstimator] = {}
        self._correction = correction if correcting else Correction((1.0,) * len(correction.ranks))
        self._correcting = correcting

    def feedback(self) -> Feedback:
        budgets = {policy: estimator.given() for policy, estimator in self._budgets.items()}
        return Feedback(self._estimator.curves(), self._correction, budgets, self._calibrator.calibration())

    def corrected(self, feedback: Feedback) -> LatencyModel:
        """The model that a plan with this feedback is made by."""
        return CorrectedModel(self.model, feedback.correction)

    def learn_coverage(self, plan: StepPlan, probes: Probes) -> None:
        """Coverage curves, and how far estimates are off; in an order that is the same on every rank."""
        lengths = {s.sample: s.sample_length for unit in plan.micro_batches for s in unit.segments}
        by_sample: dict[int, dict[int, tuple[float, ...]]] = {}
        by_layer: dict[int, list[tuple[CoverageProbe, int]]] = {}
        for sample, layer in sorted(probes):
            probe = probes[sample, layer]
            by_sample.setdefault(sample, {})[layer] = probe.router
            by_layer.setdefault(layer, []).append((probe, lengths[sample]))
        for sample, layers in by_sample.items():
            self._estimator.update_sample(sample, lengths[sample], layers)
        for layer, measured in by_layer.items():
            self._calibrator.update(
                layer,
                estimated=np.array([probe.estimated for probe, _ in measured]),
                router=np.array([probe.router for probe, _ in measured]),
                tokens=np.array([tokens for _, tokens in measured], dtype=np.float64),
            )

    def learn_budgets(self, plan: StepPlan) -> None:
        """What a tuned policy gave in a step; of one whose budgets are fixed there is nothing to learn.

        Args:
            plan: with the budgets that were really used, see `sparsebalance.training.results.as_run`.
        """
        if plan.policy not in self._budgets:
            self._budgets[plan.policy] = BudgetEstimator(self.model.block_size)
        self._budgets[plan.policy].update(plan)

    def learn_times(self, step: Sequence[Sequence[tuple[MicroBatch, UnitTime]]]) -> None:
        """Args:
        step: per rank, its micro-batches and what they took; predicted at the budgets that they really used.
        """
        if self._correcting:
            self._correction = self._correction.updated(
                [
                    [
                        Observation(unit_terms(self.model, replace(unit, budgets=time.budgets)).total_ms(), time.terms)
                        for unit, time in units
                        if unit.segments
                    ]
                    for units in step
                ]
            )

    def state_dict(self) -> dict[str, Any]:
        return {
            "estimator": self._estimator.state_dict(),
            "correction": self._correction.state_dict(),
            "calibration": self._calibrator.state_dict(),
            "budgets": {policy: estimator.state_dict() for policy, estimator in self._budgets.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises:
        InputError: the state was saved under another block size.
        """
        self._estimator.load_state_dict(state["estimator"])
        self._calibrator.load_state_dict(state["calibration"])
        self._correction = Correction.from_state_dict(state["correction"]).on_ranks(len(self._correction.ranks))
        self._budgets = {}
        for policy, saved in state["budgets"].items():
            self._budgets[policy] = BudgetEstimator(self.model.block_size)
            self._budgets[policy].load_state_dict(saved)
