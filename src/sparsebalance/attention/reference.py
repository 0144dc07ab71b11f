"""The truth that the fast paths are compared with: MoBA by its definition, one segment and head at a time.

Slow, plain and differentiable by autograd; nothing here is used in training.
Source: MoBA, Lu et al. 2025 (arXiv 2502.13189), section 2.2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparsebalance.attention.interface import Budget, Granularity, PackedLayout


def block_means(k: Tensor, block_size: int) -> Tensor:
    """[S, Hk, D] -> [ceil(S / block_size), Hk, D], each block's mean over the keys that it really has."""
    return torch.stack([block.mean(0) for block in k.split(block_size)])


@torch.no_grad()
def selected_blocks(q: Tensor, k: Tensor, block_size: int, budget: int, granularity: Granularity) -> Tensor:
    """Which blocks each query reads: [T, H, blocks] bool.

    Args:
        q: [T, H, D], the last T of S positions.
        k: [S, Hk, D].
        budget: blocks, own block included.
        granularity: "token" scores each query; "block" scores the mean query of each query block.
    """
    queries, heads, _ = q.shape
    group = heads // k.shape[1]
    means = block_means(k, block_size)
    offset = k.shape[0] - queries
    own = [(offset + t) // block_size for t in range(queries)]
    chosen = torch.zeros(queries, heads, means.shape[0], dtype=torch.bool)
    for head in range(heads):
        for t in range(queries):
            if granularity == "token":
                vector = q[t, head]
            else:
                vector = q[[i for i in range(queries) if own[i] == own[t]], head].mean(0)
            scores = [float(vector @ means[j, head // group]) for j in range(own[t])]
            past = sorted(range(own[t]), key=lambda j: (-scores[j], j))[: budget - 1]
            chosen[t, head, [own[t], *past]] = True
    return chosen


def attend_reference(
    q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, budget: Budget, granularity: Granularity
) -> tuple[Tensor, Tensor]:
    """Masked dense attention over the selected blocks.

    Args:
        q: [tokens_q, H, D]. k, v: [tokens_k, Hk, D].
        budget: [segments] blocks.

    Returns:
        out [tokens_q, H, D] and the log-sum-exp of the scaled scores [tokens_q, H].
    """
    outs, lses = [], []
    parts = zip(q.split(layout.lengths_q), k.split(layout.lengths_k), v.split(layout.lengths_k), budget.tolist())
    for q_s, k_s, v_s, blocks in parts:
        length = k_s.shape[0]
        offset = length - q_s.shape[0]
        chosen = selected_blocks(q_s.detach(), k_s.detach(), layout.block_size, int(blocks), granularity)
        readable = chosen.repeat_interleave(layout.block_size, dim=2)[:, :, :length]
        causal = torch.arange(length) <= (offset + torch.arange(q_s.shape[0]))[:, None]
        readable = readable & causal[:, None, :]
        group = q_s.shape[1] // k_s.shape[1]
        scores = torch.einsum("thd,shd->ths", q_s, k_s.repeat_interleave(group, 1)) / math.sqrt(q_s.shape[2])
        scores = scores.masked_fill(~readable, -math.inf)
        outs.append(torch.einsum("ths,shd->thd", scores.softmax(-1), v_s.repeat_interleave(group, 1)))
        lses.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(lses)
