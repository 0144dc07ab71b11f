"""What is timed: whole micro-batches of the model, made of random tokens, at chosen lengths and budgets.

In: lengths, budgets, target counts. Out: `Point`s, each a micro-batch with the times of its runs by term. Terms
are read where they run, inside the whole model, so that they include what the parts do to each other's caches.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sparsebalance.planning.plan import Latency, MicroBatch, Segment
from sparsebalance.training.data import IGNORE, Example
from sparsebalance.training.engine import Engine
from sparsebalance.training.results import UnitTime

WINDOW = 2  # calls on either side whose references tell the speed at a moment
PACKED_TOKENS = 2048  # short samples are measured packed up to this length, as they will run
MEASURED = (
    ("router", "forward"),
    ("attend", "forward"),
    ("attend", "backward"),
    ("linear", "forward"),
    ("linear", "backward"),
    ("head", "forward"),
    ("head", "backward"),
)
Work = tuple[MicroBatch, list[Example]]  # a micro-batch and the examples that its sample ids index
Gather = Callable[[Any], list[Any]]  # every rank's value, in rank order


@dataclass(frozen=True)
class Run:
    """One rank's part of one call of a point.

    Attributes:
        terms: milliseconds of each of `MEASURED`.
        whole_ms: forward + backward.
        reference_ms: what the reference micro-batch took around it: how fast the machine was just then.
        place: number of the call among all calls of all points.
    """

    terms: tuple[float, ...]
    whole_ms: float
    reference_ms: float
    place: int


@dataclass
class Point:
    """A micro-batch and its calls.

    Attributes:
        work: the micro-batch; all its samples are alike.
        calls: per call, one run for each rank that ran it at the same time. The first call, which allocates and
            warms up, only counts until there is another one.
    """

    work: Work
    calls: list[list[Run]] = field(default_factory=list)

    @property
    def unit(self) -> MicroBatch:
        return self.work[0]

    @property
    def length(self) -> int:
        return self.unit.segments[0].tokens

    @property
    def copies(self) -> int:
        return len(self.unit.segments)

    @property
    def timed(self) -> list[list[Run]]:
        return self.calls[1:] or self.calls

    def run(self, engine: Engine) -> UnitTime:
        unit, examples = self.work
        return engine.run([unit], examples, max(unit.targets, 1)).units[0]

    def median(self) -> dict[tuple[str, str], float]:
        """Milliseconds of each of `MEASURED`, mean over ranks, median over calls."""
        means = [np.mean([run.terms for run in ranks], axis=0).tolist() for ranks in self.timed]
        return {key: statistics.median(values) for key, values in zip(MEASURED, zip(*means))}

    def whole_ms(self) -> float:
        return statistics.median(self._wholes())

    def spread(self) -> float:
        """Relative standard error of the whole; a guess of 5 % where it ran once."""
        wholes = self._wholes()
        if len(wholes) < 2:
            return 0.05
        return statistics.stdev(wholes) / len(wholes) ** 0.5 / statistics.fmean(wholes)

    def _wholes(self) -> list[float]:
        return [statistics.fmean(run.whole_ms for run in ranks) for ranks in self.timed]


class Timing:
    """Runs points on all ranks at once, and knows how fast the machine was at each moment.

    Shared machines speed up and slow down by tens of percent within seconds. A small reference micro-batch runs
    between the points; `at_usual_speed` scales every run to the median of it. Single disturbed references do no
    harm: the speed at a moment is the median over the calls around it.
    """

    def __init__(self, engine: Engine, reference: Point, gather: Gather) -> None:
        self._engine, self._reference, self._gather = engine, reference, gather
        self._before = self._reference_ms()
        self._before = self._reference_ms()  # the first call does not count
        self._calls = 0

    def _reference_ms(self) -> float:
        return self._reference.run(self._engine).total_ms

    def run(self, point: Point) -> None:
        time = point.run(self._engine)
        after = self._reference_ms()
        terms = tuple(getattr(time, side).get(term, 0.0) for term, side in MEASURED)
        point.calls.append(self._gather(Run(terms, time.total_ms, (self._before + after) / 2, self._calls)))
        self._before = after
        self._calls += 1

    @staticmethod
    def at_usual_speed(points: Sequence[Point]) -> list[Point]:
        """The points with every run scaled by its rank's median reference over its own."""
        order = sorted((ranks for point in points for ranks in point.calls), key=lambda ranks: ranks[0].place)
        slowness: dict[int, list[float]] = {}  # place -> per rank, against the usual
        for runs in zip(*order):
            references = [run.reference_ms for run in runs]
            usual = statistics.median(references)
            for i, run in enumerate(runs):
                around = references[max(0, i - WINDOW) : i + WINDOW + 1]
                slowness.setdefault(run.place, []).append(statistics.median(around) / usual)

        def scaled(ranks: list[Run]) -> list[Run]:
            return [_scaled(run, 1 / slow) for run, slow in zip(ranks, slowness[ranks[0].place])]

        return [replace(point, calls=list(map(scaled, point.calls))) for point in points]


def _scaled(run: Run, factor: float) -> Run:
    return replace(run, terms=tuple(ms * factor for ms in run.terms), whole_ms=run.whole_ms * factor)


def work_of(lengths: Sequence[int], budget: int, layers: int, vocabulary: int, targets: int | None = None) -> Work:
    """Samples of these lengths packed in one micro-batch.

    Args:
        targets: of the whole micro-batch; by default a tenth of every sample, at most 1024, as in
            long-document instructions.
    """
    rng = np.random.default_rng(list(lengths))
    wanted = [min(n // 10, 1024) for n in lengths] if targets is None else _spread_out(targets, lengths)
    examples = [random_example(n, t, vocabulary, rng) for n, t in zip(lengths, wanted)]
    segments = tuple(
        Segment(i, 0, len(example.input_ids), len(example.input_ids), example.target_count)
        for i, example in enumerate(examples)
    )
    return MicroBatch(segments, (budget,) * layers, Latency(0.0, 0.0)), examples


def _spread_out(targets: int, lengths: Sequence[int]) -> list[int]:
    """Targets per sample, as even as their lengths allow (a sample of n tokens has at most n - 1)."""
    given, left = [0] * len(lengths), targets
    shortest_first = sorted(range(len(lengths)), key=lambda i: lengths[i])
    for place, index in enumerate(shortest_first):
        given[index] = min(-(-left // (len(lengths) - place)), lengths[index] - 1)
        left -= given[index]
    return given


def random_example(length: int, targets: int, vocabulary: int, rng: np.random.Generator) -> Example:
    """Random tokens, the last `targets` of which are to be predicted."""
    ids = rng.integers(0, vocabulary, length).astype(np.int32)
    wanted = np.full(length, IGNORE, dtype=np.int32)
    if targets:
        wanted[-targets - 1 : -1] = ids[-targets:]
    return Example(ids, wanted)
