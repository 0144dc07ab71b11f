"""Measures one model on this machine, term by term, and returns a latency table.

Whole micro-batches run on a grid of lengths and budgets that starts coarse. As long as there is time, the gap
in which interpolation is worst gets new points; then all points run again in interleaved rounds, so that a
slow spell of the machine hits all alike, and medians are kept. The first call of each shape never counts.
"""

from __future__ import annotations

import datetime
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PreTrainedModel

from sparsebalance.planning.errors import InputError
from sparsebalance.planning.table import AttentionPoint, Identity, LatencyTable, LinePoint
from sparsebalance.planning.work import computed_scores, key_blocks
from sparsebalance.profiling.points import PACKED_TOKENS, Gather, Point, Timing, Work, work_of
from sparsebalance.training.engine import Engine

TOLERANCE = 0.025  # of a micro-batch's time: no more points where interpolation is estimated better than this
REFINING = 0.25  # share of the time limit that may go into new points, and no more than the coarse grid took
ATTENTION = (("router", "forward"), ("attend", "forward"), ("attend", "backward"))
Progress = Callable[[int, int], None]  # (seconds so far, seconds at most)


@dataclass(frozen=True)
class Measurement:
    """Attributes:
    table: for prediction.
    rank_factors: how much slower each rank was than the mean of all, running the same work at the same time.
    held_out_ms: median forward + backward milliseconds of each held-out micro-batch, at the usual speed of the
        machine, as the table is.
    held_out_raw_ms: the same as the clock had it.
    held_out_attention_ms: of it, router and attention.
    """

    table: LatencyTable
    rank_factors: tuple[float, ...]
    held_out_ms: tuple[float, ...]
    held_out_raw_ms: tuple[float, ...]
    held_out_attention_ms: tuple[float, ...]


def measure(
    model: PreTrainedModel,
    identity: Identity,
    max_length: int,
    max_budget: int,
    rounds: int = 3,
    limit_s: float = 45.0,
    progress: Progress | None = None,
    held_out: Sequence[Work] = (),
    gather: Gather = lambda value: [value],
) -> Measurement:
    """Every rank calls this at once and gets the same table.

    Args:
        model: the decoder, with block-sparse attention activated.
        identity: recorded in the table.
        max_length: tokens of the longest sample to predict.
        max_budget: largest budget to measure; larger ones are extrapolated by their work.
        rounds: most timed rounds; at least 1.
        limit_s: nothing new starts after so many seconds; one run of the coarse grid is always finished.
        progress: called after every run.
        held_out: micro-batches that are timed in the same rounds and never enter the table.
        gather: every rank's value on every rank.

    Raises:
        InputError: max_length below two blocks (nothing to interpolate between).
    """
    if max_length < 2 * identity.block_size:
        raise InputError(
            f"max_length {max_length} is below two blocks of {identity.block_size}; nothing to interpolate"
        )
    engine = Engine.whole(model, identity.block_size, identity.granularity, identity.checkpointing)
    grid = _Grid(identity, max_length, max_budget)
    begin = time.perf_counter()
    timing = Timing(engine, grid.reference(), gather)

    def elapsed() -> float:
        """The same on every rank, so that all stop at the same point."""
        return float(gather(time.perf_counter() - begin)[0])

    def run(points: Iterable[Point]) -> None:
        for point in points:
            timing.run(point)
            if progress is not None:
                progress(min(int(time.perf_counter() - begin), int(limit_s)), int(limit_s))

    others = [Point(work) for work in held_out]
    # First calls, largest first: all others reuse its memory. They tell where to refine, and are then forgotten.
    run(sorted([*grid.points, *others], key=lambda point: -point.unit.tokens))
    most = min(REFINING * limit_s, 2 * elapsed())
    while elapsed() < most and (new := grid.refine()):
        run(new)
    everything = [*grid.points, *others]
    done, before = 0, elapsed()
    while done < rounds:
        # Shuffled, the same way on every rank, so that no kind of point always meets the same spell.
        run(everything[i] for i in np.random.default_rng(done).permutation(len(everything)))
        done += 1
        now = elapsed()
        if now + (now - before) / done > limit_s:
            break
    if progress is not None:
        progress(int(limit_s), int(limit_s))
    wholes = np.array([[run.whole_ms for run in ranks] for point in everything for ranks in point.timed])
    factors = np.median(wholes / wholes.mean(1, keepdims=True), axis=0)
    provenance = _provenance(done, time.perf_counter() - begin, len(factors), len(grid.points))
    steady = Timing.at_usual_speed(everything)
    return Measurement(
        grid.table(steady[: len(grid.points)], provenance),
        tuple((factors / factors.mean()).tolist()),
        tuple(point.whole_ms() for point in steady[len(grid.points) :]),
        tuple(point.whole_ms() for point in others),
        tuple(sum(point.median()[key] for key in ATTENTION) for point in steady[len(grid.points) :]),
    )


