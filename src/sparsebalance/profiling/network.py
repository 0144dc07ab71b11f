"""What messages between this run's processes cost: timed on the process group that training uses.

In: the ranks. Out: `NetworkCosts`, the same on every rank, or None for a single process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from sparsebalance.planning.network import LinkCost, NetworkCosts
from sparsebalance.training.parallel import Ranks

SIZES_MB = (0.004, 0.25, 4.0, 16.0)
ROUNDS = 5


def measure_network(ranks: Ranks) -> NetworkCosts | None:
    """Medians of interleaved rounds over a few sizes, a first round discarded; under a second for gloo."""
    if ranks.world == 1:
        return None
    buffers = [torch.zeros(max(1, round(size * 1e6 / 4))) for size in SIZES_MB]
    reduce = _timed(ranks, buffers, ranks.all_reduce)
    exchange = _timed(ranks, buffers, lambda buffer: _ping_pong(ranks.rank, buffer))
    sizes = [buffer.numel() * 4 / 1e6 for buffer in buffers]
    return NetworkCosts(
        point_to_point=LinkCost.fitted(sizes, [ms / 2 for ms in exchange]),
        all_reduce=LinkCost.fitted(sizes, reduce),
        ranks=ranks.world,
    )


def _timed(ranks: Ranks, buffers: list[torch.Tensor], call: Callable[[torch.Tensor], None]) -> list[float]:
    """Median milliseconds per buffer; in each round that of the slowest rank."""
    rounds = []
    for _ in range(ROUNDS + 1):
        times = []
        for buffer in buffers:
            ranks.barrier()
            begin = time.perf_counter()
            call(buffer)
            times.append((time.perf_counter() - begin) * 1e3)
        rounds.append([max(column) for column in zip(*ranks.gather(times))])
    return [statistics.median(column) for column in zip(*rounds[1:])]


def _ping_pong(rank: int, buffer: torch.Tensor) -> None:
    """Rank 0 sends to rank 1 and gets it back; the others only wait."""
    if rank == 0:
        dist.send(buffer, 1)
        dist.recv(buffer, 1)
    elif rank == 1:
        dist.recv(buffer, 0)
        dist.send(buffer, 0)
