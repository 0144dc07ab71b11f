"""What a composition did to the batches: how alike their samples are, and how far samples moved.

In: an epoch's batches, and the strict ones of the same order. Out: `BatchStatistics`, figures with sentences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sparsebalance.planning.errors import InputError
from sparsebalance.planning.latency import Floats
from sparsebalance.planning.plan import Sample

Batches = Sequence[Sequence[Sample]]


@dataclass(frozen=True)
class Spread:
    """Percentiles over steps."""

    p10: float
    p50: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        p10, p50, p90 = np.percentile(values, [10, 50, 90]).tolist()
        return cls(p10, p50, p90)


@dataclass(frozen=True)
class BatchStatistics:
    """A composition beside the strict one; correlations are of log lengths.

    Attributes:
        name: of the composition, as in reports.
        samples, steps: of the epoch.
        moved: share of the samples that left their strict step.
        max_displacement, mean_displacement: steps by which samples moved, the mean over all of them.
        strict_correlation, correlation: see `length_correlation`, before and after.
        strict_neighbours, neighbours: see `neighbour_correlation`, before and after.
        tokens, targets: per step.
    """

    name: str
    samples: int
    steps: int
    moved: float
    max_displacement: int
    mean_displacement: float
    strict_correlation: float
    correlation: float
    strict_neighbours: float
    neighbours: float
    tokens: Spread
    targets: Spread

    def sentences(self) -> list[str]:
        """What a reader should know about the batches, one sentence each."""
        moved = (
            "no sample moved"
            if self.moved == 0
            else f"{100 * self.moved:.1f} % of samples moved, at most {self.max_displacement} steps"
        )
        return [
            f"in {self.name} mode {moved}",
            f"length correlation inside a batch {self.strict_correlation:.2f} -> {self.correlation:.2f}",
            f"correlation of neighbouring steps' lengths {self.strict_neighbours:+.2f} -> {self.neighbours:+.2f}",
            *(
                f"{what} per step: {spread.p50:,.0f}, from {spread.p10:,.0f} (p10) to {spread.p90:,.0f} (p90)"
                for what, spread in (("tokens", self.tokens), ("target tokens", self.targets))
            ),
        ]


def batch_statistics(name: str, batches: Batches, strict: Batches) -> BatchStatistics:
    """Compare batches with the strict ones of the same samples.

    Samples that are in only one of the two (a tail) count for no displacement; one that is in several batches
    counts where it comes first.

    Raises:
        InputError: no batch, or one without samples.
    """
    if not batches or not strict or not all(batches) or not all(strict):
        raise InputError("batches without samples have no statistics; give at least one batch, each with a sample")
    before, after = _step_of(strict), _step_of(batches)
    moves = [abs(step - before[sample]) for sample, step in after.items() if sample in before] or [0]
    return BatchStatistics(
        name=name,
        samples=len(after),
        steps=len(batches),
        moved=float(np.mean(np.array(moves) > 0)),
        max_displacement=max(moves),
        mean_displacement=float(np.mean(moves)),
        strict_correlation=length_correlation(strict),
        correlation=length_correlation(batches),
        strict_neighbours=neighbour_correlation(strict),
        neighbours=neighbour_correlation(batches),
        tokens=Spread.of(_per_step(batches, lambda sample: sample.length)),
        targets=Spread.of(_per_step(batches, lambda sample: sample.targets)),
    )


def length_correlation(batches: Batches) -> float:
    """Correlation of the log lengths of two samples of one batch (intraclass correlation).

    About 0 for batches drawn at random, 1 where all samples of a batch have one length; 0 where nothing can be said:
    a single batch, one sample in each, or one length for all. Source: one-way random effects, ICC(1) of Shrout and
    Fleiss 1979, with the mean group size of unequal groups.
    """
    groups = _log_lengths(batches)
    sizes = np.array([len(group) for group in groups], dtype=np.float64)
    count, steps = sizes.sum(), len(groups)
    if steps < 2 or count == steps:
        return 0.0
    mean = np.concatenate(groups).mean()
    between = sum(len(g) * (g.mean() - mean) ** 2 for g in groups) / (steps - 1)
    within = sum(((g - g.mean()) ** 2).sum() for g in groups) / (count - steps)
    size = (count - (sizes**2).sum() / count) / (steps - 1)
    spread = between + (size - 1) * within
    return float((between - within) / spread) if spread > 1e-12 else 0.0


def neighbour_correlation(batches: Batches) -> float:
    """Correlation of the mean log length of a step with that of the next one; 0 for fewer than 3 steps or no spread."""
    means = np.array([group.mean() for group in _log_lengths(batches)])
    if len(means) < 3 or min(means[:-1].std(), means[1:].std()) < 1e-12:
        return 0.0
    return float(np.corrcoef(means[:-1], means[1:])[0, 1])


def _log_lengths(batches: Batches) -> list[Floats]:
    return [np.log([sample.length for sample in batch]) for batch in batches]


def _per_step(batches: Batches, count: Callable[[Sample], int]) -> list[int]:
    return [sum(count(sample) for sample in batch) for batch in batches]


def _step_of(batches: Batches) -> dict[int, int]:
    found: dict[int, int] = {}
    for step, batch in enumerate(batches):
        for sample in batch:
            found.setdefault(sample.id, step)
    return found