class _Grid:
    """Points at lengths x budgets, and small micro-batches for what does not depend on attention."""

    def __init__(self, identity: Identity, max_length: int, max_budget: int) -> None:
        self.identity = identity
        self.lengths: list[int] = []
        self.budgets: list[int] = []
        self.attention: dict[tuple[int, int], Point] = {}
        self.max_budget = min(max_budget, key_blocks(max_length, identity.block_size))
        self._packed = min(PACKED_TOKENS, 2 * max_length)
        self._uses = {count: 0 for count in (1, 32, 256, 1024) if count < max_length}
        self.small = [self._point((n,), 1) for n in sorted({1, min(64, max_length), min(512, max_length)})]
        self._add(_geometric(identity.block_size, max_length, 8), sorted({1, min(4, self.max_budget), self.max_budget}))

    @property
    def points(self) -> list[Point]:
        return [*self.small, *self.attention.values()]

    def reference(self) -> Point:
        """Small, and with something of every term."""
        decoder, size = self.identity.decoder, self.identity.block_size
        return Point(work_of((4 * size,), 2, decoder.layers, decoder.vocabulary, size // 2))

    def _add(self, lengths: Sequence[int], budgets: Sequence[int]) -> list[Point]:
        """Grow the grid; returns its new points."""
        self.lengths = sorted({*self.lengths, *lengths})
        self.budgets = sorted({*self.budgets, *budgets})
        new = {}
        for length in self.lengths:
            blocks = key_blocks(length, self.identity.block_size)
            for budget in sorted({min(k, blocks) for k in self.budgets}):
                if (length, budget) not in self.attention:
                    # One token less: the last block is not full, as with nearly every real sample.
                    copies = max(1, self._packed // length)
                    new[length, budget] = self._point((max(length - 1, 1),) * copies, budget)
        self.attention |= new
        return list(new.values())

    def _point(self, lengths: tuple[int, ...], budget: int) -> Point:
        """With a target count that was not used twice yet, the largest first; then with a single target, because
        the head costs more than all layers of a small model."""
        room = sum(lengths) - len(lengths)
        wanted = [count for count, used in self._uses.items() if count <= room and used < 2]
        targets = max(wanted, default=min(1, room))
        if targets in self._uses:
            self._uses[targets] += 1
        decoder = self.identity.decoder
        return Point(work_of(lengths, budget, decoder.layers, decoder.vocabulary, targets))

    def refine(self) -> list[Point]:
        """Points in the middle of the gap where interpolation is worst; none where it is good everywhere."""
        table = self.table(self.points, {})
        size = self.identity.block_size
        gaps: list[tuple[float, list[int], list[int]]] = []
        for a, b in zip(self.lengths, self.lengths[1:]):
            middle = round(math.sqrt(a * b) / size) * size
            if a < middle < b:
                error = max(self._error(table, (a, k), (b, k)) for k in self.budgets)
                gaps.append((error, [middle], []))
        for a, b in zip(self.budgets, self.budgets[1:]):
            middle = round(math.sqrt(a * b))
            if a < middle < b:
                long = [n for n in self.lengths if key_blocks(n, size) >= b]
                error = max((self._error(table, (n, a), (n, b)) for n in long), default=0.0)
                gaps.append((error, [], [middle]))
        worst = max(gaps, default=(0.0, [], []))
        return self._add(worst[1], worst[2]) if worst[0] > TOLERANCE else []

    def _error(self, table: LatencyTable, a: tuple[int, int], b: tuple[int, int]) -> float:
        """Estimated relative error of a micro-batch between two points: a quarter of the difference of their
        rates (a curve that bends all the way), times the share that attention has in it."""
        rates, shares = [], []
        for length, budget in (a, b):
            budget = min(budget, key_blocks(length, self.identity.block_size))
            point = self.attention[length, budget]
            scores = computed_scores(0, length, budget, self.identity.block_size, self.identity.granularity)
            attention = float(table.layer_attention(point.unit.segments[:1], [budget])[1:].sum())
            rates.append(attention / float(scores))
            shares.append(table.layers * attention * point.copies / point.whole_ms())
        return abs(math.log(rates[1] / rates[0])) / 4 * max(shares)

    def table(self, points: Sequence[Point], provenance: dict[str, object]) -> LatencyTable:
        """From the grid's points in their order, perhaps rescaled."""
        layers = self.identity.decoder.layers
        smallest = points[0].median()
        call = tuple(smallest[key] / layers for key in ATTENTION)
        attention = []
        measured = dict(zip(self.attention, points[len(self.small) :], strict=True))
        for (_, budget), point in sorted(measured.items()):
            times = point.median()
            router, forward, backward = (
                # Never below a tenth of its share of the whole: noise of a small difference.
                max(times[key] / layers - fixed, 0.1 * times[key] / layers) / point.copies
                for key, fixed in zip(ATTENTION, call)
            )
            attention.append(AttentionPoint(point.length, budget, router, forward, backward, point.spread()))
        table = LatencyTable(
            identity=self.identity,
            provenance=provenance,
            attention=tuple(attention),
            linear=_line(points, "linear", lambda point: point.unit.tokens),
            head=_line(points, "head", lambda point: point.unit.targets),
            call_ms=(call[0], call[1], call[2]),
        )
        off = [
            math.log(point.whole_ms() / table.latency(point.unit.segments, point.unit.budgets).total_ms)
            for point in points
        ]
        return replace(table, residual=1.4826 * statistics.median(map(abs, off)))


def _geometric(first: int, last: int, factor: int) -> list[int]:
    """first, first * factor, ... and `last`, none nearer to it than half a factor."""
    values = []
    while first * math.sqrt(factor) < last:
        values.append(first)
        first *= factor
    return [*(values or [first]), last]


def _line(points: Sequence[Point], term: str, count_of: Callable[[Point], int]) -> tuple[LinePoint, ...]:
    """Median over all runs of the points that share a count."""
    groups: dict[int, list[Point]] = {}
    for point in points:
        if count_of(point):
            groups.setdefault(count_of(point), []).append(point)
    line = []
    for count, group in sorted(groups.items()):
        forward, backward = (
            statistics.median(point.median()[term, side] for point in group) for side in ("forward", "backward")
        )
        spread = statistics.fmean(point.spread() for point in group) / math.sqrt(len(group))
        line.append(LinePoint(count, forward, backward, spread))
    return tuple(line)


def host_kind() -> str:
    """The processor's model name, as far as the system tells."""
    for line in _cpu_info():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _cpu_info() -> Iterator[str]:
    try:
        with open("/proc/cpuinfo") as file:
            yield from file
    except OSError:
        return


def _provenance(rounds: int, seconds: float, processes: int, points: int) -> dict[str, object]:
    return {
        "host": host_kind(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "points": points,
        "rounds": rounds,
        "seconds": round(seconds, 1),
        "processes": processes,
    }
