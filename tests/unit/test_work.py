"""Work counts against counting one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsebalance.planning.work import (
    attended_pairs,
    computed_scores,
    key_blocks,
    past_reads,
    router_scores,
)

segments = st.tuples(st.integers(0, 60), st.integers(1, 60), st.integers(1, 9), st.integers(1, 12))


def chunk(value: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """start (a multiple of the block), end, budget, block."""
    start, tokens, budget, block = value
    start -= start % block
    return start, start + tokens, budget, block


@given(segments)
def test_pairs_are_counted_one_by_one(value: tuple[int, int, int, int]) -> None:
    start, end, budget, block = chunk(value)
    reads = sum(min(p // block, budget - 1) for p in range(start, end))
    pairs = sum(min(p // block, budget - 1) * block + p % block + 1 for p in range(start, end))
    assert past_reads(start, end, budget, block) == reads
    assert attended_pairs(start, end, budget, block) == pairs


@given(segments)
def test_computed_scores_are_whole_blocks(value: tuple[int, int, int, int]) -> None:
    start, end, budget, block = chunk(value)
    query_blocks = range(start // block, key_blocks(end, block))
    per_block = sum((min(b, budget - 1) + 1) * block**2 for b in query_blocks)
    own = len(query_blocks) * block**2
    per_token = sum(min(p // block, budget - 1) * block for p in range(start, end)) + own
    assert computed_scores(start, end, budget, block, "block") == per_block
    assert computed_scores(start, end, budget, block, "token") == per_token


@given(segments)
def test_router_scores_are_causal(value: tuple[int, int, int, int]) -> None:
    start, end, _, block = chunk(value)
    assert router_scores(start, end, block, "token") == sum(p // block for p in range(start, end))
    assert router_scores(start, end, block, "block") == sum(range(start // block, key_blocks(end, block)))


@given(st.integers(1, 200), st.integers(1, 20))
def test_full_budget_is_every_causal_pair(length: int, block: int) -> None:
    assert attended_pairs(0, length, key_blocks(length, block), block) == length * (length + 1) / 2
    assert attended_pairs(0, length, 10**6, block) == length * (length + 1) / 2


@given(segments, st.integers(1, 5))
def test_chunks_add_up_to_the_whole(value: tuple[int, int, int, int], cut: int) -> None:
    _, tokens, budget, block = value
    middle = min(cut * block, tokens)
    for count in (past_reads, attended_pairs):
        whole = count(0, tokens, budget, block)
        assert count(0, middle, budget, block) + count(middle, tokens, budget, block) == whole


def test_one_long_row_costs_more_than_its_pieces() -> None:
    """8 samples of 1,024 tokens are not one of 8,192: the ratio is that of their pairs, at full budget."""
    whole = attended_pairs(0, 8192, 128, 64)
    pieces = 8 * attended_pairs(0, 1024, 128, 64)
    assert whole / pieces == pytest.approx((8192 * 8193) / (8 * 1024 * 1025))


def test_budgets_broadcast_and_a_million_tokens_are_quick() -> None:
    budgets = np.arange(1, 65)
    counts = attended_pairs(0, 1_000_000, budgets, 64)
    assert counts.shape == (64,)
    assert (np.diff(counts) > 0).all()
    assert float(counts[7]) == float(attended_pairs(0, 1_000_000, 8, 64))
