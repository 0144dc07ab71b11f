"""The profiled latency model: measured points of one machine and one model, with their provenance.

In: a JSON file that `sparsebalance profile` wrote. Out: a `LatencyModel` that also says how sure it is.
Attention is stored as measured milliseconds at (length, budget) points and interpolated in the logarithms of
time and of computed scores, so that prediction never falls where measurements do not; everything else is
piecewise linear over tokens and over target tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsebalance.planning.decoder import Decoder
from sparsebalance.planning.latency import NOTHING, Floats, KeepsTerms, Terms
from sparsebalance.planning.network import NetworkCosts
from sparsebalance.planning.plan import Latency, Segment
from sparsebalance.planning.work import Granularity, computed_scores, key_blocks, router_scores


@dataclass(frozen=True)
class Identity:
    """What a table was measured for; it predicts nothing else.

    Attributes:
        decoder: the model's sizes.
        block_size, granularity: of the block-sparse attention.
        device: "cpu" or the accelerator's name. dtype: of the computation. threads: per process.
        checkpointing: whether the backward recomputes the layers' forward.
    """

    decoder: Decoder
    block_size: int
    granularity: Granularity
    device: str
    dtype: str
    threads: int
    checkpointing: bool = False

    def flat(self) -> dict[str, object]:
        """Every field by name, the decoder's sizes among them."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "decoder"}
        return {**vars(self.decoder), **own}


@dataclass(frozen=True)
class AttentionPoint:
    """One attention layer on a whole sample of `length` tokens at `budget` blocks: the milliseconds that the
    sample adds to a call (the call's fixed cost is the table's `call_ms`).

    `spread` is the relative standard error of the three.
    """

    length: int
    budget: int
    router_ms: float
    forward_ms: float
    backward_ms: float
    spread: float = 0.0


@dataclass(frozen=True)
class LinePoint:
    """Milliseconds of everything else in the model at `count` tokens, or of the head at `count` targets."""

    count: int
    forward_ms: float
    backward_ms: float
    spread: float = 0.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """A prediction with what is known about its error.

    Attributes:
        terms: milliseconds by term.
        error_ms: one standard deviation: noise of the measured points, distance between them, and how well
            the table reproduces whole micro-batches, added as independent errors.
        extrapolated: what lies outside of the measured range: any of "length", "budget", "tokens", "targets".
    """

    terms: Terms
    error_ms: float
    extrapolated: tuple[str, ...]


