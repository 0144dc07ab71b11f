"""The core as one pure call: `plan_step(samples, latency_model, topology, policy) -> StepPlan`.

Every rank calls it on the same input and gets the same plan, so planning needs no communication.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from sparsebalance.planning.baselines import BASELINES
from sparsebalance.planning.batching import Batching, Placement, SparsityAware
from sparsebalance.planning.budgets import Anchor, Fixed, Tuning
from sparsebalance.planning.coverage import CoverageCurves
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.expected import ExpectedBudgets, LayerBudgets
from sparsebalance.planning.latency import LatencyModel
from sparsebalance.planning.pipeline import PipelineModel, simulate_plan
from sparsebalance.planning.plan import MicroBatch, Sample, StepPlan, Topology
from sparsebalance.planning.timeline import Timeline


@dataclass(frozen=True)
class Policy:
    """How a step is planned.

    Attributes:
        name: as in reports and result files.
        batching: which samples share a micro-batch and where it runs.
        budget: default attention budget in blocks, own block included.
        token_cap: most tokens of one micro-batch.
        tuning: which budgets the units get.
    """

    name: str
    batching: Batching
    budget: int
    token_cap: int
    tuning: Tuning = field(default_factory=Fixed)

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise InputError(f"budget is {self.budget}, but the own block is always read: at least 1")
        if self.token_cap < 1:
            raise InputError(f"token_cap is {self.token_cap}, but a micro-batch holds at least 1 token")

    @property
    def tuned(self) -> bool:
        return not isinstance(self.tuning, Fixed)


OURS: tuple[str, ...] = ("sab", "dst", "sab_dst")


def named_policy(
    name: str, *, budget: int, token_cap: int, anchor: Anchor | None = None, unit_size: int | None = None
) -> Policy:
    """A policy by the name that reports use: a baseline, `sab`, `dst` (random order + anchor) or `sab_dst`.

    Args:
        anchor: of the tuned policies; the published recommendation (mean, threshold 0.1) by default.
            `sab_dst` compares ranks with it, because its units are unequal by design.
        unit_size: tokens of our units: `sab` and `sab_dst` cut longer samples in chunks and pack shorter ones up
            to it; None leaves samples whole.

    Raises:
        InputError: no policy has that name.
    """
    anchor = anchor or Anchor()
    known: dict[str, tuple[Batching, Tuning]] = {name: (rule, Fixed()) for name, rule in BASELINES.items()}
    sab = SparsityAware(unit_size)
    known["sab"] = (sab, Fixed())
    known["dst"] = (BASELINES["random"], anchor)
    by_rank = replace(anchor, scope="rank")
    known["sab_dst"] = (sab, by_rank)
    if name not in known:
        raise InputError(f"no policy is called {name!r}; choose from {', '.join(known)}")
    batching, tuning = known[name]
    return Policy(name, batching, budget, token_cap, tuning)


def plan_step(
    samples: Sequence[Sample],
    latency_model: LatencyModel,
    topology: Topology,
    policy: Policy,
    coverage: CoverageCurves | None = None,
    pipeline: PipelineModel | None = None,
    expected: Mapping[int, LayerBudgets] | None = None,
) -> StepPlan:
    """Plan one step.

    Args:
        samples: the global batch, in data order.
        latency_model: predicts a micro-batch's milliseconds.
        topology: parallel degrees; one placement over dp, simulated over pp stages.
        policy: batching and tuning.
        coverage: measured curves for tuning; a prior where none are given.
        pipeline: schedule and network for the predicted step time; 1F1B and free communication by default.
        expected: sample id -> blocks per layer that it is expected to get, where an estimator knows it.

    Raises:
        InputError: no samples, two with the same id, one over the policy's token cap, or more stages than layers.
    """
    return plan_and_timeline(samples, latency_model, topology, policy, coverage, pipeline, expected)[0]


def plan_and_timeline(
    samples: Sequence[Sample],
    latency_model: LatencyModel,
    topology: Topology,
    policy: Policy,
    coverage: CoverageCurves | None = None,
    pipeline: PipelineModel | None = None,
    expected: Mapping[int, LayerBudgets] | None = None,
) -> tuple[StepPlan, Timeline]:
    """`plan_step`, with the simulated timeline that its step time comes from."""
    if len({sample.id for sample in samples}) != len(samples):
        raise InputError("two samples of the step share an id; ids must be unique within a step")
    coverage = coverage or CoverageCurves(latency_model.block_size, {})
    weighed = ExpectedBudgets((policy.budget,) * latency_model.layers, expected or {})
    placement: Placement = policy.batching(samples, latency_model, topology, weighed, policy.token_cap)
    budgets = policy.tuning(placement, latency_model, policy.budget, coverage)
    ranks = tuple(
        tuple(
            MicroBatch(unit, layers, latency_model.latency(unit, layers).scaled(latency_model.rank_factor(rank)))
            for unit, layers in zip(units, unit_budgets)
        )
        for rank, (units, unit_budgets) in enumerate(zip(placement, budgets))
    )
    timeline = simulate_plan(ranks, latency_model, topology, pipeline or PipelineModel())
    plan = StepPlan(policy.name, topology, latency_model.block_size, ranks, timeline.step_ms)
    return plan, timeline
