"""Data-parallel processes: start-up, gradients in one flat buffer, gathering, and failing together.

In: the environment that torchrun sets (or none, for a single process). Out: `Ranks`, which the trainer uses
for everything that crosses processes.
"""

from __future__ import annotations

import datetime
import os
import random
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from sparsebalance.planning.errors import InputError
from sparsebalance.profiling.memory import keep_freed_memory
from sparsebalance.training.config import ParallelConfig

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among the data-parallel ones."""

    rank: int
    world: int

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over ranks, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on every rank."""
        if self.world == 1:
            return [value]
        gathered: list[T | None] = [None] * self.world
        dist.all_gather_object(gathered, value)
        return gathered  # type: ignore[return-value]

    def from_first(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]


def start(config: ParallelConfig) -> Ranks:
    """Join the process group that the environment describes.

    Raises:
        InputError: the number of processes is not the configured `dp`.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != config.dp:
        raise InputError(
            f"{world} processes are running, but parallel.dp is {config.dp}; "
            f"start {config.dp} with torchrun, or set parallel.dp to {world}"
        )
    torch.set_num_threads(config.threads)
    keep_freed_memory()
    if world > 1:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=config.timeout_s))
    return Ranks(int(os.environ.get("RANK", "0")), world)


def stop() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


class FlatGradients:
    """All gradients of a model as views of one buffer: one all-reduce, one norm, no copies."""

    def __init__(self, model: nn.Module) -> None:
        parameters = [p for p in model.parameters() if p.requires_grad]
        self.buffer = torch.zeros(sum(p.numel() for p in parameters), dtype=parameters[0].dtype)
        start = 0
        for parameter in parameters:
            parameter.grad = self.buffer[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()

    def zero(self) -> None:
        self.buffer.zero_()

    def norm(self) -> float:
        """Euclidean norm over all gradients, in fp64 (a sum of millions of squares)."""
        return float(torch.linalg.vector_norm(self.buffer, dtype=torch.float64))

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
