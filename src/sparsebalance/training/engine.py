"""Runs one rank's part of a step plan: what a schedule says, action by action, on the stages that the rank holds.

In: stages of a model, units, a schedule, examples. Out: gradients (accumulated in place), the loss sum, and what each
unit and action took. The loss of a unit is divided by the target tokens of the *global* batch, so summed gradients do
not depend on how the batch was cut, packed or placed. Chunks of a sample run forward in order, then backward last to
first, with the keys and values of earlier ones in a buffer; a chunk that the plan marks for it keeps nothing else, and
runs forward again before its backward (ChunkFlow; Yuan et al. 2025, section 4.2). A rank without a pipeline holds one
stage, the whole model, and exchanges nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from sparsebalance.attention.interface import PackedLayout
from sparsebalance.attention.moba import MoBARouter
from sparsebalance.attention.state import SampleState
from sparsebalance.attention.ulysses import HeadExchange, shard_tokens
from sparsebalance.planning.calibration import UNCALIBRATED, Calibration
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.plan import MicroBatch, chain_lengths
from sparsebalance.planning.schedule import Action, Schedule, name, one_forward_one_backward
from sparsebalance.planning.work import Granularity
from sparsebalance.training.data import Example
from sparsebalance.training.links import Links, PipelineGroups
from sparsebalance.training.packing import PackedRow, pack
from sparsebalance.training.position import here
from sparsebalance.training.results import ActionTime, Probes, RankResult, UnitTime, joined
from sparsebalance.training.sequence_parallel import shard
from sparsebalance.training.sparse_attention import SparseContext
from sparsebalance.training.stage import Stage, tied_elsewhere
from sparsebalance.training.tensor_parallel import TensorParallel
from sparsebalance.training.unit_pass import UnitClock, UnitPass, unit_name


class Reduction(Protocol):
    """What sums gradients over ranks, and is told when it may begin."""

    def last_action(self, stage: Stage, remaining: Set[Tensor] | None = None) -> AbstractContextManager[None]:
        """Inside runs the last action of the step that adds to a stage's gradients.

        Args:
            remaining: it adds to these alone, and not by autograd: `complete` is called for each.
        """

    def complete(self, parameter: Tensor) -> None:
        """Nothing more is added to a parameter's gradient in this step."""


