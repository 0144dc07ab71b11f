"""How much softmax mass a budget covers: coverage curves, and the estimator that learns them while training.

In: measured coverage at a few budgets, per layer and sample length. Out: coverage at any budget, the quantity
that dynamic sparsity tuning may not change by more than its threshold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sparsebalance.planning.errors import InputError
from sparsebalance.planning.plan import Segment, StepPlan
from sparsebalance.planning.work import key_blocks

Floats = NDArray[np.float64]
BUDGET_GRID: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Budgets at which coverage is measured and stored: a logarithmic grid, in blocks."""

# Coverage of a length range that nothing was measured for: (budget / blocks) ** 0.25, a heavy head and a long
# tail, as the attention of trained decoders has; it only steers the first steps, until measurements arrive.
PRIOR_EXPONENT = 0.25


def length_bucket(blocks: int) -> int:
    """Range of lengths that share a curve: the power of two at or above the number of blocks."""
    return max(blocks - 1, 0).bit_length()


def at_budgets(curve: Sequence[float] | Floats, blocks: int, budgets: NDArray[np.int64]) -> Floats:
    """A curve measured at BUDGET_GRID, for a sample of `blocks` blocks, read at `budgets`; 1 from `blocks` on."""
    found = np.interp(np.log(budgets), np.log(BUDGET_GRID), curve)
    return np.where(budgets >= blocks, 1.0, np.minimum(found, 1.0))


def plan_coverage(plan: StepPlan, covered: Callable[[Segment, int, int], ArrayLike]) -> Floats:
    """Token- and layer-weighted mean over a plan of `covered(segment, layer, budget)`, a number or several."""
    cells = [
        (segment, layer, budget)
        for unit in plan.micro_batches
        for segment in unit.segments
        for layer, budget in enumerate(unit.budgets)
    ]
    mean: Floats = np.average([covered(*cell) for cell in cells], axis=0, weights=[cell[0].tokens for cell in cells])
    return mean


@dataclass(frozen=True)
class CoverageCurves:
    """Coverage over budget, per layer and length range.

    Attributes:
        block_size: keys per block.
        values: (layer, length bucket) -> coverage at BUDGET_GRID, [len(BUDGET_GRID)], not decreasing.
    """

    block_size: int
    values: Mapping[tuple[int, int], Floats]

    def coverage(self, layer: int, length: int, budgets: NDArray[np.int64]) -> Floats:
        """Coverage of a sample of `length` tokens at `budgets`, in (0, 1]; 1 from the full budget on."""
        blocks = key_blocks(length, self.block_size)
        curve = self.values.get((layer, length_bucket(blocks)))
        if curve is None:
            prior: Floats = np.minimum(budgets / blocks, 1.0) ** PRIOR_EXPONENT
            return prior
        return at_budgets(curve, blocks, budgets)

    def curve_ids(self, layer: int, segments: Sequence[Segment]) -> tuple[int, ...]:
        """Equal for two layers that have the same curves for these segments."""
        if not self.values:  # one prior for all
            return ()
        buckets = {length_bucket(key_blocks(segment.end, self.block_size)) for segment in segments}
        return tuple(id(self.values.get((layer, bucket))) for bucket in sorted(buckets))

    def unit_coverage(self, layer: int, segments: Sequence[Segment], budgets: NDArray[np.int64]) -> Floats:
        """Token-weighted mean over a micro-batch's segments, [len(budgets)]."""
        total = np.zeros(len(budgets))
        for segment in segments:
            total += segment.tokens * self.coverage(layer, segment.end, budgets)
        return total / sum(segment.tokens for segment in segments)

    def state_dict(self) -> dict[str, Any]:
        """JSON-compatible; floats survive exactly."""
        values = [[layer, bucket, curve.tolist()] for (layer, bucket), curve in self.values.items()]
        return {"block_size": self.block_size, "values": values}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        values = {(layer, bucket): np.array(curve) for layer, bucket, curve in state["values"]}
        return cls(state["block_size"], values)


class CoverageEstimator:
    """Exponential moving average of measured coverage curves; the training loop feeds it, planning reads it."""

    def __init__(self, block_size: int, decay: float = 0.8) -> None:
        """Args:
        block_size: keys per block.
        decay: weight of the past, in [0, 1).
        """
        if not 0 <= decay < 1:
            raise InputError(f"estimator decay is {decay}, but it must be at least 0 and below 1")
        self.block_size = block_size
        self.decay = decay
        self._values: dict[tuple[int, int], Floats] = {}

    def update(self, layer: int, length: int, curve: Sequence[float]) -> None:
        """Take in the coverage of one sample of `length` tokens at BUDGET_GRID.

        Raises:
            InputError: a wrong number of points, or a value that is not in [0, 1].
        """
        values = np.asarray(curve, dtype=np.float64)
        if values.shape != (len(BUDGET_GRID),):
            raise InputError(f"a coverage curve has {len(BUDGET_GRID)} points, but {values.size} were given")
        if not (np.isfinite(values).all() and values.min() >= 0 and values.max() <= 1 + 1e-6):
            raise InputError(
                f"layer {layer}: coverage must lie in [0, 1], but the curve spans "
                f"[{values.min()}, {values.max()}]; check the attention scores for NaN"
            )
        key = (layer, length_bucket(key_blocks(length, self.block_size)))
        values = np.maximum.accumulate(values)
        old = self._values.get(key)
        self._values[key] = values if old is None else self.decay * old + (1 - self.decay) * values

    def curves(self) -> CoverageCurves:
        """A frozen snapshot for planning."""
        return CoverageCurves(self.block_size, dict(self._values))

    def state_dict(self) -> dict[str, Any]:
        """JSON-compatible state; floats survive exactly."""
        return {"decay": self.decay, "curves": self.curves().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises:
        InputError: the state was saved under another block size.
        """
        curves = CoverageCurves.from_state_dict(state["curves"])
        if curves.block_size != self.block_size:
            raise InputError(
                f"estimator state has block size {curves.block_size}, but the run has {self.block_size}; "
                "resume with the same attention settings"
            )
        self.decay = state["decay"]
        self._values = dict(curves.values)
