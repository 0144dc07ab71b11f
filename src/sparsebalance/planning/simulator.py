"""Action lists + latencies -> timeline: step time, bubbles, critical path, imbalance.

In: per data-parallel rank, the latency of each unit over the whole model. Out: a `Timeline`. Stages share a
unit's latency evenly. Times are milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from sparsebalance.planning.errors import InputError
from sparsebalance.planning.plan import Latency
from sparsebalance.planning.schedule import Kind, Schedule, one_forward_one_backward

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Imbalance:
    """Slowest over mean, three ways; 1 is perfect balance.

    Attributes:
        all: over all micro-batches of the step.
        slot: per slot (the m-th micro-batch of every rank) over ranks, mean over slots; a rank that has no
            m-th micro-batch counts 0 in that slot.
        rank: over the ranks' sums.
    """

    all: float
    slot: float
    rank: float


def imbalance(ranks: Sequence[Sequence[float]]) -> Imbalance:
    """Imbalances of per-rank micro-batch latencies. Empty units (latency 0) are no micro-batches of `all`.

    Raises:
        InputError: no rank, or a rank without a unit.
    """
    if not ranks or not all(ranks):
        raise InputError(f"imbalance needs at least one unit on each rank, but the counts are {list(map(len, ranks))}")
    real = [ms for rank in ranks for ms in rank if ms > 0]
    slots = np.zeros((len(ranks), max(map(len, ranks))))
    for row, rank in zip(slots, ranks):
        row[: len(rank)] = rank
    return Imbalance(_peak(np.array(real)), float(np.mean([_peak(s) for s in slots.T])), _peak(slots.sum(1)))


def _peak(values: Floats) -> float:
    return float(values.max() / values.mean()) if values.size and values.any() else 1.0


@dataclass(frozen=True, slots=True)
class Span:
    """One action on the timeline."""

    rank: int
    stage: int
    kind: Kind
    unit: int
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Timeline:
    """What the simulated step looks like.

    Attributes:
        step_ms: until the slowest rank is done, gradient all-reduce included.
        rank_ms: [dp], when each rank's last action ends.
        busy_fraction: time in forwards and backwards / (ranks x stages x step time).
        bubble_ms: [dp, stages], step time in which a stage does nothing.
        imbalance: of the units' latencies.
        starts, ends: per rank [stages, actions].
        schedules: per rank, its action lists.
    """

    step_ms: float
    rank_ms: Floats
    busy_fraction: float
    bubble_ms: Floats
    imbalance: Imbalance
    starts: tuple[Floats, ...]
    ends: tuple[Floats, ...]
    schedules: tuple[Schedule, ...]

    def spans(self, rank: int) -> list[Span]:
        """All actions of one rank, stage by stage in execution order."""
        return [
            Span(rank, s, action.kind, action.unit, float(self.starts[rank][s, i]), float(self.ends[rank][s, i]))
            for s, actions in enumerate(self.schedules[rank])
            for i, action in enumerate(actions)
        ]

    def critical_path(self) -> list[Span]:
        """The chain of actions that ends last on the slowest rank: each starts when the one before it ends."""
        rank = int(np.argmax(self.rank_ms))
        spans = {(s.kind, s.stage, s.unit): s for s in self.spans(rank)}
        stages = len(self.schedules[rank])
        path = [max(spans.values(), key=lambda s: (s.end_ms, -s.stage))]
        while path[-1].start_ms > 0:
            span = path[-1]
            actions = self.schedules[rank][span.stage]
            index = next(i for i, a in enumerate(actions) if (a.kind, a.unit) == (span.kind, span.unit))
            before = [spans[actions[index - 1].kind, span.stage, actions[index - 1].unit]] if index else []
            source = _dependency(span.kind, span.stage, span.unit, stages)
            before += [spans[source]] if source in spans else []
            path.append(max(before, key=lambda s: s.end_ms))
        return path[::-1]


def _dependency(kind: Kind, stage: int, unit: int, stages: int) -> tuple[Kind, int, int] | None:
    """The action on another stage (or the own forward on the last one) that an action waits for."""
    if kind == "F":
        return ("F", stage - 1, unit) if stage else None
    return ("B", stage + 1, unit) if stage < stages - 1 else ("F", stage, unit)


def simulate(ranks: Sequence[Sequence[Latency]], stages: int = 1, all_reduce_ms: float = 0.0) -> Timeline:
    """Run every rank's units through 1F1B; an action starts when its stage is free and its input is there.

    Args:
        ranks: [dp][units], each the latency of a unit over the whole model; empty units have 0.
        all_reduce_ms: gradient synchronisation after the slowest rank's last backward.

    Raises:
        InputError: no rank, a rank without units, no stage, or a latency that is negative or not finite.
    """
    if not ranks or not all(ranks):
        raise InputError(f"simulation needs at least one unit on each rank, got counts {list(map(len, ranks))}")
    starts, ends, schedules = [], [], []
    for index, units in enumerate(ranks):
        forward = np.array([unit.forward_ms for unit in units]) / stages
        backward = np.array([unit.backward_ms for unit in units]) / stages
        if not (np.isfinite(forward + backward).all() and min(forward.min(), backward.min()) >= 0):
            raise InputError(f"rank {index}: latencies must be finite and not negative")
        start, end = _one_rank(forward.tolist(), backward.tolist(), stages)
        starts.append(start)
        ends.append(end)
        schedules.append(_schedule(len(units), stages))
    rank_ms = np.array([end.max() for end in ends])
    step_ms = float(rank_ms.max()) + all_reduce_ms
    busy = np.array([(end - start).sum(1) for start, end in zip(starts, ends)])
    return Timeline(
        step_ms=step_ms,
        rank_ms=rank_ms,
        busy_fraction=float(busy.sum() / (busy.size * step_ms)) if step_ms > 0 else 1.0,
        bubble_ms=step_ms - busy,
        imbalance=imbalance([[unit.total_ms for unit in units] for units in ranks]),
        starts=tuple(starts),
        ends=tuple(ends),
        schedules=tuple(schedules),
    )


_schedule = lru_cache(maxsize=256)(one_forward_one_backward)


def _one_rank(forward: list[float], backward: list[float], stages: int) -> tuple[Floats, Floats]:
    """Start and end of every action, [stages, 2 * units], in the order of 1F1B's action lists."""
    order = _order(len(forward), stages)
    start = np.zeros((stages, 2 * len(forward)))
    end = np.zeros_like(start)
    free = [0.0] * stages
    forward_end = [[0.0] * len(forward) for _ in range(stages)]
    backward_end = [[0.0] * len(forward) for _ in range(stages)]
    for stage, place, kind, unit in order:
        if kind == "F":
            ready = forward_end[stage - 1][unit] if stage else 0.0
            took, finished = forward[unit], forward_end
        else:
            ready = backward_end[stage + 1][unit] if stage < stages - 1 else forward_end[stage][unit]
            took, finished = backward[unit], backward_end
        begin = max(free[stage], ready)
        free[stage] = finished[stage][unit] = begin + took
        start[stage, place], end[stage, place] = begin, free[stage]
    return start, end


@lru_cache(maxsize=256)
def _order(units: int, stages: int) -> tuple[tuple[int, int, Kind, int], ...]:
    """(stage, place in its list, kind, unit) of all actions, every one after those that it waits for."""
    schedule = _schedule(units, stages)
    done: set[tuple[Kind, int, int]] = set()
    position = [0] * stages
    order: list[tuple[int, int, Kind, int]] = []
    while len(order) < 2 * units * stages:
        for stage, actions in enumerate(schedule):
            while position[stage] < len(actions):
                action = actions[position[stage]]
                source = _dependency(action.kind, stage, action.unit, stages)
                if source is not None and source not in done:
                    break
                order.append((stage, position[stage], action.kind, action.unit))
                done.add((action.kind, stage, action.unit))
                position[stage] += 1
    return tuple(order)
