"""Block-sparse attention on CPU, exact, with its own backward; time follows the number of blocks read.

In: packed q, k, v, a block selection and the layout; for a chunk of a sample also the keys and values of earlier
chunks. Out: attention output and log-sum-exp, differentiable in q, k, v. Query blocks that read equally many key
blocks are gathered into one batched matrix product, in slices that stay in cache; single-query reads (token
routing) are merged in by their log-sum-exp.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sparsebalance.attention.clock import TermClock
from sparsebalance.attention.interface import BlockSelection, PackedLayout
from sparsebalance.attention.moba import TILE
from sparsebalance.attention.state import LayerState, computing_dtype

SLICE_SCORES = 128 * 64 * 64  # scores of one slice: 2 MB in fp32, measured best among 16 to 512 block pairs


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: BlockSelection,
    layout: PackedLayout,
    scale: float | None = None,
    clock: TermClock | None = None,
    state: LayerState | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention over the selected blocks, causal inside the own block.

    Args:
        q: [tokens_q, H, D]. k, v: [tokens_k, Hk, D], H a multiple of Hk. fp64, fp32, or fp16/bf16, which are
            computed in fp32.
        scale: of the scores; 1 / sqrt(D) by default.
        clock: told how long forward and backward take, as the term "attend".
        state: of a chunk, written already: its keys and values are read in place of k and v, which hold the
            chunk's own [tokens_q, Hk, D] and get all their gradient, that of later chunks included.

    Returns:
        out [tokens_q, H, D] in q's dtype, and the log-sum-exp of the scaled scores [tokens_q, H] (no gradient).
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    dtype = computing_dtype(q.dtype)
    operands = (x.to(dtype) for x in (q, k, v))
    out, lse = _Attend.apply(*operands, state, selection, layout, scale, clock or TermClock())
    return out.to(q.dtype), lse


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: LayerState | None,
        selection: BlockSelection,
        layout: PackedLayout,
        scale: float,
        clock: TermClock,
    ) -> tuple[Tensor, Tensor]:
        with clock.measure("attend"):
            blocked = _blocked(k, v, layout) if state is None else (state.keys, state.values)
            out, lse = _forward(_Operands(q * scale, blocked[0], blocked[1], k.shape[1], layout), selection)
        ctx.save_for_backward(q, out, lse, *((k, v) if state is None else ()))  # a chunk's lie in the state
        ctx.kv_heads = k.shape[1]
        ctx.state, ctx.selection, ctx.layout, ctx.scale, ctx.clock = state, selection, layout, scale, clock
        ctx.mark_non_differentiable(lse)
        return out.view(q.shape[0], q.shape[1], -1), lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        with ctx.clock.measure("attend"):
            q, out, lse, *kept = ctx.saved_tensors
            blocked = _blocked(kept[0], kept[1], ctx.layout) if kept else (ctx.state.keys, ctx.state.values)
            operands = _Operands(q * ctx.scale, blocked[0], blocked[1], ctx.kv_heads, ctx.layout)
            dq, dk, dv = _backward(operands, out, lse, grad_out, ctx.state, ctx.selection)
        return dq * ctx.scale, dk, dv, None, None, None, None, None


def _forward(x: _Operands, selection: BlockSelection) -> tuple[Tensor, Tensor]:
    out_blocks, lse_blocks = _dense_forward(x, selection)
    out = _from_query_blocks(out_blocks, x.layout, x.heads)
    lse = _from_query_blocks(lse_blocks[..., None], x.layout, x.heads).squeeze(-1)
    if selection.tile_blocks.numel():
        out, lse = _merge_tiles(x, out, lse, selection)
    return out, lse


def _backward(
    x: _Operands,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    state: LayerState | None,
    selection: BlockSelection,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the scaled queries, and of the keys and values that the micro-batch itself brought."""
    delta = (grad_out * out).sum(-1)
    layout = x.layout
    if state is None:
        dk_blocks, dv_blocks = torch.zeros_like(x.k), torch.zeros_like(x.v)
    else:
        dk_blocks, dv_blocks = state.gradients(layout.lengths_k[0])
    dq_blocks = _dense_backward(x, grad_out, lse, delta, selection, dk_blocks, dv_blocks)
    dq = _from_query_blocks(dq_blocks, layout, x.heads)
    if selection.tile_blocks.numel():
        _tiles_backward(x, grad_out, lse, delta, selection, dq, dk_blocks, dv_blocks)
    if state is None:
        return dq, _from_key_blocks(dk_blocks, layout, x.kv_heads), _from_key_blocks(dv_blocks, layout, x.kv_heads)
    end = layout.lengths_k[0]
    dk, dv = state.own_gradients(end - layout.lengths_q[0], end)
    return dq, dk, dv


