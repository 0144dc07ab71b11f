"""What a rank measured in a step: times of its micro-batches and actions, loss, coverage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sparsebalance.attention.probe import CoverageProbe
from sparsebalance.planning.plan import StepPlan
from sparsebalance.planning.schedule import Action

Probes = dict[tuple[int, int], CoverageProbe]  # (sample id, layer) -> measured coverage


@dataclass(frozen=True)
class UnitTime:
    """Measured milliseconds of one unit; starts count from the start of the rank's work in the step.

    Attributes:
        start_ms, backward_start_ms: of its forward and of its backward.
        forward_ms, backward_ms: of the whole unit, coverage probing left out.
        forward, backward: the same by term (see `sparsebalance.planning.latency.Terms`), without `tune_ms`; empty
            for an empty unit.
        budgets: that the unit really used, per layer: the planned ones unless they were tuned online.
        tune_ms: of its forward, spent on tuning budgets online.
        probe_ms: spent on measuring coverage, beside everything else.
    """

    start_ms: float
    backward_start_ms: float
    forward_ms: float
    backward_ms: float
    forward: dict[str, float] = field(default_factory=dict)
    backward: dict[str, float] = field(default_factory=dict)
    budgets: tuple[int, ...] = ()
    tune_ms: float = 0.0
    probe_ms: float = 0.0

    @property
    def total_ms(self) -> float:
        return self.forward_ms + self.backward_ms

    @property
    def terms(self) -> dict[str, float]:
        """Forward + backward milliseconds by term."""
        return {term: ms + self.backward[term] for term, ms in self.forward.items()}


@dataclass(frozen=True)
class ActionTime:
    """One action as it went.

    Attributes:
        start_ms: from the start of the rank's work in the step, its input at hand.
        ms: wall time. cpu_ms: processor time of the thread that ran it.
    """

    action: Action
    start_ms: float
    ms: float
    cpu_ms: float


@dataclass
class RankResult:
    """What one process did in a step; `of_workers` and `of_replica` bring those of a data-parallel rank together.

    Attributes:
        loss: its part of the mean loss over the global batch.
        units: times in execution order, of the layers that the rank holds.
        probes: (sample id, layer) -> coverage, where measured.
        layers: of the model, that the rank holds.
        actions: in execution order.
        all_reduce_ms: after its last action, waiting for others included.
    """

    loss: float = 0.0
    units: list[UnitTime] = field(default_factory=list)
    probes: Probes = field(default_factory=dict)
    layers: tuple[int, ...] = ()
    actions: list[ActionTime] = field(default_factory=list)
    all_reduce_ms: float = 0.0

    @property
    def busy_ms(self) -> float:
        """Of all its units, over the layers that it holds."""
        return sum(unit.total_ms for unit in self.units)

    @property
    def action_ms(self) -> float:
        """In actions: besides its units, packing their rows and probing coverage."""
        return sum(action.ms for action in self.actions)

    @property
    def end_ms(self) -> float:
        """When its last action ended."""
        return max((action.start_ms + action.ms for action in self.actions), default=0.0)

    @property
    def tune_ms(self) -> float:
        return sum(unit.tune_ms for unit in self.units)

    @property
    def probe_ms(self) -> float:
        return sum(unit.probe_ms for unit in self.units)


def of_workers(replicas: Sequence[Sequence[Sequence[tuple[RankResult, float]]]], tensor: int) -> list[list[RankResult]]:
    """What each worker of each pipeline did, [data-parallel rank][worker]; those of a pipeline on one clock.

    Args:
        replicas: results and the milliseconds of their all-reduce, as `Ranks.by_replica` gives them.
        tensor: tensor-parallel degree.
    """
    return [on_one_clock([_of_worker(processes, tensor) for processes in workers]) for workers in replicas]


def _of_worker(processes: Sequence[tuple[RankResult, float]], tensor: int) -> RankResult:
    """Processes that share out a worker's tokens and heads take what the slowest takes; each group of tensor-parallel
    ones has the loss of its tokens."""
    slowest, reduce_ms = max(processes, key=lambda one: one[0].busy_ms)
    loss = sum(result.loss for result, _ in processes[::tensor])
    return replace(slowest, loss=loss, all_reduce_ms=reduce_ms)


def on_one_clock(workers: Sequence[RankResult]) -> list[RankResult]:
    """The workers of a pipeline, each of which counts from its own start, moved by as little as it takes for no
    message to arrive before it was sent; the first one stays."""
    found = [workers[0]]
    for worker in workers[1:]:
        earlier, later = _spans(found[-1]), _spans(worker)
        # From neighbour to neighbour, activations go to the next stage and gradients come back from it.
        late = [
            end - later["F", unit, stage + 1][0]
            for (kind, unit, stage), (_, end) in earlier.items()
            if kind == "F" and ("F", unit, stage + 1) in later
        ]
        early = [
            earlier["B", unit, stage - 1][0] - end
            for (kind, unit, stage), (_, end) in later.items()
            if kind == "B" and ("B", unit, stage - 1) in earlier
        ]
        found.append(_moved(worker, max([min([0.0, *early]), *late])))
    return found


def _spans(worker: RankResult) -> dict[tuple[str, int, int], tuple[float, float]]:
    """(kind, unit, stage) -> start and end of the actions that exchange messages; I counts as the B it stands for."""
    return {
        ("F" if one.action.kind == "F" else "B", one.action.unit, one.action.stage): (
            one.start_ms,
            one.start_ms + one.ms,
        )
        for one in worker.actions
        if one.action.kind != "W"
    }


def _moved(worker: RankResult, ms: float) -> RankResult:
    """Everything that long after its own clock."""
    units = [
        replace(time, start_ms=time.start_ms + ms, backward_start_ms=time.backward_start_ms + ms)
        for time in worker.units
    ]
    actions = [replace(one, start_ms=one.start_ms + ms) for one in worker.actions]
    return replace(worker, units=units, actions=actions)


def of_replica(workers: Sequence[RankResult]) -> RankResult:
    """What the workers of one pipeline did, as one: each unit's times added up over them, without their actions."""
    if len(workers) == 1:
        return workers[0]
    layers = [worker.layers for worker in workers]
    units = [
        joined(list(zip(layers, times, strict=True)))
        for times in zip(*(worker.units for worker in workers), strict=True)
    ]
    held = tuple(sorted(layer for own in layers for layer in own))
    return RankResult(
        loss=sum(worker.loss for worker in workers),
        units=units,
        probes=merged(worker.probes for worker in workers),
        layers=held,
        all_reduce_ms=max(worker.all_reduce_ms for worker in workers),
    )


