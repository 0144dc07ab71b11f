"""Sequence parallel attention over heads: ranks that hold some tokens of a row attend all of it with some heads.

In: q, k, v of a rank's tokens, all heads. Out: the same of the whole row for the rank's own heads, and, after
attention, the output of its own tokens for all heads again: one message each way, differentiable. Routing and
attention never see the difference, since every head chooses and reads for itself.
Source: DeepSpeed-Ulysses, Jacobs et al. 2023 (arXiv 2309.14509), section 3.1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from sparsebalance.planning.errors import InputError


def check_sequence_degree(heads: int, kv_heads: int, degree: int) -> None:
    """Key/value heads set no limit of their own: where ranks share one, each gets a copy.

    Args:
        heads, kv_heads: that one process would hold; under tensor parallelism, those of one of its ranks.

    Raises:
        InputError: query heads cannot be shared out evenly over `degree` ranks, or over the key/value heads.
    """
    if kv_heads < 1 or heads % kv_heads:
        raise InputError(
            f"{heads} attention heads cannot share {kv_heads} key/value heads evenly; "
            "choose a number of key/value heads that divides that of the attention heads"
        )
    if degree < 1 or heads % degree:
        works = [str(d) for d in range(1, heads + 1) if heads % d == 0]
        raise InputError(
            f"{heads} attention heads cannot be shared out over {degree} sequence parallel ranks; "
            f"choose a degree out of {', '.join(works)}"
        )


def shard_tokens(tokens: int, degree: int) -> int:
    """Tokens that each of `degree` ranks holds of a row, the padding behind its last token included."""
    return -(-tokens // degree)


def kv_copies(heads: int, kv_heads: int, degree: int) -> int:
    """How often each key/value head is sent, so that equally many query heads of a rank read each one that it gets.

    1 where a rank's query heads make up whole groups, degree / kv_heads where a rank's query heads are a part of one
    group, and more where they lie across the border of two.
    """
    group = heads // kv_heads
    return group // math.gcd(heads // degree, group)


@dataclass(frozen=True)
class HeadExchange:
    """Token shards of a row against its heads, over the ranks of a process group; its members call in the same order.

    Rank r holds tokens [r * n, (r + 1) * n) of the row padded to `degree` * n, with n = `shard_tokens`, and attends
    with query heads [r * H / degree, (r + 1) * H / degree).
    """

    group: dist.ProcessGroup

    @property
    def degree(self) -> int:
        return self.group.size()

    @property
    def rank(self) -> int:
        return self.group.rank()

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Whole row, own heads; padding is cut off, and its gradient is 0.

        Args:
            q: [n, H, D]. k, v: [n, Hk, D], of this rank's shard.
            tokens: of the whole row.

        Returns:
            q [tokens, H / degree, D], k, v [tokens, H / degree / g, D], each read by g consecutive query heads.

        Raises:
            InputError: H is not divisible by the degree, or q is not a shard of such a row.
        """
        if q.shape[0] != shard_tokens(tokens, self.degree):
            raise InputError(
                f"a shard holds {q.shape[0]} tokens, but one of {self.degree} shards of a row of {tokens} tokens holds "
                f"{shard_tokens(tokens, self.degree)}; cut the row with `shard`"
            )
        return unpack_heads(_AllToAll.apply(pack_heads(q, k, v, self.degree), self.group), q, k, v, tokens)

    def to_tokens(self, out: Tensor) -> Tensor:
        """Own tokens, all heads: out [tokens, H / degree, D] -> [n, H, D], zeros for padding."""
        return unpack_tokens(_AllToAll.apply(pack_tokens(out, self.degree), self.group), out.shape[1])

    def gather(self, x: Tensor) -> Tensor:
        """See `gather_heads`."""
        return gather_heads(x, self.group)


@torch.no_grad()
def gather_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[rows, ...] -> [ranks * rows, ...], by rank, the same on all of them; no gradient."""
    found = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(found, x.contiguous(), group=group)
    return found


def pack_heads(q: Tensor, k: Tensor, v: Tensor, degree: int) -> Tensor:
    """What a shard sends: q [n, H, D], k, v [n, Hk, D] -> [degree, n, width], one part for every rank's heads.

    Raises:
        InputError: see `check_sequence_degree`.
    """
    heads, kv_heads = q.shape[1], k.shape[1]
    check_sequence_degree(heads, kv_heads, degree)
    copies = kv_copies(heads, kv_heads, degree)
    if copies > 1:  # its backward adds up the gradients of the copies
        k, v = k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)
    # q, k and v in one message: latency is paid once, and ranks cannot disagree on an order.
    return torch.cat([x.unflatten(1, (degree, -1)).flatten(2).transpose(0, 1) for x in (q, k, v)], -1)


def unpack_heads(received: Tensor, q: Tensor, k: Tensor, v: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """The other end of `pack_heads`: what all shards sent to one rank, [degree, n, width], as its q, k, v of the
    whole row; the shard's own q, k, v tell sizes."""
    degree, heads = received.shape[0], q.shape[1]
    kv_heads = k.shape[1] * kv_copies(heads, k.shape[1], degree) // degree
    widths = [heads // degree * q.shape[2], kv_heads * k.shape[2], kv_heads * v.shape[2]]
    row = received.flatten(0, 1)[:tokens]
    # Each on its own: attention keeps q for its backward, and of a chunk not k and v.
    parts = (part.contiguous() for part in row.split(widths, 1))
    whole_q, whole_k, whole_v = (part.unflatten(1, (-1, x.shape[2])) for part, x in zip(parts, (q, k, v)))
    return whole_q, whole_k, whole_v


def pack_tokens(out: Tensor, degree: int) -> Tensor:
    """What a rank sends back: [tokens, H / degree, D] -> [degree, n, width], one part for every rank's tokens."""
    n = shard_tokens(out.shape[0], degree)
    return pad(out.flatten(1), (0, 0, 0, n * degree - out.shape[0])).unflatten(0, (degree, n))


def unpack_tokens(received: Tensor, heads: int) -> Tensor:
    """The other end of `pack_tokens`: what all ranks sent to one, [degree, n, width] of `heads` heads each, as
    [n, degree * heads, D]."""
    return received.unflatten(2, (heads, -1)).transpose(0, 1).flatten(1, 2)


class _AllToAll(torch.autograd.Function):
    """x [degree, ...]: part r goes to rank r, and what rank r sent here takes its place; gradients take the way
    back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grad, ctx.group), None


def _exchanged(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    sent = x.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received
