"""Placed units -> micro-batches with their budgets and predicted times.

In: a placement, one budget per unit and layer, a latency model. Out: micro-batches per rank, as plans hold them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sparsebalance.planning.latency import LatencyModel, recomputed_terms
from sparsebalance.planning.plan import Latency, MicroBatch, Ranks, chain_lengths
from sparsebalance.planning.units import Placement, Unit

_UNKNOWN = Latency(0.0, 0.0)


def micro_batches(
    placement: Placement, budgets: Sequence[Sequence[tuple[int, ...]]], model: LatencyModel, keep_chunks: int | None
) -> Ranks:
    """Args:
    budgets: [rank][unit][layer] blocks. keep_chunks: see `Policy`.
    """
    ranks = []
    for units, layers in zip(placement, budgets, strict=True):
        again = _recomputed(units, keep_chunks)
        ranks.append([MicroBatch(*made) for made in zip(units, layers, itertools.repeat(_UNKNOWN), again)])
    return timed(ranks, model)


def timed(ranks: Sequence[Sequence[MicroBatch]], model: LatencyModel) -> Ranks:
    """The same micro-batches with the times that their segments and budgets take on their ranks."""
    units = [unit for rank in ranks for unit in rank]
    terms = model.many_terms([unit.segments for unit in units], np.array([unit.budgets for unit in units]))
    factors = np.repeat([model.rank_factor(rank) for rank in range(len(ranks))], [len(rank) for rank in ranks])
    again = np.array([unit.recompute for unit in units])
    forward, backward = (recomputed_terms(terms, again).sum(0) * factors).tolist()
    made = map(lambda unit, latency: replace(unit, latency=latency), units, map(Latency, forward, backward))
    return tuple(tuple(itertools.islice(made, len(rank))) for rank in ranks)


def _recomputed(units: Sequence[Unit], keep_chunks: int | None) -> list[bool]:
    """Per unit, whether it is a chunk with `keep_chunks` or more later ones of its sample."""
    if keep_chunks is None:
        return [False] * len(units)
    return [place < length - keep_chunks for length in chain_lengths(units) for place in range(length)]
