"""A step plan as pipelines: what every unit costs on every stage, and the schedule that a stage follows.

In: units per rank, a latency model, the topology, optionally a memory model. Out: `Pipeline`s and their simulated
`Timeline`. Layers are shared out evenly over the stages, or by time (`layers_by_time`); the head runs on the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import numpy as np

from sparsebalance.planning.errors import InputError
from sparsebalance.planning.latency import TERMS, Floats, LatencyModel
from sparsebalance.planning.list_schedule import zero_bubble
from sparsebalance.planning.memory import MemoryModel, StageLayers
from sparsebalance.planning.plan import MicroBatch, Topology, chain_lengths
from sparsebalance.planning.schedule import Schedule, gpipe, interleaved, one_forward_one_backward
from sparsebalance.planning.simulator import Network, Pipeline, StageCosts, simulate
from sparsebalance.planning.timeline import Timeline

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "auto"]
VIRTUAL_STAGES = 2  # of each worker under the interleaved schedule


@dataclass(frozen=True)
class PipelineModel:
    """Everything besides time per unit that the simulated step depends on.

    Attributes:
        schedule: what each stage's action list is made by; "auto" takes for every rank and step what is simulated
            faster, "1f1b" or "zero_bubble".
        network: transfers between stages, and the gradient all-reduce.
        memory: sizes of activations; None leaves memory out.
        layers: of each stage; None shares them out evenly.
    """

    schedule: ScheduleName = "1f1b"
    network: Network = field(default_factory=Network)
    memory: MemoryModel | None = None
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.schedule not in get_args(ScheduleName):
            raise InputError(f"schedule is {self.schedule!r}; choose one of {', '.join(get_args(ScheduleName))}")

    def stages(self, topology: Topology) -> int:
        """Stages of the model, several on one worker under the interleaved schedule."""
        return topology.pp * (VIRTUAL_STAGES if self.schedule == "interleaved" and topology.pp > 1 else 1)

    def split(self, layers: int, topology: Topology) -> tuple[StageLayers, ...]:
        """Of a model with so many layers.

        Raises:
            InputError: more stages than layers, or stages that were cut for another model or topology.
        """
        count = self.stages(topology)
        if self.layers is None:
            return split_layers(layers, count)
        if sum(self.layers) != layers or len(self.layers) != count:
            raise InputError(
                f"stages of {list(self.layers)} layers do not fit a model of {layers} on {count} stages; cut it again"
            )
        return tuple(StageLayers(own, s == 0, s == count - 1) for s, own in enumerate(self.layers))


def split_layers(layers: int, stages: int) -> tuple[StageLayers, ...]:
    """Layers shared out evenly, the earlier stages taking one more; embedding first, head last.

    Raises:
        InputError: more stages than layers.
    """
    if stages > layers:
        raise InputError(f"{stages} pipeline stages for {layers} layers; a stage needs at least one layer")
    whole, rest = divmod(layers, stages)
    return tuple(StageLayers(whole + (s < rest), s == 0, s == stages - 1) for s in range(stages))


def layers_by_time(units: Sequence[MicroBatch], model: LatencyModel, stages: int) -> tuple[int, ...]:
    """Layers of each stage such that the slowest takes least time for these units, the head counted where it runs.

    All layers take the same time; the embedding's is nothing beside a layer's.

    Raises:
        InputError: more stages than layers.
    """
    split_layers(model.layers, stages)  # checks
    terms = model.many_terms([unit.segments for unit in units], np.array([unit.budgets for unit in units])).sum((1, 2))
    head_ms = float(terms[TERMS.index("head")])
    layer_ms = (float(terms.sum()) - head_ms) / model.layers
    if stages == 1:
        return (model.layers,)

    def slowest(last: int) -> float:
        return max(layer_ms * last + head_ms, layer_ms * -(-(model.layers - last) // (stages - 1)))

    # From an even share down: among equals the one that leaves the other stages least.
    last = min(range(-(-model.layers // stages), 0, -1), key=slowest)
    return (*(stage.layers for stage in split_layers(model.layers - last, stages - 1)), last)


def simulate_plan(
    ranks: Sequence[Sequence[MicroBatch]], model: LatencyModel, topology: Topology, pipeline: PipelineModel
) -> Timeline:
    """The step's timeline.

    Raises:
        InputError: more stages than layers; or chunked samples under the interleaved schedule.
    """
    return simulate(rank_pipelines(ranks, model, topology, pipeline), pipeline.network)


def rank_pipelines(
    ranks: Sequence[Sequence[MicroBatch]], model: LatencyModel, topology: Topology, pipeline: PipelineModel
) -> list[Pipeline]:
    """[dp], what `simulate_plan` simulates.

    Raises:
        InputError: see `simulate_plan`.
    """
    stages = pipeline.split(model.layers, topology)
    return [_one_rank(units, model, model.rank_factor(rank), stages, pipeline) for rank, units in enumerate(ranks)]


def simulate_rank(
    rank: int, units: Sequence[MicroBatch], model: LatencyModel, topology: Topology, pipeline: PipelineModel
) -> float:
    """Milliseconds until one rank's last action ends, as in the whole plan, where it waits for no other rank."""
    stages = pipeline.split(model.layers, topology)
    alone = _one_rank(units, model, model.rank_factor(rank), stages, pipeline)
    return float(simulate([alone], pipeline.network).rank_ms[0])


