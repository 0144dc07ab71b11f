"""Runs one rank's part of a step plan: forward and backward of its micro-batches, timed one by one.

In: model, plan, examples. Out: gradients (accumulated in place), the loss sum, and what each unit took.
The loss of a unit is divided by the target tokens of the *global* batch, so summed gradients do not depend
on how the batch was cut, packed or placed. Chunks of a sample run forward in order, then backward last to first,
with the keys and values of earlier ones in a buffer; a chunk that the plan marks for it keeps nothing else, and
runs forward again before its backward (ChunkFlow; Yuan et al. 2025, section 4.2).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparsebalance.attention.clock import TermClock
from sparsebalance.attention.interface import PackedLayout
from sparsebalance.attention.moba import MoBARouter
from sparsebalance.attention.probe import CoverageProbe
from sparsebalance.attention.state import SampleState
from sparsebalance.planning.latency import TERMS
from sparsebalance.planning.plan import MicroBatch, chain_lengths
from sparsebalance.planning.work import Granularity
from sparsebalance.training.data import Example
from sparsebalance.training.loss import linear_cross_entropy
from sparsebalance.training.packing import PackedRow, pack
from sparsebalance.training.sparse_attention import SparseContext

Probes = dict[tuple[int, int], CoverageProbe]  # (sample id, layer) -> measured coverage


@dataclass(frozen=True)
class UnitTime:
    """Measured milliseconds of one unit; starts count from the start of the rank's work in the step.

    Attributes:
        start_ms, backward_start_ms: of its forward and of its backward.
        forward_ms, backward_ms: of the whole unit, coverage probing left out.
        forward, backward: the same by term (see `sparsebalance.planning.latency.Terms`); empty for an empty unit.
    """

    start_ms: float
    backward_start_ms: float
    forward_ms: float
    backward_ms: float
    forward: dict[str, float] = field(default_factory=dict)
    backward: dict[str, float] = field(default_factory=dict)

    @property
    def total_ms(self) -> float:
        return self.forward_ms + self.backward_ms

    @property
    def terms(self) -> dict[str, float]:
        """Forward + backward milliseconds by term."""
        return {term: ms + self.backward[term] for term, ms in self.forward.items()}


@dataclass
class RankResult:
    """What one rank did in a step.

    Attributes:
        loss: its part of the mean loss over the global batch.
        units: times in execution order.
        probes: (sample id, layer) -> coverage, where measured.
    """

    loss: float = 0.0
    units: list[UnitTime] = field(default_factory=list)
    probes: Probes = field(default_factory=dict)

    @property
    def busy_ms(self) -> float:
        return sum(unit.total_ms for unit in self.units)


@dataclass(frozen=True)
class Engine:
    """A model with the attention settings that its micro-batches run under."""

    model: PreTrainedModel
    block_size: int
    granularity: Granularity
    checkpointing: bool = False

    def context(
        self, unit: MicroBatch, row: PackedRow, probe_rows: int = 0, state: SampleState | None = None
    ) -> SparseContext:
        layout = PackedLayout(row.lengths_q, row.lengths_k, self.block_size)
        router = MoBARouter(self.granularity)
        keep = self.checkpointing or unit.recompute
        return SparseContext(layout, unit.budgets, router, keep, probe_rows, state=state)

    def loss_sum(self, row: PackedRow, context: SparseContext) -> Tensor:
        """Cross-entropy summed over the row's target tokens; exactly 0 where it has none."""
        hidden = self.hidden(row, context)
        if not row.targets.numel():  # a chunk may have none: it must not hold a gradient of the head's size for it
            return hidden[row.target_index].sum()
        weight = self.model.get_output_embeddings().weight
        with context.clock.measure("head"):
            return linear_cross_entropy(hidden[row.target_index], weight, row.targets, context.clock)

    def hidden(self, row: PackedRow, context: SparseContext) -> Tensor:
        """[T, hidden] after the last layer."""
        output = self.model.base_model(
            input_ids=row.input_ids, position_ids=row.position_ids, use_cache=False, sparse=context
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def run(
        self,
        units: Sequence[MicroBatch],
        examples: Sequence[Example],
        denominator: int,
        probe_rows: int = 0,
    ) -> RankResult:
        """Forward and backward of each unit; adds to the gradients of the loss over the global batch.

        Args:
            units: of this rank, in order; empty ones are skipped.
            denominator: target tokens of the global batch.
            probe_rows: measure coverage on so many queries per sample; 0 does not.
        """
        loss = torch.zeros((), dtype=torch.float64)
        times: list[UnitTime] = []
        probes: Probes = {}
        begin = time.perf_counter()
        for chain in _chains(units):
            passes = self._passes(chain, begin, examples, max(denominator, 1), probe_rows)
            for one in passes:
                one.forward()
            for one in reversed(passes):
                one.backward()
            for one in passes:
                loss += one.loss
                times.append(one.time())
                probes.update(one.probes)
        return RankResult(float(loss), times, probes)

    @torch.no_grad()
    def probe(self, units: Sequence[MicroBatch], examples: Sequence[Example], rows: int) -> Probes:
        """Forward only, to measure coverage: (sample id, layer) -> probe."""
        probes: Probes = {}
        for chain in _chains(units):
            passes = self._passes(chain, time.perf_counter(), examples, 1, rows)
            for one in passes:
                one.probe()
                probes.update(one.probes)
        return probes

    def _passes(
        self, chain: Sequence[MicroBatch], begin: float, examples: Sequence[Example], denominator: int, rows: int
    ) -> list[_Pass]:
        state = SampleState(chain[0].segments[0].sample_length, self.block_size) if len(chain) > 1 else None
        return [_Pass(self, unit, begin, examples, denominator, rows, state) for unit in chain]


def _chains(units: Sequence[MicroBatch]) -> Iterator[Sequence[MicroBatch]]:
    """The chunks of a sample together, any other unit alone."""
    first = 0
    for length in chain_lengths([unit.segments for unit in units]):
        yield units[first : first + length]
        first += length


def merged(parts: Iterable[Probes]) -> Probes:
    """All ranks' probes in one."""
    return {key: probe for part in parts for key, probe in part.items()}


class _Pass:
    """One unit on its way through forward and backward."""

    def __init__(
        self,
        engine: Engine,
        unit: MicroBatch,
        begin: float,
        examples: Sequence[Example],
        denominator: int,
        probe_rows: int,
        state: SampleState | None,
    ) -> None:
        self.loss = torch.zeros((), dtype=torch.float64)
        self.probes: Probes = {}
        self._engine, self._unit, self._begin, self._denominator = engine, unit, begin, denominator
        self._graph: Tensor | None = None
        self._parts: list[tuple[float, dict[str, float]]] = []  # start and terms of forward and backward
        if unit.segments:
            self._row = pack(unit, examples)
            # A chunk's own queries alone would tell of a part of the sample; the last one sees all of its keys.
            last = unit.segments[-1].end == unit.segments[-1].sample_length
            self._context = engine.context(unit, self._row, probe_rows if last else 0, state)

    def forward(self) -> None:
        with self._timed():
            if not self._unit.segments:
                return
            if self._unit.recompute:
                with torch.no_grad():
                    self._engine.hidden(self._row, self._context)
            else:
                self._graph = self._loss()

    def backward(self) -> None:
        with self._timed():
            if not self._unit.segments:
                return
            graph = self._loss() if self._graph is None else self._graph
            graph.backward()
            self.loss += graph.detach()
            self._graph = None
        self.probes = _by_sample(self._unit, self._context)
        del self._context  # and what its selections hold

    @torch.no_grad()
    def probe(self) -> None:
        """Forward only."""
        if self._unit.segments:
            self._engine.hidden(self._row, self._context)
            self.probes = _by_sample(self._unit, self._context)

    def time(self) -> UnitTime:
        (start, forward), (backward_start, backward) = self._parts
        return UnitTime(start, backward_start, sum(forward.values()), sum(backward.values()), forward, backward)

    def _loss(self) -> Tensor:
        return self._engine.loss_sum(self._row, self._context) / self._denominator

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        took = (time.perf_counter() - start) * 1e3
        terms = _by_term(took, self._context.clock) if self._unit.segments else {}
        self._parts.append(((start - self._begin) * 1e3, terms))


def _by_term(whole_ms: float, clock: TermClock) -> dict[str, float]:
    """What the terms took, the linear part being what the others leave; probing is not part of the work."""
    taken = clock.take()
    others = {term: taken.get(term, 0.0) for term in TERMS if term != "linear"}
    linear = whole_ms - sum(others.values()) - taken.get("probe", 0.0)
    return {"linear": linear, **others}


def _by_sample(unit: MicroBatch, context: SparseContext) -> Probes:
    return {
        (segment.sample, layer): probe
        for layer, probes in context.probes.items()
        for segment, probe in zip(unit.segments, probes)
    }
