"""The core as one pure call: `plan_step(samples, latency_model, topology, policy) -> StepPlan`.

Every rank calls it on the same input and gets the same plan, so planning needs no communication.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from sparsebalance.planning.baselines import BASELINES, DenseChunks
from sparsebalance.planning.batching import Batching, Placement, SparsityAware, Unit
from sparsebalance.planning.budgets import Anchor, Fixed, Tuning, UnitBudgets
from sparsebalance.planning.coverage import CoverageCurves
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.expected import ExpectedBudgets, LayerBudgets
from sparsebalance.planning.latency import LatencyModel, recomputed_terms
from sparsebalance.planning.pipeline import PipelineModel, simulate_plan
from sparsebalance.planning.plan import Latency, MicroBatch, Sample, StepPlan, Topology, chain_lengths
from sparsebalance.planning.plan_order import Ranks, order_by_simulation
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
        keep_chunks: chunks of a sample whose activations are kept at once, the last ones; earlier ones run forward
            again before their backward, so that memory does not grow with the sample. None keeps all.
    """

    name: str
    batching: Batching
    budget: int
    token_cap: int
    tuning: Tuning = field(default_factory=Fixed)
    keep_chunks: int | None = None

    def __post_init__(self) -> None:
        if self.keep_chunks is not None and self.keep_chunks < 1:
            raise InputError(f"keep_chunks is {self.keep_chunks}, but at least 1 chunk is alive while it runs")
        if self.budget < 1:
            raise InputError(f"budget is {self.budget}, but the own block is always read: at least 1")
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


def named_policy(
    name: str,
    *,
    budget: int,
    token_cap: int,
    anchor: Anchor | None = None,
    unit_size: int | None = None,
    keep_chunks: int | None = None,
) -> Policy:
    """A policy by the name that reports use: a baseline, `sab`, `dst` (random order + anchor) or `sab_dst`.

    Args:
        anchor: of the tuned policies; the published recommendation (mean, threshold 0.1) by default.
            `sab_dst` compares ranks with it, because its units are unequal by design.
        unit_size: tokens of a unit: `sab`, `sab_dst` and `dense_chunks` cut longer samples in chunks and pack
            shorter ones up to it; None leaves samples whole.
        keep_chunks: see `Policy`.

    Raises:
        InputError: no policy has that name.
    """
    anchor = anchor or Anchor()
    known: dict[str, tuple[Batching, Tuning]] = {name: (rule, Fixed()) for name, rule in BASELINES.items()}
    known["dense_chunks"] = (DenseChunks(unit_size), Fixed())
    sab = SparsityAware(unit_size)
    known["sab"] = (sab, Fixed())
    known["dst"] = (BASELINES["random"], anchor)
    by_rank = replace(anchor, scope="rank")
    known["sab_dst"] = (sab, by_rank)
    if name not in known:
        raise InputError(f"no policy is called {name!r}; choose from {', '.join(known)}")
    batching, tuning = known[name]
    return Policy(name, batching, budget, token_cap, tuning, keep_chunks)


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
    ranks = _micro_batches(placement, budgets, latency_model, policy.keep_chunks)
    pipeline = pipeline or PipelineModel()
    if isinstance(policy.batching, SparsityAware):
        ranks = order_by_simulation(ranks, latency_model, topology, pipeline)
    timeline = simulate_plan(ranks, latency_model, topology, pipeline)
    plan = StepPlan(policy.name, topology, latency_model.block_size, ranks, timeline.step_ms)
    return plan, timeline


def _micro_batches(placement: Placement, budgets: UnitBudgets, model: LatencyModel, keep_chunks: int | None) -> Ranks:
    """Units with their budgets and predicted times."""
    units = [unit for rank in placement for unit in rank]
    again = [recomputed for rank in placement for recomputed in _recomputed(rank, keep_chunks)]
    layers = [unit_budgets for rank in budgets for unit_budgets in rank]
    terms = model.many_terms(units, np.array(layers))
    factors = np.repeat([model.rank_factor(rank) for rank in range(len(placement))], [len(rank) for rank in placement])
    forward, backward = (recomputed_terms(terms, np.array(again)).sum(0) * factors).tolist()
    made = iter(map(MicroBatch, units, layers, map(Latency, forward, backward), again))
    return tuple(tuple(itertools.islice(made, len(rank))) for rank in placement)


def _recomputed(units: Sequence[Unit], keep_chunks: int | None) -> list[bool]:
    """Per unit, whether it is a chunk with `keep_chunks` or more later ones of its sample."""
    if keep_chunks is None:
        return [False] * len(units)
    return [place < length - keep_chunks for length in chain_lengths(units) for place in range(length)]
