"""How long a micro-batch takes, by term: the latency protocol, and the analytic roofline.

In: segments and one attention budget per layer. Out: predicted milliseconds of four terms (linear layers,
router, attention, head), forward and backward apart. The profiled model is
`sparsebalance.planning.table.LatencyTable`; `sparsebalance.planning.correction` adjusts either while training.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from sparsebalance.planning.decoder import Decoder
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.hardware import Device
from sparsebalance.planning.plan import Latency, MicroBatch, Segment
from sparsebalance.planning.work import Granularity, computed_scores, router_scores

TERMS: tuple[str, ...] = ("linear", "router", "attend", "head")
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Amount = TypeVar("Amount", float, Floats)


@dataclass(frozen=True, slots=True)
class Terms:
    """Predicted milliseconds of one micro-batch over the whole model.

    Attributes:
        linear: embedding, projections, feed-forward layers, norms, and the fixed cost of a call.
        router: choosing key blocks; nothing in the backward, where no gradient passes through it.
        attend: attention over the chosen blocks.
        head: output projection and loss over the target tokens.
    """

    linear: Latency
    router: Latency
    attend: Latency
    head: Latency

    @property
    def latency(self) -> Latency:
        a, b, c, d = self.linear, self.router, self.attend, self.head
        return Latency(
            a.forward_ms + b.forward_ms + c.forward_ms + d.forward_ms,
            a.backward_ms + b.backward_ms + c.backward_ms + d.backward_ms,
        )

    def recomputed(self) -> Terms:
        """Of a chunk whose forward keeps nothing: it runs again before the backward, with the blocks already chosen,
        and the head only then."""

        def again(part: Latency) -> Latency:
            return Latency(part.forward_ms, part.backward_ms + part.forward_ms)

        head = Latency(0.0, self.head.total_ms)
        return Terms(again(self.linear), self.router, again(self.attend), head)

    def total_ms(self) -> dict[str, float]:
        """Forward + backward milliseconds by term."""
        return {name: getattr(self, name).total_ms for name in TERMS}


NOTHING = Terms(*(Latency(0.0, 0.0) for _ in TERMS))
"""The terms of an empty micro-batch."""


class LatencyModel(Protocol):
    """What batching, tuning and the simulator need to know about time."""

    @property
    def block_size(self) -> int:
        """Keys per block."""
        ...

    @property
    def layers(self) -> int:
        """Attention layers of the model."""
        ...

    def terms(self, segments: Sequence[Segment], budgets: Sequence[int]) -> Terms:
        """Milliseconds of the micro-batch made of `segments` over the whole model, `budgets[layer]` blocks.

        An empty micro-batch takes 0.
        """
        ...

    def many_terms(self, units: Sequence[Sequence[Segment]], budgets: Ints) -> Floats:
        """`terms` of many micro-batches in one call, [4, 2, units]: by `TERMS`, forward and backward milliseconds.

        Args:
            budgets: [layers] blocks for all of them, or [units, layers].
        """
        ...

    def layer_attention(self, segments: Sequence[Segment], budgets: Sequence[int]) -> Floats:
        """Milliseconds of one attention layer at each of `budgets`, [3, len(budgets)]: router, forward, backward."""
        ...

    def latency(self, segments: Sequence[Segment], budgets: Sequence[int]) -> Latency:
        """The sum of `terms`."""
        ...

    def attention_ms(self, segments: Sequence[Segment], budgets: NDArray[np.int64]) -> Floats:
        """Forward + backward milliseconds of one attention layer, router included, at each of `budgets`."""
        ...

    def rank_factor(self, rank: int) -> float:
        """How much longer a data-parallel rank takes than this model says; 1 where all ranks are alike."""
        ...


def unit_terms(model: LatencyModel, unit: MicroBatch) -> Terms:
    """What a micro-batch of a plan takes, its recomputed forward included."""
    terms = model.terms(unit.segments, unit.budgets)
    return terms.recomputed() if unit.recompute else terms


def recomputed_terms(terms: Floats, again: NDArray[np.bool_]) -> Floats:
    """`Terms.recomputed` of the units marked in `again` [units]; terms as `LatencyModel.many_terms` gives them."""
    linear, _, attend, head = terms[:, 0]
    found = terms.copy()
    found[TERMS.index("linear"), 1] += np.where(again, linear, 0.0)
    found[TERMS.index("attend"), 1] += np.where(again, attend, 0.0)
    found[TERMS.index("head"), 1] += np.where(again, head, 0.0)
    found[TERMS.index("head"), 0] = np.where(again, 0.0, head)
    return found


class FromTerms:
    """What follows from `terms` and `layer_attention` in every latency model."""

    def many_terms(self: LatencyModel, units: Sequence[Sequence[Segment]], budgets: Ints) -> Floats:
        found = np.zeros((len(TERMS), 2, len(units)))
        rows: list[list[int]] = np.broadcast_to(budgets, (len(units), budgets.shape[-1])).tolist()
        for place, (unit, layers) in enumerate(zip(units, rows)):
            terms = self.terms(unit, layers)
            for term, name in enumerate(TERMS):
                latency: Latency = getattr(terms, name)
                found[term, :, place] = latency.forward_ms, latency.backward_ms
        return found

    def latency(self: LatencyModel, segments: Sequence[Segment], budgets: Sequence[int]) -> Latency:
        return self.terms(segments, budgets).latency

    def attention_ms(self: LatencyModel, segments: Sequence[Segment], budgets: NDArray[np.int64]) -> Floats:
        total: Floats = self.layer_attention(segments, budgets.tolist()).sum(0)
        return total

    def rank_factor(self, rank: int) -> float:
        return 1.0


@dataclass(frozen=True, eq=False)
class FlatUnits:
    """Many micro-batches as arrays over all their segments.

    Attributes:
        unit: [segments] int64, place of the segment's micro-batch. start, end: [segments] int64.
        tokens, targets: [units] float64 sums.
    """

    unit: Ints
    start: Ints
    end: Ints
    tokens: Floats
    targets: Floats

    @classmethod
    def of(cls, units: Sequence[Sequence[Segment]]) -> FlatUnits:
        counts = np.fromiter(map(len, units), dtype=np.int64, count=len(units))
        unit, total = np.repeat(np.arange(len(units)), counts), int(counts.sum())
        segments = itertools.chain.from_iterable(units)
        rows = np.fromiter(((s.start, s.end, s.targets) for s in segments), np.dtype((np.int64, 3)), total)
        start, end, targets = np.ascontiguousarray(rows.T)
        return cls(
            unit=unit,
            start=start,
            end=end,
            tokens=_summed(unit, end - start, len(units)),
            targets=_summed(unit, targets, len(units)),
        )

    def sums(self, values: Floats) -> Floats:
        """[n, segments] -> [n, units]."""
        return np.stack([_summed(self.unit, row, len(self.tokens)) for row in values])

    def by_layers(self, budgets: Ints) -> list[tuple[Ints, int]]:
        """(budget of every segment, [segments], number of layers that have just these) of budgets [(units,) layers]."""
        columns = np.atleast_2d(budgets).T  # [layers, units], or one for all units
        alike = Counter(column.tobytes() for column in columns)
        place = self.unit if budgets.ndim == 2 else np.zeros_like(self.unit)
        return [(np.frombuffer(column, dtype=budgets.dtype)[place], layers) for column, layers in alike.items()]


def _summed(place: Ints, values: Floats | Ints, places: int) -> Floats:
    return np.asarray(np.bincount(place, weights=values, minlength=places), dtype=np.float64)


class KeepsTerms(FromTerms, ABC):
    """Models made of what each segment's attention costs and what the sums of tokens and targets cost.

    Planning and its comparisons ask for the same micro-batches again and again, so their terms are kept.
    """

    def terms(self, segments: Sequence[Segment], budgets: Sequence[int]) -> Terms:
        return self._terms(tuple(segments), tuple(budgets))

    @cached_property
    def _terms(self) -> Callable[[tuple[Segment, ...], tuple[int, ...]], Terms]:
        return lru_cache(maxsize=2**14)(self._computed_terms)

    def _computed_terms(self, segments: tuple[Segment, ...], budgets: tuple[int, ...]) -> Terms:
        tokens, targets = float(sum(s.tokens for s in segments)), float(sum(s.targets for s in segments))
        if not tokens:  # no segment, or only segments of empty samples
            return NOTHING
        counts = Counter(budgets)
        attention = self.layer_attention(segments, tuple(counts)) @ np.array([list(counts.values())]).T
        router, forward, backward = attention[:, 0].tolist()
        found = self._assembled(tokens, targets, router, forward, backward)
        return Terms(*(Latency(float(there), float(back)) for there, back in found))

    def layer_attention(self, segments: Sequence[Segment], budgets: Sequence[int]) -> Floats:
        total = np.repeat(self._call()[:, None], len(budgets), axis=1)
        for s in segments:
            total += self._segment_ms(s.start, s.end, tuple(budgets))
        return total

    @cached_property
    def _segment_ms(self) -> Callable[[int, int, tuple[int, ...]], Floats]:
        """Of one segment at each of some budgets; kept as the terms are."""

        @lru_cache(maxsize=2**16)
        def segment_ms(start: int, end: int, budgets: tuple[int, ...]) -> Floats:
            blocks = np.array(budgets)
            return self._segments_ms(np.full(len(blocks), start), np.full(len(blocks), end), blocks)

        return segment_ms

    def many_terms(self, units: Sequence[Sequence[Segment]], budgets: Ints) -> Floats:
        flat = FlatUnits.of(units)
        attention = np.repeat(self._call()[:, None] * budgets.shape[-1], len(units), axis=1)
        for blocks, layers in flat.by_layers(budgets):
            attention += layers * flat.sums(self._segments_ms(flat.start, flat.end, blocks))
        found = np.array(self._assembled(flat.tokens, flat.targets, *attention))
        found[:, :, flat.tokens == 0] = 0.0
        return found

    def _call(self) -> Floats:
        """[3] fixed milliseconds of one attention layer's call: router, forward, backward."""
        return np.zeros(3)

    @abstractmethod
    def _segments_ms(self, start: Ints, end: Ints, budgets: Ints) -> Floats:
        """[3, segments] ms that each segment adds to one layer's call at its own budget; all arguments [segments]."""

    @abstractmethod
    def _assembled(
        self, tokens: Amount, targets: Amount, router: Amount, forward: Amount, backward: Amount
    ) -> tuple[tuple[Amount, Amount], ...]:
        """Forward and backward ms of each of `TERMS`, from a micro-batch's sums and the attention of all its layers;
        of many where the sums are arrays. A micro-batch without tokens may come out wrong."""


