"""The sliced loss of `loss.py` where every rank holds the rows of a part of the vocabulary.

No rank ever has the logits of the whole vocabulary: of a slice of targets each computes those of its own rows, and
the ranks exchange two numbers per target, the largest logit and the sum of exponentials (Shoeybi et al. 2019,
Megatron-LM, section 3). The gradient is computed in the forward, slice by slice.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparsebalance.attention.clock import TermClock
from sparsebalance.training.loss import SLICE_TARGETS


def vocabulary_parallel_cross_entropy(
    hidden: Tensor,
    weight_shard: Tensor,
    targets: Tensor,
    first: int,
    group: dist.ProcessGroup,
    clock: TermClock | None = None,
) -> Tensor:
    """Sum over targets of the cross-entropy of `hidden @ weight.T`; exactly 0 without targets.

    All ranks of `group` call it with the same hidden states and targets. The gradient of `hidden` is this rank's
    part: the sum over ranks is the whole one, as the backward of `gather_tokens` makes it.

    Args:
        hidden: [N, hidden]. weight_shard: [rows, hidden], rows [first, first + rows) of the vocabulary, at least one.
        targets: [N] int64 token ids.
        clock: told how long the backward takes, as the term "head".

    Returns:
        The whole loss, the same on every rank: a scalar in fp32, or fp64 for fp64 input.
    """
    return _VocabularyCrossEntropy.apply(hidden, weight_shard, targets, first, group, clock or TermClock())


class _VocabularyCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        first: int,
        group: dist.ProcessGroup,
        clock: TermClock,
    ) -> Tensor:
        accurate = torch.promote_types(hidden.dtype, torch.float32)
        own = (targets >= first) & (targets < first + weight.shape[0])
        rows = torch.where(own, targets - first, 0)  # of targets elsewhere: any row, masked out
        total = torch.zeros((), dtype=accurate, device=hidden.device)
        chosen = torch.zeros_like(total)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=accurate) if ctx.needs_input_grad[1] else None
        for start in range(0, hidden.shape[0], SLICE_TARGETS):
            stop = start + SLICE_TARGETS
            part, row, here = hidden[start:stop], rows[start:stop, None], own[start:stop, None]
            logits = (part @ weight.T).to(accurate)
            chosen += torch.where(here, logits.gather(1, row), 0).sum()
            top = logits.amax(1, keepdim=True)
            p = logits.sub_(top).exp_()  # not normalised: scaling small results is cheaper than all of p
            log_sum, scale = _over_ranks(top, p.sum(1, keepdim=True), group)
            total += log_sum.sum()
            expected = (p.to(weight.dtype) @ weight).to(accurate) * scale
            grad_hidden[start:stop] = expected - torch.where(here, weight[row[:, 0]], 0)
            if grad_weight is not None:
                grad_weight.addmm_(p.T, part.to(accurate) * scale)
        dist.all_reduce(chosen, group=group)
        if grad_weight is not None:
            grad_weight.index_add_(0, rows, torch.where(own[:, None], hidden.to(accurate), 0), alpha=-1)
            grad_weight = grad_weight.to(weight.dtype)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.clock = clock
        return total - chosen

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with ctx.clock.measure("head"):
            parts = (None if part is None else part * grad.to(part.dtype) for part in ctx.saved_tensors)
            grad_hidden, grad_weight = parts
        return grad_hidden, grad_weight, None, None, None, None


def _over_ranks(top: Tensor, norm: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """This rank's largest logits and sums of exp(logit - largest), [n, 1] each -> the logarithm of the sum of
    exponentials over all ranks, and what this rank's exp(logit - largest) is to be multiplied with, [n, 1] each."""
    own = torch.cat([top, norm], 1)
    both = own.new_empty(group.size() * own.shape[0], 2)
    dist.all_gather_single(both, own, group=group)
    tops, norms = both.view(group.size(), *own.shape).split(1, 2)
    highest = tops.amax(0)
    whole = (norms * (tops - highest).exp()).sum(0)
    return whole.log() + highest, (top - highest).exp() / whole
