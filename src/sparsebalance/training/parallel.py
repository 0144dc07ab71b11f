"""Processes: start-up, their places in the device mesh, gradients in one flat buffer, and failing together.

In: the environment that torchrun sets (or none, for a single process). Out: `Ranks`, which the trainer uses
for everything that crosses processes.
"""

from __future__ import annotations

import datetime
import math
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from sparsebalance.planning.errors import InputError
from sparsebalance.planning.plan import Topology
from sparsebalance.profiling.memory import keep_freed_memory
from sparsebalance.training.config import ParallelConfig
from sparsebalance.training.links import PipelineGroups
from sparsebalance.training.rendezvous import store_of_attempt
from sparsebalance.training.stage import Stage
from sparsebalance.training.tensor_parallel import TensorParallel

T = TypeVar("T")
BUCKET_BYTES = 25 * 2**20  # of gradients that one all-reduce sums


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
    return joined_ranks(rank, topology, config.timeout_s)


def joined_ranks(rank: int, topology: Topology, timeout_s: float) -> Ranks:
    """This process's place and groups; all processes call it at once, after `init_process_group`."""
    limit = datetime.timedelta(seconds=timeout_s)
    places = np.arange(topology.world_size).reshape(topology.dp, topology.pp, topology.sp, topology.tp)

    def group(*along: int) -> dist.ProcessGroup | None:
        """Processes that differ along these dimensions alone."""
        rows = np.moveaxis(places, along, range(-len(along), 0)).reshape(-1, *(places.shape[axis] for axis in along))
        members = [row.ravel().tolist() for row in rows]
        return dist.new_subgroups_by_enumeration(members, timeout=limit)[0] if len(members[0]) > 1 else None

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
    return Ranks(rank, topology.world_size, topology, data, pipeline, ends, sequence, tensor, heads, model)


def stop() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


class FlatGradients:
    """All gradients of a rank's parameters as views of one buffer: no copies, one norm.

    They are summed over the data-parallel ranks in buckets, the last parameters first, as a backward completes them
    (Li et al. 2020, PyTorch Distributed, section 3.2): each while the rest of the step's last backward runs, as soon
    as its gradients are complete and the bucket before it is on its way. So every rank sums the same buckets in the
    same order, whatever it runs.

    Attributes:
        buffer: all of them, [parameters].
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        ranks: Ranks,
        tied: nn.Parameter | None = None,
        tensor: TensorParallel | None = None,
    ) -> None:
        """Args:
        named: by name; those that need no gradient have none.
        tied: of them, the one that another worker of the pipeline holds as well.
        tensor: how they are spread over tensor-parallel ranks, where they are.
        """
        parameters = [p for p in named.values() if p.requires_grad]
        self._named, self._ranks, self._tied, self._tensor = named, ranks, tied, tensor
        dtype = next(iter(named.values())).dtype
        self.buffer = torch.zeros(sum(p.numel() for p in parameters), dtype=dtype)  # empty where all is frozen
        self._buckets: list[Tensor] = []
        self._bucket_of: dict[Tensor, int] = {}
        start = stop = self.buffer.numel()
        for parameter in reversed(parameters):
            end, start = start, start - parameter.numel()
            parameter.grad = self.buffer[start:end].view_as(parameter)
            self._bucket_of[parameter] = len(self._buckets)
            if (stop - start) * self.buffer.itemsize >= BUCKET_BYTES or not start:
                self._buckets.append(self.buffer[start:stop])
                stop = start
        self._incomplete: list[set[Tensor]] = []  # by bucket
        self._sums: list[dist.Work | None] = []  # of the buckets on their way
        self._expect_all()

    @property
    def buckets(self) -> int:
        """How many there are."""
        return len(self._buckets)

    def zero(self) -> None:
        """Before a step."""
        self.buffer.zero_()
        self._expect_all()

    @contextmanager
    def last_action(self, stage: Stage, remaining: Set[Tensor] | None = None) -> Iterator[None]:
        """Inside runs the last action of the step that adds to a stage's gradients: see `Reduction`."""
        own = [parameter for _, parameter in stage.named_parameters() if parameter in self._bucket_of]
        if remaining is not None:
            self._discard([parameter for parameter in own if parameter not in remaining])
        # None are needed where nothing is summed.
        hooked = [] if self._ranks.data is None else own
        hooks = [parameter.register_post_accumulate_grad_hook(self.complete) for parameter in hooked]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self._discard(own)

    def complete(self, parameter: Tensor) -> None:
        """Nothing more is added to a parameter's gradient in this step.

        Raises:
            RuntimeError: that was said before; its bucket may have been summed without what came in between.
        """
        incomplete = self._incomplete[self._bucket_of[parameter]]
        if parameter not in incomplete:
            shape = list(parameter.shape)
            raise RuntimeError(f"a gradient of shape {shape} was added to twice in a stage's last action of the step")
        self._discard([parameter])

    def reduce(self) -> None:
        """Sum over the data-parallel ranks, as far as that has not begun, and wait for it; then sum what is spread
        over this rank's copy of the model: a tied weight over the two stages that hold it, and over tensor-parallel
        ranks what each has only a part of."""
        self._discard(self._bucket_of)
        for work in self._sums:
            if work is not None:
                work.wait()
        if self._tied is not None and self._tied.grad is not None:
            dist.all_reduce(self._tied.grad, group=self._ranks.ends)
        if self._tensor is not None:
            self._tensor.complete_gradients(self._named.items())

    def _expect_all(self) -> None:
        self._sums.clear()
        self._incomplete = [set() for _ in self._buckets]
        for parameter, bucket in self._bucket_of.items():
            self._incomplete[bucket].add(parameter)

    def _discard(self, complete: Iterable[Tensor]) -> None:
        """Send off the next buckets, up to the first that is not complete without these gradients."""
        for parameter in complete:
            self._incomplete[self._bucket_of[parameter]].discard(parameter)
        if self._ranks.data is None:
            return
        while len(self._sums) < len(self._buckets) and not self._incomplete[len(self._sums)]:
            bucket = self._buckets[len(self._sums)]
            self._sums.append(dist.all_reduce(bucket, group=self._ranks.data, async_op=True))

    def norm(self) -> float:
        """Euclidean norm over all gradients of the model, in fp64 (a sum of millions of squares)."""
        if self._ranks.model is None:
            return float(torch.linalg.vector_norm(self.buffer, dtype=torch.float64))
        if self._tensor is None:
            squares = float(torch.linalg.vector_norm(self.buffer, dtype=torch.float64)) ** 2
        else:
            squares = self._tensor.grad_square_sum(self._named.items())
        if self._tied is not None and self._tied.grad is not None and self._ranks.stage_worker:  # counted by the first
            squares -= float(torch.linalg.vector_norm(self._tied.grad, dtype=torch.float64)) ** 2
        return math.sqrt(max(self._ranks.sum_over_model(squares), 0.0))

    def clip(self, limit: float) -> float:
        """Scale down to `limit` where the norm is larger; returns the norm before."""
        norm = self.norm()
        if norm > limit:
            self.buffer.mul_(limit / norm)
        return norm


def rng_state() -> dict[str, object]:
    """This process's random state: Python, numpy, torch."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}  # noqa: NPY002


def set_rng_state(state: dict[str, object]) -> None:
    random.setstate(state["python"])  # type: ignore[arg-type]
    np.random.set_state(state["numpy"])  # type: ignore[arg-type]  # noqa: NPY002
    torch.set_rng_state(state["torch"])  # type: ignore[arg-type]
