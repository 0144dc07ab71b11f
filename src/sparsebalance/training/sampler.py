"""Which samples form which step, and the plan of the next step made while the current one runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, Literal, TypeVar

import numpy as np

from sparsebalance.planning.errors import InputError
from sparsebalance.planning.plan import Sample, StepPlan

Inputs = TypeVar("Inputs")


@dataclass(frozen=True)
class GlobalBatches:
    """Step number -> samples of its global batch: shuffled every epoch by seed, so the position is the step.

    Attributes:
        samples: of the whole data set.
        batch_size: samples of a step.
        seed: of the shuffling.
        tail: whether an epoch's last, smaller batch is used ("keep") or not ("drop").
        ranks: every batch must give each of them a sample.
    """

    samples: tuple[Sample, ...]
    batch_size: int
    seed: int
    tail: Literal["keep", "drop"] = "drop"
    ranks: int = 1

    def __post_init__(self) -> None:
        count = len(self.samples)
        if count < self.ranks:
            raise InputError(
                f"the data has {count} samples for {self.ranks} ranks; use at most {count} ranks or more data"
            )
        if self.batches_per_epoch == 0:
            raise InputError(
                f"the data has {count} samples, fewer than one batch of {self.batch_size}; "
                'lower data.batch_size or set data.tail to "keep"'
            )

    @property
    def batches_per_epoch(self) -> int:
        whole, rest = divmod(len(self.samples), self.batch_size)
        return whole + (self.tail == "keep" and rest > 0)

    def at(self, step: int) -> list[Sample]:
        """Samples of step 0, 1, 2, ... over all epochs."""
        epoch, batch = divmod(step, self.batches_per_epoch)
        order = _order(len(self.samples), self.seed, epoch)
        return [self.samples[i] for i in order[batch * self.batch_size : (batch + 1) * self.batch_size]]


@lru_cache(maxsize=4)
def _order(count: int, seed: int, epoch: int) -> Sequence[int]:
    order: list[int] = np.random.default_rng([seed, epoch]).permutation(count).tolist()
    return order


class PlanAhead(Generic[Inputs]):
    """Makes plans in a worker thread: `prepare(step)` while an earlier step runs, `take(step)` when it is due.

    A plan depends on the step and on the inputs given to `prepare`, on nothing else; a resumed run that prepares
    with the same inputs gets the same plan.
    """

    def __init__(self, plan: Callable[[int, Inputs], StepPlan]) -> None:
        self._plan = plan
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="plan")
        self._pending: tuple[int, Future[tuple[StepPlan, float]]] | None = None

    def prepare(self, step: int, inputs: Inputs) -> None:
        self._pending = (step, self._worker.submit(self._timed, step, inputs))

    def take(self, step: int) -> tuple[StepPlan, float]:
        """The prepared plan, and the milliseconds that making it took."""
        if self._pending is None or self._pending[0] != step:
            raise RuntimeError(f"no plan was prepared for step {step}")
        return self._pending[1].result()

    def _timed(self, step: int, inputs: Inputs) -> tuple[StepPlan, float]:
        begin = time.perf_counter()
        plan = self._plan(step, inputs)
        return plan, (time.perf_counter() - begin) * 1e3

    def close(self) -> None:
        self._worker.shutdown(cancel_futures=True)
