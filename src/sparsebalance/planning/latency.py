"""How long a micro-batch takes: the latency protocol, and the analytic roofline.

In: segments and one attention budget per layer. Out: predicted milliseconds, forward and backward apart.
The profiled model is `sparsebalance.planning.table.LatencyTable`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sparsebalance.planning.errors import InputError
from sparsebalance.planning.plan import Latency, Segment
from sparsebalance.planning.work import Granularity, computed_scores, router_scores


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

    def latency(self, segments: Sequence[Segment], budgets: Sequence[int]) -> Latency:
        """Milliseconds of the micro-batch made of `segments` over the whole model, `budgets[layer]` blocks.

        An empty micro-batch takes 0.
        """
        ...

    def attention_ms(self, segments: Sequence[Segment], budgets: NDArray[np.int64]) -> NDArray[np.float64]:
        """Forward + backward milliseconds of one attention layer, router included, at each of `budgets`."""
        ...


@dataclass(frozen=True)
class RooflineModel:
    """Analytic latency: arithmetic divided by an achieved rate, per term, plus a fixed cost per unit.

    Analytic, not measured: good for comparing plans before any profile exists, and for doctests.

    Attributes:
        layers, hidden, intermediate, heads, kv_heads, head_dim, vocabulary: the decoder's sizes.
        block_size, granularity: of the block-sparse attention.
        linear_tflops, attention_tflops, router_tflops: achieved rates, teraflop per second.
        unit_ms: fixed milliseconds per micro-batch, split 1:2 over forward and backward.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    block_size: int
    granularity: Granularity = "token"
    linear_tflops: float = 450.0
    attention_tflops: float = 200.0
    router_tflops: float = 300.0
    unit_ms: float = 0.1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, str) and not value > 0:
                raise InputError(f"roofline model: {name} is {value!r}, but it must be above 0")

    def latency(self, segments: Sequence[Segment], budgets: Sequence[int]) -> Latency:
        if not segments:
            return Latency(0.0, 0.0)
        tokens = sum(segment.tokens for segment in segments)
        targets = sum(segment.targets for segment in segments)
        projections = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        parameters = self.layers * (projections + 3 * self.hidden * self.intermediate)
        head = targets * self.hidden * self.vocabulary
        linear = 2 * (tokens * parameters + head) / (self.linear_tflops * 1e9) + self.unit_ms / 3
        attend, route = self._attention_terms(segments, np.asarray(budgets, dtype=np.int64))
        # A matrix product has two in its backward; attention also recomputes its scores (5 products for 2).
        return Latency(float(linear + attend.sum() + route * len(budgets)), float(2 * linear + 2.5 * attend.sum()))

    def attention_ms(self, segments: Sequence[Segment], budgets: NDArray[np.int64]) -> NDArray[np.float64]:
        attend, route = self._attention_terms(segments, budgets)
        return 3.5 * attend + route

    def _attention_terms(
        self, segments: Sequence[Segment], budgets: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], float]:
        """Forward milliseconds of one layer: attend at each budget, and route."""
        width = 2 * self.heads * self.head_dim
        scores = np.zeros(len(budgets))
        routed = 0.0
        for s in segments:
            scores += computed_scores(s.start, s.end, budgets, self.block_size, self.granularity)
            routed += router_scores(s.start, s.end, self.block_size, self.granularity)
        return 2 * width * scores / (self.attention_tflops * 1e9), width * routed / (self.router_tflops * 1e9)
