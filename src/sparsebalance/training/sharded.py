"""Parameters, gradients and optimiser state shared out between steps: FSDP2, or HSDP over copies of the model.

In: an engine's stages, and a mesh of the processes that hold the same parameters. Out: the same stages, whose
parameters are `DTensor`s except while a step runs, and `ShardedGradients`.

A step gathers them once, before its first micro-batch, and scatters gradients once, after its last, as ZeRO stage 1
does (Rajbhandari et al. 2020, ZeRO, section 5). A gather for each micro-batch, which would save the whole parameters
and gradients too, is a collective in each layer of each micro-batch: ranks run as many of these as balances them, some
more than others, so they would wait for each other in each layer, or for ever. And a collective inside of a
micro-batch would count what it waits as this micro-batch's time, from which the next plans are made.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from sparsebalance.planning.plan import Latency, MicroBatch, Sample, Segment
from sparsebalance.training.data import IGNORE, Example
from sparsebalance.training.engine import Engine
from sparsebalance.training.gradients import Gradients
from sparsebalance.training.parallel import Ranks
from sparsebalance.training.stage import Stage

# What runs to have FSDP scatter the gradients: with them, it adds zeros.
TINY = Example(np.zeros(2, dtype=np.int32), np.array([0, IGNORE], dtype=np.int32))


class ShardedGradients(Gradients):
    """Of parameters that are shared out, each layer's on its own, and what is outside of layers together."""

    def __init__(self, engine: Engine, ranks: Ranks, mesh: DeviceMesh) -> None:
        """Shares out the parameters of the engine's stages, in place."""
        super().__init__(ranks, engine.tied_elsewhere, engine.tensor)
        self._engine, self._group = engine, mesh.get_group("shard")
        for parameter in engine.named_parameters.values():
            parameter.grad = None
        self._megabytes = sum(p.nbytes for p in engine.named_parameters.values() if p.requires_grad) / 1e6
        self._modules = [module for stage in engine.stages for module in _shared_out(stage, mesh)]
        self._parameters = {name: p for name, p in engine.named_parameters.items() if p.requires_grad}

    @property
    def buckets(self) -> int:
        return 1

    @property
    def megabytes(self) -> float:
        return self._megabytes

    @property
    def own(self) -> dict[str, Tensor]:
        return {name: p.grad.to_local() for name, p in self._parameters.items() if isinstance(p.grad, DTensor)}

    def begin(self) -> None:
        for parameter in (*self._parameters.values(), *self._engine.named_parameters.values()):
            parameter.grad = None
        for module in self._modules:
            # Explicit, and in one order: a rank may have no micro-batch that would do it.
            module.unshard()

    def last_action(self, stage: Stage, remaining: Set[Tensor] | None = None) -> AbstractContextManager[None]:
        return nullcontext()

    def complete(self, parameter: Tensor) -> None:
        pass

    def reduce(self) -> None:
        for stage in self._engine.stages:
            self._scatter(stage)
        for module in self._modules:
            module.reshard()
        self._complete_over_model()

    def _scatter(self, stage: Stage) -> None:
        """FSDP sums gradients in a backward alone, so a tiny one runs, times zero."""
        engine = self._engine
        unit = MicroBatch((Segment.whole(Sample(0, 2, 1)),), (1,) * stage.model.config.num_hidden_layers, Latency(0, 0))
        row, received = engine.row(unit, [TINY]), None
        if not stage.is_first:
            received = torch.zeros(engine.shard_tokens(unit.tokens), stage.width, dtype=stage.model.dtype)
        output = stage.output(row, engine.context(unit, row), received, 1)
        if output.requires_grad:  # else all of the stage is frozen
            _sum_in_backward(stage, True)
            (output.sum() * 0).backward()
            _sum_in_backward(stage, False)

    def _square_sum(self, gradients: Iterable[Tensor]) -> float:
        total = torch.tensor(super()._square_sum(gradients), dtype=torch.float64)
        dist.all_reduce(total, group=self._group)
        return float(total)


def _shared_out(stage: Stage, mesh: DeviceMesh) -> list[FSDPModule]:
    """Share a stage's parameters out, in place; the modules that hold them, in the order in which they run."""
    model = stage.model
    modules = []
    for part in (*cast(nn.ModuleList, model.base_model.layers), model):
        module = fully_shard(part, mesh=mesh, reshard_after_forward=False)
        modules.append(module)
        module.set_gradient_divide_factor(1.0)  # losses are divided by the targets of all ranks
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other for fp32
        module.set_reduce_scatter_unused_params(True, recurse=False)
    # FSDP acts when a module is called, but a stage calls only parts of its model.
    model.__dict__["inside"] = stage.inside
    register_fsdp_forward_method(model, "inside")
    stage.inside = model.__dict__["inside"]
    _sum_in_backward(stage, False)
    return modules


def _sum_in_backward(stage: Stage, switch: bool) -> None:
    model = cast(FSDPModule, stage.model)
    model.set_requires_gradient_sync(switch)
    model.set_reshard_after_backward(switch)
    model.set_is_last_backward(switch)
