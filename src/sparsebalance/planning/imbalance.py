"""Latencies of a step's micro-batches -> how unbalanced they are.

In: per data-parallel rank, the latency of each micro-batch. Out: an `Imbalance`, three ratios of slowest to mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparsebalance.planning.errors import InputError


@dataclass(frozen=True, slots=True)
class Imbalance:
    """Slowest over mean, three ways; 1 is perfect balance.

    Attributes:
        all: over all micro-batches of the step.
        slot: per slot (the m-th micro-batch of every rank) over ranks, mean over slots; a rank that has no
            m-th micro-batch counts 0 in that slot.
        rank: over the ranks' sums.
    """

    all: float
    slot: float
    rank: float


def imbalance(ranks: Sequence[Sequence[float]]) -> Imbalance:
    """Imbalances of per-rank micro-batch latencies. Empty units (latency 0) are no micro-batches of `all`.

    Raises:
        InputError: no rank, or a rank without a unit.
    """
    if not ranks or not all(ranks):
        raise InputError(f"imbalance needs at least one unit on each rank, but the counts are {list(map(len, ranks))}")
    real = [ms for rank in ranks for ms in rank if ms > 0]
    slots = np.zeros((len(ranks), max(map(len, ranks))))
    for row, rank in zip(slots, ranks):
        row[: len(rank)] = rank
    return Imbalance(_peak(np.array(real)), float(np.mean([_peak(s) for s in slots.T])), _peak(slots.sum(1)))


def _peak(values: NDArray[np.float64]) -> float:
    return float(values.max() / values.mean()) if values.size and values.any() else 1.0
