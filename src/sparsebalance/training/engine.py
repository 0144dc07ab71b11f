"""Runs one rank's part of a step plan: forward and backward of its micro-batches, timed one by one.

In: model, plan, examples. Out: gradients (accumulated in place), the loss sum, and what each unit took.
The loss of a unit is divided by the target tokens of the *global* batch, so summed gradients do not depend
on how the batch was cut, packed or placed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparsebalance.attention.clock import TermClock
from sparsebalance.attention.interface import PackedLayout
from sparsebalance.attention.moba import MoBARouter
from sparsebalance.attention.probe import CoverageProbe
from sparsebalance.planning.latency import TERMS
from sparsebalance.planning.plan import MicroBatch
from sparsebalance.planning.work import Granularity
from sparsebalance.training.data import Example
from sparsebalance.training.loss import linear_cross_entropy
from sparsebalance.training.packing import PackedRow, pack
from sparsebalance.training.sparse_attention import SparseContext

Probes = dict[tuple[int, int], CoverageProbe]  # (sample id, layer) -> measured coverage


@dataclass(frozen=True)
class UnitTime:
    """Measured milliseconds of one unit; `start_ms` counts from the start of the rank's work in the step.

    Attributes:
        forward_ms, backward_ms: of the whole unit, coverage probing left out.
        forward, backward: the same by term (see `sparsebalance.planning.latency.Terms`); empty for an empty unit.
    """

    start_ms: float
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

    def context(self, unit: MicroBatch, row: PackedRow, probe_rows: int = 0) -> SparseContext:
        layout = PackedLayout(row.lengths_q, row.lengths_k, self.block_size)
        router = MoBARouter(self.granularity)
        return SparseContext(layout, unit.budgets, router, self.checkpointing, probe_rows)

    def loss_sum(self, row: PackedRow, context: SparseContext) -> Tensor:
        """Cross-entropy summed over the row's target tokens; exactly 0 where it has none."""
        hidden = self._hidden(row, context)
        weight = self.model.get_output_embeddings().weight
        with context.clock.measure("head"):
            return linear_cross_entropy(hidden[row.target_index], weight, row.targets, context.clock)

    def _hidden(self, row: PackedRow, context: SparseContext) -> Tensor:
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
        result = RankResult()
        loss = torch.zeros((), dtype=torch.float64)
        begin = time.perf_counter()
        for unit in units:
            t0 = time.perf_counter()
            start_ms = (t0 - begin) * 1e3
            if not unit.segments:
                result.units.append(UnitTime(start_ms, 0.0, 0.0))
                continue
            row = pack(unit, examples)
            context = self.context(unit, row, probe_rows)
            unit_loss = self.loss_sum(row, context) / max(denominator, 1)
            t1 = time.perf_counter()
            forward = _by_term((t1 - t0) * 1e3, context.clock)
            unit_loss.backward()
            backward = _by_term((time.perf_counter() - t1) * 1e3, context.clock)
            loss += unit_loss.detach().double()
            result.probes.update(_by_sample(unit, context))
            totals = sum(forward.values()), sum(backward.values())
            result.units.append(UnitTime(start_ms, *totals, forward, backward))
        result.loss = float(loss)
        return result

    @torch.no_grad()
    def probe(self, units: Sequence[MicroBatch], examples: Sequence[Example], rows: int) -> Probes:
        """Forward only, to measure coverage: (sample id, layer) -> probe."""
        probes: Probes = {}
        for unit in units:
            if unit.segments:
                row = pack(unit, examples)
                context = self.context(unit, row, rows)
                self._hidden(row, context)
                probes.update(_by_sample(unit, context))
        return probes


def merged(parts: Iterable[Probes]) -> Probes:
    """All ranks' probes in one."""
    return {key: probe for part in parts for key, probe in part.items()}


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
