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
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparsebalance.attention.clock import TermClock
from sparsebalance.attention.interface import PackedLayout
from sparsebalance.attention.moba import MoBARouter
from sparsebalance.attention.probe import CoverageProbe
from sparsebalance.attention.state import SampleState
from sparsebalance.planning.calibration import UNCALIBRATED, Calibration
from sparsebalance.planning.coverage import chunk_factor
from sparsebalance.planning.latency import TERMS
from sparsebalance.planning.plan import MicroBatch, StepPlan, chain_lengths
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
        forward, backward: the same by term (see `sparsebalance.planning.latency.Terms`), without `tune_ms`; empty
            for an empty unit.
        budgets: that the unit really used, per layer: the planned ones unless they were tuned online.
        tune_ms: of its forward, spent on tuning budgets online.
        probe_ms: spent on measuring coverage, beside everything else.
    """

    start_ms: float
    backward_start_ms: float
    forward_ms: float
    backward_ms: float
    forward: dict[str, float] = field(default_factory=dict)
    backward: dict[str, float] = field(default_factory=dict)
    budgets: tuple[int, ...] = ()
    tune_ms: float = 0.0
    probe_ms: float = 0.0

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

    @property
    def tune_ms(self) -> float:
        return sum(unit.tune_ms for unit in self.units)

    @property
    def probe_ms(self) -> float:
        return sum(unit.probe_ms for unit in self.units)


@dataclass(frozen=True)
class Engine:
    """A model with the attention settings that its micro-batches run under.

    Attributes:
        calibration: of estimated coverage, for micro-batches that are tuned online.
    """

    model: PreTrainedModel
    block_size: int
    granularity: Granularity
    checkpointing: bool = False
    calibration: Calibration = UNCALIBRATED

    def context(
        self,
        unit: MicroBatch,
        row: PackedRow,
        probe_rows: int = 0,
        state: SampleState | None = None,
        name: str = "a micro-batch",
    ) -> SparseContext:
        return SparseContext(
            PackedLayout(row.lengths_q, row.lengths_k, self.block_size),
            unit.budgets,
            MoBARouter(self.granularity),
            keep_selections=self.checkpointing or unit.recompute,
            probe_rows=probe_rows,
            state=state,
            name=name,
            online=unit.online,
            calibration=self.calibration,
        )

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

        Raises:
            InputError: a query or key is NaN or infinite; names layer and micro-batch.
        """
        loss = torch.zeros((), dtype=torch.float64)
        times: list[UnitTime] = []
        probes: Probes = {}
        begin = time.perf_counter()
        for first, chain in _chains(units):
            passes = self._passes(chain, begin, examples, max(denominator, 1), probe_rows, first)
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
        for first, chain in _chains(units):
            passes = self._passes(chain, time.perf_counter(), examples, 1, rows, first)
            for one in passes:
                one.probe()
                probes.update(one.probes)
        return probes

    def _passes(
        self,
        chain: Sequence[MicroBatch],
        begin: float,
        examples: Sequence[Example],
        denominator: int,
        rows: int,
        first: int = 0,
    ) -> list[_Pass]:
        state = SampleState(chain[0].segments[0].sample_length, self.block_size) if len(chain) > 1 else None
        return [
            _Pass(self, unit, _name(place, unit), begin, examples, denominator, rows, state)
            for place, unit in enumerate(chain, first)
        ]


def _chains(units: Sequence[MicroBatch]) -> Iterator[tuple[int, Sequence[MicroBatch]]]:
    """The chunks of a sample together, any other unit alone, each with the place of its first unit."""
    first = 0
    for length in chain_lengths([unit.segments for unit in units]):
        yield first, units[first : first + length]
        first += length


def merged(parts: Iterable[Probes]) -> Probes:
    """All ranks' probes in one."""
    return {key: probe for part in parts for key, probe in part.items()}


def as_run(plan: StepPlan, results: Sequence[RankResult]) -> StepPlan:
    """The plan with the budgets that its units really used; `results` of all ranks."""
    ranks = tuple(
        tuple(replace(unit, budgets=time.budgets) for unit, time in zip(units, result.units, strict=True))
        for units, result in zip(plan.ranks, results, strict=True)
    )
    return replace(plan, ranks=ranks)


def _name(place: int, unit: MicroBatch) -> str:
    """What an error message calls the unit: its place among those of its rank, and where to find its text."""
    if len(unit.segments) == 1:
        (segment,) = unit.segments
        return f"micro-batch {place} (sample {segment.sample}, tokens {segment.start:,} to {segment.end:,})"
    samples = ", ".join(str(segment.sample) for segment in unit.segments[:8])
    more = f" and {len(unit.segments) - 8} more" if len(unit.segments) > 8 else ""
    return f"micro-batch {place} (samples {samples}{more}, {unit.tokens:,} tokens)"


class _Pass:
    """One unit on its way through forward and backward."""

    def __init__(
        self,
        engine: Engine,
        unit: MicroBatch,
        name: str,
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
        self._budgets, self._tune_ms, self._probe_ms = unit.budgets, 0.0, 0.0
        if unit.segments:
            self._row = pack(unit, examples)
            # A chunk's own queries alone would tell of a part of the sample; the last one sees all of its keys.
            last = unit.segments[-1].end == unit.segments[-1].sample_length
            self._context = engine.context(unit, self._row, probe_rows if last else 0, state, name)

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
        used = self._context.used
        self._budgets = tuple(int(used.get(layer, wish)) for layer, wish in enumerate(self._unit.budgets))  # type: ignore[arg-type]
        del self._context  # and what its selections hold

    @torch.no_grad()
    def probe(self) -> None:
        """Forward only."""
        if self._unit.segments:
            self._engine.hidden(self._row, self._context)
            self.probes = _by_sample(self._unit, self._context)

    def time(self) -> UnitTime:
        (start, forward), (backward_start, backward) = self._parts
        return UnitTime(
            start_ms=start,
            backward_start_ms=backward_start,
            forward_ms=sum(forward.values()) + self._tune_ms,
            backward_ms=sum(backward.values()),
            forward=forward,
            backward=backward,
            budgets=self._budgets,
            tune_ms=self._tune_ms,
            probe_ms=self._probe_ms,
        )

    def _loss(self) -> Tensor:
        return self._engine.loss_sum(self._row, self._context) / self._denominator

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        took = (time.perf_counter() - start) * 1e3
        terms: dict[str, float] = {}
        if self._unit.segments:
            terms, tune_ms, probe_ms = _by_term(took, self._context.clock)
            self._probe_ms += probe_ms
            self._tune_ms += tune_ms  # all of it in the forward: a recompute attends what was chosen there
        self._parts.append(((start - self._begin) * 1e3, terms))


def _by_term(whole_ms: float, clock: TermClock) -> tuple[dict[str, float], float, float]:
    """What the terms took, the linear part being what the others leave; what tuning took, and what probing took."""
    taken = clock.take()
    others = {term: taken.get(term, 0.0) for term in TERMS if term != "linear"}
    tune, probe = taken.get("tune", 0.0), taken.get("probe", 0.0)
    return {"linear": whole_ms - sum(others.values()) - tune - probe, **others}, tune, probe


def _by_sample(unit: MicroBatch, context: SparseContext) -> Probes:
    """A chunk's probe tells of its own queries, which are late ones: it is read as one of the whole sample."""
    return {
        (segment.sample, layer): probe if segment.is_whole else probe.scaled(1 / chunk_factor(segment))
        for layer, probes in context.probes.items()
        for segment, probe in zip(unit.segments, probes)
    }
