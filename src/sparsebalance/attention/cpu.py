"""Block-sparse attention on CPU, exact, with its own backward; time follows the number of blocks read.

In: packed q, k, v, a block selection and the layout. Out: attention output and log-sum-exp, differentiable
in q, k, v. Query blocks that read equally many key blocks are gathered into one batched matrix product, in
slices that stay in cache; single-query reads (token routing) are merged in by their log-sum-exp.
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

SLICE_SCORES = 128 * 64 * 64  # scores of one slice: 2 MB in fp32, measured best among 16 to 512 block pairs


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: BlockSelection,
    layout: PackedLayout,
    scale: float | None = None,
    clock: TermClock | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention over the selected blocks, causal inside the own block.

    Args:
        q: [tokens_q, H, D]. k, v: [tokens_k, Hk, D], H a multiple of Hk. fp64, fp32, or fp16/bf16, which are
            computed in fp32.
        scale: of the scores; 1 / sqrt(D) by default.
        clock: told how long forward and backward take, as the term "attend".

    Returns:
        out [tokens_q, H, D] in q's dtype, and the log-sum-exp of the scaled scores [tokens_q, H] (no gradient).
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    clock = clock or TermClock()
    if q.dtype in (torch.float16, torch.bfloat16):
        out, lse = _Attend.apply(q.float(), k.float(), v.float(), selection, layout, scale, clock)
        return out.to(q.dtype), lse
    return _Attend.apply(q, k, v, selection, layout, scale, clock)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        selection: BlockSelection,
        layout: PackedLayout,
        scale: float,
        clock: TermClock,
    ) -> tuple[Tensor, Tensor]:
        with clock.measure("attend"):
            out, lse = _forward(q, k, v, selection, layout, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.selection, ctx.layout, ctx.scale, ctx.clock = selection, layout, scale, clock
        ctx.mark_non_differentiable(lse)
        return out.view(q.shape[0], q.shape[1], -1), lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        with ctx.clock.measure("attend"):
            q, k, v, out, lse = ctx.saved_tensors
            dq, dk, dv = _backward(q, k, v, out, lse, grad_out, ctx.selection, ctx.layout, ctx.scale)
        return dq, dk, dv, None, None, None, None


def _forward(
    q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection, layout: PackedLayout, scale: float
) -> tuple[Tensor, Tensor]:
    heads = q.shape[1]
    out_blocks, lse_blocks = _dense_forward(_Operands(q * scale, k, v, layout), selection)
    out = _from_query_blocks(out_blocks, layout, heads)
    lse = _from_query_blocks(lse_blocks[..., None], layout, heads).squeeze(-1)
    if selection.tile_blocks.numel():
        out, lse = _merge_tiles(q * scale, k, v, out, lse, selection, layout)
    return out, lse


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    selection: BlockSelection,
    layout: PackedLayout,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    heads = q.shape[1]
    delta = (grad_out * out).sum(-1)
    operands = _Operands(q * scale, k, v, layout)
    dq_blocks, dk_blocks, dv_blocks = _dense_backward(operands, grad_out, lse, delta, selection)
    dq = _from_query_blocks(dq_blocks, layout, heads)
    if selection.tile_blocks.numel():
        _tiles_backward(operands, grad_out, lse, delta, selection, dq, dk_blocks, dv_blocks)
    dk = _from_key_blocks(dk_blocks, layout, k.shape[1])
    dv = _from_key_blocks(dv_blocks, layout, k.shape[1])
    return dq * scale, dk, dv


class _Operands:
    """Blocked views that forward and backward share: queries scaled, heads outermost."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> None:
        self.layout = layout
        self.heads, self.kv_heads = q.shape[1], k.shape[1]
        self.q_flat = q
        self.q = _head_major(layout.to_query_blocks(q))
        self.k = _head_major(layout.to_key_blocks(k))
        self.v = _head_major(layout.to_key_blocks(v))
        size = layout.block_size
        self.causal = torch.full((size, size), -math.inf, dtype=q.dtype).triu_(1)

    def query_blocks(self, x: Tensor) -> Tensor:
        """[tokens_q, H, ...] -> [H * query blocks, block_size, ...]."""
        return _head_major(self.layout.to_query_blocks(x))

    def slices(self, selection: BlockSelection) -> Iterator[tuple[Tensor, Tensor]]:
        """Runs of query blocks that read equally many key blocks: rows [n], key block rows [n, count]."""
        size, blocks = self.layout.block_size, self.k.shape[0] // self.kv_heads
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
                yield rows, selection.dense_indices[places] + (kv_head[rows] * blocks)[:, None]
            position += length


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
    x: _Operands, grad_out: Tensor, lse: Tensor, delta: Tensor, selection: BlockSelection
) -> tuple[Tensor, Tensor, Tensor]:
    size = x.layout.block_size
    grad = x.query_blocks(grad_out)
    lse, delta = x.query_blocks(lse), x.query_blocks(delta)
    dq, dk, dv = torch.empty_like(x.q), torch.zeros_like(x.k), torch.zeros_like(x.v)
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
    return dq, dk, dv


def _with_empty_row(x: Tensor) -> Tensor:
    """[tokens, H, ...] -> [tokens * H + 1, ...]; the last row stands for empty places of tiles."""
    flat = x.flatten(0, 1)
    return torch.cat([flat, flat.new_zeros(1, *flat.shape[1:])])


def _tile_slices(selection: BlockSelection, size: int) -> Iterator[slice]:
    step = max(1, SLICE_SCORES // (TILE * size))
    for start in range(0, selection.tile_blocks.numel(), step):
        yield slice(start, start + step)


def _tile_key_rows(selection: BlockSelection, x_blocks: int) -> Tensor:
    return selection.tile_heads * x_blocks + selection.tile_blocks


def _merge_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    selection: BlockSelection,
    layout: PackedLayout,
) -> tuple[Tensor, Tensor]:
    tokens, heads, dim = out.shape
    key_blocks, value_blocks = _head_major(layout.to_key_blocks(k)), _head_major(layout.to_key_blocks(v))
    key_rows = _tile_key_rows(selection, sum(layout.key_blocks))
    q_flat = _with_empty_row(q)
    rows = selection.tile_rows.flatten()
    partial, partial_lse = q.new_empty(rows.numel(), dim), q.new_empty(rows.numel())
    for part in _tile_slices(selection, layout.block_size):
        places = slice(part.start * TILE, part.stop * TILE)
        blocks = key_rows[part]
        p = torch.bmm(q_flat[selection.tile_rows[part]], key_blocks[blocks].transpose(1, 2))
        top = p.amax(-1, keepdim=True)
        total = p.sub_(top).exp_().sum(-1, keepdim=True)
        partial[places] = torch.bmm(p, value_blocks[blocks]).div_(total).flatten(0, 1)
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
    key_rows = _tile_key_rows(selection, x.k.shape[0] // x.kv_heads)
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
