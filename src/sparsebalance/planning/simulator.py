"""Schedules + costs -> timeline of one step, by discrete-event simulation of all pipelines.

In: per data-parallel rank a `Pipeline` (its schedule and what each action costs), and the `Network`. Out: a
`Timeline`. Milliseconds and megabytes. An action starts when its worker is free and its input has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from sparsebalance.planning.errors import InputError
from sparsebalance.planning.imbalance import Imbalance, imbalance
from sparsebalance.planning.plan import Latency
from sparsebalance.planning.schedule import Program, Schedule, compile_schedule, one_forward_one_backward
from sparsebalance.planning.timeline import Run, Span, Timeline

__all__ = [
    "Imbalance",
    "Network",
    "Pipeline",
    "Span",
    "StageCosts",
    "Timeline",
    "imbalance",
    "simulate",
    "simulate_units",
]

Floats = NDArray[np.float64]

VECTOR_RANKS = 8  # from this many ranks with one schedule on, arrays over ranks are faster than plain lists


def _nothing() -> Floats:
    return np.zeros(0)


@dataclass(frozen=True, eq=False)
class StageCosts:
    """What the units of one rank cost on each stage of the model.

    Attributes:
        forward_ms, input_ms, weight_ms: [stages, units] float64; a whole backward takes input_ms + weight_ms.
        activation_mb: [stages, units] float64, held from the start of F to the end of B, or of I. Zeros if not given.
        state_mb: [stages, units] float64, keys and values of chunks. The sum over a chain is taken at once, from the
            forward of its first chunk to the end of that chunk's backward (of I where it is split). Zeros if not given.
        deferred_mb: [stages, units] float64, what I leaves for W: inputs of the linear layers and gradients of their
            outputs, held from the end of I to the end of W. Half of the activations if not given.

    Raises:
        InputError: shapes differ or are not [stages, units], or a value is negative or not finite.
    """

    forward_ms: Floats
    input_ms: Floats
    weight_ms: Floats
    activation_mb: Floats = field(default_factory=_nothing)
    state_mb: Floats = field(default_factory=_nothing)
    deferred_mb: Floats = field(default_factory=_nothing)

    def __post_init__(self) -> None:
        shape = np.shape(self.forward_ms)
        if len(shape) != 2 or 0 in shape:
            raise InputError(f"forward_ms has shape {shape}; it must be [stages, units] with at least one of each")
        for name in ("forward_ms", "input_ms", "weight_ms", "activation_mb", "state_mb", "deferred_mb"):
            values = np.asarray(getattr(self, name), dtype=np.float64)
            if name.endswith("_mb") and not values.size:
                unknown = self.activation_mb / 2 if name == "deferred_mb" else np.zeros(shape)
                object.__setattr__(self, name, unknown)
                continue
            if values.shape != shape:
                raise InputError(f"{name} has shape {values.shape}, but forward_ms has {shape}; both are per unit")
            _check_values(name, values)
            object.__setattr__(self, name, values)

    @property
    def stages(self) -> int:
        return int(self.forward_ms.shape[0])

    @property
    def units(self) -> int:
        return int(self.forward_ms.shape[1])

    def durations(self, program: Program) -> Floats:
        """[actions] float64 ms of a program's actions."""
        by_kind = np.stack([self.forward_ms, self.input_ms + self.weight_ms, self.input_ms, self.weight_ms])
        return by_kind[program.kinds, program.stage_of, program.units]


@dataclass(frozen=True, eq=False)
class Network:
    """What communication costs; nothing by default.

    Attributes:
        latency_ms, ms_per_mb: a unit's activations or gradients, `unit_mb` large, take latency_ms + unit_mb *
            ms_per_mb from one worker to another. Workers go on meanwhile. Stages on one worker exchange for free.
        all_reduce_ms: gradient all-reduce over the ranks, one value for every stage or [stages]. It needs the last
            gradient action of the stage on every rank.
        buckets: equal parts in which a stage's gradients are reduced one after another. Bucket i of n is ready when
            i/n of the stage's last gradient action is done on every rank; 1 means no overlap.

    Raises:
        InputError: a value is negative or not finite, or there is no bucket.
    """

    latency_ms: float = 0.0
    ms_per_mb: float = 0.0
    all_reduce_ms: float | Floats = 0.0
    buckets: int = 1

    def __post_init__(self) -> None:
        for name in ("latency_ms", "ms_per_mb", "all_reduce_ms"):
            _check_values(name, np.asarray(getattr(self, name), dtype=np.float64))
        if self.buckets < 1:
            raise InputError(f"buckets is {self.buckets}; the gradients are reduced in at least 1 part")