def joined(parts: Sequence[tuple[Sequence[int], UnitTime]]) -> UnitTime:
    """What a unit took on several stages, added up.

    Args:
        parts: the layers of each stage, and its times.
    """
    times = [time for _, time in parts]
    budgets = list(times[0].budgets)
    for layers, time in parts:
        for layer in layers if time.budgets else ():
            budgets[layer] = time.budgets[layer]
    return UnitTime(
        start_ms=min(time.start_ms for time in times),
        backward_start_ms=min(time.backward_start_ms for time in times),
        forward_ms=sum(time.forward_ms for time in times),
        backward_ms=sum(time.backward_ms for time in times),
        forward=_added(time.forward for time in times),
        backward=_added(time.backward for time in times),
        budgets=tuple(budgets),
        tune_ms=sum(time.tune_ms for time in times),
        probe_ms=sum(time.probe_ms for time in times),
    )


def _added(terms: Iterable[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in terms:
        for name, ms in one.items():
            found[name] = found.get(name, 0.0) + ms
    return found


def merged(parts: Iterable[Probes]) -> Probes:
    """All ranks' probes in one."""
    return {key: probe for part in parts for key, probe in part.items()}


def as_run(plan: StepPlan, results: Sequence[RankResult]) -> StepPlan:
    """The plan with the budgets that its units really used; `results` of all ranks."""
    ranks = tuple(
        tuple(replace(unit, budgets=time.budgets) for unit, time in zip(units, result.units, strict=True))
        for units, result in zip(plan.ranks, results, strict=True)
    )
    return replace(plan, ranks=ranks)
