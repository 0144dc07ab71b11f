"""What messages between processes cost: a fixed time and a time per megabyte.

In: measured (size, milliseconds) pairs, or a device's link rates. Out: milliseconds of a transfer between two
neighbours and of an all-reduce over the data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class LinkCost:
    """latency_ms + megabytes * ms_per_mb."""

    latency_ms: float
    ms_per_mb: float

    def ms(self, megabytes: float) -> float:
        return self.latency_ms + megabytes * self.ms_per_mb

    @classmethod
    def fitted(cls, sizes_mb: Sequence[float], times_ms: Sequence[float]) -> LinkCost:
        """Least squares of the relative error over at least two sizes; neither part is below 0."""
        sizes, times = np.asarray(sizes_mb, dtype=np.float64), np.asarray(times_ms, dtype=np.float64)
        weighted = np.stack([1 / times, sizes / times], axis=1)
        fixed, slope = np.linalg.lstsq(weighted, np.ones(len(times)), rcond=None)[0].tolist()
        if fixed < 0:
            fixed, slope = 0.0, float(np.mean(times / np.maximum(sizes, 1e-12)))
        if slope < 0:
            fixed, slope = float(times.mean()), 0.0
        return cls(fixed, slope)


@dataclass(frozen=True)
class NetworkCosts:
    """Attributes:
    point_to_point: one message between two processes.
    all_reduce: sum over `ranks` processes, per megabyte of the buffer.
    ranks: processes that took part in the measurement.
    """

    point_to_point: LinkCost
    all_reduce: LinkCost
    ranks: int


def ring_all_reduce(megabytes: float, ranks: int, gb_per_s: float, latency_us: float) -> float:
    """Analytic milliseconds: 2 (n - 1) steps, each moving 1 / n of the buffer (Patarasuk and Yuan 2009)."""
    if ranks == 1:
        return 0.0
    steps = 2 * (ranks - 1)
    return steps * (latency_us / 1e3 + megabytes / ranks / gb_per_s)
