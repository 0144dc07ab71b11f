"""The default attention budget over a run, for models that come from dense attention.

In: a step's number. Out: blocks that a query may read by default; tuning goes on from there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from sparsebalance.planning.errors import InputError

ScheduleKind = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class BudgetSchedule:
    """From `start` blocks at step 0 to `end` blocks at step `steps`, and so from then on.

    Attributes:
        kind: "constant" is `end` from the beginning; "linear" and "cosine" are how it falls (or rises).

    Raises:
        InputError: another kind, a budget below 1 block, or steps below 0.
    """

    kind: ScheduleKind
    start: int
    end: int
    steps: int

    def __post_init__(self) -> None:
        if self.kind not in get_args(ScheduleKind):
            raise InputError(f"budget schedule is {self.kind!r}; choose one of {', '.join(get_args(ScheduleKind))}")
        if min(self.start, self.end) < 1:
            raise InputError(f"a budget goes from {self.start} to {self.end} blocks, but it is at least 1 everywhere")
        if self.steps < 0:
            raise InputError(f"a budget schedule of {self.steps} steps; it takes at least 0")

    def at(self, step: int) -> int:
        """Whole blocks at a step; a function of the step alone, so that a run that goes on needs no state."""
        if self.kind == "constant" or step >= self.steps:
            return self.end
        done = step / self.steps
        left = 1 - done if self.kind == "linear" else (1 + math.cos(math.pi * done)) / 2
        return round(self.end + (self.start - self.end) * left)