@dataclass(frozen=True, eq=False)
class Pipeline:
    """One data-parallel rank. A rank on slower hardware has larger costs.

    Attributes:
        schedule, chains: see `schedule.py`.
        costs: for all stages and the units of `chains`.
        unit_mb: [units] float64, size of what one stage sends to the next. Zeros if not given.
        program: the schedule compiled, where it is at hand already.

    Raises:
        InputError: the numbers of units differ, or a size is negative or not finite.
    """

    schedule: Schedule
    chains: tuple[int, ...]
    costs: StageCosts
    unit_mb: Floats = field(default_factory=_nothing)
    program: Program | None = None

    def compiled(self) -> Self:
        """The same with its program, for simulating one schedule under many costs.

        Raises:
            InputError: see `check_schedule`.
        """
        return replace(self, program=compile_schedule(self.schedule, self.chains, self.costs.stages))

    def __post_init__(self) -> None:
        units = self.costs.units
        if sum(self.chains) != units:
            raise InputError(f"the chains hold {sum(self.chains)} units, but there are costs of {units}")
        sizes = np.asarray(self.unit_mb, dtype=np.float64)
        sizes = sizes if sizes.size else np.zeros(units)
        if sizes.shape != (units,):
            raise InputError(f"unit_mb has shape {sizes.shape}, but there are {units} units; give one size each")
        _check_values("unit_mb", sizes)
        object.__setattr__(self, "unit_mb", sizes)


def _check_values(name: str, values: Floats) -> None:
    if values.size and not (values.min() >= 0 and values.max() < np.inf):  # written so that nan fails
        raise InputError(f"{name} lies between {values.min()} and {values.max()}; it must be finite and not negative")


def simulate(pipelines: Sequence[Pipeline], network: Network | None = None) -> Timeline:
    """Run every rank's schedule, then the gradient all-reduce of each stage.

    Args:
        pipelines: [dp]. Numbers of units and schedules may differ; stages and workers must agree.
        network: `Network()` if not given.

    Raises:
        InputError: no rank, ranks of different stages or workers, all_reduce_ms of another number of stages, or a
            schedule that does not fit its chains (see `check_schedule`).
    """
    network = network or Network()
    if not pipelines:
        raise InputError("simulation needs at least one rank, got none")
    sizes = {(len(pipeline.schedule), pipeline.costs.stages) for pipeline in pipelines}
    if len(sizes) > 1:
        raise InputError(f"ranks have different (workers, stages): {sorted(sizes)}; they must agree")
    workers, stages = sizes.pop()
    reduce_ms = np.asarray(network.all_reduce_ms, dtype=np.float64)
    if reduce_ms.shape not in ((), (stages,)):
        raise InputError(f"all_reduce_ms has shape {reduce_ms.shape}, but there are {stages} stages; give one each")
    reduce_ms = np.broadcast_to(reduce_ms, (stages,))

    runs: dict[int, Run] = {}
    busy = np.empty((len(pipelines), workers))
    first_ready, last_ready, rank_ms = np.zeros(stages), np.zeros(stages), np.empty(len(pipelines))
    for program, ranks in _by_program(pipelines).items():
        durations = np.stack([pipelines[rank].costs.durations(program) for rank in ranks], axis=1)
        sent_mb = np.stack([pipelines[rank].unit_mb for rank in ranks], axis=1)
        transfer = network.latency_ms + sent_mb * network.ms_per_mb
        starts, ends = (_run_many if len(ranks) >= VECTOR_RANKS else _run_few)(program, durations, transfer)
        busy[ranks] = np.add.reduceat(durations, program.first).T
        rank_ms[ranks] = ends.max(0)
        last = program.last_gradient
        bucket = starts[last] + durations[last] / network.buckets
        first_ready = np.maximum(first_ready, bucket.max(1))
        last_ready = np.maximum(last_ready, ends[last].max(1))
        for column, rank in enumerate(ranks):
            costs = pipelines[rank].costs
            times = durations[:, column], starts[:, column], ends[:, column], transfer[:, column]
            runs[rank] = Run(program, *times, costs.activation_mb, costs.state_mb, costs.deferred_mb)

    # Bucket i of n ends no earlier than ready_i + (n - i + 1) / n * R. ready_i is convex in i (a maximum of lines),
    # so the latest of these bounds is that of the first or of the last bucket.
    reduced = np.maximum(first_ready + reduce_ms, last_ready + reduce_ms / network.buckets)
    step_ms = float(max(rank_ms.max(), reduced.max()))
    return Timeline(
        step_ms=step_ms,
        rank_ms=rank_ms,
        busy_fraction=float(busy.sum() / (busy.size * step_ms)) if step_ms > 0 else 1.0,
        bubble_ms=step_ms - busy,
        all_reduce_end_ms=reduced,
        all_reduce_ms=reduce_ms,
        buckets=network.buckets,
        runs=tuple(runs[rank] for rank in range(len(pipelines))),
    )


