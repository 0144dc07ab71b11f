"""The MoBA router: a query reads its own block and the past blocks whose mean key it likes best.

Two granularities. `token` is the definition (Lu et al. 2025, arXiv 2502.13189, section 2.2): every query
chooses for itself. `block` lets the mean query of a query block choose once for the whole block, which is
cheaper to route and to attend; a query's choice then depends on later queries of its own block (at most
block_size - 1 of them), though on nothing that it reads and through no gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsebalance.attention.interface import (
    GRANULARITIES,
    BlockSelection,
    Budget,
    Granularity,
    PackedLayout,
    RoutingScores,
)
from sparsebalance.planning.errors import InputError

TILE = 32  # queries that share one read of a key block; a compromise of padding and matmul efficiency
SCORE_ROWS = 1024  # queries scored at once: keeps the score matrix causal and small


@dataclass(frozen=True)
class MoBARouter:
    """See the module's docstring."""

    granularity: Granularity = "token"

    def __post_init__(self) -> None:
        if self.granularity not in GRANULARITIES:
            raise InputError(f"granularity is {self.granularity!r}; choose one of {', '.join(GRANULARITIES)}")

    @torch.no_grad()
    def score(self, q: Tensor, k: Tensor, layout: PackedLayout) -> RoutingScores:
        """q [tokens_q, H, D], k [tokens_k, Hk, D] -> mean keys, and the vectors that will score them."""
        keys = layout.to_key_blocks(k.detach()).sum(1) / layout.keys_per_block.to(k.dtype)[:, None, None]
        return self.score_means(q, keys, layout)

    @torch.no_grad()
    def score_means(self, q: Tensor, keys: Tensor, layout: PackedLayout) -> RoutingScores:
        """The same from mean keys [sum(key_blocks), Hk, D] that are there already, as a chunk's are."""
        queries = q.detach()
        if self.granularity == "block":
            queries = layout.to_query_blocks(queries).sum(1) / layout.queries_per_block.to(q.dtype)[:, None, None]
        return RoutingScores(queries, keys, self.granularity, layout)

    @torch.no_grad()
    def select(self, scores: RoutingScores, budget: Budget) -> BlockSelection:
        """Choose blocks under `budget` [segments]; see `BlockSelection` for the form of the answer."""
        layout, heads = scores.layout, scores.queries.shape[1]
        scored = [
            s for s in range(layout.segments) if 1 < int(budget[s]) < layout.key_blocks[s]
        ]  # with budget 1 or a full budget there is nothing to choose
        choose_per_token = self.granularity == "token"
        past = {} if choose_per_token else {s: _choose_for_blocks(scores, s, int(budget[s])) for s in scored}
        own_only = budget.clone()
        if choose_per_token and scored:
            own_only[scored] = 1
        counts, indices = _dense_part(layout, heads, own_only, past)
        if choose_per_token and scored:
            tiles = _tiles([_choose_for_tokens(scores, s, int(budget[s])) for s in scored], scores)
        else:
            tiles = (counts.new_empty(0, TILE), counts.new_empty(0), counts.new_empty(0))
        return BlockSelection(counts, indices, *tiles, granularity=self.granularity)


def top_blocks(scores: Tensor, count: int) -> Tensor:
    """The `count` best of the last dimension, best first, ties to the lowest index; -1 where the score is -inf.

    scores [..., n] -> [..., min(count, n)] int64.
    """
    n = scores.shape[-1]
    count = min(count, n)
    values, indices = scores.topk(min(count + 1, n), dim=-1)
    if n > count:
        # topk promises no order among equals; only a tie across the cut can change the chosen set.
        tied = (values[..., count - 1] == values[..., count]) & (values[..., count] > -math.inf)
        if bool(tied.any()):
            order = scores[tied].sort(dim=-1, descending=True, stable=True)
            values[tied], indices[tied] = order.values[..., : count + 1], order.indices[..., : count + 1]
    return indices[..., :count].masked_fill(values[..., :count] == -math.inf, -1)


