"""Which attention budget each sample of a step is expected to get, before it is placed.

In: plans of earlier steps with the budgets that tuning gave. Out: per sample and layer the blocks that batching
weighs it by, from the sample's own earlier epochs, else from samples of its length, else the default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from sparsebalance.planning.coverage import check_block_size, check_decay, length_bucket
from sparsebalance.planning.plan import Sample, StepPlan
from sparsebalance.planning.sample_memory import (
    MAX_SAMPLE_LAYERS,
    SAMPLE_DECAY,
    SampleMemory,
    decode_arrays,
    encode_arrays,
)
from sparsebalance.planning.work import key_blocks

LayerBudgets = tuple[int, ...]
Floats = NDArray[np.float64]
BUDGET_TYPE = np.dtype("<f4")


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


@dataclass(frozen=True)
class GivenBudgets:
    """Budgets that tuning gave so far, averaged.

    Attributes:
        block_size: keys per block.
        ranges: length bucket -> blocks, [layers] float64.
        samples: sample id -> blocks, [layers] float32.
    """

    block_size: int
    ranges: Mapping[int, Floats] = field(default_factory=dict)
    samples: Mapping[int, NDArray[np.float32]] = field(default_factory=dict)

    def expected(self, samples: Sequence[Sample]) -> dict[int, LayerBudgets]:
        """Sample id -> whole blocks per layer, at least 1; samples without any knowledge are left out."""
        found: dict[int, LayerBudgets] = {}
        for sample in samples:
            blocks: NDArray[Any] | None = self.samples.get(sample.id)
            if blocks is None:
                blocks = self.ranges.get(length_bucket(key_blocks(sample.length, self.block_size)))
            if blocks is not None:
                found[sample.id] = tuple(np.maximum(np.rint(blocks), 1).astype(int).tolist())
        return found

    def state_dict(self) -> dict[str, Any]:
        """JSON-compatible; numbers survive exactly."""
        ranges = [[bucket, blocks.tolist()] for bucket, blocks in self.ranges.items()]
        samples = encode_arrays(self.samples, BUDGET_TYPE)
        return {"block_size": self.block_size, "ranges": ranges, "samples": samples}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        ranges = {bucket: np.array(blocks) for bucket, blocks in state["ranges"]}
        return cls(state["block_size"], ranges, decode_arrays(state["samples"], BUDGET_TYPE))


class BudgetEstimator:
    """Exponential moving averages of the budgets that one policy's plans gave, per layer and length range, and per
    layer and sample. Every rank feeds it the same plans and so keeps the same state."""

    def __init__(self, block_size: int, decay: float = 0.8, most: int = MAX_SAMPLE_LAYERS) -> None:
        """Args:
            block_size: keys per block.
            decay: weight of the past of a length range, in [0, 1); of a sample's past it is SAMPLE_DECAY.
            most: sample-layers remembered, 4 bytes each; the samples planned least recently are forgotten.

        Raises:
            InputError: a decay or limit out of range.
        """
        check_decay(decay)
        self.block_size = block_size
        self.decay = decay
        self._ranges: dict[int, Floats] = {}
        self._samples: SampleMemory[NDArray[np.float32]] = SampleMemory(most)

    def update(self, plan: StepPlan) -> None:
        """Take in the budgets of a step's samples, in the order of their ids."""
        for sample, (length, blocks) in sorted(sample_budgets(plan).items()):
            full = key_blocks(length, self.block_size)
            bucket = length_bucket(full)
            # From the full budget on all budgets read the same; a larger one would only distort the averages.
            in_range = np.minimum(blocks, 2**bucket)
            old = self._ranges.get(bucket)
            self._ranges[bucket] = in_range if old is None else self.decay * old + (1 - self.decay) * in_range
            own, past = np.minimum(blocks, full), self._samples.get(sample)
            mean = own if past is None else SAMPLE_DECAY * past + (1 - SAMPLE_DECAY) * own
            self._samples.put(sample, mean.astype(BUDGET_TYPE))

    def given(self) -> GivenBudgets:
        """A frozen snapshot for planning; it shares the arrays and so costs no more than a list of their names."""
        return GivenBudgets(self.block_size, dict(self._ranges), self._samples.snapshot())

    def expected(self, samples: Sequence[Sample]) -> dict[int, LayerBudgets]:
        """See `GivenBudgets.expected`."""
        return self.given().expected(samples)

    def state_dict(self) -> dict[str, Any]:
        """JSON-compatible state; numbers survive exactly."""
        return {"decay": self.decay, "given": self.given().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises:
        InputError: the state was saved under another block size.
        """
        given = GivenBudgets.from_state_dict(state["given"])
        check_block_size(given.block_size, self.block_size)
        self.decay = state["decay"]
        self._ranges = dict(given.ranges)
        self._samples.restore(given.samples)


def sample_budgets(plan: StepPlan) -> dict[int, tuple[int, Floats]]:
    """Sample id -> its length, and blocks per layer, [layers] float64: over its chunks their mean by tokens."""
    lengths: dict[int, int] = {}
    totals: dict[int, Floats] = {}  # blocks x tokens: whole numbers, so equal budgets come out exactly
    for unit in plan.micro_batches:
        budgets = np.array(unit.budgets, dtype=np.float64)
        for segment in unit.segments:
            lengths[segment.sample] = segment.sample_length
            totals[segment.sample] = totals.get(segment.sample, 0.0) + segment.tokens * budgets
    return {sample: (length, totals[sample] / length) for sample, length in lengths.items()}