def _by_program(pipelines: Sequence[Pipeline]) -> dict[Program, list[int]]:
    """The ranks of each distinct schedule, compiled. Hashing a schedule is slow, so it is done once per object."""
    compiled: dict[tuple[int, tuple[int, ...]], Program] = {}
    groups: dict[Program, list[int]] = {}
    for rank, pipeline in enumerate(pipelines):
        key = (id(pipeline.schedule), pipeline.chains)
        if pipeline.program is not None:
            compiled[key] = pipeline.program
        elif key not in compiled:
            compiled[key] = compile_schedule(pipeline.schedule, pipeline.chains, pipeline.costs.stages)
        groups.setdefault(compiled[key], []).append(rank)
    return groups


def _run_many(program: Program, durations: Floats, transfer: Floats) -> tuple[Floats, Floats]:
    """Starts and ends, [actions, ranks], action after action for all ranks at once."""
    starts = np.empty_like(durations)
    ends = np.zeros((len(durations) + 1, durations.shape[1]))  # row -1: nothing to wait for
    for number, previous, remote, unit in program.steps:
        begin = starts[number]
        if remote < 0:
            begin[:] = ends[previous]
        else:
            np.add(ends[remote], transfer[unit], out=begin)
            np.maximum(begin, ends[previous], out=begin)
        np.add(begin, durations[number], out=ends[number])
    return starts, ends[:-1]


def _run_few(program: Program, durations: Floats, transfer: Floats) -> tuple[Floats, Floats]:
    """The same, rank after rank in plain lists."""
    starts, ends = np.empty_like(durations), np.empty_like(durations)
    for rank, (took, sent) in enumerate(zip(durations.T.tolist(), transfer.T.tolist())):
        start = [0.0] * len(took)
        end = [0.0] * (len(took) + 1)  # place -1: nothing to wait for
        for number, previous, remote, unit in program.steps:
            begin = end[previous]
            if remote >= 0:
                arrival = end[remote] + sent[unit]
                if arrival > begin:
                    begin = arrival
            start[number] = begin
            end[number] = begin + took[number]
        starts[:, rank], ends[:, rank] = start, end[:-1]
    return starts, ends


def simulate_units(
    ranks: Sequence[Sequence[Latency]], stages: int = 1, all_reduce_ms: float | Floats = 0.0
) -> Timeline:
    """Whole units through classical 1F1B; the stages share a unit's latency evenly.

    Args:
        ranks: [dp][units], each the latency of a unit over the whole model; empty units have 0. Half of a backward
            counts as input gradient, half as weight gradient.
        stages: one per worker.
        all_reduce_ms: see `Network`.

    Raises:
        InputError: no rank, a rank without units, no stage, or a latency that is negative or not finite.
    """
    if not ranks or not all(ranks):
        raise InputError(f"simulation needs at least one unit on each rank, got counts {list(map(len, ranks))}")
    pipelines = []
    for rank, units in enumerate(ranks):
        chains = (1,) * len(units)
        schedule = one_forward_one_backward(chains, stages)
        forward = np.array([unit.forward_ms for unit in units]) / stages
        half_backward = np.array([unit.backward_ms for unit in units]) / (2 * stages)
        if not (np.isfinite(forward + half_backward).all() and min(forward.min(), half_backward.min()) >= 0):
            raise InputError(f"rank {rank}: latencies must be finite and not negative")
        forward, half = (np.broadcast_to(ms, (stages, len(units))) for ms in (forward, half_backward))
        pipelines.append(Pipeline(schedule, chains, StageCosts(forward, half, half)))
    return simulate(pipelines, Network(all_reduce_ms=all_reduce_ms))
