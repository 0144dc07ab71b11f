"""A training set-up to be judged before it runs: model, device, topology, units; and what follows from it.

In: names and numbers as a user gives them. Out: a `Scenario` that knows its latency model, network and memory.
Analytic unless it is given a measured latency table.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from sparsebalance.planning.coverage import CoverageCurves
from sparsebalance.planning.decoder import Decoder
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.hardware import ANALYTIC, Device
from sparsebalance.planning.latency import LatencyModel, RooflineModel, check_heads
from sparsebalance.planning.measured_curves import measured_curves
from sparsebalance.planning.memory import MemoryModel
from sparsebalance.planning.network import ring_all_reduce
from sparsebalance.planning.pipeline import PipelineModel, ScheduleName
from sparsebalance.planning.plan import Topology
from sparsebalance.planning.simulator import Network
from sparsebalance.planning.table import LatencyTable
from sparsebalance.planning.work import Granularity

BUCKETS = 8  # of the gradient all-reduce of a stage, overlapped with its last backward
CURVES = "by curves measured on SmolLM2-135M-Instruct"  # where coverage comes from, said beside it
USABLE = 0.92  # of a device's memory; the rest goes to its runtime, fragmentation and communication buffers
Precision = Literal["float64", "float32", "bfloat16"]


@dataclass(frozen=True)
class Scenario:
    """Attributes:
    decoder: the model's sizes.
    device: accelerator with its links; None for a measured table, which knows its own machine.
    topology: parallel degrees.
    block_size, budget, granularity: of the block-sparse attention.
    unit_size: tokens of a unit of policies that cut; None leaves samples whole.
    schedule: of the pipeline.
    dtype, checkpointing, zero: of training; `zero` spreads the optimiser over the data-parallel ranks (ZeRO-1).
    table: measured latencies instead of analytic ones.

    Raises:
        InputError: more stages than layers, heads that cannot be split, or a table with tp or sp.
    """

    decoder: Decoder
    device: Device | None
    topology: Topology
    block_size: int
    budget: int
    granularity: Granularity = "token"
    unit_size: int | None = None
    schedule: ScheduleName = "1f1b"
    dtype: Precision = "bfloat16"
    checkpointing: bool = True
    zero: bool = True
    table: LatencyTable | None = None

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise InputError(f"budget is {self.budget}, but the own block is always read: at least 1")
        check_heads(self.decoder, self.topology.tp, self.topology.sp)
        PipelineModel(self.schedule).split(self.decoder.layers, self.topology)
        if (self.device is None) == (self.table is None):
            raise InputError("give either a device or a latency table")
        if self.table is not None and self.topology.tp * self.topology.sp > 1:
            raise InputError(
                f"a latency table holds whole layers, so tp {self.topology.tp} and sp {self.topology.sp} must be 1; "
                "plan with a device instead"
            )

    @property
    def source(self) -> str:
        """Where its times come from, for every table and page that shows them."""
        if self.table is not None:
            return f"measured on {self.table.provenance.get('host', 'this machine')}"
        assert self.device is not None
        return f"{self.device.name}, {ANALYTIC}"

    @cached_property
    def model(self) -> LatencyModel:
        if self.table is not None:
            return self.table
        assert self.device is not None
        return RooflineModel(
            self.decoder,
            self.device,
            self.block_size,
            self.granularity,
            self.topology.tp,
            self.topology.sp,
            self.checkpointing,
        )

    @cached_property
    def curves(self) -> CoverageCurves:
        """Coverage over budget, as measured on a real model."""
        return measured_curves(self.decoder.layers, self.block_size)

    @cached_property
    def memory(self) -> MemoryModel:
        return MemoryModel(
            self.decoder,
            self.block_size,
            self.granularity,
            self.budget,
            self.dtype,
            self.checkpointing,
            self.topology.tp,
            self.topology.sp,
            self.topology.dp if self.zero else 1,
        )

    @cached_property
    def pipeline(self) -> PipelineModel:
        return PipelineModel(self.schedule, self._network(), self.memory)

    def _network(self) -> Network:
        stages = PipelineModel(self.schedule).split(self.decoder.layers, self.topology)
        gradients_mb = [self.memory.static(stage)[1] for stage in stages]
        topology = self.topology
        if self.device is None:
            measured = self.table.network if self.table is not None else None
            if measured is None:
                return Network()
            reduce = [measured.all_reduce.ms(mb) if topology.dp > 1 else 0.0 for mb in gradients_mb]
            link = measured.point_to_point
            return Network(link.latency_ms, link.ms_per_mb, np.array(reduce), BUCKETS)
        device = self.device
        # Tensor and sequence ranks sit next to each other, then the stages, then the data-parallel ranks.
        inner = topology.tp * topology.sp
        neighbours = device.link_gbps if inner * topology.pp <= device.devices_per_node else device.network_gbps
        copies = topology.dp * topology.sp  # every sequence rank holds the whole layer's weights
        across = device.link_gbps if topology.world_size <= device.devices_per_node else device.network_gbps
        reduce = [ring_all_reduce(mb, copies, across, device.link_latency_us) for mb in gradients_mb]
        return Network(device.link_latency_us / 1e3, 1 / neighbours, np.array(reduce), BUCKETS)

    def static_mb(self) -> list[float]:
        """Weights, gradients and optimiser of each worker's device."""
        stages = self.pipeline.split(self.decoder.layers, self.topology)
        per_stage = [sum(self.memory.static(stage)) for stage in stages]
        return [sum(per_stage[worker :: self.topology.pp]) for worker in range(self.topology.pp)]

    @property
    def capacity_mb(self) -> float | None:
        """Usable memory of a device; None where it is not known."""
        return None if self.device is None else self.device.memory_gb * 1e3 * USABLE
