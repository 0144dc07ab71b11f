"""Dense causal attention beside the block-sparse one: from which sample length on is sparse faster?

In: what a table is measured for. Out: one layer's forward and backward milliseconds over sample length. Torch's
scaled_dot_product_attention, the strongest dense kernel there is on a CPU.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch.nn.functional import scaled_dot_product_attention

from sparsebalance.planning.table import Identity, LinePoint

MOST_TOKENS = 4096  # dense time grows with the square; the crossover lies far below
ROUNDS = 3


def measure_dense(identity: Identity, max_length: int) -> tuple[LinePoint, ...]:
    """Medians of interleaved rounds at a few lengths, a first round discarded; a second or two."""
    lengths = [n for n in (64, 128, 256, 512, 1024, 2048, 4096) if n <= min(MOST_TOKENS, max_length)]
    lengths = lengths or [max_length]
    rounds = [[_one(identity, length) for length in lengths] for _ in range(ROUNDS + 1)][1:]
    points = []
    for length, times in zip(lengths, zip(*rounds)):
        forward, backward = (statistics.median(side) for side in zip(*times))
        points.append(LinePoint(length, forward, backward))
    return tuple(points)


def _one(identity: Identity, length: int) -> tuple[float, float]:
    """Forward and backward milliseconds of one layer on one sample."""
    decoder, dtype = identity.decoder, getattr(torch, identity.dtype)
    q = torch.randn(1, decoder.heads, length, decoder.head_dim, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(1, decoder.kv_heads, length, decoder.head_dim, dtype=dtype, requires_grad=True) for _ in "kv")
    begin = time.perf_counter()
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    middle = time.perf_counter()
    out.sum().backward()
    return (middle - begin) * 1e3, (time.perf_counter() - middle) * 1e3
