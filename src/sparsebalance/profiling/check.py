"""How wrong is a latency table? Whole micro-batches off its grid, measured and predicted side by side.

They are timed in the same interleaved rounds as the table's own points, so that the error is the predictor's and
not that of a machine whose speed changed in between.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sparsebalance.planning.table import Identity
from sparsebalance.profiling.measure import Measurement
from sparsebalance.profiling.points import Work, work_of


@dataclass(frozen=True)
class CheckPoint:
    """One held-out micro-batch: forward + backward milliseconds of the whole model.

    Attributes:
        predicted_ms, error_ms: of the table, with its own estimate of its standard error.
        measured_ms: at the machine's usual speed, as the table is. raw_ms: as the clock had it.
        attention_error: relative error of router and attention alone, with sign.
    """

    lengths: tuple[int, ...]
    budget: int
    predicted_ms: float
    error_ms: float
    measured_ms: float
    raw_ms: float
    attention_error: float

    @property
    def error(self) -> float:
        """Relative, with sign: above 0 where the prediction is too slow."""
        return self.predicted_ms / self.measured_ms - 1


def mean_absolute_error(points: Sequence[CheckPoint]) -> float:
    return statistics.fmean(abs(point.error) for point in points)


def raw_error(points: Sequence[CheckPoint]) -> float:
    """Mean absolute error against times that the machine's drift is not taken out of."""
    return statistics.fmean(abs(point.predicted_ms / point.raw_ms - 1) for point in points)


def attention_error(points: Sequence[CheckPoint]) -> float:
    """Mean absolute error of router and attention alone."""
    return statistics.fmean(abs(point.attention_error) for point in points)


def share_within(points: Sequence[CheckPoint], deviations: float) -> float:
    """Share of the points whose error is at most so many of the table's own standard errors."""
    inside = [abs(p.predicted_ms - p.measured_ms) <= deviations * p.error_ms for p in points]
    return statistics.fmean(inside)


def held_out_work(identity: Identity, max_length: int, max_budget: int, count: int = 12, seed: int = 1) -> list[Work]:
    """`count` micro-batches of random lengths and budgets that a table up to `max_length` has no point for.

    Half are single samples, half are packs of 2 to 6; lengths are log-uniform from one block to half of
    `max_length` (shared out in a pack), budgets log-uniform from 1 to `max_budget`. Lengths are odd, and so no
    measuring point. The first is the largest that a plan can hold: a single sample just below `max_length`.
    """
    rng = np.random.default_rng(seed)
    layers, vocabulary = identity.decoder.layers, identity.decoder.vocabulary
    works = [work_of((max(max_length - 3, 1) | 1,), max(max_budget // 2, 1), layers, vocabulary)]
    while len(works) < count:
        samples = 1 if len(works) % 2 == 0 else int(rng.integers(2, 7))
        longest = max(max_length // 2 // samples, 2)
        low = min(identity.block_size, longest - 1)
        lengths = np.exp(rng.uniform(np.log(low), np.log(longest), samples)).astype(int) | 1
        budget = int(np.exp(rng.uniform(0, np.log(max_budget + 1))))
        works.append(work_of(lengths.tolist(), budget, layers, vocabulary))
    return works


def check_points(measurement: Measurement, works: Sequence[Work]) -> list[CheckPoint]:
    """Predictions of the table beside the times measured with it."""
    points = []
    m = measurement
    times = zip(m.held_out_ms, m.held_out_raw_ms, m.held_out_attention_ms, strict=True)
    for (unit, _), (measured_ms, raw_ms, attention_ms) in zip(works, times, strict=True):
        prediction = m.table.predict(unit.segments, unit.budgets)
        attention = prediction.terms.router.total_ms + prediction.terms.attend.total_ms
        lengths = tuple(segment.tokens for segment in unit.segments)
        predicted_ms = prediction.terms.latency.total_ms
        points.append(
            CheckPoint(
                lengths,
                unit.budgets[0],
                predicted_ms,
                prediction.error_ms,
                measured_ms,
                raw_ms,
                attention / attention_ms - 1,
            )
        )
    return points
