"""Coverage estimated from the router's scores: by hand, exact where blocks are uniform, and without a host sync."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sparsebalance.attention.estimate import estimated_coverage, sampled_queries, segment_estimates
from sparsebalance.attention.interface import Granularity, PackedLayout, RoutingScores
from sparsebalance.attention.moba import MoBARouter
from sparsebalance.attention.probe import probe_coverage
from sparsebalance.attention.state import LayerState
from sparsebalance.planning.coverage import BUDGET_GRID
from tests.unit.test_attention import inputs

BLOCK = 4


def uniform(layout: PackedLayout, kv_heads: int, equal_queries: bool, heads: int = 4) -> tuple[Tensor, Tensor]:
    """Queries and keys, keys of a block all equal; queries of a block too, if asked."""
    q, k, _ = (x.detach() for x in inputs(layout, heads, kv_heads, torch.float64))
    blocks = layout.key_slots // BLOCK
    first = torch.searchsorted(blocks, blocks)
    if equal_queries:
        own = layout.query_slots // BLOCK
        q = q[torch.searchsorted(own, own)]
    return q * 2, k[first]


@pytest.mark.parametrize("granularity", ["token", "block"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("rows", [3, 16, 100])
def test_exact_where_all_keys_of_a_block_are_equal(granularity: Granularity, kv_heads: int, rows: int) -> None:
    """Whole samples, a chunk, one token, and a last block that is not full: the estimate is the router's coverage."""
    layout = PackedLayout((20, 33, 1, 3, 14), (20, 33, 1, 3, 30), BLOCK)
    q, k = uniform(layout, kv_heads, equal_queries=granularity == "block")
    for probe in probe_coverage(q, k, layout, MoBARouter(granularity), rows=rows):
        assert probe.estimated == pytest.approx(probe.router, abs=1e-6)


def test_by_hand() -> None:
    """Three blocks of two keys, one query at position 4 of 5: masses 2 e^0, 2 e^1 and, of its own block, 1 e^2."""
    layout = PackedLayout((1,), (5,), 2)
    keys = torch.tensor([[[0.0]], [[1.0]], [[2.0]]])
    scores = RoutingScores(torch.tensor([[[2.0]]]), keys, "token", layout)
    found = estimated_coverage(scores, scale=0.5)
    total = 2 + 2 * math.e + math.e**2
    expected = [math.e**2 / total, (math.e**2 + 2 * math.e) / total] + [1.0] * (len(BUDGET_GRID) - 2)
    assert found.shape == (1, len(BUDGET_GRID))
    assert found[0].tolist() == pytest.approx(expected)


def test_heads_of_a_group_and_segments_by_tokens_are_averaged() -> None:
    layout = PackedLayout.from_lengths([24, 2, 60, 9], BLOCK)
    q, k, _ = inputs(layout, 4, 2, torch.float64)
    found = estimated_coverage(MoBARouter("token").score(q, k, layout), 0.3, rows=100)
    expected = torch.zeros_like(found)
    for q_s, k_s in zip(q.split([24, 2, 60, 9]), k.split([24, 2, 60, 9])):
        for head in range(4):
            alone = PackedLayout.from_lengths([len(q_s)], BLOCK)
            scores = MoBARouter("token").score(q_s[:, head : head + 1], k_s[:, head // 2 : head // 2 + 1], alone)
            expected[head // 2] += estimated_coverage(scores, 0.3, rows=100)[0] * len(q_s) / 2 / 95
    assert torch.allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize("granularity", ["token", "block"])
def test_a_chunk_reads_means_of_earlier_chunks(granularity: Granularity) -> None:
    """From the state's means, as from all keys at once."""
    layout = PackedLayout((12,), (32,), BLOCK)
    q, k, _ = (x.detach() for x in inputs(layout, 4, 2, torch.float64))
    state = LayerState(k, k, 40, BLOCK)
    state.write(0, k[:20], k[:20])
    state.write(20, k[20:], k[20:])
    router = MoBARouter(granularity)
    chunk = estimated_coverage(router.score_means(q, state.means[:8], layout), 0.4)
    assert torch.allclose(chunk, estimated_coverage(router.score(q, k, layout), 0.4), atol=1e-12)
    # The first query sees 5 past blocks: with budgets of 1 to 5, something is left.
    assert bool((chunk[:, :4] < 1).all())
    assert chunk[:, -1].tolist() == pytest.approx([1.0, 1.0])


def test_equal_scores_cover_by_number_of_keys() -> None:
    """Ties: all keys weigh the same, so the last query of 16 with budget k covers 4 k of 16 keys."""
    layout = PackedLayout((1,), (16,), BLOCK)
    scores = RoutingScores(torch.zeros(1, 4, 8), torch.ones(4, 2, 8), "token", layout)
    found = estimated_coverage(scores, 1.0)
    assert found[:, :4].tolist() == [pytest.approx([0.25, 0.5, 0.75, 1.0])] * 2


def test_large_scores_stay_finite_and_half_precision_is_computed_in_fp32() -> None:
    layout = PackedLayout.from_lengths([40], BLOCK)
    q, k, _ = (x.detach() for x in inputs(layout, 2, 1, torch.float32))
    sharp = estimated_coverage(MoBARouter("token").score(q * 1e4, k, layout), 1.0)
    assert bool(((sharp >= 0) & (sharp <= 1)).all())
    half = estimated_coverage(MoBARouter("token").score(q.bfloat16(), k.bfloat16(), layout), 1.0)
    assert half.dtype == torch.float32
    full = estimated_coverage(MoBARouter("token").score(q, k, layout), 1.0)
    assert torch.allclose(half, full, atol=0.02)


def test_rows_lie_in_the_middle_of_equal_shares() -> None:
    assert sampled_queries(8, 4) == [1, 3, 5, 7]
    assert sampled_queries(3, 16) == [0, 1, 2]
    assert sampled_queries(1, 16) == [0]
    assert sampled_queries(10, 4) == [1, 3, 6, 8]


@pytest.mark.parametrize("granularity", ["token", "block"])
def test_nothing_is_read_back_from_the_device(granularity: Granularity) -> None:
    """Meta tensors have no values: whatever asked for one would fail."""
    layout = PackedLayout((14, 40, 1), (30, 40, 1), BLOCK)
    rows = layout.tokens_q if granularity == "token" else sum(layout.query_blocks)
    queries = torch.empty(rows, 4, 8, device="meta")
    keys = torch.empty(sum(layout.key_blocks), 2, 8, device="meta")
    found = segment_estimates(RoutingScores(queries, keys, granularity, layout), 0.3)
    assert (found.shape, found.device.type) == ((3, 2, len(BUDGET_GRID)), "meta")
    assert estimated_coverage(RoutingScores(queries, keys, granularity, layout), 0.3).device.type == "meta"
