"""Which attention budget each sample of a step is expected to get, before it is placed.

In: a default per layer, and what an estimator knows of single samples. Out: what batching weighs samples by.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LayerBudgets = tuple[int, ...]


@dataclass(frozen=True)
class ExpectedBudgets:
    """Attributes:
    default: blocks per layer, of samples that nothing is known of.
    samples: sample id -> blocks per layer.
    """

    default: LayerBudgets
    samples: Mapping[int, LayerBudgets] = field(default_factory=dict)

    def of(self, sample: int) -> LayerBudgets:
        """Blocks per layer of the sample with this id."""
        return self.samples.get(sample, self.default)
