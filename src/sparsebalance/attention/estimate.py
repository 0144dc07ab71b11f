"""Coverage as the router's own scores tell it: what a budget would cover if a block were as its mean key says.

In: routing scores, which are there before any attention is computed. Out: a coverage curve at BUDGET_GRID per
key/value head, on a few query rows. Nothing here waits for the device, so budgets can follow it while a layer runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from sparsebalance.attention.interface import PackedLayout, RoutingScores
from sparsebalance.attention.state import computing_dtype
from sparsebalance.planning.coverage import BUDGET_GRID, length_bucket

SAMPLED_ROWS = 16  # query rows per segment


@torch.no_grad()
def estimated_coverage(scores: RoutingScores, scale: float, rows: int = SAMPLED_ROWS) -> Tensor:
    """Share of softmax mass in the own block and the best past blocks, if every key of a block scored as its mean key.

    A past block then weighs block_size * exp(scale * query . mean key), and the own block so much per key up to the
    query. The estimate ignores that keys of a block differ, which makes a block weigh more than its mean key says;
    that the own block's mean holds keys behind the query; and, under block routing, that queries of a block differ.
    It is exact where keys (and there, queries) of a block are equal; `planning.calibration` corrects it elsewhere.

    Args:
        scores: of a packed row; a chunk's hold the mean keys of earlier chunks too.
        scale: of the attention scores.
        rows: queries sampled per segment, evenly spaced.

    Returns:
        [Hk, len(BUDGET_GRID)], mean over the query heads of a key/value head and, by tokens, over segments; in the
        computing dtype, on the scores' device.
    """
    curves = segment_estimates(scores, scale, rows)
    layout = scores.layout
    weights = torch.tensor(layout.lengths_q, dtype=curves.dtype, device=curves.device) / layout.tokens_q
    return (curves * weights[:, None, None]).sum(0)


@torch.no_grad()
def segment_estimates(scores: RoutingScores, scale: float, rows: int = SAMPLED_ROWS) -> Tensor:
    """`estimated_coverage` of every segment by itself: [segments, Hk, len(BUDGET_GRID)]."""
    keys = scores.keys
    shape = scores.layout.segments, keys.shape[1], len(BUDGET_GRID)
    found = torch.ones(shape, dtype=computing_dtype(keys.dtype), device=keys.device)
    for segments in _alike(scores.layout):
        where = torch.tensor(segments, device=keys.device)
        found = found.index_copy(0, where, _curves(scores, segments, scale, rows))
    return found


def sampled_queries(queries: int, rows: int) -> list[int]:
    """At most `rows` of a segment's `queries`, evenly spaced, each at the middle of its share."""
    count = min(rows, queries)
    return [(2 * i + 1) * queries // (2 * count) for i in range(count)]


def _alike(layout: PackedLayout) -> list[list[int]]:
    """Segments that are computed together: of one range of lengths, so that padding at most doubles the work.
    Segments of one block are left out: their own block is all there is."""
    ranges: dict[int, list[int]] = {}
    for segment, blocks in enumerate(layout.key_blocks):
        if blocks > 1:
            ranges.setdefault(length_bucket(blocks), []).append(segment)
    return list(ranges.values())


def _curves(scores: RoutingScores, segments: Sequence[int], scale: float, rows: int) -> Tensor:
    """[len(segments), Hk, len(BUDGET_GRID)]; axes: s segment, r row, h key/value head, g its query heads, b block."""
    layout, device, size = scores.layout, scores.keys.device, scores.layout.block_size
    dtype, kv_heads = computing_dtype(scores.keys.dtype), scores.keys.shape[1]
    vectors, positions, weights = (x.to(device) for x in _sampled(scores, segments, rows))
    width = max(layout.key_blocks[s] for s in segments)
    starts = [0, *accumulate(layout.key_blocks)]
    # Places behind a segment's last block hold any block: they count as future ones.
    places = (torch.tensor([starts[s] for s in segments])[:, None] + torch.arange(width)).clamp_(max=starts[-1] - 1)
    queries = scores.queries[vectors].to(dtype).unflatten(2, (kv_heads, -1)) * scale
    logits = torch.einsum("srhgd,sbhd->srhgb", queries, scores.keys[places.to(device)].to(dtype))
    own = (positions // size)[:, :, None, None, None]
    own_keys = (positions % size + 1)[:, :, None, None, None]
    own_mass = logits.gather(-1, own.expand(*logits.shape[:-1], 1)) + own_keys.to(dtype).log()
    future = torch.arange(width, device=device) >= own
    past_mass = logits.masked_fill(future, -math.inf) + math.log(size)
    total = torch.logaddexp(own_mass, past_mass.logsumexp(-1, keepdim=True))
    best = past_mass.topk(min(BUDGET_GRID[-1], width) - 1, dim=-1).values
    covered = (torch.cat([own_mass, best], -1) - total).exp().cumsum(-1)
    at_grid = torch.tensor([min(budget, covered.shape[-1]) - 1 for budget in BUDGET_GRID], device=device)
    curves = covered.index_select(-1, at_grid).clamp(max=1.0).mean(3)
    return (curves * weights[:, :, None, None].to(dtype)).sum(1)


def _sampled(scores: RoutingScores, segments: Sequence[int], rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Per sampled query its routed vector, its position in the sample and its weight, [len(segments), rows] each;
    rows of weight 0 fill up short segments."""
    layout = scores.layout
    routed = layout.lengths_q if scores.granularity == "token" else layout.query_blocks
    first = [0, *accumulate(routed)]
    most = min(rows, max(layout.lengths_q[s] for s in segments))
    vectors, positions, weights = [], [], []
    for s in segments:
        picked = sampled_queries(layout.lengths_q[s], rows)
        offset = layout.lengths_k[s] - layout.lengths_q[s]
        share = [1 / len(picked)] * len(picked) + [0.0] * (most - len(picked))
        picked += [0] * (most - len(picked))
        place = [q + offset for q in picked]
        if scores.granularity == "token":
            vectors.append([first[s] + q for q in picked])
        else:
            vectors.append([first[s] + p // layout.block_size - layout.first_blocks[s] for p in place])
        positions.append(place)
        weights.append(share)
    return torch.tensor(vectors), torch.tensor(positions), torch.tensor(weights, dtype=torch.float64)
