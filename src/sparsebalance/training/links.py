"""Messages between the stages of a pipeline: hidden states forward, their gradients back.

In: the schedule, from which every worker knows what each other one sends, in which order and of which size. Out:
`Links` of one step. No shapes are sent; receives are posted ahead, and a send is never waited for while there is
work, so that two neighbours that send to each other at once cannot block. Forward and backward messages go over
process groups of their own, and arrive in the order in which their sender's schedule sends them.
"""

from __future__ import annotations

import datetime
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from sparsebalance.planning.schedule import Action, Schedule

AHEAD = 2  # receives of one neighbour that are posted before they are asked for
Key = tuple[int, int]  # (stage that receives, unit)


@dataclass(frozen=True, eq=False)
class PipelineGroups:
    """Process groups of one pipeline.

    Attributes:
        ranks: global ranks of its workers, in the order of their first stages.
        forward, backward: over all of them, one for each direction.
        timeout_s: a message that takes longer ends the run.
    """

    ranks: tuple[int, ...]
    forward: dist.ProcessGroup
    backward: dist.ProcessGroup
    timeout_s: float


@dataclass
class _Inbox:
    """What one neighbour sends in one direction, in its order."""

    peer: int
    group: dist.ProcessGroup
    expected: deque[tuple[Key, Action, tuple[int, int]]]
    posted: deque[tuple[Key, Action, Tensor, dist.Work]] = field(default_factory=deque)
    arrived: dict[Key, Tensor] = field(default_factory=dict)


class Links:
    """The messages of one worker in one step."""

    def __init__(
        self,
        groups: PipelineGroups | None,
        worker: int,
        schedule: Schedule,
        tokens: Sequence[int],
        width: int,
        dtype: torch.dtype,
    ) -> None:
        """Args:
        groups: None where all stages are on this worker.
        schedule: of all workers. tokens: [units]; nothing is sent of units without any.
        width: of hidden states.
        """
        self._groups, self._worker, self._dtype, self._units = groups, worker, dtype, len(tokens)
        self._home = {action.stage: place for place, own in enumerate(schedule) for action in own}
        self._inboxes: dict[tuple[bool, int], _Inbox] = {}
        self._here: dict[tuple[bool, Key], Tensor] = {}  # between stages of this worker
        self._sends: deque[tuple[dist.Work, Tensor, Action, int]] = deque()
        for peer, own in enumerate(schedule):
            if groups is None or peer == worker:
                continue
            for action in own:
                target = _target(action)
                if self._home.get(target, -1) != worker or not tokens[action.unit]:
                    continue
                forward = action.kind == "F"
                inbox = self._inboxes.setdefault(
                    (forward, peer), _Inbox(groups.ranks[peer], self._group(forward), deque())
                )
                inbox.expected.append(((target, action.unit), action, (tokens[action.unit], width)))
        for inbox in self._inboxes.values():
            self._post(inbox)

    def send(self, action: Action, tensor: Tensor) -> None:
        """What an action made, to the stage that needs it."""
        target = _target(action)
        home, forward = self._home[target], action.kind == "F"
        if home == self._worker:
            self._here[forward, (target, action.unit)] = tensor
            return
        peer = self._between.ranks[home]
        work = dist.isend(tensor.contiguous(), peer, group=self._group(forward), tag=self._tag(action))
        assert work is not None  # this rank belongs to the group
        self._sends.append((work, tensor, action, peer))
        while self._sends and self._sends[0][0].is_completed():
            self._sends.popleft()

    def receive(self, action: Action) -> Tensor:
        """[T, width] that an action needs from its neighbour stage.

        Raises:
            RuntimeError: it did not come; names the rank and what it should have sent.
        """
        forward, key = action.kind == "F", (action.stage, action.unit)
        source = action.stage - 1 if forward else action.stage + 1
        home = self._home[source]
        if home == self._worker:
            return self._here.pop((forward, key))
        inbox = self._inboxes[forward, home]
        while key not in inbox.arrived:
            if not inbox.posted:
                self._post(inbox)
            found, sent, tensor, work = inbox.posted.popleft()
            self._post(inbox)
            self._wait(work, sent, inbox.peer)
            inbox.arrived[found] = tensor
        return inbox.arrived.pop(key)

    def close(self) -> None:
        """Wait until everything sent has been taken.

        Raises:
            RuntimeError: it was not; names the rank.
        """
        while self._sends:
            work, _, action, peer = self._sends.popleft()
            self._wait(work, action, peer, "to take")

    def _tag(self, action: Action) -> int:
        return action.stage * self._units + action.unit

    def _group(self, forward: bool) -> dist.ProcessGroup:
        return self._between.forward if forward else self._between.backward

    @property
    def _between(self) -> PipelineGroups:
        assert self._groups is not None  # stages on other workers have groups to them
        return self._groups

    def _post(self, inbox: _Inbox) -> None:
        while inbox.expected and len(inbox.posted) < AHEAD:
            key, action, shape = inbox.expected.popleft()
            tensor = torch.empty(shape, dtype=self._dtype)
            work = dist.irecv(tensor, inbox.peer, group=inbox.group, tag=self._tag(action))
            assert work is not None  # this rank belongs to the group
            inbox.posted.append((key, action, tensor, work))

    def _wait(self, work: dist.Work, action: Action, peer: int, what: str = "to send") -> None:
        begin = time.perf_counter()
        try:
            work.wait(datetime.timedelta(seconds=self._between.timeout_s))
        except RuntimeError as error:
            waited = time.perf_counter() - begin
            # gloo's own message is of sockets; what a user can look for is the rank and where it was.
            raise RuntimeError(
                f"waited {waited:.1f} s for rank {peer} {what} {action.kind}{action.unit} of stage {action.stage}: "
                f"it is stuck, or gone ({str(error).splitlines()[0][:200]})"
            ) from error


def _target(action: Action) -> int:
    """The stage that needs what an action makes; of weight gradients, and at the ends of the model, there is none."""
    return {"F": action.stage + 1, "W": -1}.get(action.kind, action.stage - 1)
