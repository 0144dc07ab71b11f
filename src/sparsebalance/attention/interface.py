"""What routers, kernels and probes exchange: packed layout, budget, routing scores, block selection.

A row is packed: several segments one after another, no padding. Queries of a segment are the last
`length_q` of its `length_k` positions; keys before them belong to earlier chunks of the same sample.
Blocks are counted from position 0 of the sample, so they never cross samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from sparsebalance.planning.errors import InputError
from sparsebalance.planning.work import Granularity

GRANULARITIES: tuple[Granularity, ...] = ("token", "block")


@dataclass(frozen=True)
class PackedLayout:
    """Geometry of a packed row; lengths are host integers, known from the plan without a device sync.

    Attributes:
        lengths_q: queries per segment, each >= 1.
        lengths_k: keys per segment, lengths_k[i] >= lengths_q[i].
        block_size: keys per block.
    """

    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    block_size: int

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise InputError(f"block_size is {self.block_size}, but a block holds at least 1 key")
        if len(self.lengths_q) != len(self.lengths_k):
            raise InputError(
                f"{len(self.lengths_q)} query lengths do not match {len(self.lengths_k)} key lengths; "
                "give one of each per segment"
            )
        for index, (length_q, length_k) in enumerate(zip(self.lengths_q, self.lengths_k)):
            if not 1 <= length_q <= length_k:
                raise InputError(
                    f"segment {index}: {length_q} queries and {length_k} keys; "
                    "it needs at least 1 query, and its own queries among its keys"
                )

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], block_size: int) -> PackedLayout:
        """Whole samples: as many keys as queries."""
        return cls(tuple(lengths), tuple(lengths), block_size)

    @property
    def segments(self) -> int:
        return len(self.lengths_q)

    @property
    def tokens_q(self) -> int:
        return sum(self.lengths_q)

    @property
    def tokens_k(self) -> int:
        return sum(self.lengths_k)

    @cached_property
    def cu_seqlens_q(self) -> Tensor:
        """[segments + 1] int32, start of each segment's queries in the row."""
        return torch.tensor([0, *self.lengths_q]).cumsum(0).int()

    @cached_property
    def cu_seqlens_k(self) -> Tensor:
        """[segments + 1] int32, start of each segment's keys in the row."""
        return torch.tensor([0, *self.lengths_k]).cumsum(0).int()

    @cached_property
    def first_blocks(self) -> tuple[int, ...]:
        """Per segment, the block (of its sample) that holds its first query."""
        return tuple((k - q) // self.block_size for q, k in zip(self.lengths_q, self.lengths_k))

    @cached_property
    def key_blocks(self) -> tuple[int, ...]:
        """Per segment, the number of key blocks."""
        return tuple(math.ceil(k / self.block_size) for k in self.lengths_k)

    @cached_property
    def query_blocks(self) -> tuple[int, ...]:
        """Per segment, the number of blocks that hold its queries."""
        return tuple(n - first for n, first in zip(self.key_blocks, self.first_blocks))

    @cached_property
    def segment_of_query(self) -> Tensor:
        """[tokens_q] int64."""
        return torch.repeat_interleave(torch.arange(self.segments), torch.tensor(self.lengths_q, dtype=torch.long))

    @cached_property
    def positions_q(self) -> Tensor:
        """[tokens_q] int64, position of each query in its sample."""
        shift = torch.tensor([k - q for q, k in zip(self.lengths_q, self.lengths_k)], dtype=torch.long)
        starts = self.cu_seqlens_q[:-1].long()
        return torch.arange(self.tokens_q) + (shift - starts)[self.segment_of_query]

    @cached_property
    def query_slots(self) -> Tensor:
        """[tokens_q] int64, where each query lies in the row padded to whole query blocks."""
        starts = self._block_starts(self.query_blocks)
        first = torch.tensor(self.first_blocks, dtype=torch.long)
        return self.positions_q + ((starts - first) * self.block_size)[self.segment_of_query]

    @cached_property
    def key_slots(self) -> Tensor:
        """[tokens_k] int64, where each key lies in the row padded to whole key blocks."""
        lengths = torch.tensor(self.lengths_k, dtype=torch.long)
        segment = torch.repeat_interleave(torch.arange(self.segments), lengths)
        starts = self._block_starts(self.key_blocks) * self.block_size - self.cu_seqlens_k[:-1].long()
        return torch.arange(self.tokens_k) + starts[segment]

    @cached_property
    def keys_per_block(self) -> Tensor:
        """[sum(key_blocks)] int64, real keys of each block: less than block_size only in a last one."""
        return torch.bincount(self.key_slots // self.block_size, minlength=sum(self.key_blocks))

    @cached_property
    def queries_per_block(self) -> Tensor:
        """[sum(query_blocks)] int64, real queries of each query block."""
        return torch.bincount(self.query_slots // self.block_size, minlength=sum(self.query_blocks))

    @cached_property
    def segment_of_query_block(self) -> Tensor:
        """[sum(query_blocks)] int64."""
        blocks = torch.tensor(self.query_blocks, dtype=torch.long)
        return torch.repeat_interleave(torch.arange(self.segments), blocks)

    @cached_property
    def own_blocks(self) -> Tensor:
        """[sum(query_blocks)] int64, the block id within the sample of each query block."""
        starts = self._block_starts(self.query_blocks)
        first = torch.tensor(self.first_blocks, dtype=torch.long)
        return torch.arange(sum(self.query_blocks)) + (first - starts)[self.segment_of_query_block]

    @cached_property
    def first_key_block(self) -> Tensor:
        """[segments] int64, index of each segment's key block 0 among all key blocks of the row."""
        return self._block_starts(self.key_blocks)

    def to_query_blocks(self, x: Tensor) -> Tensor:
        """[tokens_q, ...] -> [sum(query_blocks), block_size, ...], zeros where a block holds no query."""
        return self._to_blocks(x, self.query_slots, sum(self.query_blocks))

    def to_key_blocks(self, x: Tensor) -> Tensor:
        """[tokens_k, ...] -> [sum(key_blocks), block_size, ...], zeros where a block holds no key."""
        return self._to_blocks(x, self.key_slots, sum(self.key_blocks))

    def _to_blocks(self, x: Tensor, slots: Tensor, blocks: int) -> Tensor:
        size = blocks * self.block_size
        if size != x.shape[0]:  # without padding the slots are the identity
            x = x.new_zeros(size, *x.shape[1:]).index_copy_(0, slots, x)
        return x.view(blocks, self.block_size, *x.shape[1:])

    @staticmethod
    def _block_starts(blocks: Sequence[int]) -> Tensor:
        return torch.tensor([0, *blocks[:-1]], dtype=torch.long).cumsum(0)[: len(blocks)]


Budget = Tensor
"""[segments] int64: key blocks that each query of a segment may read, own block included, each >= 1."""


def budget_per_segment(budget: int | Sequence[int] | Tensor, layout: PackedLayout) -> Budget:
    """One budget for all segments, or one each, as a checked [segments] tensor.

    Raises:
        InputError: a budget below 1 (the own block is always read), or not one per segment.
    """
    blocks = torch.as_tensor(budget, dtype=torch.long).reshape(-1)
    if blocks.numel() == 1:
        blocks = blocks.expand(layout.segments)
    if blocks.numel() != layout.segments:
        raise InputError(f"{blocks.numel()} budgets for {layout.segments} segments; give one for all or one for each")
    if blocks.numel() and int(blocks.min()) < 1:
        raise InputError(f"budget {int(blocks.min())} is below 1 block: the own block is always read")
    return blocks


@dataclass(frozen=True)
class RoutingScores:
    """What a router knows after looking at queries and keys; scores themselves are made on demand, causally.

    Attributes:
        queries: one vector per routed row. `token`: [tokens_q, H, D]; `block`: mean query per query block
            [sum(query_blocks), H, D].
        keys: [sum(key_blocks), Hk, D], mean key per block.
        granularity: what a routed row is.
        layout: the row's geometry.
    """

    queries: Tensor
    keys: Tensor
    granularity: Granularity
    layout: PackedLayout


@dataclass(frozen=True)
class BlockSelection:
    """Which key blocks each query reads. Every query block reads `dense_counts` blocks with all its queries;
    under token routing single queries read further past blocks, listed as tiles.

    Rows of query blocks are head-major: row h * sum(query_blocks) + b. Key blocks are indexed over all key
    blocks of the packed row, without the head.

    Attributes:
        dense_counts: [H * sum(query_blocks)] int64, >= 1.
        dense_indices: [sum(dense_counts)] int64, key blocks, a row's own block first.
        tile_rows: [tiles, TILE] int64, flat query index token * H + head; tokens_q * H marks an empty place.
        tile_blocks: [tiles] int64, the key block that the tile's queries all read.
        tile_heads: [tiles] int64, the key/value head.
        granularity: how it was routed.
    """

    dense_counts: Tensor
    dense_indices: Tensor
    tile_rows: Tensor
    tile_blocks: Tensor
    tile_heads: Tensor
    granularity: Granularity


class Router(Protocol):
    """Chooses key blocks. Nothing here is differentiated: gradients do not pass through selection."""

    @property
    def granularity(self) -> Granularity:
        """What routes for itself: every query, or every query block."""
        ...

    def score(self, q: Tensor, k: Tensor, layout: PackedLayout) -> RoutingScores:
        """q [tokens_q, H, D], k [tokens_k, Hk, D] -> scores."""
        ...

    def select(self, scores: RoutingScores, budget: Budget) -> BlockSelection:
        """Own block first, then the best past blocks, min(budget, blocks so far) in all; ties to the lowest id."""
        ...
