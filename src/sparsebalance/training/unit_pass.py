"""One micro-batch on its way through one stage: forward, backward or its two halves, timed and named in errors.

In: a unit of a plan, a stage, what the stages before and after it sent. Out: what this stage sends on, gradients
(accumulated in place), the loss sum, coverage probes and times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparsebalance.attention.clock import TermClock
from sparsebalance.planning.coverage import chunk_factor
from sparsebalance.planning.latency import TERMS
from sparsebalance.planning.plan import MicroBatch
from sparsebalance.training.packing import PackedRow
from sparsebalance.training.results import Probes, UnitTime
from sparsebalance.training.sparse_attention import SparseContext
from sparsebalance.training.stage import Stage
from sparsebalance.training.weight_gradients import Deferred, Splitter


@dataclass
class UnitPass:
    """One unit, which is not empty, on one stage.

    Attributes:
        stage, unit, row, context: what runs.
        denominator: of the loss: target tokens of the global batch.
        splitter: of the stage's model, where its weight gradients may be put off; None where they never are.
        clock: collects what it takes.
        loss: its part of the mean loss, where the stage is the last.
        probes: (sample id, layer) -> coverage, where measured.
    """

    stage: Stage
    unit: MicroBatch
    row: PackedRow
    context: SparseContext
    denominator: int
    splitter: Splitter | None
    clock: UnitClock
    loss: float = 0.0
    probes: Probes = field(default_factory=dict)
    _received: Tensor | None = None
    _sent: Tensor | None = None
    _deferred: Deferred | None = None

    def forward(self, received: Tensor | None) -> Tensor | None:
        """[T, hidden] from the stage before -> what goes to the stage after; None at the ends of the model."""
        with self.clock.forward(self.context.clock):
            if received is not None:
                self._received = received.requires_grad_()
            if self.unit.recompute:
                with torch.no_grad():
                    hidden = self.stage.hidden(self.row, self.context, self._received)
                return None if self.stage.is_last else hidden
            if self.splitter is not None:
                self._deferred = Deferred()
            self._sent = self._graph()
            return None if self.stage.is_last else self._sent.detach()

    def backward(self, gradient: Tensor | None) -> Tensor | None:
        """[T, hidden] gradient from the stage after -> what goes to the stage before; None at the ends.

        Where weight gradients are put off, `weight_gradient` has to follow.
        """
        with self.clock.backward(self.context.clock):
            if self.unit.recompute and self.splitter is not None:
                self._deferred = Deferred()
            sent = self._graph() if self._sent is None else self._sent
            if sent.requires_grad:  # else everything up to here is frozen, and nobody waits for a gradient
                with self._collecting():
                    sent.backward(gradient)
            if self.stage.is_last:
                self.loss = float(sent.detach())
            received, self._received, self._sent = self._received, None, None
        self._learn()
        if received is None:
            return None
        # Of a unit with nothing that needs a gradient in this stage none arrives; the stage before still waits for it.
        return torch.zeros_like(received) if received.grad is None else received.grad

    @property
    def put_off(self) -> set[Tensor]:
        """Parameters to whose gradients `weight_gradient` will add."""
        return set() if self._deferred is None else self._deferred.parameters

    def weight_gradient(self, added: Callable[[Tensor], None] | None = None) -> None:
        """What `backward` put off; `added` is told of each parameter whose gradient grew."""
        with self.clock.backward(self.context.clock):
            if self._deferred is not None:
                self._deferred.run(added)
                self._deferred = None

    @torch.no_grad()
    def probe(self, received: Tensor | None) -> Tensor | None:
        """Forward only, to measure coverage."""
        hidden = self.stage.hidden(self.row, self.context, received)
        self._learn()
        return None if self.stage.is_last else hidden

    def time(self) -> UnitTime:
        used = self.context.used
        budgets = tuple(int(used.get(layer, wish)) for layer, wish in enumerate(self.unit.budgets))  # type: ignore[arg-type]
        return self.clock.unit_time(budgets)

    def _graph(self) -> Tensor:
        """See `Stage.output`; ready for its backward."""
        with self._collecting():
            return self.stage.output(self.row, self.context, self._received, self.denominator)

    def _collecting(self) -> AbstractContextManager[None]:
        if self.splitter is None or self._deferred is None:
            return nullcontext()
        return self.splitter.collecting(self._deferred)

    def _learn(self) -> None:
        """A chunk's probe tells of its own queries, which are late ones: it is read as one of the whole sample."""
        self.probes = {
            (segment.sample, layer): probe if segment.is_whole else probe.scaled(1 / chunk_factor(segment))
            for layer, probes in self.context.probes.items()
            for segment, probe in zip(self.unit.segments, probes)
        }


class UnitClock:
    """What a unit took on a stage, by term; starts count from the beginning of the step."""

    def __init__(self, begin: float) -> None:
        self._begin = begin  # by time.perf_counter()
        self._starts: list[float] = []  # of forward and backward
        self._terms: tuple[dict[str, float], dict[str, float]] = ({}, {})
        self._tune_ms = self._probe_ms = 0.0

    def forward(self, clock: TermClock) -> AbstractContextManager[None]:
        return self._timed(0, clock)

    def backward(self, clock: TermClock) -> AbstractContextManager[None]:
        """Once, or twice where it runs in two halves."""
        return self._timed(1, clock)

    @contextmanager
    def _timed(self, side: int, clock: TermClock) -> Iterator[None]:
        start = time.perf_counter()
        yield
        whole_ms = (time.perf_counter() - start) * 1e3
        taken = clock.take()
        others = {term: taken.get(term, 0.0) for term in TERMS if term != "linear"}
        tune, probe = taken.get("tune", 0.0), taken.get("probe", 0.0)
        terms = {"linear": whole_ms - sum(others.values()) - tune - probe, **others}
        for term, ms in terms.items():
            self._terms[side][term] = self._terms[side].get(term, 0.0) + ms
        self._tune_ms += tune  # all of it in the forward: a recompute attends what was chosen there
        self._probe_ms += probe
        if len(self._starts) == side:
            self._starts.append((start - self._begin) * 1e3)

    def unit_time(self, budgets: tuple[int, ...]) -> UnitTime:
        forward, backward = self._terms
        return UnitTime(
            start_ms=self._starts[0],
            backward_start_ms=self._starts[1],
            forward_ms=sum(forward.values()) + self._tune_ms,
            backward_ms=sum(backward.values()),
            forward=forward,
            backward=backward,
            budgets=budgets,
            tune_ms=self._tune_ms,
            probe_ms=self._probe_ms,
        )


def unit_name(place: int, unit: MicroBatch) -> str:
    """What an error message calls the unit: its place among those of its rank, and where to find its text."""
    if len(unit.segments) == 1:
        (segment,) = unit.segments
        return f"micro-batch {place} (sample {segment.sample}, tokens {segment.start:,} to {segment.end:,})"
    samples = ", ".join(str(segment.sample) for segment in unit.segments[:8])
    more = f" and {len(unit.segments) - 8} more" if len(unit.segments) > 8 else ""
    return f"micro-batch {place} (samples {samples}{more}, {unit.tokens:,} tokens)"
