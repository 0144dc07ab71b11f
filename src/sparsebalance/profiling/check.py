"""How wrong is a latency table? Whole micro-batches off its grid, measured and predicted side by side."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sparsebalance.planning.plan import Latency, MicroBatch, Segment
from sparsebalance.planning.table import LatencyTable
from sparsebalance.planning.work import key_blocks
from sparsebalance.training.data import Example
from sparsebalance.training.engine import Engine


@dataclass(frozen=True)
class CheckPoint:
    """One held-out micro-batch: forward + backward milliseconds of the whole model."""

    lengths: tuple[int, ...]
    budget: int
    predicted_ms: float
    measured_ms: float

    @property
    def error(self) -> float:
        """Relative, with sign: above 0 where the prediction is too slow."""
        return self.predicted_ms / self.measured_ms - 1


def mean_absolute_error(points: list[CheckPoint]) -> float:
    return statistics.fmean(abs(point.error) for point in points)


def check_table(
    engine: Engine,
    table: LatencyTable,
    max_length: int,
    count: int = 12,
    rounds: int = 3,
    seed: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> list[CheckPoint]:
    """Measure `count` micro-batches of random lengths and budgets that the table has no point for.

    Half are single samples, half are packs of up to 6; lengths are log-uniform from one block to
    `max_length`, budgets from 1 to the largest measured one. Gradients of the engine's model are touched.
    """
    units = _held_out(table, max_length, count, np.random.default_rng(seed))
    times: list[list[float]] = [[] for _ in units]
    for index in range(rounds + 1):  # the first round warms up
        for place, (unit, examples) in enumerate(units):
            result = engine.run([unit], examples, max(unit.targets, 1))
            if index:
                times[place].append(result.busy_ms)
            if progress is not None:
                progress(index * len(units) + place + 1, (rounds + 1) * len(units))
    return [
        CheckPoint(
            tuple(s.tokens for s in unit.segments),
            unit.budgets[0],
            unit.latency.total_ms,
            statistics.median(ms),
        )
        for (unit, _), ms in zip(units, times)
    ]


def _held_out(
    table: LatencyTable, max_length: int, count: int, rng: np.random.Generator
) -> list[tuple[MicroBatch, list[Example]]]:
    known = {(point.length, point.budget) for point in table.attention}
    highest = max(point.budget for point in table.attention)
    units: list[tuple[MicroBatch, list[Example]]] = []
    while len(units) < count:
        samples = 1 if len(units) % 2 == 0 else int(rng.integers(2, 7))
        longest = max_length // samples
        low = min(table.block_size, longest)
        lengths = np.exp(rng.uniform(np.log(low), np.log(longest), samples)).astype(int).tolist()
        budget = int(np.exp(rng.uniform(0, np.log(highest + 1))))
        if samples == 1 and (lengths[0], min(budget, key_blocks(lengths[0], table.block_size))) in known:
            continue
        examples = [_example(length, table.identity.vocabulary, rng) for length in lengths]
        segments = tuple(
            Segment(i, 0, length, length, int((example.targets >= 0).sum()))
            for i, (length, example) in enumerate(zip(lengths, examples))
        )
        budgets = (budget,) * table.layers
        unit = MicroBatch(segments, budgets, Latency(0.0, 0.0))
        units.append((MicroBatch(unit.segments, budgets, table.latency(segments, budgets)), examples))
    return units


def _example(length: int, vocabulary: int, rng: np.random.Generator) -> Example:
    """Random tokens; the last tenth are targets, at most 1024, as in long-document instructions."""
    ids = rng.integers(0, vocabulary, length).astype(np.int32)
    targets = np.full(length, -100, dtype=np.int32)
    wanted = min(length // 10, 1024)
    if wanted:
        targets[-wanted - 1 : -1] = ids[-wanted:]
    return Example(ids, targets)
