"""Step plan -> per-stage action lists for the pipeline.

In: numbers of units and stages. Out: per stage, the forwards and backwards in the order in which it runs
them; the executor and the simulator read the same lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sparsebalance.planning.errors import InputError

Kind = Literal["F", "B"]


@dataclass(frozen=True, slots=True)
class Action:
    """Forward ("F") or backward ("B") of one unit on one stage."""

    kind: Kind
    unit: int


Schedule = tuple[tuple[Action, ...], ...]  # [stage][execution order]


def one_forward_one_backward(units: int, stages: int) -> Schedule:
    """1F1B (PipeDream-Flush): stage s runs stages - 1 - s forwards ahead, then alternates, then drains.

    Works for any number of units, fewer than stages included.

    Raises:
        InputError: no unit or no stage.
    """
    if units < 1 or stages < 1:
        raise InputError(f"{units} units on {stages} stages: a schedule needs at least one of each")
    return tuple(_one_stage(units, min(stages - 1 - stage, units)) for stage in range(stages))


def _one_stage(units: int, ahead: int) -> tuple[Action, ...]:
    actions = [Action("F", unit) for unit in range(ahead)]
    for unit in range(units):
        if ahead + unit < units:
            actions.append(Action("F", ahead + unit))
        actions.append(Action("B", unit))
    return tuple(actions)


def check_schedule(schedule: Schedule, units: int) -> None:
    """Replay the lists: every unit runs forward and backward once on every stage, and nothing blocks.

    Raises:
        InputError: names the missing or repeated action, or in a deadlock the action each stage waits for.
    """
    expected = sorted((kind, unit) for kind in ("B", "F") for unit in range(units))
    for stage, actions in enumerate(schedule):
        found = sorted((action.kind, action.unit) for action in actions)
        if found != expected:
            wrong = sorted(set(expected) ^ set(found)) or [a for a in found if found.count(a) > 1]
            kind, unit = wrong[0]
            raise InputError(f"stage {stage}: {kind}{unit} must appear exactly once in its schedule")
    done: set[tuple[str, int, int]] = set()
    position = [0] * len(schedule)
    progress = True
    while progress:
        progress = False
        for stage, actions in enumerate(schedule):
            while position[stage] < len(actions) and _ready(actions[position[stage]], stage, schedule, done):
                action = actions[position[stage]]
                done.add((action.kind, stage, action.unit))
                position[stage] += 1
                progress = True
    blocked = [
        f"stage {stage} waits at {actions[at].kind}{actions[at].unit}"
        for stage, (actions, at) in enumerate(zip(schedule, position))
        if at < len(actions)
    ]
    if blocked:
        raise InputError(f"the schedule deadlocks: {'; '.join(blocked)}")


def _ready(action: Action, stage: int, schedule: Sequence[object], done: set[tuple[str, int, int]]) -> bool:
    if action.kind == "F":
        return stage == 0 or ("F", stage - 1, action.unit) in done
    last = stage == len(schedule) - 1
    needed = ("F", stage, action.unit) if last else ("B", stage + 1, action.unit)
    return needed in done
