"""The profiled latency model: measured points of one machine and one model, with their provenance.

In: a JSON file that `sparsebalance profile` wrote. Out: a `LatencyModel`. Attention is stored as measured
milliseconds at (length, budget) points and interpolated as milliseconds per computed score, which varies
slowly, in the logarithms of both; the rest of the model as milliseconds over tokens and over target tokens.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from sparsebalance.planning.errors import InputError
from sparsebalance.planning.files import write_whole
from sparsebalance.planning.plan import Latency, Segment
from sparsebalance.planning.work import Granularity, computed_scores, key_blocks

SCHEMA = 1
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Identity:
    """What a table was measured for; it predicts nothing else.

    Attributes:
        layers, hidden, intermediate, heads, kv_heads, head_dim, vocabulary: the decoder's sizes.
        block_size, granularity: of the block-sparse attention.
        device: "cpu" or the accelerator's name. dtype: of the computation. threads: per process.
        checkpointing: whether the backward recomputes the layers' forward.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    block_size: int
    granularity: Granularity
    device: str
    dtype: str
    threads: int
    checkpointing: bool = False


@dataclass(frozen=True)
class AttentionPoint:
    """One attention layer on a whole sample of `length` tokens at `budget` blocks: the milliseconds that the
    sample adds to a call (the call's fixed cost is the table's `call_ms`)."""

    length: int
    budget: int
    router_ms: float
    forward_ms: float
    backward_ms: float


@dataclass(frozen=True)
class LinePoint:
    """Milliseconds of everything else in the model at `count` tokens, or of the loss at `count` targets."""

    count: int
    forward_ms: float
    backward_ms: float


def _slope(left: float, right: float, share: float) -> float:
    """What is added to `left` at `share` of the way to `right`; beyond the last point time never falls."""
    return (right - left) * (share if right > left else min(share, 1.0))


