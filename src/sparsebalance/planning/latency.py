"""How long a micro-batch takes, by term: the latency protocol, and the analytic roofline.

In: segments and one attention budget per layer. Out: predicted milliseconds of four terms (linear layers,
router, attention, head), forward and backward apart. The profiled model is
`sparsebalance.planning.table.LatencyTable`; `sparsebalance.planning.correction` adjusts either while training.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sparsebalance.planning.decoder import Decoder
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.hardware import Device
from sparsebalance.planning.plan import Latency, Segment
from sparsebalance.planning.work import Granularity, computed_scores, router_scores

TERMS: tuple[str, ...] = ("linear", "router", "attend", "head")
Floats = NDArray[np.float64]


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


class FromTerms:
    """What follows from `terms` and `layer_attention` in every latency model."""

    def latency(self: LatencyModel, segments: Sequence[Segment], budgets: Sequence[int]) -> Latency:
        return self.terms(segments, budgets).latency

    def attention_ms(self: LatencyModel, segments: Sequence[Segment], budgets: NDArray[np.int64]) -> Floats:
        total: Floats = self.layer_attention(segments, budgets.tolist()).sum(0)
        return total

    def rank_factor(self, rank: int) -> float:
        return 1.0


class KeepsTerms(FromTerms, ABC):
    """Planning and its comparisons ask for the same micro-batches again and again, so their terms are kept."""

    def terms(self, segments: Sequence[Segment], budgets: Sequence[int]) -> Terms:
        return self._terms(tuple(segments), tuple(budgets))

    @cached_property
    def _terms(self) -> Callable[[tuple[Segment, ...], tuple[int, ...]], Terms]:
        return lru_cache(maxsize=2**14)(self._computed_terms)

    @abstractmethod
    def _computed_terms(self, segments: tuple[Segment, ...], budgets: tuple[int, ...]) -> Terms: ...


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

    def _computed_terms(self, segments: tuple[Segment, ...], budgets: tuple[int, ...]) -> Terms:
        if not segments:
            return NOTHING
        tokens, targets = sum(s.tokens for s in segments), sum(s.targets for s in segments)
        decoder, ranks = self.decoder, self.tp * self.sp
        linear_rate = self.device.linear_tflops * 1e9 * ranks
        layers = decoder.layers * (2 * tokens * decoder.layer_parameters / linear_rate + self._collectives_ms(tokens))
        head = 2 * targets * decoder.hidden * decoder.vocabulary / linear_rate
        counts = Counter(budgets)
        attention = self.layer_attention(segments, tuple(counts)) @ np.array(list(counts.values()))
        router, forward, backward = attention.tolist()
        again = 1 if self.checkpointing else 0
        fixed = self.device.unit_ms / 3
        return Terms(  # a matrix product has two in its backward
            Latency(layers + fixed, (2 + again) * layers + 2 * fixed),
            Latency(router, 0.0),
            Latency(forward, backward),
            Latency(head, 2 * head),
        )

    def _collectives_ms(self, tokens: int) -> float:
        """Milliseconds of one layer's collectives in the forward; the backward has twice as many."""
        hidden_mb = tokens / self.sp * self.decoder.hidden * 2 / 1e6
        per_mb = 1 / self.device.link_gbps  # 1 GB/s moves 1 MB in 1 ms
        latency = self.device.link_latency_us / 1e3
        total = 0.0
        if self.tp > 1:  # two all-gathers and two reduce-scatters
            total += 4 * (latency + hidden_mb * (self.tp - 1) / self.tp * per_mb)
        if self.sp > 1:  # q, k, v in, output back, each tp rank its own heads
            width = (2 * self.decoder.heads + 2 * self.decoder.kv_heads) * self.decoder.head_dim / self.tp
            mb = tokens / self.sp * width * 2 / 1e6
            total += 2 * latency + mb * (self.sp - 1) / self.sp * per_mb
        return total

    def layer_attention(self, segments: Sequence[Segment], budgets: Sequence[int]) -> Floats:
        total = np.zeros((3, len(budgets)))
        for s in segments:
            total += self._segment_ms(s.start, s.end, tuple(budgets))
        return total

    @cached_property
    def _segment_ms(self) -> Callable[[int, int, tuple[int, ...]], Floats]:
        """Of one segment; planning asks for the same ones again and again, so they are kept."""
        width = 2 * self.decoder.heads * self.decoder.head_dim
        attend_rate = self.device.attention_tflops * 1e9 * self.tp * self.sp
        router_rate = self.device.router_tflops * 1e9 * self.tp * self.sp
        # Two products forward; backward five, because the scores are computed again.
        backward = 3.5 if self.checkpointing else 2.5

        @lru_cache(maxsize=2**16)
        def segment_ms(start: int, end: int, budgets: tuple[int, ...]) -> Floats:
            scores = computed_scores(start, end, np.array(budgets), self.block_size, self.granularity)
            routed = router_scores(start, end, self.block_size, self.granularity)
            attend = 2 * width * scores / attend_rate
            return np.stack([np.full(len(budgets), width * routed / router_rate), attend, backward * attend])

        return segment_ms


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
