"""What a simulated step looks like: times, bubbles, spans, critical path, memory, slack.

In: per data-parallel rank a `Run`, i.e. when each action of its program started and ended. Out: a `Timeline` that
answers questions about the step; the costly ones are worked out when asked. Milliseconds and megabytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from sparsebalance.planning.schedule import KINDS, Kind, Program

Floats = NDArray[np.float64]

_F, _B, _I, _W = range(len(KINDS))


@dataclass(frozen=True, slots=True)
class Span:
    """One action on the timeline."""

    rank: int
    worker: int
    stage: int
    kind: Kind
    unit: int
    start_ms: float
    end_ms: float


@dataclass(frozen=True, eq=False)
class Run:
    """One rank's program with its times.

    Attributes:
        program: the compiled schedule.
        durations, starts, ends: [actions] float64, by action number.
        transfer_ms: [units] float64, from one worker to the next.
        activation_mb, state_mb, deferred_mb: [stages, units] float64, see `StageCosts`.
    """

    program: Program
    durations: Floats
    starts: Floats
    ends: Floats
    transfer_ms: Floats
    activation_mb: Floats
    state_mb: Floats
    deferred_mb: Floats

    def memory_mb(self) -> list[tuple[Floats, Floats]]:
        """Per worker: times [n] at which its memory changes, and the megabytes [n] from each time on."""
        program = self.program
        activation = self.activation_mb[program.stage_of, program.units]
        deferred = self.deferred_mb[program.stage_of, program.units]
        taken = np.where(program.kinds == _F, activation, 0.0)
        released = np.choose(program.kinds, [np.zeros_like(activation), activation, activation - deferred, deferred])
        # A chain's whole state is there from the forward of its first chunk until that chunk's (input) gradient,
        # the last to run; computing weight gradients does not read it.
        heads = [0, *accumulate(program.chains)][:-1]
        state = np.zeros_like(self.state_mb)
        state[:, heads] = np.add.reduceat(self.state_mb, heads, axis=1)
        held = state[program.stage_of, program.units]
        taken += np.where(program.kinds == _F, held, 0.0)
        released += np.where((program.kinds == _B) | (program.kinds == _I), held, 0.0)
        times = np.stack([self.starts, self.ends], axis=1)
        changes = np.stack([taken, -released], axis=1)
        curves = []
        for own_times, own_changes in zip(
            np.split(times, program.first[1:]), np.split(changes, program.first[1:]), strict=True
        ):
            some = own_changes.ravel() != 0
            curves.append((own_times.ravel()[some], np.cumsum(own_changes.ravel()[some])))
        return curves


@dataclass(frozen=True, eq=False)
class Timeline:
    """A simulated step.

    Attributes:
        step_ms: until the slowest rank is done and all gradients are reduced.
        rank_ms: [dp] float64, when each rank's last action ends.
        busy_fraction: time in actions / (ranks x workers x step time).
        bubble_ms: [dp, workers] float64, step time in which a worker does nothing.
        all_reduce_end_ms: [stages] float64, when each stage's gradients are reduced over the ranks.
        all_reduce_ms, buckets: [stages] float64, int, see `Network`.
        runs: [dp].
    """

    step_ms: float
    rank_ms: Floats
    busy_fraction: float
    bubble_ms: Floats
    all_reduce_end_ms: Floats
    all_reduce_ms: Floats
    buckets: int
    runs: tuple[Run, ...]

    def spans(self, rank: int) -> list[Span]:
        """All actions of one rank, worker by worker in execution order."""
        run = self.runs[rank]
        return [
            Span(rank, worker, action.stage, action.kind, action.unit, start, end)
            for action, worker, start, end in zip(
                run.program.actions, run.program.workers.tolist(), run.starts.tolist(), run.ends.tolist()
            )
        ]

    def critical_path(self) -> list[Span]:
        """The chain of actions that ends last, before the all-reduce; it begins at 0.

        Each action starts when the one before it ends or, on another worker, when that one's result arrives: then
        the gap between them is the transfer.
        """
        rank = int(np.argmax(self.rank_ms))
        run = self.runs[rank]
        before = {number: (previous, remote) for number, previous, remote, _ in run.program.steps}
        starts, ends = run.starts.tolist(), run.ends.tolist()
        path = [int(np.argmax(run.ends))]
        while starts[path[-1]] > 0:
            previous, remote = before[path[-1]]
            # The action before it on the same worker, unless that one ended too early to be what it waited for.
            path.append(previous if previous >= 0 and ends[previous] == starts[path[-1]] else remote)
        spans = self.spans(rank)
        return [spans[number] for number in reversed(path)]

    def memory_mb(self, rank: int) -> list[tuple[Floats, Floats]]:
        """Per worker of a rank, activations and state as a step function.

        Returns:
            Per worker (times [n] ms, mb [n]), both float64: mb[i] is held from times[i] until times[i + 1]. Where one
            action frees memory and the next takes some at the same time, both are there, the lower value first.
        """
        return self.runs[rank].memory_mb()

    @cached_property
    def peak_memory_mb(self) -> Floats:
        """[dp, workers] float64, the highest point of each memory curve; 0 where nothing is held."""
        return np.array([[mb.max(initial=0.0) for _, mb in run.memory_mb()] for run in self.runs])

    def slack(self, rank: int) -> Floats:
        """[actions] float64 ms, in the order of `spans`: how much longer each action alone could take.

        The step then takes no longer. This is the backward pass of the critical path method (Kelley and Walker 1959)
        over the order on each worker and the data between workers; the end is the step's end after the all-reduce.
        """
        run, step, buckets = self.runs[rank], self.step_ms, self.buckets
        durations, starts, ends = run.durations.tolist(), run.starts.tolist(), run.ends.tolist()
        transfer = run.transfer_ms.tolist()
        latest_end = [step] * len(ends)
        reduce_ms = dict(zip(run.program.last_gradient.tolist(), self.all_reduce_ms.tolist()))
        slack = [0.0] * len(ends)
        for number, previous, remote, unit in reversed(run.program.steps):
            duration = durations[number]
            slack[number] = latest_end[number] - ends[number]
            latest_start = latest_end[number] - duration
            if number in reduce_ms:
                # Its last bucket must be reduced in time after its end, and all buckets after its first one is ready.
                whole = reduce_ms[number]
                last, first = step - whole / buckets, step - whole - duration / buckets
                slack[number] = min(slack[number], last - ends[number], (first - starts[number]) * buckets)
                latest_start = min(latest_start, last - duration, first)
            if previous >= 0:
                latest_end[previous] = min(latest_end[previous], latest_start)
            if remote >= 0:
                latest_end[remote] = min(latest_end[remote], latest_start - transfer[unit])
        return np.maximum(slack, 0.0)  # rounding can leave -1e-15