@dataclass(frozen=True)
class RooflineModel(KeepsTerms):
    """Analytic latency: arithmetic divided by an achieved rate, per term, plus a fixed cost per unit.

    Analytic, not measured: for planning before there is a machine to measure, and for doctests. With tensor
    and sequence parallel ranks the arithmetic is shared out evenly, and the collectives of a layer are added:
    tensor parallel all-gathers and reduce-scatters the hidden states around attention and feed-forward layers
    (Megatron-LM; Korthikanti et al. 2022, section 4.2), sequence parallel exchanges q, k, v and the output
    all-to-all (DeepSpeed-Ulysses; Jacobs et al. 2023, section 3.1).

    Attributes:
        decoder: the model's sizes.
        device: achieved rates and links.
        block_size, granularity: of the block-sparse attention.
        tp, sp: tensor and sequence parallel degrees; a micro-batch is spread over all tp * sp devices.
        checkpointing: the backward runs the layers' forward again.

    Raises:
        InputError: heads are not divisible by tp * sp.
    """

    decoder: Decoder
    device: Device
    block_size: int
    granularity: Granularity = "token"
    tp: int = 1
    sp: int = 1
    checkpointing: bool = False

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise InputError(f"block_size is {self.block_size}, but a block holds at least 1 key")
        check_heads(self.decoder, self.tp, self.sp)

    @property
    def layers(self) -> int:
        return self.decoder.layers

    def _assembled(
        self, tokens: Amount, targets: Amount, router: Amount, forward: Amount, backward: Amount
    ) -> tuple[tuple[Amount, Amount], ...]:
        decoder, ranks = self.decoder, self.tp * self.sp
        linear_rate = self.device.linear_tflops * 1e9 * ranks
        layers = decoder.layers * (2 * tokens * decoder.layer_parameters / linear_rate + self._collectives_ms(tokens))
        head = 2 * targets * decoder.hidden * decoder.vocabulary / linear_rate
        again = 1 if self.checkpointing else 0
        fixed = self.device.unit_ms / 3
        return (  # a matrix product has two in its backward
            (layers + fixed, (2 + again) * layers + 2 * fixed),
            (router, 0.0 * router),
            (forward, backward),
            (head, 2 * head),
        )

    def _collectives_ms(self, tokens: Amount) -> Amount:
        """Milliseconds of one layer's collectives in the forward; the backward has twice as many."""
        hidden_mb = tokens / self.sp * self.decoder.hidden * 2 / 1e6
        per_mb = 1 / self.device.link_gbps  # 1 GB/s moves 1 MB in 1 ms
        latency = self.device.link_latency_us / 1e3
        total = 0.0 * tokens
        if self.tp > 1:  # two all-gathers and two reduce-scatters
            total = total + 4 * (latency + hidden_mb * (self.tp - 1) / self.tp * per_mb)
        if self.sp > 1:  # q, k, v in, output back, each tp rank its own heads
            width = (2 * self.decoder.heads + 2 * self.decoder.kv_heads) * self.decoder.head_dim / self.tp
            mb = tokens / self.sp * width * 2 / 1e6
            total = total + 2 * latency + mb * (self.sp - 1) / self.sp * per_mb
        return total

    def _segments_ms(self, start: Ints, end: Ints, budgets: Ints) -> Floats:
        width = 2 * self.decoder.heads * self.decoder.head_dim
        attend_rate = self.device.attention_tflops * 1e9 * self.tp * self.sp
        router_rate = self.device.router_tflops * 1e9 * self.tp * self.sp
        # Two products forward; backward five, because the scores are computed again.
        backward = 3.5 if self.checkpointing else 2.5
        attend = 2 * width * computed_scores(start, end, budgets, self.block_size, self.granularity) / attend_rate
        routed = router_scores(start, end, self.block_size, self.granularity)
        return np.array([width * routed / router_rate, attend, backward * attend])


def check_heads(decoder: Decoder, tp: int, sp: int) -> None:
    """Raises:
    InputError: attention heads cannot be shared out over tp * sp ranks.
    """
    if tp < 1 or sp < 1:
        raise InputError(f"tp is {tp} and sp is {sp}, but both must be at least 1")
    if decoder.heads % (tp * sp):
        raise InputError(
            f"{decoder.heads} attention heads cannot be split over tp {tp} x sp {sp} = {tp * sp} ranks; "
            f"choose degrees whose product divides {decoder.heads}"
        )
