"""The plan of the next step, made in a worker thread while the current step runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Inputs = TypeVar("Inputs")
Plan = TypeVar("Plan")


class PlanAhead(Generic[Inputs, Plan]):
    """Makes plans in a worker thread: `prepare(step)` while an earlier step runs, `take(step)` when it is due.

    A plan depends on the step and on the inputs given to `prepare`, on nothing else; a resumed run that prepares
    with the same inputs gets the same plan.
    """

    def __init__(self, plan: Callable[[int, Inputs], Plan]) -> None:
        self._plan = plan
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="plan")
        self._pending: tuple[int, Future[tuple[Plan, float]]] | None = None

    @property
    def prepared(self) -> int | None:
        """The step that `take` would give the plan of."""
        return None if self._pending is None else self._pending[0]

    def prepare(self, step: int, inputs: Inputs) -> None:
        self._pending = (step, self._worker.submit(self._timed, step, inputs))

    def take(self, step: int) -> tuple[Plan, float]:
        """The prepared plan, and the milliseconds that making it took."""
        if self._pending is None or self._pending[0] != step:
            raise RuntimeError(f"no plan was prepared for step {step}")
        return self._pending[1].result()

    def _timed(self, step: int, inputs: Inputs) -> tuple[Plan, float]:
        begin = time.perf_counter()
        plan = self._plan(step, inputs)
        return plan, (time.perf_counter() - begin) * 1e3

    def close(self) -> None:
        self._worker.shutdown(cancel_futures=True)