@dataclass(frozen=True)
class LatencyTable:
    """Attributes:
    identity: see `Identity`.
    provenance: host kind, torch version, date, repeats: for people and reports.
    attention: points over lengths and budgets; at every length the same budgets up to its full one.
    linear: model without attention over the tokens of a micro-batch, at least 2 points.
    head: final projection and loss over target tokens, at least 2 points.
    call_ms: fixed (forward, backward) milliseconds of one attention layer's call.
    interaction: measured time of whole micro-batches over the sum of their separately measured parts, median;
        above 1 because the parts push each other out of the caches. Every prediction is multiplied by it.
    """

    identity: Identity
    provenance: Mapping[str, Any]
    attention: tuple[AttentionPoint, ...]
    linear: tuple[LinePoint, ...]
    head: tuple[LinePoint, ...]
    call_ms: tuple[float, float]
    interaction: float = 1.0

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: what was derived from them is made again on the other side."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def block_size(self) -> int:
        return self.identity.block_size

    @property
    def layers(self) -> int:
        return self.identity.layers

    def latency(self, segments: Sequence[Segment], budgets: Sequence[int]) -> Latency:
        if not segments:
            return Latency(0.0, 0.0)
        forward, backward = self._line(self.linear, sum(segment.tokens for segment in segments))
        targets = sum(segment.targets for segment in segments)
        if targets:
            head_forward, head_backward = self._line(self.head, targets)
            forward, backward = forward + head_forward, backward + head_backward
        layers = Counter(budgets)
        attention = self._attention(segments, tuple(layers)) @ np.array(list(layers.values()))
        return Latency(forward + float(attention[0]), backward + float(attention[1])).scaled(self.interaction)

    def attention_ms(self, segments: Sequence[Segment], budgets: NDArray[np.int64]) -> NDArray[np.float64]:
        total: Floats = self._attention(segments, tuple(budgets.tolist())).sum(0) * self.interaction
        return total

    def _attention(self, segments: Sequence[Segment], budgets: tuple[int, ...]) -> Floats:
        """Milliseconds of one layer's call at each budget, [2, len(budgets)]: forward with routing, backward."""
        total = np.repeat(np.array(self.call_ms)[:, None], len(budgets), axis=1)
        for s in segments:
            total += self._segment_ms(s.start, s.end, budgets)
        return total

    @cached_property
    def _segment_ms(self) -> Callable[[int, int, tuple[int, ...]], Floats]:
        """What a segment adds to a call; planning asks for the same ones again and again, so they are kept."""

        @lru_cache(maxsize=2**14)
        def segment_ms(start: int, end: int, budgets: tuple[int, ...]) -> Floats:
            allowed = np.minimum(budgets, key_blocks(end, self.block_size))
            scores = computed_scores(start, end, allowed, self.block_size, self.identity.granularity)
            found: Floats = scores * self._rates(end, allowed)
            return found

        return segment_ms

    def _rates(self, length: int, budgets: NDArray[np.int64]) -> Floats:
        """Milliseconds per computed score, [2, len(budgets)], bilinear in logarithms, held at the edges."""
        lengths, grid, logs = self._grid
        x = np.clip(np.interp(math.log(length), lengths, np.arange(len(lengths))), 0, len(lengths) - 1)
        low = min(int(x), len(lengths) - 2)
        weight = x - low
        row = logs[:, low] * (1 - weight) + logs[:, low + 1] * weight
        log_budgets = np.log(budgets)
        rates: Floats = np.exp(np.stack([np.interp(log_budgets, grid, values) for values in row]))
        return rates

    @cached_property
    def _grid(self) -> tuple[Floats, Floats, Floats]:
        """log lengths [n], log budgets [m], log milliseconds per score [2, n, m]."""
        lengths = sorted({point.length for point in self.attention})
        budgets = sorted({point.budget for point in self.attention})
        logs = np.full((2, len(lengths), len(budgets)), np.nan)
        for point in self.attention:
            scores = float(computed_scores(0, point.length, point.budget, self.block_size, self.identity.granularity))
            place = (lengths.index(point.length), budgets.index(point.budget))
            for side, ms in enumerate((point.router_ms + point.forward_ms, point.backward_ms)):
                logs[side][place] = math.log(ms / scores)
        for side in range(2):
            for row in logs[side]:  # a short sample's full budget stands for every larger one
                known = np.flatnonzero(~np.isnan(row))
                row[:] = np.interp(np.arange(len(budgets)), known, row[known])
        return np.log(lengths), np.log(budgets), logs

    @staticmethod
    def _line(points: Sequence[LinePoint], count: int) -> tuple[float, float]:
        """Piecewise linear through the points and on at the last slope; below the first, the first's cost."""
        if count <= points[0].count:
            return points[0].forward_ms, points[0].backward_ms
        right = min(bisect_left(points, count, key=lambda point: point.count), len(points) - 1)
        a, b = points[right - 1], points[right]
        share = (count - a.count) / (b.count - a.count)
        return (
            a.forward_ms + _slope(a.forward_ms, b.forward_ms, share),
            a.backward_ms + _slope(a.backward_ms, b.backward_ms, share),
        )

    def check_matches(self, run: Identity) -> None:
        """Raises:
        InputError: the run's model, attention or machine differs; names every differing field.
        """
        differing = [
            f"{f.name} (table {getattr(self.identity, f.name)!r}, run {getattr(run, f.name)!r})"
            for f in fields(Identity)
            if getattr(self.identity, f.name) != getattr(run, f.name)
        ]
        if differing:
            raise InputError(
                f"the latency table was measured for something else: {', '.join(differing)}; "
                "measure again with `sparsebalance profile`, or run what it was measured for"
            )

    @classmethod
    def mean(cls, tables: Sequence[LatencyTable]) -> LatencyTable:
        """Point by point mean of tables measured at the same points, as several ranks do at once."""

        def attention(points: tuple[AttentionPoint, ...]) -> AttentionPoint:
            router, forward, backward = np.mean(
                [(p.router_ms, p.forward_ms, p.backward_ms) for p in points], axis=0
            ).tolist()
            return AttentionPoint(points[0].length, points[0].budget, router, forward, backward)

        def line(points: tuple[LinePoint, ...]) -> LinePoint:
            forward, backward = np.mean([(p.forward_ms, p.backward_ms) for p in points], axis=0).tolist()
            return LinePoint(points[0].count, forward, backward)

        call = np.mean([table.call_ms for table in tables], axis=0).tolist()
        return replace(
            tables[0],
            provenance={**tables[0].provenance, "processes": len(tables)},
            attention=tuple(map(attention, zip(*(table.attention for table in tables), strict=True))),
            linear=tuple(map(line, zip(*(table.linear for table in tables), strict=True))),
            head=tuple(map(line, zip(*(table.head for table in tables), strict=True))),
            call_ms=(call[0], call[1]),
            interaction=float(np.mean([table.interaction for table in tables])),
        )

    def save(self, path: Path) -> None:
        """Write atomically as JSON."""
        write_whole(path, json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises:
        InputError: no such file, not JSON, another schema, or a table that cannot be interpolated.
        """
        if not path.is_file():
            raise InputError(f"no latency table at {path}; make one with `sparsebalance profile --table {path}`")
        try:
            record = json.loads(path.read_text())
            schema = record.pop("schema")
            if schema != SCHEMA:
                raise InputError(
                    f"latency table {path} has schema {schema}, but this version reads {SCHEMA}; "
                    "measure it again with `sparsebalance profile`"
                )
            table = cls(
                identity=Identity(**record["identity"]),
                provenance=record["provenance"],
                attention=tuple(AttentionPoint(**point) for point in record["attention"]),
                linear=tuple(LinePoint(**point) for point in record["linear"]),
                head=tuple(LinePoint(**point) for point in record["head"]),
                call_ms=(float(record["call_ms"][0]), float(record["call_ms"][1])),
                interaction=float(record["interaction"]),
            )
        except (json.JSONDecodeError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise InputError(
                f"latency table {path} is broken ({error}); measure it again with `sparsebalance profile`"
            ) from error
        table._check_points(path)
        return table

    def _check_points(self, path: Path) -> None:
        times = [t for p in self.attention for t in (p.router_ms, p.forward_ms, p.backward_ms)]
        times.append(self.interaction)
        times += [t for p in (*self.linear, *self.head) for t in (p.forward_ms, p.backward_ms)]
        lengths = {point.length for point in self.attention}
        if len(lengths) < 2 or len(self.linear) < 2 or len(self.head) < 2:
            raise InputError(f"latency table {path} has too few points; measure it again")
        if not all(math.isfinite(t) and t > 0 for t in times):
            raise InputError(f"latency table {path} holds a time that is not above 0; measure it again")