class _Operands:
    """Blocked views that forward and backward share: queries scaled, heads outermost.

    Attributes:
        q: [H * query blocks, block_size, D]. k, v: [Hk * blocks, block_size, D].
        q_flat: [tokens_q, H, D].
        blocks: key blocks of each head in k and v.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, kv_heads: int, layout: PackedLayout) -> None:
        """q [tokens_q, H, D]; k, v blocked."""
        self.layout = layout
        self.heads, self.kv_heads = q.shape[1], kv_heads
        self.q_flat = q
        self.q = _head_major(layout.to_query_blocks(q))
        self.k, self.v = k, v
        self.blocks = k.shape[0] // kv_heads
        size = layout.block_size
        self.causal = torch.full((size, size), -math.inf, dtype=q.dtype).triu_(1)

    def query_blocks(self, x: Tensor) -> Tensor:
        """[tokens_q, H, ...] -> [H * query blocks, block_size, ...]."""
        return _head_major(self.layout.to_query_blocks(x))

    def slices(self, selection: BlockSelection) -> Iterator[tuple[Tensor, Tensor]]:
        """Runs of query blocks that read equally many key blocks: rows [n], key block rows [n, count]."""
        size = self.layout.block_size
        counts = selection.dense_counts
        starts = counts.cumsum(0) - counts
        kv_head = torch.arange(counts.numel()) // (counts.numel() // self.heads) // (self.heads // self.kv_heads)
        ordered, order = counts.sort(stable=True)
        runs, lengths = torch.unique_consecutive(ordered, return_counts=True)
        position = 0
        for count, length in zip(runs.tolist(), lengths.tolist()):
            step = max(1, SLICE_SCORES // (count * size * size))
            for start in range(position, position + length, step):
                rows = order[start : min(start + step, position + length)]
                places = starts[rows][:, None] + torch.arange(count)
                yield rows, selection.dense_indices[places] + (kv_head[rows] * self.blocks)[:, None]
            position += length


def _blocked(k: Tensor, v: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor]:
    """k, v [tokens_k, Hk, D] -> [Hk * key blocks, block_size, D] each."""
    return _head_major(layout.to_key_blocks(k)), _head_major(layout.to_key_blocks(v))


def _head_major(blocks: Tensor) -> Tensor:
    """[blocks, block_size, h, ...] -> [h * blocks, block_size, ...], contiguous."""
    return blocks.transpose(1, 2).transpose(0, 1).flatten(0, 1).contiguous()


def _from_query_blocks(x: Tensor, layout: PackedLayout, heads: int) -> Tensor:
    """[H * query blocks, block_size, D] -> [tokens_q, H, D]."""
    return x.view(heads, -1, x.shape[-1])[:, layout.query_slots].transpose(0, 1).contiguous()


def _from_key_blocks(x: Tensor, layout: PackedLayout, kv_heads: int) -> Tensor:
    """[Hk * key blocks, block_size, D] -> [tokens_k, Hk, D]."""
    return x.view(kv_heads, -1, x.shape[-1])[:, layout.key_slots].transpose(0, 1).contiguous()


def _dense_forward(x: _Operands, selection: BlockSelection) -> tuple[Tensor, Tensor]:
    size, dim = x.layout.block_size, x.v.shape[-1]
    out = torch.empty(*x.q.shape[:2], dim, dtype=x.q.dtype)
    lse = torch.empty(x.q.shape[:2], dtype=x.q.dtype)
    for rows, blocks in x.slices(selection):
        keys = x.k[blocks.flatten()].view(len(rows), -1, x.k.shape[-1])
        values = x.v[blocks.flatten()].view(len(rows), -1, dim)
        p = torch.bmm(x.q[rows], keys.transpose(1, 2))
        p[..., :size] += x.causal  # the own block comes first; past blocks are always whole and visible
        top = p.amax(-1, keepdim=True)
        total = p.sub_(top).exp_().sum(-1, keepdim=True)
        out[rows] = torch.bmm(p, values).div_(total)
        lse[rows] = (top + total.log_()).squeeze(-1)
    return out, lse


def _dense_backward(
    x: _Operands,
    grad_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    selection: BlockSelection,
    dk: Tensor,
    dv: Tensor,
) -> Tensor:
    """Returns dq, blocked; adds to the blocked dk and dv, in place."""
    size = x.layout.block_size
    grad = x.query_blocks(grad_out)
    lse, delta = x.query_blocks(lse), x.query_blocks(delta)
    dq = torch.empty_like(x.q)
    for rows, blocks in x.slices(selection):
        flat = blocks.flatten()
        queries, grads = x.q[rows], grad[rows]
        keys = x.k[flat].view(len(rows), -1, x.k.shape[-1])
        values = x.v[flat].view(len(rows), -1, x.v.shape[-1])
        p = torch.bmm(queries, keys.transpose(1, 2))
        p[..., :size] += x.causal
        p.sub_(lse[rows][..., None]).exp_()
        dv.index_add_(0, flat, torch.bmm(p.transpose(1, 2), grads).view(-1, size, dv.shape[-1]))
        ds = torch.bmm(grads, values.transpose(1, 2)).sub_(delta[rows][..., None]).mul_(p)
        dq[rows] = torch.bmm(ds, keys)
        dk.index_add_(0, flat, torch.bmm(ds.transpose(1, 2), queries).view(-1, size, dk.shape[-1]))
    return dq


def _with_empty_row(x: Tensor) -> Tensor:
    """[tokens, H, ...] -> [tokens * H + 1, ...]; the last row stands for empty places of tiles."""
    flat = x.flatten(0, 1)
    return torch.cat([flat, flat.new_zeros(1, *flat.shape[1:])])


def _tile_slices(selection: BlockSelection, size: int) -> Iterator[slice]:
    step = max(1, SLICE_SCORES // (TILE * size))
    for start in range(0, selection.tile_blocks.numel(), step):
        yield slice(start, start + step)


def _tile_key_rows(selection: BlockSelection, x: _Operands) -> Tensor:
    return selection.tile_heads * x.blocks + selection.tile_blocks


def _merge_tiles(x: _Operands, out: Tensor, lse: Tensor, selection: BlockSelection) -> tuple[Tensor, Tensor]:
    tokens, heads, dim = out.shape
    key_rows = _tile_key_rows(selection, x)
    q_flat = _with_empty_row(x.q_flat)
    rows = selection.tile_rows.flatten()
    partial, partial_lse = out.new_empty(rows.numel(), dim), out.new_empty(rows.numel())
    for part in _tile_slices(selection, x.layout.block_size):
        places = slice(part.start * TILE, part.stop * TILE)
        blocks = key_rows[part]
        p = torch.bmm(q_flat[selection.tile_rows[part]], x.k[blocks].transpose(1, 2))
        top = p.amax(-1, keepdim=True)
        total = p.sub_(top).exp_().sum(-1, keepdim=True)
        partial[places] = torch.bmm(p, x.v[blocks]).div_(total).flatten(0, 1)
        partial_lse[places] = (top + total.log_()).flatten()
    base, base_lse = _with_empty_row(out), _with_empty_row(lse)
    top = base_lse.scatter_reduce(0, rows, partial_lse, "amax")
    own_weight, weight = (base_lse - top).exp_(), (partial_lse - top[rows]).exp_()
    total = own_weight.clone().index_add_(0, rows, weight)
    merged = (base * own_weight[:, None]).index_add_(0, rows, partial.mul_(weight[:, None])).div_(total[:, None])
    merged_lse = top + total.log()
    return merged[:-1].view(tokens, heads, dim), merged_lse[:-1].view(tokens, heads)


def _tiles_backward(
    x: _Operands,
    grad_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    selection: BlockSelection,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Add the tiles' part to dq [tokens_q, H, D] and to the blocked dk, dv, in place."""
    key_rows = _tile_key_rows(selection, x)
    q_flat, grad_flat = _with_empty_row(x.q_flat), _with_empty_row(grad_out)
    lse_flat, delta_flat = _with_empty_row(lse), _with_empty_row(delta)
    dq_flat = _with_empty_row(torch.zeros_like(dq))
    for part in _tile_slices(selection, x.layout.block_size):
        rows, blocks = selection.tile_rows[part], key_rows[part]
        queries, grads, keys = q_flat[rows], grad_flat[rows], x.k[blocks]
        p = torch.bmm(queries, keys.transpose(1, 2)).sub_(lse_flat[rows][..., None]).exp_()
        # An empty place has query, gradient and delta 0: it adds nothing to dv, dk or any real row of dq.
        dv.index_add_(0, blocks, torch.bmm(p.transpose(1, 2), grads))
        ds = torch.bmm(grads, x.v[blocks].transpose(1, 2)).sub_(delta_flat[rows][..., None]).mul_(p)
        dk.index_add_(0, blocks, torch.bmm(ds.transpose(1, 2), queries))
        dq_flat.index_add_(0, rows.flatten(), torch.bmm(ds, keys).flatten(0, 1))
    dq.add_(dq_flat[:-1].view_as(dq))