@dataclass(frozen=True)
class LatencyTable(KeepsTerms):
    """Attributes:
    identity: see `Identity`.
    provenance: host kind, torch version, date, repeats: for people and reports.
    attention: points over lengths and budgets; at every length the same budgets up to its full one.
    linear: model without attention over the tokens of a micro-batch, at least 2 points.
    head: final projection and loss over target tokens, at least 2 points.
    call_ms: fixed (router, forward, backward) milliseconds of one attention layer's call.
    residual: relative standard deviation of measured over predicted whole micro-batches, of those measured.
    network: costs of the process group; None where the table was measured by one process.
    dense: one layer of dense causal attention over sample length, for comparison; no prediction uses it.
    """

    identity: Identity
    provenance: Mapping[str, Any]
    attention: tuple[AttentionPoint, ...]
    linear: tuple[LinePoint, ...]
    head: tuple[LinePoint, ...]
    call_ms: tuple[float, float, float]
    residual: float = 0.0
    network: NetworkCosts | None = None
    dense: tuple[LinePoint, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: what was derived from them is made again on the other side."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def block_size(self) -> int:
        return self.identity.block_size

    @property
    def layers(self) -> int:
        return self.identity.decoder.layers

    def _computed_terms(self, segments: tuple[Segment, ...], budgets: tuple[int, ...]) -> Terms:
        if not segments:
            return NOTHING
        linear = _line(self.linear, sum(segment.tokens for segment in segments))
        targets = sum(segment.targets for segment in segments)
        head = _line(self.head, targets) if targets else (0.0, 0.0)
        layers = Counter(budgets)
        attention = self.layer_attention(segments, tuple(layers)) @ np.array(list(layers.values()))
        router, forward, backward = attention.tolist()
        return Terms(Latency(*linear), Latency(router, 0.0), Latency(forward, backward), Latency(*head))

    def layer_attention(self, segments: Sequence[Segment], budgets: Sequence[int]) -> Floats:
        total = np.repeat(np.array(self.call_ms)[:, None], len(budgets), axis=1)
        for s in segments:
            total += self._segment_ms(s.start, s.end, tuple(budgets))
        return total

    @cached_property
    def _segment_ms(self) -> Callable[[int, int, tuple[int, ...]], Floats]:
        """What a segment adds to a call; planning asks for the same ones again and again, so they are kept."""

        @lru_cache(maxsize=2**16)
        def segment_ms(start: int, end: int, budgets: tuple[int, ...]) -> Floats:
            allowed = np.minimum(budgets, key_blocks(end, self.block_size))
            whole = self._whole_ms(end, allowed)
            if start:  # a chunk costs its own queries at the rate of its position
                whole[0] *= _share(lambda a, b: router_scores(a, b, self.block_size, self._granularity), start, end)
                whole[1:] *= self._scores(start, end, allowed) / self._scores(0, end, allowed)
            return whole

        return segment_ms

    @property
    def _granularity(self) -> Granularity:
        return self.identity.granularity

    def _scores(self, start: int, end: int, budgets: NDArray[np.int64]) -> Floats:
        return computed_scores(start, end, budgets, self.block_size, self._granularity)

    def _whole_ms(self, length: int, budgets: NDArray[np.int64]) -> Floats:
        """[3, budgets]: router, forward and backward of a whole sample, no budget above its number of blocks.

        At the two nearest measured lengths, as rates per work at the budget, then between them in the logarithm
        of the length.
        """
        choosing = (budgets > 1) & (budgets < key_blocks(length, self.block_size))
        low, weight = _place(self._lengths, length)
        rates = (1 - weight) * self._log_rates(low, budgets, choosing)
        if weight:
            rates = rates + weight * self._log_rates(low + 1, budgets, choosing)
        found: Floats = np.exp(rates) * self._work(length, budgets)
        return found

    def _work(self, length: int, budgets: NDArray[np.int64]) -> Floats:
        """[3, budgets], what router, forward and backward times are divided by: query blocks looked at, scores."""
        scores = self._scores(0, length, budgets)
        looks = router_scores(0, length, self.block_size, self._granularity) + key_blocks(length, self.block_size)
        return np.stack([np.full(len(budgets), looks), scores, scores])

    def _log_rates(self, row: int, budgets: NDArray[np.int64], choosing: NDArray[np.bool_]) -> Floats:
        """[3, budgets]: log milliseconds per work at a measured length, log-linear between measured budgets.

        Time is interpolated over scores (not the rate over the budget), so it rises with the budget wherever
        the measured times do. The router's time jumps where there is nothing to choose (the own block alone, or
        all blocks): it is interpolated among points of the same kind, where the row has any.
        """
        length, measured, times = self._rows[row]
        blocks = key_blocks(length, self.block_size)
        work = self._work(length, np.minimum(budgets, blocks))
        nodes, wanted, logs = np.log(self._scores(0, length, measured)), np.log(work[1]), np.log(times)

        def router(kind: NDArray[np.bool_]) -> Floats:
            alike = kind if kind.any() else np.ones_like(kind)
            found: Floats = np.interp(wanted, nodes[alike], logs[alike, 0])
            return found

        picks = (measured > 1) & (measured < blocks)
        # Beyond the measured budgets attention goes on with its work, the router does not.
        beyond = np.maximum(wanted - nodes[-1], 0.0) + np.minimum(wanted - nodes[0], 0.0)
        attend = [np.interp(wanted, nodes, logs[:, side]) + beyond for side in (1, 2)]
        rates: Floats = np.stack([np.where(choosing, router(picks), router(~picks)), *attend]) - np.log(work)
        return rates

    @cached_property
    def _rows(self) -> list[tuple[int, NDArray[np.int64], Floats]]:
        """Per measured length: budgets, and times [budgets, 3]; those of attention never fall with the budget."""
        rows: dict[int, list[AttentionPoint]] = {}
        for point in self.attention:
            rows.setdefault(point.length, []).append(point)
        found = []
        for length in sorted(rows):
            points = sorted(rows[length], key=lambda point: point.budget)
            times = np.array([(p.router_ms, p.forward_ms, p.backward_ms) for p in points])
            times[:, 1:] = np.maximum.accumulate(times[:, 1:], axis=0)
            found.append((length, np.array([p.budget for p in points]), times))
        return found

    @cached_property
    def _lengths(self) -> list[float]:
        return [math.log(length) for length, _, _ in self._rows]

    def crossover(self, budget: int) -> int | None:
        """Tokens from which on block-sparse attention at `budget` is faster than dense, between the lengths that
        were measured dense; None where it is nowhere, the first of them where it always is."""
        faster = None
        for length in np.unique(np.geomspace(self.dense[0].count, self.dense[-1].count, 200).astype(int)).tolist():
            sparse = float(self.attention_ms([Segment(0, 0, length, length, 0)], np.array([budget]))[0])
            if sparse > self._dense_ms(length):
                faster = None
            elif faster is None:
                faster = length
        return faster

    def _dense_ms(self, length: int) -> float:
        """Forward + backward of one layer, between the measured lengths linear in the logarithms."""
        counts, times = [p.count for p in self.dense], [p.forward_ms + p.backward_ms for p in self.dense]
        return float(np.exp(np.interp(math.log(length), np.log(counts), np.log(times))))

    def predict(self, segments: Sequence[Segment], budgets: Sequence[int]) -> Prediction:
        """`terms` with an error estimate, and whether anything was extrapolated."""
        terms = self.terms(segments, budgets)
        if not segments:
            return Prediction(terms, 0.0, ())
        tokens, targets = sum(s.tokens for s in segments), sum(s.targets for s in segments)
        attention = np.array([self._attention_error(segment.end, max(budgets)) for segment in segments])
        shares = np.array([float(self.attention_ms([s], np.array([max(budgets)]))[0]) for s in segments])
        parts = [
            (terms.linear.total_ms, _line_error(self.linear, tokens)),
            (terms.router.total_ms + terms.attend.total_ms, float((attention * shares).sum() / shares.sum())),
            (terms.head.total_ms, _line_error(self.head, targets)),
            (terms.latency.total_ms, self.residual),
        ]
        return Prediction(
            terms, math.sqrt(sum((ms * error) ** 2 for ms, error in parts)), self._outside(segments, budgets)
        )

    def _outside(self, segments: Sequence[Segment], budgets: Sequence[int]) -> tuple[str, ...]:
        blocks = [key_blocks(s.end, self.block_size) for s in segments]
        largest = max(int(measured[-1]) for _, measured, _ in self._rows)
        checks = {
            "length": max(blocks) > key_blocks(self._rows[-1][0], self.block_size),
            "budget": min(max(budgets), max(blocks)) > largest,
            "tokens": sum(s.tokens for s in segments) > self.linear[-1].count,
            "targets": sum(s.targets for s in segments) > self.head[-1].count,
        }
        return tuple(name for name, outside in checks.items() if outside)

    def _attention_error(self, length: int, budget: int) -> float:
        """Relative: the noise of the nearest points, and up to a quarter of how far rates differ around."""
        low, weight = _place(self._lengths, length)
        high = min(low + 1, len(self._rows) - 1)
        at = [self._log_rates(row, np.array([budget]), np.array([True]))[1:, 0] for row in (low, high)]
        rates = [float(np.logaddexp(*pair)) for pair in at]
        noise = [p.spread for p in self.attention if p.length in (self._rows[low][0], self._rows[high][0])]
        between = weight * (1 - weight) * abs(rates[1] - rates[0])
        return math.hypot(max(noise), between)


def _place(nodes: Sequence[float], length: int) -> tuple[int, float]:
    """(i, weight): `length` lies at `weight` of the way from node i to i + 1, held at the edges."""
    x = math.log(length)
    low = max(0, min(int(np.searchsorted(nodes, x, side="right")) - 1, len(nodes) - 2))
    weight = (x - nodes[low]) / (nodes[low + 1] - nodes[low])
    return low, min(max(weight, 0.0), 1.0)


def _share(work: Callable[[int, int], float], start: int, end: int) -> float:
    """Part of a sample's work that its last tokens [start, end) do; by tokens where there is none."""
    whole = work(0, end)
    return work(start, end) / whole if whole else (end - start) / end


def _line(points: Sequence[LinePoint], count: int) -> tuple[float, float]:
    """Piecewise linear through the points and on at the last slope; below the first, the first's cost."""
    if count <= points[0].count:
        return points[0].forward_ms, points[0].backward_ms
    right = min(next((i for i, p in enumerate(points) if p.count >= count), len(points)), len(points) - 1)
    a, b = points[right - 1], points[right]
    share = (count - a.count) / (b.count - a.count)
    return _between(a.forward_ms, b.forward_ms, share), _between(a.backward_ms, b.backward_ms, share)


def _between(left: float, right: float, share: float) -> float:
    """Beyond the last point (share > 1) time goes on rising but never falls."""
    return left + (right - left) * (share if right > left else min(share, 1.0))


def _line_error(points: Sequence[LinePoint], count: int) -> float:
    """Relative noise of the nearest points."""
    near = sorted(points, key=lambda point: abs(math.log(point.count) - math.log(max(count, 1))))[:2]
    return max(point.spread for point in near)
