"""Numbers of units, stages and workers -> per-worker action lists of the pipeline, and their check.

In: `chains`, the units of one data-parallel rank as lengths of consecutive runs: a run of 1 is an ordinary unit,
a run of n is one long sample in n chunks. Out: per worker, the actions in the order in which it runs them; the
executor and the simulator read the same lists. `compile_schedule` turns them into arrays for the simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sparsebalance.planning.errors import InputError

Kind = Literal["F", "B", "I", "W"]
KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a worker does.

    Attributes:
        kind: "F" forward, "B" whole backward, or its two halves "I" input gradient and "W" weight gradient.
        unit: 0 .. units - 1, in forward order.
        stage: of the model, 0 .. stages - 1; a worker can hold several (interleaving).
    """

    kind: Kind
    unit: int
    stage: int


Schedule = tuple[tuple[Action, ...], ...]  # [worker][execution order]


def backward_order(chains: Sequence[int]) -> list[int]:
    """Units in the order of their backwards: chain after chain, the chunks of each from last to first."""
    return [unit for end, size in zip(accumulate(chains), chains) for unit in range(end - 1, end - size - 1, -1)]


def check_sizes(chains: Sequence[int], stages: int) -> tuple[int, ...]:
    """The chains as a tuple.

    Raises:
        InputError: no unit, an empty chain, or no stage.
    """
    if not chains or min(chains) < 1 or stages < 1:
        raise InputError(
            f"chains {list(chains)[:8]} on {stages} stages: a schedule needs at least one unit in every chain, "
            "at least one chain and at least one stage"
        )
    return tuple(int(size) for size in chains)


def gpipe(chains: Sequence[int], stages: int) -> Schedule:
    """All forwards, then all backwards (GPipe, Huang et al. 2019, section 2.3).

    Raises:
        InputError: see `check_sizes`.
    """
    return _gpipe(check_sizes(chains, stages), stages)


@lru_cache(maxsize=128)
def _gpipe(chains: tuple[int, ...], stages: int) -> Schedule:
    units, backwards = range(sum(chains)), backward_order(chains)
    return tuple(
        (*(Action("F", unit, stage) for unit in units), *(Action("B", unit, stage) for unit in backwards))
        for stage in range(stages)
    )


def one_forward_one_backward(chains: Sequence[int], stages: int) -> Schedule:
    """1F1B (PipeDream-Flush, Narayanan et al. 2021), aware of chunks.

    Before each backward, a stage runs forwards until that backward's chain is complete, and until as many units are
    alive as the longest chain has, and in both cases stages - 1 - stage more: while one chain runs backward the next
    one runs forward, in the memory that the longest one needs anyway. A single stage has nobody to keep busy, and runs
    chain after chain.
    With chains of one unit each this is the classical 1F1B. It cannot block: before its n-th backward no stage asks
    for more forwards than the stage before it, and all stages run the same order of units.

    Raises:
        InputError: see `check_sizes`.
    """
    return _one_forward_one_backward(check_sizes(chains, stages), stages)


@lru_cache(maxsize=128)
def _one_forward_one_backward(chains: tuple[int, ...], stages: int) -> Schedule:
    complete = [end for end, size in zip(accumulate(chains), chains) for _ in range(size)]
    backwards = backward_order(chains)
    longest = max(chains) if stages > 1 else 0
    schedule = []
    for stage in range(stages):
        actions: list[Action] = []
        forwards = 0
        for done, (unit, end) in enumerate(zip(backwards, complete)):
            wanted = min(len(backwards), max(end, done + longest) + stages - 1 - stage)
            actions += [Action("F", ahead, stage) for ahead in range(forwards, wanted)]
            actions.append(Action("B", unit, stage))
            forwards = max(forwards, wanted)
        schedule.append(tuple(actions))
    return tuple(schedule)


def interleaved(units: int, workers: int, virtual: int) -> Schedule:
    """Interleaved 1F1B (Narayanan et al. 2021, Megatron-LM, section 2.2.2), for any number of units.

    Worker w holds the stages w, w + workers, ... One stage per worker is plain 1F1B. The published schedule wants a
    multiple of `workers` units: here it is made for the next multiple and the surplus units are taken out again.
    A schedule that cannot block still cannot without some of its units, since units do not wait for each other's data.

    Raises:
        InputError: units, workers or virtual below 1.
    """
    if min(units, workers, virtual) < 1:
        raise InputError(
            f"{units} units on {workers} workers with {virtual} stages each: a schedule needs at least one of each"
        )
    return _one_forward_one_backward((1,) * units, workers) if virtual == 1 else _interleaved(units, workers, virtual)