def _one_rank(
    units: Sequence[MicroBatch],
    model: LatencyModel,
    factor: float,
    stages: tuple[StageLayers, ...],
    pipeline: PipelineModel,
) -> Pipeline:
    chains = chain_lengths([unit.segments for unit in units])
    costs = stage_costs(units, chains, model, factor, stages, pipeline.memory)
    memory = pipeline.memory
    tokens = np.array([unit.tokens for unit in units], dtype=np.float64)
    unit_mb = tokens * (memory.decoder.hidden * memory.dtype_bytes / 1e6 / (memory.tp * memory.sp) if memory else 0.0)
    network = pipeline.network
    transfer_ms = (network.latency_ms + unit_mb * network.ms_per_mb).tolist()

    def made(name: ScheduleName) -> Pipeline:
        return Pipeline(_schedule(name, chains, costs, transfer_ms), chains, costs, unit_mb)

    if pipeline.schedule != "auto":
        return made(pipeline.schedule)
    # Greedy split backwards can lose where input and weight gradients differ much.
    both = [made(name) for name in ("1f1b", "zero_bubble")] if costs.stages > 1 else [made("1f1b")]
    return min(both, key=lambda one: float(simulate([one], network).rank_ms[0]))


def _schedule(name: ScheduleName, chains: tuple[int, ...], costs: StageCosts, transfer_ms: list[float]) -> Schedule:
    if name == "zero_bubble" and costs.stages > 1:
        return zero_bubble(chains, costs, transfer_ms)
    if name == "gpipe":
        return gpipe(chains, costs.stages)
    if name == "interleaved" and costs.stages > 1:
        if max(chains) > 1:
            raise InputError("the interleaved schedule does not run samples in chunks; choose 1f1b or zero_bubble")
        return interleaved(sum(chains), costs.stages // VIRTUAL_STAGES, VIRTUAL_STAGES)
    return one_forward_one_backward(chains, costs.stages)


def stage_costs(
    units: Sequence[MicroBatch],
    chains: Sequence[int],
    model: LatencyModel,
    factor: float,
    stages: Sequence[StageLayers],
    memory: MemoryModel | None = None,
) -> StageCosts:
    """Milliseconds and megabytes of every unit on every stage.

    Half of the linear layers' and the head's backward is taken as weight gradients (of the two products in the
    backward of a matrix product, one is); attention has no weights of its own.

    A recomputed chunk keeps no activations from its forward, whose head is left out and which runs again in its
    backward; the routing does not.

    Args:
        chains: see `chain_lengths`. factor: how much slower this rank is than the model says.
    """
    terms = model.many_terms([unit.segments for unit in units], np.array([unit.budgets for unit in units])) * factor
    recompute = np.array([unit.recompute for unit in units])
    forward, backward = (dict(zip(TERMS, terms[:, side])) for side in (0, 1))
    layers = np.array([stage.layers for stage in stages]) / model.layers
    linear = np.repeat(layers[:, None], len(units), axis=1)
    attention = _attention_shares(units, model, stages, linear)
    head = np.array([[float(stage.head)] for stage in stages])
    weight_ms = (linear * backward["linear"] + head * backward["head"]) / 2
    head_ms = head * forward["head"]
    again_ms = linear * forward["linear"] + attention * forward["attend"] + head_ms
    costs = StageCosts(
        forward_ms=linear * forward["linear"]
        + attention * (forward["router"] + forward["attend"])
        + np.where(recompute, 0.0, head_ms),
        input_ms=weight_ms + attention * (backward["router"] + backward["attend"]) + np.where(recompute, again_ms, 0.0),
        weight_ms=weight_ms,
    )
    if memory is None:
        return costs
    tokens = np.array([unit.tokens for unit in units], dtype=np.float64)
    chunked = np.repeat([length > 1 for length in chains], chains)
    return replace(
        costs,
        activation_mb=np.array([memory.activations_mb(1.0, s.layers, s.head) for s in stages])[:, None]
        * np.where(recompute, 0.0, tokens),
        deferred_mb=np.array([memory.deferred_mb(1.0, s.layers) for s in stages])[:, None] * tokens,
        state_mb=np.array([memory.state_mb(1.0, s.layers) for s in stages])[:, None] * np.where(chunked, tokens, 0.0),
    )


def _attention_shares(
    units: Sequence[MicroBatch], model: LatencyModel, stages: Sequence[StageLayers], linear: Floats
) -> Floats:
    """[stages, units]: the part of a unit's attention that a stage runs; by layers where all have one budget."""
    shares = linear.copy()
    mixed = [place for place, unit in enumerate(units) if unit.segments and len(set(unit.budgets)) > 1]
    if len(stages) == 1 or not mixed:
        return shares
    budgets = np.array([units[place].budgets for place in mixed])
    distinct, places = np.unique(budgets, return_inverse=True)
    asked = np.zeros((len(mixed), len(distinct)), dtype=bool)
    rows = np.arange(len(mixed))[:, None]
    asked[rows, places.reshape(budgets.shape)] = True
    unit, budget = np.nonzero(asked)
    terms = model.many_terms([units[mixed[one]].segments for one in unit], distinct[budget][:, None])  # of one layer
    ms = np.zeros(asked.shape)
    ms[asked] = (terms[TERMS.index("router")] + terms[TERMS.index("attend")]).sum(0)
    by_layer = ms[rows, places.reshape(budgets.shape)]
    edges = np.cumsum([0, *(stage.layers for stage in stages)])[:-1]
    shares[:, mixed] = (np.add.reduceat(by_layer, edges, axis=1) / by_layer.sum(1, keepdims=True)).T
    return shares
