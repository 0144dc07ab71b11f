"""The core as one pure call: `plan_step(samples, latency_model, topology, policy) -> StepPlan`.

Every rank calls it on the same input and gets the same plan, so planning needs no communication.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import get_args

from sparsebalance.planning.anchor import Anchor
from sparsebalance.planning.baselines import BASELINES, DenseChunks
from sparsebalance.planning.batching import Batching, SparsityAware
from sparsebalance.planning.budgets import Fixed, Timing, Tuning, TuningStep, tuned
from sparsebalance.planning.coverage import CoverageCurves
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.expected import ExpectedBudgets, LayerBudgets
from sparsebalance.planning.latency import LatencyModel
from sparsebalance.planning.micro_batches import micro_batches
from sparsebalance.planning.pipeline import PipelineModel, simulate_plan
from sparsebalance.planning.plan import Sample, StepPlan, Topology
from sparsebalance.planning.plan_order import order_by_simulation
from sparsebalance.planning.slack import Slack, SlackAim
from sparsebalance.planning.timeline import Timeline
from sparsebalance.planning.waterfill import Waterfill


@dataclass(frozen=True)
class Policy:
    """How a step is planned.

    Attributes:
        name: as in reports and result files.
        batching: which samples share a micro-batch and where it runs.
        budget: default attention budget in blocks, own block included.
        token_cap: most tokens of one micro-batch.
        tuning: which budgets the units get.
        keep_chunks: chunks of a sample whose activations are kept at once, the last ones; earlier ones run forward
            again before their backward, so that memory does not grow with the sample. None keeps all.
        timing: when budgets are tuned. "planned": with the plan, from the estimator's curves; costs no run time.
            "online": targets come with the plan, and each layer follows its own routing scores while it runs.
    """

    name: str
    batching: Batching
    budget: int
    token_cap: int
    tuning: Tuning = field(default_factory=Fixed)
    keep_chunks: int | None = None
    timing: Timing = "planned"

    def __post_init__(self) -> None:
        if self.keep_chunks is not None and self.keep_chunks < 1:
            raise InputError(f"keep_chunks is {self.keep_chunks}, but at least 1 chunk is alive while it runs")
        if self.budget < 1:
            raise InputError(f"budget is {self.budget}, but the own block is always read: at least 1")
        if self.timing not in get_args(Timing):
            raise InputError(f"timing is {self.timing!r}; choose one of {', '.join(get_args(Timing))}")
        if self.token_cap < 1:
            raise InputError(f"token_cap is {self.token_cap}, but a micro-batch holds at least 1 token")

    @property
    def unit_size(self) -> int | None:
        """Tokens of a unit of a policy that cuts and packs to one; None where samples stay whole."""
        return self.batching.unit_size if isinstance(self.batching, SparsityAware | DenseChunks) else None

    @property
    def tuned(self) -> bool:
        return not isinstance(self.tuning, Fixed)


OURS: tuple[str, ...] = ("sab", "dst", "sab_dst")
CUTTING: tuple[str, ...] = ("dense_chunks", "sab", "sab_dst")
"""Policies with a unit size: they run longer samples in chunks."""
TUNINGS: tuple[str, ...] = ("anchor", "slack", "waterfill", "slack_waterfill")
"""How budgets can be tuned, on top of any batching: `sab+slack`, `kk_tokens+anchor`."""
_SHORT = {"dst": "random+anchor", "sab_dst": "sab+slack_waterfill"}


def parts(name: str) -> tuple[str, str | None]:
    """Names of a policy's batching and of its tuning, if it tunes: `sab_dst` -> ("sab", "slack_waterfill").

    Raises:
        InputError: no policy has that name.
    """
    batching, plus, tuning = _SHORT.get(name, name).partition("+")
    if batching not in (*BASELINES, "sab") or (plus and tuning not in TUNINGS):
        raise InputError(
            f"no policy is called {name!r}; choose from {', '.join((*BASELINES, *OURS))}, or join a batching rule and "
            f"one of {', '.join(TUNINGS)}, as in sab+slack"
        )
    return batching, tuning or None


def is_ours(name: str) -> bool:
    """Whether a policy by this name is no baseline."""
    return name in OURS or "+" in name


def cuts(name: str) -> bool:
    """Whether a policy by this name has a unit size."""
    return parts(name)[0] in CUTTING


def tunes(name: str) -> bool:
    """Whether a policy by this name changes what attention reads."""
    return parts(name)[1] is not None


def named_policy(
    name: str,
    *,
    budget: int,
    token_cap: int,
    anchor: Anchor | None = None,
    aim: SlackAim = "balance",
    timing: Timing = "planned",
    unit_size: int | None = None,
    keep_chunks: int | None = None,
) -> Policy:
    """A policy by the name that reports use: a baseline, `sab`, `dst` (random order + anchor), `sab_dst` (the
    recommended tuning), or any batching rule and tuning as in `sab+slack`.

    Args:
        anchor: the published rule with its limits, which hold for every tuning; mean and 0.1 by default. On `sab` it
            compares ranks, because units are unequal by design.
        aim: see `Slack`; a waterfill alone saves time at equal coverage, unless its aim is to hold the time.
        timing: see `Policy`.
        unit_size: tokens of a unit: `sab`, `sab_dst` and `dense_chunks` cut longer samples in chunks and pack
            shorter ones up to it; None leaves samples whole.
        keep_chunks: see `Policy`.

    Raises:
        InputError: no policy has that name.
    """
    batching_name, tuning_name = parts(name)
    batching: Batching = BASELINES.get(batching_name, SparsityAware(unit_size))
    if batching_name == "dense_chunks":
        batching = DenseChunks(unit_size)
    tuning = _tuning(tuning_name, anchor or Anchor(), aim, by_rank=batching_name in CUTTING)
    return Policy(name, batching, budget, token_cap, tuning, keep_chunks, timing)


def _tuning(name: str | None, anchor: Anchor, aim: SlackAim, by_rank: bool) -> Tuning:
    if name is None:
        return Fixed()
    if name == "anchor":
        return replace(anchor, scope="rank") if by_rank else anchor
    limits = {"threshold": anchor.threshold, "min_budget": anchor.min_budget, "max_budget": anchor.max_budget}
    if name == "waterfill":
        return Waterfill(aim="coverage" if aim == "hold" else "time", **limits)  # type: ignore[arg-type]
    return Slack(aim=aim, share=name == "slack_waterfill", **limits)  # type: ignore[arg-type]


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
    pipeline = pipeline or PipelineModel()
    default = (policy.budget,) * latency_model.layers
    weighed = ExpectedBudgets(default, expected or {})
    placement = policy.batching(samples, latency_model, topology, weighed, policy.token_cap)
    budgets = [[default] * len(units) for units in placement]
    ranks = micro_batches(placement, budgets, latency_model, policy.keep_chunks)
    if isinstance(policy.batching, SparsityAware):
        ranks = order_by_simulation(ranks, latency_model, topology, pipeline)
    if policy.tuned:
        step = TuningStep(ranks, latency_model, topology, pipeline, policy.budget, coverage)
        ranks = tuned(step, policy.tuning, policy.timing)
    timeline = simulate_plan(ranks, latency_model, topology, pipeline)
    plan = StepPlan(policy.name, topology, latency_model.block_size, ranks, timeline.step_ms)
    return plan, timeline