@lru_cache(maxsize=128)
def _interleaved(units: int, workers: int, virtual: int) -> Schedule:
    rounds = -(-units // workers)
    # Each round brings `workers` units through the first stage of every worker, then through the second, ...
    turns = [
        (turn, base * workers + unit) for base in range(rounds) for turn in range(virtual) for unit in range(workers)
    ]
    schedule = []
    for worker in range(workers):
        forwards = [Action("F", unit, turn * workers + worker) for turn, unit in turns]
        backwards = [Action("B", unit, (virtual - 1 - turn) * workers + worker) for turn, unit in turns]
        ahead = min(len(turns), 2 * (workers - 1 - worker) + (virtual - 1) * workers)
        pairs = chain.from_iterable(zip(forwards[ahead:], backwards))
        drain = backwards[len(turns) - ahead :]
        schedule.append(tuple(a for a in (*forwards[:ahead], *pairs, *drain) if a.unit < units))
    return tuple(schedule)


@dataclass(frozen=True, eq=False)
class Program:
    """A checked schedule as arrays. Actions are numbered worker by worker, in execution order.

    Attributes:
        schedule, chains, stages: what was compiled.
        actions: all actions by number.
        workers: [actions] int64, who runs it.
        first: [workers] int64, number of each worker's first action.
        kinds: [actions] int64, place in `KINDS`.
        units, stage_of: [actions] int64.
        steps: in an order in which nothing waits: (number, number of the worker's action before it, number of the
            action on another worker whose result it needs, unit); -1 stands for none. What an action needs from its
            own worker comes earlier in that worker's list, so the order of the list already says it.
        last_gradient: [stages] int64, the last B or W of each stage: then its weight gradients are complete.
    """

    schedule: Schedule
    chains: tuple[int, ...]
    stages: int
    actions: tuple[Action, ...]
    workers: NDArray[np.int64]
    first: NDArray[np.int64]
    kinds: NDArray[np.int64]
    units: NDArray[np.int64]
    stage_of: NDArray[np.int64]
    steps: tuple[tuple[int, int, int, int], ...]
    last_gradient: NDArray[np.int64]


def check_schedule(schedule: Schedule, chains: Sequence[int], stages: int) -> None:
    """Every unit runs forward and backward once on every stage, chunks run in order, and nothing blocks.

    Chunk rules: on each stage the forwards of a chain run in chunk order and its backwards in reverse, so that the
    first of them comes after the chain's last forward.

    Raises:
        InputError: names the missing, repeated or misplaced action, or in a deadlock where each worker waits.
    """
    compile_schedule(schedule, chains, stages)


def compile_schedule(schedule: Schedule, chains: Sequence[int], stages: int) -> Program:
    """The schedule as a `Program`; equal schedules share one.

    Raises:
        InputError: as `check_schedule`.
    """
    return _compile(schedule, check_sizes(chains, stages), stages)


@lru_cache(maxsize=256)
def _compile(schedule: Schedule, chains: tuple[int, ...], stages: int) -> Program:
    actions = tuple(chain.from_iterable(schedule))
    workers = [worker for worker, own in enumerate(schedule) for _ in own]
    forward, backward = _places(actions, sum(chains), stages)
    home = _homes(actions, workers, len(schedule), stages)
    _check_chunks(forward, backward, chains)
    remote = [-1] * len(actions)
    needs: list[tuple[int, ...]] = []  # numbers of the actions whose results an action needs
    for number, action in enumerate(actions):
        stage, unit = action.stage, action.unit
        if action.kind == "W":
            needs.append((backward[stage][unit],))
            continue
        if action.kind == "F":
            other, own = (forward[stage - 1][unit] if stage else -1), -1
        else:
            other, own = (backward[stage + 1][unit] if stage < stages - 1 else -1), forward[stage][unit]
        needs.append(tuple(number for number in (own, other) if number >= 0))
        if other >= 0 and workers[other] != home[stage]:
            remote[number] = other
    first = [0, *accumulate(map(len, schedule))]
    order = _order(actions, needs, first)
    starts = set(first)
    gradients = {a.stage: number for number, a in enumerate(actions) if a.kind in "BW"}
    return Program(
        schedule=schedule,
        chains=chains,
        stages=stages,
        actions=actions,
        workers=np.array(workers),
        first=np.array(first[:-1]),
        kinds=np.array([KINDS.index(a.kind) for a in actions]),
        units=np.array([a.unit for a in actions]),
        stage_of=np.array([a.stage for a in actions]),
        steps=tuple((n, -1 if n in starts else n - 1, remote[n], actions[n].unit) for n in order),
        last_gradient=np.array([gradients[stage] for stage in range(stages)]),
    )


def _places(actions: Sequence[Action], units: int, stages: int) -> tuple[list[list[int]], list[list[int]]]:
    """[stages][units] numbers of the forwards, and of the backwards (of I where the backward is split)."""
    place: dict[tuple[str, int, int], int] = {}
    for number, action in enumerate(actions):
        if not (action.kind in KINDS and 0 <= action.unit < units and 0 <= action.stage < stages):
            raise InputError(f"{name(action)} is not an action of {units} units on {stages} stages")
        if place.setdefault((action.kind, action.stage, action.unit), number) != number:
            raise InputError(f"stage {action.stage}: {action.kind}{action.unit} must appear exactly once")
    forward = [[place.get(("F", stage, unit), -1) for unit in range(units)] for stage in range(stages)]
    backward = [[-1] * units for _ in range(stages)]
    for stage in range(stages):
        for unit in range(units):
            whole, inputs, weights = (place.get((kind, stage, unit), -1) for kind in KINDS[1:])
            if whole >= 0 and max(inputs, weights) >= 0:
                raise InputError(f"stage {stage}: B{unit} is there beside I{unit} or W{unit}; keep B, or I and W")
            missing = [("F", forward[stage][unit])]
            missing += [("B", whole)] if max(inputs, weights) < 0 else [("I", inputs), ("W", weights)]
            for kind, number in missing:
                if number < 0:
                    raise InputError(f"stage {stage}: {kind}{unit} must appear exactly once, but it is missing")
            backward[stage][unit] = max(whole, inputs)
    return forward, backward


def name(action: Action) -> str:
    return f"{action.kind}{action.unit} of stage {action.stage}"


def _homes(actions: Sequence[Action], workers: Sequence[int], count: int, stages: int) -> list[int]:
    """The worker of each stage."""
    home = [-1] * stages
    for action, worker in zip(actions, workers):
        if home[action.stage] not in (-1, worker):
            raise InputError(
                f"stage {action.stage} is on workers {home[action.stage]} and {worker}; give it to one of them"
            )
        home[action.stage] = worker
    idle = sorted(set(range(count)) - set(home))
    if idle:
        raise InputError(f"worker {idle[0]} has no action; use no more workers than stages")
    return home


def _check_chunks(forward: list[list[int]], backward: list[list[int]], chains: Sequence[int]) -> None:
    # The last chunk's backward needs its own forward, so the deadlock check sees that it comes after all forwards.
    for end, size in zip(accumulate(chains), chains):
        for chunk in range(end - size + 1, end):
            for stage, (forwards, backwards) in enumerate(zip(forward, backward)):
                if forwards[chunk] < forwards[chunk - 1]:
                    raise InputError(f"stage {stage}: F{chunk} is before F{chunk - 1}; chunks run forward in order")
                if backwards[chunk] > backwards[chunk - 1]:
                    raise InputError(
                        f"stage {stage}: the backward of {chunk - 1} is before that of {chunk}; "
                        "chunks run backward in reverse order"
                    )


def _order(actions: Sequence[Action], needs: Sequence[tuple[int, ...]], first: Sequence[int]) -> list[int]:
    """Numbers of the actions in an order in which each comes after what it needs and after its worker's list."""
    at = list(first[:-1])
    done = bytearray(len(actions))
    waiting: dict[int, list[int]] = {}  # action -> workers that stopped for it
    order: list[int] = []
    ready = list(range(len(at)))
    while ready:
        worker = ready.pop()
        while at[worker] < first[worker + 1]:
            number = at[worker]
            missing = [needed for needed in needs[number] if not done[needed]]
            if missing:
                waiting.setdefault(missing[0], []).append(worker)
                break
            done[number] = True
            order.append(number)
            at[worker] += 1
            ready += waiting.pop(number, ())
    if len(order) < len(actions):
        blocked = [
            f"worker {worker} waits at {name(actions[number])}"
            for worker, number in enumerate(at)
            if number < first[worker + 1]
        ]
        raise InputError(f"the schedule deadlocks: {'; '.join(blocked)}")
    return order
