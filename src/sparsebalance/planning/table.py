"""The profiled latency model: measured points of one machine and one model, with their provenance.

In: a JSON file that `sparsebalance profile` wrote. Out: a `LatencyModel` that also says how sure it is.
Attention is stored as measured milliseconds at (length, budget) points and interpolated in the logarithms of
time and of computed scores, so that prediction never falls where measurements do not; everything else is
piecewise linear over tokens and over target tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsebalance.planning.decoder import Decoder
from sparsebalance.planning.latency import Amount, Floats, Ints, KeepsTerms, Terms
from sparsebalance.planning.network import NetworkCosts
from sparsebalance.planning.plan import Segment
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

    def _assembled(
        self, tokens: Amount, targets: Amount, router: Amount, forward: Amount, backward: Amount
    ) -> tuple[tuple[Amount, Amount], ...]:
        there, back = _line(self.head, targets)
        some = targets > 0
        return _line(self.linear, tokens), (router, 0.0 * router), (forward, backward), (some * there, some * back)

    def _call(self) -> Floats:
        return np.array(self.call_ms)

    def _segments_ms(self, start: Ints, end: Ints, budgets: Ints) -> Floats:
        allowed = np.minimum(budgets, key_blocks(end, self.block_size))
        found = self._whole_ms(end, allowed)
        chunks = start > 0  # a chunk costs its own queries at the rate of its position
        if chunks.any():
            a, b, blocks = start[chunks], end[chunks], allowed[chunks]
            found[0, chunks] *= _share(self._routed(a, b), self._routed(np.zeros_like(b), b), (b - a) / b)
            found[1:, chunks] *= self._scores(a, b, blocks) / self._scores(np.zeros_like(b), b, blocks)
        return found

    @property
    def _granularity(self) -> Granularity:
        return self.identity.granularity

    def _scores(self, start: Ints, end: Ints, budgets: Ints) -> Floats:
        return computed_scores(start, end, budgets, self.block_size, self._granularity)

    def _routed(self, start: Ints, end: Ints) -> Floats:
        return router_scores(start, end, self.block_size, self._granularity)

    def _whole_ms(self, lengths: Ints, budgets: Ints) -> Floats:
        """[3, n]: router, forward and backward of whole samples of [n] lengths, no budget above a length's blocks.

        At the two nearest measured lengths, as rates per work at the budget, then between them in the logarithm
        of the length.
        """
        choosing = (budgets > 1) & (budgets < key_blocks(lengths, self.block_size))
        low, weight = _place(self._lengths, lengths)
        rates = np.empty((3, len(lengths)))
        for row in set(low.tolist()):
            here = low == row
            at, chosen, share = budgets[here], choosing[here], weight[here]
            rates[:, here] = (1 - share) * self._log_rates(row, at, chosen)
            if share.any():
                rates[:, here] += share * self._log_rates(row + 1, at, chosen)
        found: Floats = np.exp(rates) * self._work(lengths, budgets)
        return found

    def _work(self, lengths: Ints, budgets: Ints) -> Floats:
        """[3, n], what router, forward and backward times are divided by: query blocks looked at, scores."""
        none = np.zeros_like(lengths)
        scores = self._scores(none, lengths, budgets)
        return np.stack([self._routed(none, lengths) + key_blocks(lengths, self.block_size), scores, scores])

    def _log_rates(self, row: int, budgets: NDArray[np.int64], choosing: NDArray[np.bool_]) -> Floats:
        """[3, budgets]: log milliseconds per work at a measured length, log-linear between measured budgets.

        Time is interpolated over scores (not the rate over the budget), so it rises with the budget wherever
        the measured times do. The router's time jumps where there is nothing to choose (the own block alone, or
        all blocks): it is interpolated among points of the same kind, where the row has any.
        """
        length, measured, nodes, logs = self._rows[row]
        blocks = key_blocks(length, self.block_size)
        work = self._work(np.full(len(budgets), length), np.minimum(budgets, blocks))
        wanted = np.log(work[1])

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
    def _rows(self) -> list[tuple[int, Ints, Floats, Floats]]:
        """Per measured length: budgets, and the logarithms of their scores [budgets] and times [budgets, 3]; times of
        attention never fall with the budget."""
        rows: dict[int, list[AttentionPoint]] = {}
        for point in self.attention:
            rows.setdefault(point.length, []).append(point)
        found = []
        for length in sorted(rows):
            points = sorted(rows[length], key=lambda point: point.budget)
            times = np.array([(p.router_ms, p.forward_ms, p.backward_ms) for p in points])
            times[:, 1:] = np.maximum.accumulate(times[:, 1:], axis=0)
            measured = np.array([p.budget for p in points])
            scores = self._scores(np.zeros_like(measured), np.full(len(measured), length), measured)
            found.append((length, measured, np.log(scores), np.log(times)))
        return found

    @cached_property
    def _lengths(self) -> Floats:
        return np.log([float(length) for length, *_ in self._rows])

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
        largest = max(int(measured[-1]) for _, measured, _, _ in self._rows)
        checks = {
            "length": max(blocks) > key_blocks(self._rows[-1][0], self.block_size),
            "budget": min(max(budgets), max(blocks)) > largest,
            "tokens": sum(s.tokens for s in segments) > self.linear[-1].count,
            "targets": sum(s.targets for s in segments) > self.head[-1].count,
        }
        return tuple(name for name, outside in checks.items() if outside)

    def _attention_error(self, length: int, budget: int) -> float:
        """Relative: the noise of the nearest points, and up to a quarter of how far rates differ around."""
        (low,), (weight,) = (found.tolist() for found in _place(self._lengths, np.array([length])))
        high = min(low + 1, len(self._rows) - 1)
        at = [self._log_rates(row, np.array([budget]), np.array([True]))[1:, 0] for row in (low, high)]
        rates = [float(np.logaddexp(*pair)) for pair in at]
        noise = [p.spread for p in self.attention if p.length in (self._rows[low][0], self._rows[high][0])]
        between = weight * (1 - weight) * abs(rates[1] - rates[0])
        return math.hypot(max(noise), between)


def _place(nodes: Floats, lengths: Ints) -> tuple[Ints, Floats]:
    """(i, weight): a length lies at `weight` of the way from node i to i + 1, held at the edges."""
    x = np.log(lengths)
    low = np.clip(np.searchsorted(nodes, x, side="right") - 1, 0, len(nodes) - 2)
    weight = (x - nodes[low]) / (nodes[low + 1] - nodes[low])
    return low, np.clip(weight, 0.0, 1.0)


def _share(part: Floats, whole: Floats, by_tokens: Floats) -> Floats:
    """Part of a sample's work; by tokens where there is none."""
    return np.divide(part, whole, out=by_tokens.copy(), where=whole > 0)


def _line(points: Sequence[LinePoint], counts: Amount) -> tuple[Amount, Amount]:
    """Forward and backward, piecewise linear through the points; below the first, the first's cost; beyond the last,
    on at the last slope, but time never falls."""
    x = [point.count for point in points]
    beyond = np.maximum(counts - x[-1], 0.0)

    def at(y: Sequence[float]) -> Amount:
        found: Amount = np.interp(counts, x, y) + max(0.0, (y[-1] - y[-2]) / (x[-1] - x[-2])) * beyond
        return found

    return at([point.forward_ms for point in points]), at([point.backward_ms for point in points])


def _line_error(points: Sequence[LinePoint], count: int) -> float:
    """Relative noise of the nearest points."""
    near = sorted(points, key=lambda point: abs(math.log(point.count) - math.log(max(count, 1))))[:2]
    return max(point.spread for point in near)
