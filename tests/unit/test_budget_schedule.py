"""The default budget over a run."""

from __future__ import annotations

import pytest

from sparsebalance.planning.budget_schedule import BudgetSchedule
from sparsebalance.planning.errors import InputError


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("constant", [8, 8, 8, 8, 8]),
        ("linear", [40, 32, 24, 8, 8]),
        ("cosine", [40, 35, 24, 8, 8]),  # (1 + cos(pi / 4)) / 2 = 0.854
    ],
)
def test_by_hand(kind: str, expected: list[int]) -> None:
    schedule = BudgetSchedule(kind, 40, 8, 8)  # type: ignore[arg-type]
    assert [schedule.at(step) for step in (0, 2, 4, 8, 100)] == expected


def test_no_steps_are_the_end_from_the_beginning() -> None:
    assert BudgetSchedule("linear", 40, 8, 0).at(0) == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("step", 1, 1, 1), "budget schedule is 'step'"),
        (("linear", 0, 1, 1), "from 0 to 1 blocks"),
        (("linear", 1, 1, -1), "-1 steps"),
    ],
)
def test_wrong_settings_are_refused(arguments: tuple[str, int, int, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        BudgetSchedule(*arguments)  # type: ignore[arg-type]