@dataclass(frozen=True)
class Engine:
    """The stages that a rank holds, with the attention settings that its micro-batches run under.

    Attributes:
        stages: of the model, in order.
        calibration: of estimated coverage, for micro-batches that are tuned online.
        worker: place of this rank among those of its pipeline.
        groups: how they exchange messages; None without a pipeline.
        sequence: of the ranks that share out the tokens of this one's micro-batches; None without any.
        tensor: of those that share out its heads and matrices; None without any.
        heads: process group of both together, which share out the heads.
    """

    stages: tuple[Stage, ...]
    block_size: int
    granularity: Granularity
    checkpointing: bool = False
    calibration: Calibration = UNCALIBRATED
    worker: int = 0
    groups: PipelineGroups | None = None
    sequence: HeadExchange | None = None
    tensor: TensorParallel | None = None
    heads: dist.ProcessGroup | None = None

    @classmethod
    def whole(
        cls, model: PreTrainedModel, block_size: int, granularity: Granularity, checkpointing: bool = False
    ) -> Engine:
        """All of a model on one rank."""
        return cls((Stage.whole(model),), block_size, granularity, checkpointing)

    @property
    def layers(self) -> tuple[int, ...]:
        """That this rank holds."""
        return tuple(layer for stage in self.stages for layer in stage.layers)

    @property
    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Of all stages of this rank, under their names in the whole model."""
        return {name: parameter for stage in self.stages for name, parameter in stage.named_parameters()}

    @property
    def tied_elsewhere(self) -> str | None:
        """Name of the embedding or head that another worker of the pipeline holds as well."""
        tied = tied_elsewhere(self.stages)
        return next((name for name, parameter in self.named_parameters.items() if parameter is tied), None)

    def row(self, unit: MicroBatch, examples: Sequence[Example]) -> PackedRow:
        """Of a micro-batch, this rank's tokens where others share them out."""
        row = pack(unit, examples)
        return row if self.sequence is None else shard(row, self.sequence.rank, self.sequence.degree)

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
            sequence=self.sequence,
            heads=self.heads,
        )

    def shard_tokens(self, tokens: int) -> int:
        """Of a micro-batch, whose hidden states this rank holds between stages."""
        own = tokens if self.sequence is None else shard_tokens(tokens, self.sequence.degree)
        return own if self.tensor is None else shard_tokens(own, self.tensor.degree)

    def run(
        self,
        units: Sequence[MicroBatch],
        examples: Sequence[Example],
        denominator: int,
        probe_rows: int = 0,
        schedule: Schedule | None = None,
        reduction: Reduction | None = None,
    ) -> RankResult:
        """Forward and backward of each unit; adds to the gradients of the loss over the global batch.

        Args:
            units: of this rank, or of its pipeline, in order; empty ones are skipped.
            denominator: target tokens of the global batch.
            probe_rows: measure coverage on so many queries per sample; 0 does not.
            schedule: of the pipeline's workers, checked; 1F1B where not given.
            reduction: begins with the gradients of the stage that is done with them; where not given, whoever called
                sums them afterwards.

        Raises:
            InputError: a query or key is NaN or infinite; names layer and micro-batch.
            RuntimeError: a neighbour's message did not come.
        """
        if not units:
            return RankResult(layers=self.layers)
        if schedule is None:
            chains = chain_lengths([unit.segments for unit in units])
            schedule = one_forward_one_backward(chains, self.stages[0].count)
        return _Step(self, units, examples, max(denominator, 1), probe_rows, schedule, reduction).run()

    @torch.no_grad()
    def probe(self, units: Sequence[MicroBatch], examples: Sequence[Example], rows: int) -> Probes:
        """Forward only, to measure coverage: (sample id, layer) -> probe, of the layers that this rank holds."""
        if not units:
            return {}
        count = self.stages[0].count
        workers = range(count // len(self.stages))
        forwards = tuple(
            tuple(
                Action("F", unit, stage) for unit in range(len(units)) for stage in range(worker, count, len(workers))
            )
            for worker in workers
        )
        return _Step(self, units, examples, 1, rows, forwards).probe()


class _Step:
    """What one rank holds while it runs the units of a step."""

    def __init__(
        self,
        engine: Engine,
        units: Sequence[MicroBatch],
        examples: Sequence[Example],
        denominator: int,
        probe_rows: int,
        schedule: Schedule,
        reduction: Reduction | None = None,
    ) -> None:
        self._engine, self._units, self._examples, self._reduction = engine, units, examples, reduction
        self._denominator, self._probe_rows = denominator, probe_rows
        self._actions = schedule[engine.worker]
        self._split = any(action.kind == "W" for action in self._actions)
        gradients = [a for a in self._actions if a.kind == ("W" if self._split else "B") and units[a.unit].segments]
        self._last_gradient = {action.stage: action for action in gradients}
        self._stages = {stage.place: stage for stage in engine.stages}
        first = engine.stages[0]
        tokens = [engine.shard_tokens(unit.tokens) for unit in units]
        self._links = Links(engine.groups, engine.worker, schedule, tokens, first.width, first.model.dtype)
        lengths = chain_lengths([unit.segments for unit in units])
        self._chains = [(place, length) for place, length in enumerate(lengths) for _ in range(length)]
        edges = [*accumulate(lengths, initial=0)]
        self._heads, self._tails = set(edges[:-1]), {edge - 1 for edge in edges[1:]}  # first and last units of chains
        self._states: dict[tuple[int, int], SampleState] = {}  # (stage, chain)
        self._passes: dict[tuple[int, int], UnitPass] = {}  # (stage, unit)
        self._begin = time.perf_counter()

    def run(self) -> RankResult:
        result = RankResult(layers=self._engine.layers)
        times: list[list[tuple[Stage, UnitTime]]] = [[] for _ in self._units]
        for action in self._actions:
            if not self._units[action.unit].segments:
                continue
            result.actions.append(self._run(action))
            if action.kind == ("W" if self._split else "B"):
                done = self._passes.pop((action.stage, action.unit))
                result.loss += done.loss
                result.probes.update(done.probes)
                times[action.unit].append((done.stage, done.time()))
        self._links.close()
        result.units = self._in_order(times)
        return result

    def probe(self) -> Probes:
        probes: Probes = {}
        for action in self._actions:
            if self._units[action.unit].segments:
                one = self._passes[action.stage, action.unit] = self._pass(action)
                sent = one.probe(self._received(action))
                if sent is not None:
                    self._links.send(action, sent)
                probes.update(one.probes)
                del self._passes[action.stage, action.unit]
                if action.unit in self._tails:
                    self._forget_state(action)
        self._links.close()
        return probes

    def _run(self, action: Action) -> ActionTime:
        received = self._received(action)
        start, cpu = time.perf_counter(), time.thread_time()
        try:
            with here().at(name(action)), self._summing(action):
                sent = self._compute(action, received)
        except InputError:
            raise
        except Exception as error:
            raise RuntimeError(f"{name(action)}: {type(error).__name__}: {error}") from error
        took = ActionTime(
            action=action,
            start_ms=(start - self._begin) * 1e3,
            ms=(time.perf_counter() - start) * 1e3,
            cpu_ms=(time.thread_time() - cpu) * 1e3,
        )
        if sent is not None:
            self._links.send(action, sent)
        return took

    def _compute(self, action: Action, received: Tensor | None) -> Tensor | None:
        key = action.stage, action.unit
        if action.kind == "F":
            self._passes[key] = self._pass(action)
            return self._passes[key].forward(received)
        if action.kind == "W":
            reduction, last = self._reduction, self._last_gradient[action.stage]
            self._passes[key].weight_gradient(None if reduction is None or action != last else reduction.complete)
            return None
        sent = self._passes[key].backward(received)
        if action.unit in self._heads:  # the last of its chain to run backward
            self._forget_state(action)
        return sent

    def _summing(self, action: Action) -> AbstractContextManager[None]:
        if self._reduction is None or action != self._last_gradient.get(action.stage):
            return nullcontext()
        remaining = self._passes[action.stage, action.unit].put_off if self._split else None
        return self._reduction.last_action(self._stages[action.stage], remaining)

    def _received(self, action: Action) -> Tensor | None:
        stage = self._stages[action.stage]
        if action.kind == "W" or (stage.is_first if action.kind == "F" else stage.is_last):
            return None
        return self._links.receive(action)

    def _pass(self, action: Action) -> UnitPass:
        engine, stage, unit = self._engine, self._stages[action.stage], self._units[action.unit]
        chain, length = self._chains[action.unit]
        state = None
        if length > 1:
            state = self._states.get((action.stage, chain))
            if state is None:
                state = SampleState(unit.segments[0].sample_length, engine.block_size)
                self._states[action.stage, chain] = state
        row = engine.row(unit, self._examples)
        # A chunk's own queries alone would tell of a part of the sample; the last one sees all of its keys.
        last = unit.segments[-1].end == unit.segments[-1].sample_length
        probe_rows = self._probe_rows if last else 0
        context = engine.context(unit, row, probe_rows, state, unit_name(action.unit, unit))
        splitter = stage.splitter if self._split else None
        return UnitPass(stage, unit, row, context, self._denominator, splitter, UnitClock(self._begin))

    def _forget_state(self, action: Action) -> None:
        self._states.pop((action.stage, self._chains[action.unit][0]), None)

    def _in_order(self, times: Sequence[Sequence[tuple[Stage, UnitTime]]]) -> list[UnitTime]:
        """One time per unit, over the rank's stages; an empty one takes none, when the one before it ended."""
        found: list[UnitTime] = []
        now = 0.0
        for unit, parts in zip(self._units, times, strict=True):
            if parts:
                found.append(joined([(stage.layers, taken) for stage, taken in parts]))
                now = found[-1].start_ms + found[-1].forward_ms
            else:
                found.append(UnitTime(now, now, 0.0, 0.0, budgets=unit.budgets))
        return found
