"""How long a micro-batch takes: exact work counts, and latency models built on them.

In: segments and one attention budget per layer. Out: predicted milliseconds, forward and backward apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sparsebalance.planning.plan import Latency, Segment


class LatencyModel(Protocol):
    """What batching, tuning and the simulator need to know about time.

    Attributes:
        block_size: keys per block.
        layers: attention layers of the model.
    """

    block_size: int
    layers: int

    def latency(self, segments: Sequence[Segment], budgets: Sequence[int]) -> Latency:
        """Milliseconds of the micro-batch made of `segments` over the whole model, `budgets[layer]` blocks."""
        ...

    def attention_ms(self, segments: Sequence[Segment], budgets: NDArray[np.int64]) -> NDArray[np.float64]:
        """Forward + backward milliseconds of one attention layer, router included, at each budget: [len(budgets)]."""
        ...
