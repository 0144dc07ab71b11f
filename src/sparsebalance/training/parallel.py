"""Processes: start-up, their places in the device mesh, and what they say to each other.

In: the environment that torchrun sets (or none, for a single process). Out: `Ranks`, which the trainer uses
for everything that crosses processes.
"""

from __future__ import annotations

import datetime
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sparsebalance.planning.errors import InputError
from sparsebalance.planning.plan import Topology
from sparsebalance.profiling.memory import keep_freed_memory
from sparsebalance.training.config import ParallelConfig
from sparsebalance.training.links import PipelineGroups
from sparsebalance.training.rendezvous import store_of_attempt

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among all.

    Processes are numbered with the tensor-parallel ones next to each other, then the sequence-parallel ones, then the
    workers of a pipeline, then the pipelines (data-parallel ranks). Groups are None where nothing is exchanged.

    Attributes:
        rank, world: of all processes.
        topology: parallel degrees; where none is given, all processes are data-parallel ranks.
        data: processes that hold the same parameters: of the same stage, and over sequence-parallel ranks too.
        pipeline: those of this process's pipeline.
        ends: first and last worker of this process's pipeline, for them alone.
        sequence, tensor, heads: processes that share out this one's tokens, its heads and matrices, or either.
        model: processes that hold different parameters of one copy of the model.
        shards: of `data`, those that share parameters out between steps; two dimensions where there are several such
            groups. None where each holds its parameters whole.
    """

    rank: int
    world: int
    topology: Topology = field(default_factory=Topology)
    data: dist.ProcessGroup | None = field(default=None, compare=False)
    pipeline: PipelineGroups | None = field(default=None, compare=False)
    ends: dist.ProcessGroup | None = field(default=None, compare=False)
    sequence: dist.ProcessGroup | None = field(default=None, compare=False)
    tensor: dist.ProcessGroup | None = field(default=None, compare=False)
    heads: dist.ProcessGroup | None = field(default=None, compare=False)
    model: dist.ProcessGroup | None = field(default=None, compare=False)
    shards: DeviceMesh | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.topology.world_size == 1:
            object.__setattr__(self, "topology", Topology(dp=self.world))

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def replica(self) -> int:
        """Data-parallel rank."""
        return self.rank // self._per_replica

    @property
    def stage_worker(self) -> int:
        """Place in the pipeline."""
        return self.rank % self._per_replica // self._per_stage

    @property
    def _per_replica(self) -> int:
        return self.topology.pp * self._per_stage

    @property
    def _per_stage(self) -> int:
        return self.topology.sp * self.topology.tp

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over the processes that hold the same parameters, in place."""
        if self.topology.dp * self.topology.sp > 1:
            dist.all_reduce(tensor, group=self.data)

    def sum_over_model(self, value: float) -> float:
        """Over the processes that hold one copy of the model together, on each of them, in fp64."""
        if self.model is None:
            return value
        total = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total, group=self.model)
        return float(total)

    def gather(self, value: T) -> list[T]:
        """Every process's value, in rank order, on every process."""
        if self.world == 1:
            return [value]
        gathered: list[T | None] = [None] * self.world
        dist.all_gather_object(gathered, value)
        return gathered  # type: ignore[return-value]

    def by_replica(self, values: Sequence[T]) -> list[list[list[T]]]:
        """Gathered values as [data-parallel rank][worker of the pipeline][process of the stage]."""
        stages = [list(values[first : first + self._per_stage]) for first in range(0, self.world, self._per_stage)]
        return [stages[first : first + self.topology.pp] for first in range(0, len(stages), self.topology.pp)]

    def slowest(self, values: Sequence[float]) -> list[float]:
        """Of gathered values, the largest of each data-parallel rank."""
        return [max(max(stage) for stage in replica) for replica in self.by_replica(values)]

    def from_first(self, value: T) -> T:
        """Rank 0's value, on every process."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]


def start(config: ParallelConfig) -> Ranks:
    """Join the process group that the environment describes.

    Raises:
        InputError: the number of processes is not that of the configured topology.
    """
    world, topology = int(os.environ.get("WORLD_SIZE", "1")), config.topology
    if world != topology.world_size:
        raise InputError(
            f"{world} processes are running, but parallel.dp {topology.dp} x pp {topology.pp} x tp {topology.tp} x "
            f"sp {topology.sp} needs {topology.world_size}; start that many with torchrun, or change parallel"
        )
    torch.set_num_threads(config.threads)
    keep_freed_memory()
    rank = int(os.environ.get("RANK", "0"))
    if world == 1:
        return Ranks(rank, world)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    timeout = datetime.timedelta(seconds=config.timeout_s)
    # A store of this attempt: torchrun's own still holds the addresses of processes that it has started again.
    store = store_of_attempt(rank, world, timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    return joined_ranks(rank, topology, config.timeout_s, config.shard)


def joined_ranks(rank: int, topology: Topology, timeout_s: float, shard: int = 1) -> Ranks:
    """This process's place and groups; all processes call it at once, after `init_process_group`.

    Args:
        shard: processes of those with the same parameters that share them out between steps.
    """
    limit = datetime.timedelta(seconds=timeout_s)
    places = np.arange(topology.world_size).reshape(topology.dp, topology.pp, topology.sp, topology.tp)

    def alike(*along: int) -> list[list[int]]:
        """Processes that differ along these dimensions alone."""
        rows = np.moveaxis(places, along, range(-len(along), 0)).reshape(-1, *(places.shape[axis] for axis in along))
        return [row.ravel().tolist() for row in rows]

    def joined(members: list[list[int]]) -> dist.ProcessGroup | None:
        return dist.new_subgroups_by_enumeration(members, timeout=limit)[0] if len(members[0]) > 1 else None

    def group(*along: int) -> dist.ProcessGroup | None:
        return joined(alike(*along))

    data, forward, backward, model = group(0, 2), group(1), group(1), group(1, 3)
    sequence, tensor, heads = group(2), group(3), group(2, 3)
    pipeline, ends = None, None
    if forward is not None and backward is not None:
        # Messages in both directions at once need a group each: in one, two neighbours could wait for each other.
        pipeline = PipelineGroups(tuple(dist.get_process_group_ranks(forward)), forward, backward, timeout_s)
        outer = [[first, last] for first, last in zip(places[:, 0].ravel().tolist(), places[:, -1].ravel().tolist())]
        ends = dist.new_subgroups_by_enumeration(outer, timeout=limit)[0]
        if not any(rank in pair for pair in outer):
            ends = None
    shards = None
    if shard > 1:
        grids = [np.array(row).reshape(-1, shard) for row in alike(0, 2)]
        within = joined([row for grid in grids for row in grid.tolist()])
        copies = joined([column for grid in grids for column in grid.T.tolist()])
        shards = _mesh(within, copies, next(grid for grid in grids if rank in grid))
    return Ranks(rank, topology.world_size, topology, data, pipeline, ends, sequence, tensor, heads, model, shards)


def _mesh(within: dist.ProcessGroup | None, copies: dist.ProcessGroup | None, grid: np.ndarray) -> DeviceMesh:
    """Of [copies, processes that share one out]; without the first dimension where there is one copy."""
    assert within is not None
    if copies is None:
        return DeviceMesh.from_group(within, "cpu", mesh_dim_names=("shard",))
    return DeviceMesh.from_group([copies, within], "cpu", mesh=grid.tolist(), mesh_dim_names=("copy", "shard"))


def stop() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def rng_state() -> dict[str, object]:
    """This process's random state: Python, numpy, torch."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}  # noqa: NPY002


def set_rng_state(state: dict[str, object]) -> None:
    random.setstate(state["python"])  # type: ignore[arg-type]
    np.random.set_state(state["numpy"])  # type: ignore[arg-type]  # noqa: NPY002
    torch.set_rng_state(state["torch"])  # type: ignore[arg-type]
