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

from sparsebalance.attention.interface import PackedLayout
from sparsebalance.attention.moba import MoBARouter
from sparsebalance.attention.probe import CoverageProbe
from sparsebalance.planning.plan import MicroBatch
from sparsebalance.planning.work import Granularity
from sparsebalance.training.data import Example
from sparsebalance.training.loss import linear_cross_entropy
from sparsebalance.training.packing import PackedRow, pack
from sparsebalance.training.sparse_attention import SparseContext

Probes = dict[tuple[int, int], CoverageProbe]  # (sample id, layer) -> measured coverage


@dataclass(frozen=True)
class UnitTime:
    """Measured milliseconds of one unit; `start_ms` counts from the start of the rank's work in the step."""

    start_ms: float
    forward_ms: float
    backward_ms: float


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
        return sum(unit.forward_ms + unit.backward_ms for unit in self.units)


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
        return linear_cross_entropy(hidden[row.target_index], weight, row.targets)

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
            t1 = t2 = t0
            if unit.segments:
                row = pack(unit, examples)
                context = self.context(unit, row, probe_rows)
                unit_loss = self.loss_sum(row, context) / max(denominator, 1)
                t1 = time.perf_counter()
                unit_loss.backward()
                t2 = time.perf_counter()
                loss += unit_loss.detach().double()
                result.probes.update(_by_sample(unit, context))
            result.units.append(UnitTime((t0 - begin) * 1e3, (t1 - t0) * 1e3, (t2 - t1) * 1e3))
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


def _by_sample(unit: MicroBatch, context: SparseContext) -> Probes:
    return {
        (segment.sample, layer): probe
        for layer, probes in context.probes.items()
        for segment, probe in zip(unit.segments, probes)
    }