def _segment_vectors(scores: RoutingScores, segment: int) -> tuple[Tensor, Tensor]:
    """Queries [Hk, group, rows, D] and mean keys [Hk, D, key blocks] of one segment."""
    layout = scores.layout
    per_token = scores.granularity == "token"
    rows = layout.lengths_q if per_token else layout.query_blocks
    first = sum(rows[:segment])
    queries = scores.queries[first : first + rows[segment]]
    start = int(layout.first_key_block[segment])
    keys = scores.keys[start : start + layout.key_blocks[segment]]
    kv_heads = keys.shape[1]
    grouped = queries.unflatten(1, (kv_heads, queries.shape[1] // kv_heads)).permute(1, 2, 0, 3)
    return grouped, keys.permute(1, 2, 0)


def _choose_for_blocks(scores: RoutingScores, segment: int, budget: int) -> Tensor:
    """[H, query blocks of the segment, budget - 1] past blocks within the sample, -1 for none."""
    queries, keys = _segment_vectors(scores, segment)
    layout = scores.layout
    matrix = torch.matmul(queries, keys[:, None]).flatten(0, 1)
    own = layout.first_blocks[segment] + torch.arange(layout.query_blocks[segment])
    future = torch.arange(layout.key_blocks[segment]) >= own[:, None]
    return top_blocks(matrix.masked_fill_(future, -math.inf), budget - 1)


def _choose_for_tokens(scores: RoutingScores, segment: int, budget: int) -> tuple[Tensor, Tensor, Tensor]:
    """(query index in the row, query head, key block of the row), one triple for every past read."""
    queries, keys = _segment_vectors(scores, segment)
    layout = scores.layout
    first_query = int(layout.cu_seqlens_q[segment])
    first_key = int(layout.first_key_block[segment])
    offset = layout.lengths_k[segment] - layout.lengths_q[segment]
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for start in range(0, layout.lengths_q[segment], SCORE_ROWS):
        part = queries[:, :, start : start + SCORE_ROWS]
        own = (offset + start + torch.arange(part.shape[2])) // layout.block_size
        visible = int(own[-1])  # no query of this part may read further
        if visible == 0:
            continue
        matrix = torch.matmul(part, keys[:, None, :, :visible]).flatten(0, 1)
        matrix.masked_fill_(torch.arange(visible) >= own[:, None], -math.inf)
        chosen = top_blocks(matrix, budget - 1)
        head, row, place = (chosen >= 0).nonzero(as_tuple=True)
        found.append((row + (first_query + start), head, chosen[head, row, place] + first_key))
    if not found:
        empty = torch.empty(0, dtype=torch.long)
        return empty, empty, empty
    rows, heads, blocks = (torch.cat(parts) for parts in zip(*found))
    return rows, heads, blocks


def _dense_part(layout: PackedLayout, heads: int, budget: Budget, past: dict[int, Tensor]) -> tuple[Tensor, Tensor]:
    """Counts and indices of the blocks that whole query blocks read, own block first.

    Segments in `past` read the chosen blocks; all others read everything (budget at least the number of
    blocks) or, with budget 1, their own block alone.
    """
    own, segment = layout.own_blocks, layout.segment_of_query_block
    counts = torch.minimum(own + 1, budget[segment]).repeat(heads)
    base = layout.first_key_block[segment].repeat(heads)
    own = own.repeat(heads)
    starts = counts.cumsum(0) - counts
    row = torch.repeat_interleave(torch.arange(counts.numel()), counts)
    place = torch.arange(row.numel()) - starts[row]
    indices = torch.where(place == 0, own[row], place - 1) + base[row]
    for s, chosen in past.items():
        first = sum(layout.query_blocks[:s])
        rows = torch.arange(heads)[:, None] * sum(layout.query_blocks) + first + torch.arange(chosen.shape[1])
        target = starts[rows][..., None] + 1 + torch.arange(chosen.shape[2])
        valid = chosen >= 0
        indices[target[valid]] = chosen[valid] + layout.first_key_block[s]
    return counts, indices


def _tiles(reads: list[tuple[Tensor, Tensor, Tensor]], scores: RoutingScores) -> tuple[Tensor, Tensor, Tensor]:
    """Group single reads by key block and head into tiles of TILE queries: (rows, blocks, heads)."""
    heads, kv_heads = scores.queries.shape[1], scores.keys.shape[1]
    query, head, block = (torch.cat(parts) for parts in zip(*reads))
    if query.numel() == 0:
        return query.new_empty(0, TILE), query.new_empty(0), query.new_empty(0)
    key = block * kv_heads + head // (heads // kv_heads)
    key, order = key.sort(stable=True)
    reads_per_key = torch.bincount(key)
    tiles_per_key = (reads_per_key + TILE - 1) // TILE
    first_read = reads_per_key.cumsum(0) - reads_per_key
    first_tile = tiles_per_key.cumsum(0) - tiles_per_key
    place = first_tile[key] * TILE + torch.arange(key.numel()) - first_read[key]
    rows = torch.full((int(tiles_per_key.sum()) * TILE,), scores.layout.tokens_q * heads, dtype=torch.long)
    rows[place] = (query * heads + head)[order]
    tile_key = torch.repeat_interleave(torch.arange(tiles_per_key.numel()), tiles_per_key)
    return rows.view(-1, TILE), tile_key // kv_heads, tile_key % kv_heads
