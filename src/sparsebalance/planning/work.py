"""Exact counts of the work in a segment: query-key pairs, scores that a kernel computes, router scores.

Closed forms over token positions, so a million-token sample costs as little to count as a short one, and
eight samples of 1,024 tokens are never taken for one of 8,192. Positions and budgets may be arrays: counts broadcast.
"""

from __future__ import annotations

from typing import Literal, TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

Granularity = Literal["token", "block"]
Counts = NDArray[np.float64]
Positions = TypeVar("Positions", int, NDArray[np.int64])


def key_blocks(tokens: Positions, block_size: int) -> Positions:
    """Blocks of a sample of `tokens` tokens, the last one perhaps partial."""
    return -(-tokens // block_size)


def _sum_min(n: ArrayLike, limit: ArrayLike) -> Counts:
    """sum of min(j, limit) for j = 0 .. n - 1."""
    n, limit = np.asarray(n, dtype=np.float64), np.asarray(limit, dtype=np.float64)
    ramp = np.minimum(n, limit + 1)
    total: Counts = ramp * (ramp - 1) / 2 + np.maximum(n - ramp, 0) * limit
    return total


def past_reads(start: Positions, end: Positions, budget: ArrayLike, block_size: int) -> Counts:
    """(query, past block) reads of queries [start, end): sum of min(position // block_size, budget - 1)."""
    past = np.asarray(budget, dtype=np.float64) - 1

    def up_to(position: int | NDArray[np.int64]) -> Counts:
        whole, rest = np.divmod(position, block_size)
        reads: Counts = block_size * _sum_min(whole, past) + rest * np.minimum(whole, past)
        return reads

    return up_to(end) - up_to(start)


def attended_pairs(start: int, end: int, budget: ArrayLike, block_size: int) -> Counts:
    """(query, key) pairs that queries [start, end) really attend, causal inside the own block."""

    def own_up_to(position: int) -> float:
        whole, rest = divmod(position, block_size)
        return whole * block_size * (block_size + 1) / 2 + rest * (rest + 1) / 2

    return past_reads(start, end, budget, block_size) * block_size + (own_up_to(end) - own_up_to(start))


def computed_scores(
    start: Positions, end: Positions, budget: ArrayLike, block_size: int, granularity: Granularity
) -> Counts:
    """Scores that a block kernel computes: whole own blocks, and past blocks per query block or per query."""
    first, last = start // block_size, key_blocks(end, block_size)
    own = (last - first) * block_size**2
    if granularity == "token":
        return past_reads(start, end, budget, block_size) * block_size + own
    past = np.asarray(budget, dtype=np.float64) - 1
    return (_sum_min(last, past) - _sum_min(first, past)) * block_size**2 + own


@overload
def router_scores(start: int, end: int, block_size: int, granularity: Granularity) -> float: ...


@overload
def router_scores(
    start: NDArray[np.int64], end: NDArray[np.int64], block_size: int, granularity: Granularity
) -> Counts: ...


def router_scores(start: Positions, end: Positions, block_size: int, granularity: Granularity) -> float | Counts:
    """Mean keys that a causal router scores for queries [start, end): per query, or per query block."""
    first, last = start // block_size, key_blocks(end, block_size)
    if granularity == "token":
        reads = past_reads(start, end, last, block_size)
        return reads if np.ndim(reads) else float(reads)
    return (last * (last - 1) - first * (first - 1)) / 2
