"""A packed row's tokens spread over tensor-parallel ranks, outside attention and feed-forward (sequence parallel).

Rank r holds tokens [r * n, (r + 1) * n) of the row, n = `shard_tokens(T, degree)`: equally many, whatever T is, with
padding at the row's end that reaches neither attention nor any gradient. Before a layer that needs all tokens they are
gathered; what the ranks' parts of that layer give is summed, and every rank keeps the sum of its own tokens. Each of
the two is the other's backward (Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer
Models, section 4.2.2).
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from sparsebalance.attention.ulysses import shard_tokens


def gather_tokens(shard: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[1, n, width] of each rank -> [1, degree * n, width], on every rank; the padding comes last.

    The gradient of a rank's shard is the sum of what all ranks' gradients say of it, so each rank may give the part
    that it knows.
    """
    gathered: Tensor = _Gather.apply(shard, group)
    return gathered


def scatter_tokens(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[1, T, width], whose sum over ranks is wanted -> [1, n, width] of the sum, this rank's tokens."""
    degree = group.size()
    missing = shard_tokens(part.shape[1], degree) * degree - part.shape[1]
    summed: Tensor = _Scatter.apply(functional.pad(part, (0, 0, 0, missing)) if missing else part, group)
    return summed


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather(shard, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter(gradient, ctx.group), None


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _reduce_scatter(part, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_gather(gradient, ctx.group), None


def _all_gather(shard: Tensor, group: dist.ProcessGroup) -> Tensor:
    _, tokens, width = shard.shape
    gathered = shard.new_empty(tokens * group.size(), width)
    dist.all_gather_single(gathered, shard[0].contiguous(), group=group)
    return gathered[None]


def _reduce_scatter(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    _, tokens, width = part.shape
    summed = part.new_empty(tokens // group.size(), width)
    dist.reduce_scatter_single(summed, part[0].contiguous(), group=group)
    return summed[None]
