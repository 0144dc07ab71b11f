"""A torch batch sampler of planned micro-batches: one rank's units, step after step, with the next plan made ahead.

In: global batches and a planning function. Out: lists of `Segment`s for a DataLoader over a `SegmentView`, and a
position that can be saved and gone on from, in the middle of an epoch too.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch.utils.data import Sampler

from sparsebalance.planning.errors import InputError
from sparsebalance.planning.plan import MicroBatch, Sample, Segment, StepPlan
from sparsebalance.training.global_batches import GlobalBatches, Seen
from sparsebalance.training.plan_ahead import PlanAhead

__all__ = ["GlobalBatches", "PlanAhead", "PlannedSampler", "PlannedUnit", "Seen"]

Loaded = TypeVar("Loaded")
DIGESTS = ("lengths and targets", "costs")  # parts of a fingerprint that say nothing to a reader
WAYS_BACK = {
    "composition": " (Window keeps the dp of the first run on any number of ranks)",
    "costs": " (use the latency table of the first run)",
}


@dataclass(frozen=True)
class PlannedUnit:
    """One micro-batch of this rank, and where it stands.

    Attributes:
        step: of the run, over all epochs.
        index: of the micro-batch in its step on this rank.
        is_last: whether the rank's step is done after it.
        unit: segments, budgets and predicted latency; without segments for an explicit empty one.
        step_targets: target tokens of the step on all ranks, the denominator of its loss.
    """

    step: int
    index: int
    is_last: bool
    unit: MicroBatch
    step_targets: int

    @property
    def after(self) -> tuple[int, int]:
        """The position behind it: step and micro-batch."""
        return (self.step + 1, 0) if self.is_last else (self.step, self.index + 1)


class PlannedSampler(Sampler[list[Segment]]):
    """Yields this rank's micro-batches as lists of segments, an empty list for an explicit empty unit.

    One iteration goes from the position to the end of its epoch, the next one on from there; with `forever` it never
    ends. There is no `__len__`: how many micro-batches a rank gets is known only once a step is planned, and differs
    between ranks.

    A loader with workers reads ahead, and its position with it. Go through `follow`, or name the position when it is
    saved.

    Args:
        batches: step -> samples.
        plan: (step, its samples) -> plan. It runs in another thread and must give the same on all ranks.
        rank: data-parallel rank, from 0.
        forever: go on with the next epoch by itself.

    Raises:
        InputError: a plan that does not fit its samples, or has no such rank; when it is iterated.
    """

    def __init__(
        self,
        batches: GlobalBatches,
        plan: Callable[[int, list[Sample]], StepPlan],
        rank: int,
        forever: bool = False,
    ) -> None:
        if rank < 0:
            raise InputError(f"rank is {rank}, but ranks count from 0; give this process's data-parallel rank")
        self.batches, self.rank, self.forever = batches, rank, forever
        self._plan = plan
        self._ahead: PlanAhead[GlobalBatches, StepPlan] = PlanAhead(self._checked_plan)
        self._position = (0, 0)
        self._current: tuple[int, StepPlan] | None = None
        self._handed_out: deque[PlannedUnit] | None = None  # not yet seen by whom `follow` serves

    @property
    def step(self) -> int:
        """The step of the next micro-batch."""
        return self._position[0]

    @property
    def micro_batch(self) -> int:
        """The next micro-batch's place in its step; 0 at a step border."""
        return self._position[1]

    @property
    def epoch(self) -> int:
        """The epoch of the next micro-batch."""
        return self.batches.locate(self.step)[0]

    def plan_of(self, step: int) -> StepPlan:
        """The whole step's plan, on all ranks; the one after it is begun in the background.

        Raises:
            InputError: see the class.
        """
        if self._current is None or self._current[0] != step:
            if self._ahead.prepared != step:
                self._ahead.prepare(step, self.batches)
            self._current = (step, self._ahead.take(step)[0])
            self._ahead.prepare(step + 1, self.batches)
        return self._current[1]

    def _checked_plan(self, step: int, batches: GlobalBatches) -> StepPlan:
        samples = batches.at(step)  # composing a window takes a while, so here too, in the other thread
        plan = self._plan(step, samples)
        plan.validate(samples)
        if self.rank >= len(plan.ranks):
            raise InputError(
                f"step {step} is planned for {len(plan.ranks)} ranks, so there is no rank {self.rank}; "
                "plan for as many data-parallel ranks as there are processes"
            )
        return plan

    def units(self) -> Iterator[PlannedUnit]:
        """From the position on, to the end of its epoch or forever; moves nothing."""
        step, begin = self._position
        end = None if self.forever else self.batches.first_step(self.epoch + 1)
        while end is None or step < end:
            plan = self.plan_of(step)
            units = plan.ranks[self.rank]
            for index in range(begin, len(units)):
                yield PlannedUnit(step, index, index == len(units) - 1, units[index], plan.targets)
            step, begin = step + 1, 0

    def __iter__(self) -> Iterator[list[Segment]]:
        for unit in self.units():
            if self._handed_out is None:
                self._position = unit.after
            else:
                self._handed_out.append(unit)
            yield list(unit.unit.segments)

    def steps(self) -> Iterator[tuple[int, tuple[MicroBatch, ...]]]:
        """(step, this rank's micro-batches that are left of it), for a trainer that loads by itself.

        The position moves to the next step when that one is asked for.
        """
        end = None if self.forever else self.batches.first_step(self.epoch + 1)
        while end is None or self.step < end:
            step, begin = self._position
            yield step, self.plan_of(step).ranks[self.rank][begin:]
            self._position = (step + 1, 0)

    def follow(self, loader: Iterable[Loaded]) -> Iterator[tuple[PlannedUnit, Loaded]]:
        """What a DataLoader over this sampler gives, each with its unit; the position is that of the consumer.

        Args:
            loader: in order, as DataLoader is by default; it may read ahead in any number of workers.

        Raises:
            InputError: a loader over another sampler.
        """
        self._handed_out = handed_out = deque[PlannedUnit]()
        try:
            for loaded in loader:
                if not handed_out:
                    raise InputError(
                        "the loader gave a batch that this sampler did not hand out; make it with batch_sampler=sampler"
                    )
                unit = handed_out.popleft()
                self._position = unit.after
                yield unit, loaded
        finally:
            self._handed_out = None

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; a position inside that epoch stays, so that a resumed run goes on there.

        Raises:
            InputError: an epoch below 0.
        """
        if epoch < 0:
            raise InputError(f"epoch is {epoch}, but epochs count from 0")
        if self.epoch != epoch:
            self._position = (self.batches.first_step(epoch), 0)

    def state_dict(self, step: int | None = None, micro_batch: int = 0) -> dict[str, Any]:
        """The position and what it depends on, JSON-compatible.

        Args:
            step, micro_batch: the next micro-batch to train on, where a loader read ahead of it; the sampler's own
                position by default.
        """
        position = self._position if step is None else (step, micro_batch)
        state = {"step": position[0], "micro_batch": position[1], "fingerprint": self.batches.fingerprint()}
        if position[1]:  # inside of a step the position means something to this rank and this plan only
            state |= {"rank": self.rank, "plan": _layout(self.plan_of(position[0]))}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a saved position.

        At a step border it may come from any rank, of a run with any number of ranks.

        Raises:
            InputError: saved with other data or settings; names what differs. Or a position inside a step that
                another rank saved, or whose plan is not the same any more.
        """
        saved, own = state["fingerprint"], self.batches.fingerprint()
        if different := [name for name in own if saved.get(name) != own[name]]:
            shown = "".join(f"; {n}: {saved.get(n)} then, {own[n]} now" for n in different if n not in DIGESTS)
            ways = "".join(WAYS_BACK.get(name, "") for name in different)
            raise InputError(
                f"the sampler's position was saved with other {', '.join(different)}{shown}; restore them{ways}, or "
                "start the data from its beginning"
            )
        step, micro_batch = int(state["step"]), int(state["micro_batch"])
        if micro_batch:
            where = f"the position is inside step {step}, before micro-batch {micro_batch}"
            if state["rank"] != self.rank:
                raise InputError(
                    f"{where} of rank {state['rank']}, but this is rank {self.rank}; load each rank's own, or save at "
                    "a step border"
                )
            if state["plan"] != _layout(self.plan_of(step)):
                raise InputError(
                    f"{where}, but the step is planned differently now, for {len(self.plan_of(step).ranks)} ranks; go "
                    "on with the ranks and settings of the run that saved it, or save at a step border"
                )
        self._position = (step, micro_batch)

    def close(self) -> None:
        """End the planning thread; the sampler cannot be iterated any more."""
        self._ahead.close()


def _layout(plan: StepPlan) -> str:
    """SHA-256 of which rank runs which segments in which order."""
    segments = [[[(s.sample, s.start, s.end) for s in unit.segments] for unit in units] for units in plan.ranks]
    return hashlib.sha256(repr(segments).encode()).hexdigest()
