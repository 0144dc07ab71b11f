"""Keys and values of a sample that runs in chunks: what later chunks read, and the gradients that they send back.

A chunk's micro-batch holds its own tokens alone; the keys and values of earlier chunks stay here, one buffer per
layer, written once and never copied. Gradients of keys and values add up in twin buffers while chunks run their
backward last to first, so that a chunk takes out its own part when all later ones have added theirs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsebalance.attention.interface import PackedLayout
from sparsebalance.planning.work import key_blocks


def computing_dtype(dtype: torch.dtype) -> torch.dtype:
    """What attention is computed in: fp32 for fp16 and bf16."""
    return torch.promote_types(dtype, torch.float32)


class LayerState:
    """One layer of one sample.

    Blocked like the kernel reads them, heads outermost, zeros in the unused places of a last block:

    Attributes:
        keys, values: [Hk * blocks, block_size, D], in the computing dtype.
        means: [blocks, Hk, D], mean key of each written block, in k's dtype.
        kv_heads, blocks: Hk, and the blocks of the whole sample.
    """

    def __init__(self, k: Tensor, v: Tensor, length: int, block_size: int) -> None:
        """Args:
        k, v: [tokens, Hk, D] of any chunk, for their sizes and dtype.
        length: tokens of the whole sample.
        """
        self.kv_heads, self.blocks, self.block_size = k.shape[1], key_blocks(length, block_size), block_size
        dtype = computing_dtype(k.dtype)
        rows = self.kv_heads * self.blocks
        self.keys = k.new_zeros(rows, block_size, k.shape[2], dtype=dtype)
        self.values = v.new_zeros(rows, block_size, v.shape[2], dtype=dtype)
        self.means = k.new_zeros(self.blocks, self.kv_heads, k.shape[2])
        self._gradients: tuple[Tensor, Tensor] | None = None
        self._written = 0  # tokens
        self._awaited = length  # the chunk that ends here is the next to run its backward

    @torch.no_grad()
    def write(self, start: int, k: Tensor, v: Tensor) -> None:
        """Keep a chunk's k, v [tokens, Hk, D] at [start, start + tokens); a recompute finds its own there and writes
        nothing, so it cannot disturb what other chunks read.

        Raises:
            RuntimeError: an earlier chunk is missing.
        """
        end = start + k.shape[0]
        if end <= self._written:
            return
        if start != self._written:
            raise RuntimeError(f"a chunk starts at token {start}, but {self._written} tokens ran before it")
        own = PackedLayout.from_lengths((k.shape[0],), self.block_size)
        blocks = slice(start // self.block_size, key_blocks(end, self.block_size))
        blocked = own.to_key_blocks(k)
        self.means[blocks] = blocked.sum(1) / own.keys_per_block.to(k.dtype)[:, None, None]
        self._by_head(self.keys)[:, blocks] = blocked.permute(2, 0, 1, 3).to(self.keys.dtype)
        self._by_head(self.values)[:, blocks] = own.to_key_blocks(v).permute(2, 0, 1, 3).to(self.values.dtype)
        self._written = end

    def prefix(self, end: int) -> Tensor:
        """Keys [0, end) as [end, Hk, D], copied."""
        return self._tokens(self.keys, 0, end)

    def gradients(self, end: int) -> tuple[Tensor, Tensor]:
        """Twin buffers of keys and values, for the backward of the chunk that ends at token `end` to add to.

        Raises:
            RuntimeError: a later chunk has not run its backward yet.
        """
        if end != self._awaited:
            raise RuntimeError(
                f"the backward of the chunk that ends at token {end} came before that of the one at {self._awaited}; "
                "chunks of a sample run backward last to first"
            )
        if self._gradients is None:
            self._gradients = torch.zeros_like(self.keys), torch.zeros_like(self.values)
        return self._gradients

    def own_gradients(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Gradients of a chunk's k and v, [tokens, Hk, D] each: complete once its own backward has added to them."""
        dk, dv = self.gradients(end)
        self._awaited = start
        return self._tokens(dk, start, end), self._tokens(dv, start, end)

    def _tokens(self, buffer: Tensor, start: int, end: int) -> Tensor:
        """[start, end) of a blocked buffer as [tokens, Hk, D], copied; start lies on a block border."""
        blocks = slice(start // self.block_size, key_blocks(end, self.block_size))
        return self._by_head(buffer)[:, blocks].permute(1, 2, 0, 3).flatten(0, 1)[: end - start]

    def _by_head(self, buffer: Tensor) -> Tensor:
        return buffer.view(self.kv_heads, self.blocks, *buffer.shape[1:])


class SampleState:
    """All layers of one sample, each allocated when its first chunk reaches it."""

    def __init__(self, length: int, block_size: int) -> None:
        self._length, self._block_size = length, block_size
        self._layers: dict[int, LayerState] = {}

    def layer(self, layer: int, k: Tensor, v: Tensor) -> LayerState:
        """k, v [tokens, Hk, D] give sizes and dtype."""
        if layer not in self._layers:
            self._layers[layer] = LayerState(k, v, self._length, self._block_size)
        return self._layers[layer]
