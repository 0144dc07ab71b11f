"""Exact coverage on a few query rows: how much softmax mass lies in the blocks that a budget would read.

In: q, k of one layer on a packed row. Out: per segment the coverage curve at BUDGET_GRID, with the router's
order of blocks and with the best one, and what the router's scores alone let expect. It scores sampled queries
against all their keys, so it needs no second forward and costs rows / tokens of a dense one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsebalance.attention.estimate import SAMPLED_ROWS, sampled_queries, segment_estimates
from sparsebalance.attention.interface import PackedLayout, Router
from sparsebalance.planning.coverage import BUDGET_GRID


@dataclass(frozen=True)
class CoverageProbe:
    """One segment's coverage at BUDGET_GRID, mean over sampled queries and heads.

    Attributes:
        estimated: what `estimated_coverage` makes of the router's scores, on the same queries.
        router: own block first, then past blocks as the router ranks them.
        oracle: own block first, then past blocks by their true mass; oracle - router is the regret.
    """

    estimated: tuple[float, ...]
    router: tuple[float, ...]
    oracle: tuple[float, ...]

    def scaled(self, factor: float) -> CoverageProbe:
        """All curves times a factor, at most 1."""

        def times(curve: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(min(1.0, covered * factor) for covered in curve)

        return CoverageProbe(times(self.estimated), times(self.router), times(self.oracle))


@torch.no_grad()
def probe_coverage(
    q: Tensor, k: Tensor, layout: PackedLayout, router: Router, rows: int = SAMPLED_ROWS, scale: float | None = None
) -> list[CoverageProbe]:
    """Args:
        q: [tokens_q, H, D]. k: [tokens_k, Hk, D].
        rows: queries sampled per segment, evenly spaced.
        scale: of the attention scores; 1 / sqrt(D) by default.

    Returns:
        One probe per segment.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1]
    scores = router.score(q, k, layout)
    estimates = segment_estimates(scores, scale, rows).mean(1).tolist()
    probes = []
    query_start, block_start = 0, 0
    parts = zip(q.split(layout.lengths_q), k.split(layout.lengths_k), layout.key_blocks, layout.first_blocks)
    for s, (q_s, k_s, blocks, first_block) in enumerate(parts):
        length, queries = k_s.shape[0], q_s.shape[0]
        picked = torch.tensor(sampled_queries(queries, rows))
        position = picked + length - queries
        own = position // layout.block_size
        # Routed vectors [rows, H, D]: the query itself, or the mean query of its block.
        if router.granularity == "token":
            routed = scores.queries[query_start + picked]
        else:
            routed = scores.queries[block_start + own - first_block]
        means = scores.keys[int(layout.first_key_block[s]) :][:blocks].repeat_interleave(group, 1)
        liking = torch.einsum("thd,nhd->thn", routed, means)
        logits = torch.einsum("thd,shd->ths", q_s[picked] * scale, k_s.repeat_interleave(group, 1))
        future = torch.arange(length) > position[:, None]
        weights = logits.float().masked_fill_(future[:, None], -math.inf).softmax(-1)
        padded = torch.nn.functional.pad(weights, (0, blocks * layout.block_size - length))
        mass = padded.unflatten(-1, (blocks, layout.block_size)).sum(-1)
        probes.append(CoverageProbe(tuple(estimates[s]), _curve(mass, liking, own), _curve(mass, mass, own)))
        query_start += queries
        block_start += layout.query_blocks[s]
    return probes


def _curve(mass: Tensor, preference: Tensor, own: Tensor) -> tuple[float, ...]:
    """Mass [rows, H, blocks] covered by the own block and the most preferred past ones, at BUDGET_GRID."""
    blocks = torch.arange(mass.shape[-1])
    ranked = preference.masked_fill((blocks >= own[:, None])[:, None], -math.inf)
    ranked = ranked.masked_fill((blocks == own[:, None])[:, None], math.inf)
    order = ranked.sort(dim=-1, descending=True, stable=True).indices
    covered = mass.gather(-1, order).cumsum(-1).mean((0, 1)).clamp_(max=1.0)
    return tuple(float(covered[min(budget, len(covered)) - 1]) for budget in BUDGET_GRID)
