"""How much softmax mass a budget covers: coverage curves, and the estimator that learns them while training.

In: measured coverage at a few budgets, per layer and sample. Out: coverage at any budget, of a sample that was
measured in an earlier epoch or of samples of its length: the quantity that dynamic sparsity tuning may not change
by more than its threshold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sparsebalance.planning.errors import InputError
from sparsebalance.planning.plan import Segment, StepPlan
from sparsebalance.planning.sample_memory import (
    MAX_SAMPLE_LAYERS,
    SAMPLE_DECAY,
    SampleMemory,
    decode_arrays,
    encode_arrays,
)
from sparsebalance.planning.work import key_blocks

Floats = NDArray[np.float64]
Steps = NDArray[np.uint16]
BUDGET_GRID: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Budgets at which coverage is measured and stored: a logarithmic grid, in blocks."""

# Coverage of a length range that nothing was measured for: (budget / blocks) ** 0.25, a heavy head and a long
# tail, as the attention of trained decoders has; it only steers the first steps, until measurements arrive.
PRIOR_EXPONENT = 0.25

# A sample's own curve is kept in steps of 1 / STEPS: wrong by at most 8e-6, far less than probing a few queries is,
# in half the memory of float32; rounding keeps curves from decreasing.
STEPS = 65534
NOT_MEASURED = 65535
STEP_TYPE = np.dtype("<u2")


def length_bucket(blocks: int) -> int:
    """Range of lengths that share a curve: the power of two at or above the number of blocks."""
    return max(blocks - 1, 0).bit_length()


def at_budgets(curve: Sequence[float] | Floats, blocks: int, budgets: NDArray[np.int64]) -> Floats:
    """A curve measured at BUDGET_GRID, for a sample of `blocks` blocks, read at `budgets`; 1 from `blocks` on."""
    found = np.interp(np.log(budgets), np.log(BUDGET_GRID), curve)
    return np.where(budgets >= blocks, 1.0, np.minimum(found, 1.0))


def chunk_factor(segment: Segment) -> float:
    """How much more of their attention a chunk's queries cover than their sample's on average, at one budget.

    The later a query, the more blocks it chooses from: taken is that coverage falls with its position as that of the
    prior does. Weighed by tokens, the mean over a sample's chunks is 1.
    """
    rest = 1 - PRIOR_EXPONENT
    rise = segment.end**rest - segment.start**rest
    return float(segment.sample_length**PRIOR_EXPONENT * rise / segment.tokens)


def chunk_coverage(covered: Floats, segment: Segment, budgets: NDArray[np.int64], block_size: int) -> Floats:
    """A segment's coverage at budgets [..., n] from that of its whole sample; 1 from its own full budget on."""
    if segment.is_whole:
        return covered
    full = budgets >= key_blocks(segment.end, block_size)
    return np.where(full, 1.0, np.minimum(chunk_factor(segment) * covered, 1.0))


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


def mean_coverage(plan: StepPlan, curves: CoverageCurves) -> float:
    """Token- and layer-weighted mean coverage of a plan's budgets, by curves."""
    units = [unit for unit in plan.micro_batches if unit.segments]
    budgets = np.array([unit.budgets for unit in units])
    tried, places = np.unique(budgets, return_inverse=True)
    covered = curves.of_units(budgets.shape[1], [unit.segments for unit in units], tried)
    chosen = np.take_along_axis(covered, places.reshape(budgets.shape)[:, :, None], 2)[:, :, 0]
    return float(np.average(chosen.mean(1), weights=[unit.tokens for unit in units]))


@dataclass(frozen=True)
class CoverageCurves:
    """Coverage over budget: per layer and sample where one was measured, else per layer and length range.

    Attributes:
        block_size: keys per block.
        values: (layer, length bucket) -> coverage at BUDGET_GRID, [len(BUDGET_GRID)], not decreasing.
        samples: sample id -> its own coverage at BUDGET_GRID in steps of 1 / STEPS, [layers, len(BUDGET_GRID)]
            uint16, not decreasing; NOT_MEASURED in the rows of layers that were not measured.
    """

    block_size: int
    values: Mapping[tuple[int, int], Floats]
    samples: Mapping[int, Steps] = field(default_factory=dict)

    def coverage(self, layer: int, length: int, budgets: NDArray[np.int64], sample: int | None = None) -> Floats:
        """Coverage of the first `length` tokens of a sample at `budgets`, in (0, 1]; 1 from the full budget on.

        Args:
            sample: id, to read its own curve where it has one. The curve is of the whole sample, so it is a low
                estimate for an early chunk, whose queries choose among fewer blocks.
        """
        blocks = key_blocks(length, self.block_size)
        curve = self._curve(layer, blocks, sample)
        return _prior(blocks, budgets) if curve is None else at_budgets(curve, blocks, budgets)

    def _curve(self, layer: int, blocks: int, sample: int | None) -> Floats | None:
        """The sample's own curve at BUDGET_GRID, else that of its length range; None where nothing was measured."""
        steps = None if sample is None else self.samples.get(sample)
        own = None if steps is None else own_curve(steps, layer)
        return self.values.get((layer, length_bucket(blocks))) if own is None else own

    def of_units(self, layers: int, units: Sequence[Sequence[Segment]], budgets: NDArray[np.int64]) -> Floats:
        """[units, layers, len(budgets)] float64: coverage of each micro-batch at `budgets`, mean over its tokens."""
        # Reading all curves at the same budgets is one matrix product: what np.interp makes of each point of the grid.
        points = np.eye(len(BUDGET_GRID))
        read = np.array([np.interp(np.log(budgets), np.log(BUDGET_GRID), point) for point in points])
        known: dict[tuple[int, int | None], Floats] = {}
        total = np.zeros((len(units), layers, len(budgets)))
        for place, unit in enumerate(units):
            for segment in unit:
                blocks = key_blocks(segment.sample_length, self.block_size)
                key = blocks, segment.sample if segment.sample in self.samples else None
                if key not in known:
                    known[key] = self._at(*key, layers, budgets, read)
                total[place] += segment.tokens * chunk_coverage(known[key], segment, budgets, self.block_size)
            total[place] /= sum(segment.tokens for segment in unit)
        return total

    def _at(self, blocks: int, sample: int | None, layers: int, budgets: NDArray[np.int64], read: Floats) -> Floats:
        """[layers, len(budgets)] coverage of one segment."""
        found = np.repeat(_prior(blocks, budgets)[None], layers, axis=0)
        each = ((layer, self._curve(layer, blocks, sample)) for layer in range(layers))
        curves = {layer: curve for layer, curve in each if curve is not None}
        if curves:
            measured = np.minimum(np.array(list(curves.values())) @ read, 1.0)
            found[list(curves)] = np.where(budgets >= blocks, 1.0, measured)
        return found

    def state_dict(self) -> dict[str, Any]:
        """JSON-compatible; numbers survive exactly."""
        values = [[layer, bucket, curve.tolist()] for (layer, bucket), curve in self.values.items()]
        samples = encode_arrays(self.samples, STEP_TYPE)
        return {"block_size": self.block_size, "values": values, "samples": samples}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        values = {(layer, bucket): np.array(curve) for layer, bucket, curve in state["values"]}
        samples = decode_arrays(state["samples"], STEP_TYPE, (len(BUDGET_GRID),))
        return cls(state["block_size"], values, samples)


def _prior(blocks: int, budgets: NDArray[np.int64]) -> Floats:
    covered: Floats = np.minimum(budgets / blocks, 1.0) ** PRIOR_EXPONENT
    return covered


def own_curve(steps: Steps, layer: int) -> Floats | None:
    """A layer's coverage at BUDGET_GRID from one sample's [layers, len(BUDGET_GRID)] steps, if it was measured."""
    if layer >= len(steps) or steps[layer, 0] == NOT_MEASURED:
        return None
    curve: Floats = steps[layer] / STEPS
    return curve


def check_decay(decay: float) -> None:
    """Raises:
    InputError: a weight of the past that is not in [0, 1).
    """
    if not 0 <= decay < 1:
        raise InputError(f"estimator decay is {decay}, but it must be at least 0 and below 1")


def check_block_size(saved: int, own: int) -> None:
    """Raises:
    InputError: an estimator's state was saved under another block size than the run's.
    """
    if saved != own:
        raise InputError(
            f"estimator state has block size {saved}, but the run has {own}; resume with the same attention settings"
        )


class CoverageEstimator:
    """Exponential moving averages of measured coverage curves, per layer and length range, and per layer and
    sample; the training loop feeds it, planning reads it."""

    def __init__(self, block_size: int, decay: float = 0.8, most: int = MAX_SAMPLE_LAYERS) -> None:
        """Args:
            block_size: keys per block.
            decay: weight of the past of a length range, in [0, 1); of a sample's past it is SAMPLE_DECAY.
            most: sample-layers of which an own curve is kept, 28 bytes each; the samples measured least recently
                are forgotten.

        Raises:
            InputError: a decay or limit out of range.
        """
        check_decay(decay)
        self.block_size = block_size
        self.decay = decay
        self._values: dict[tuple[int, int], Floats] = {}
        self._samples: SampleMemory[Steps] = SampleMemory(most)

    def update(self, layer: int, length: int, curve: Sequence[float]) -> None:
        """`update_sample` with one layer of a sample that need not be remembered."""
        self.update_sample(None, length, {layer: curve})

    def update_sample(self, sample: int | None, length: int, curves: Mapping[int, Sequence[float]]) -> None:
        """Take in the coverage of one sample of `length` tokens.

        Args:
            sample: id, to remember the curves for the next time that this sample comes; None forgets them.
            curves: layer -> coverage at BUDGET_GRID, of at least one layer.

        Raises:
            InputError: a wrong number of points, or a value that is not in [0, 1].
        """
        for layer, curve in curves.items():
            if len(curve) != len(BUDGET_GRID):
                raise InputError(
                    f"layer {layer}: a coverage curve has {len(BUDGET_GRID)} points, but {len(curve)} were given; "
                    "measure at BUDGET_GRID"
                )
        values = np.array(list(curves.values()), dtype=np.float64)
        wrong = ~((values >= 0) & (values <= 1 + 1e-6)).all(axis=1)  # written so that NaN is wrong
        if wrong.any():
            row = int(np.argmax(wrong))
            raise InputError(
                f"layer {list(curves)[row]}: coverage must lie in [0, 1], but the curve spans "
                f"[{values[row].min()}, {values[row].max()}]; check the attention scores for NaN"
            )
        values = np.maximum.accumulate(np.minimum(values, 1.0), axis=1)
        bucket = length_bucket(key_blocks(length, self.block_size))
        for layer, new in zip(curves, values):
            old = self._values.get((layer, bucket))
            self._values[layer, bucket] = new if old is None else self.decay * old + (1 - self.decay) * new
        if sample is not None:
            self._remember(sample, list(curves), values)

    def _remember(self, sample: int, layers: Sequence[int], values: Floats) -> None:
        """`values` [len(layers), len(BUDGET_GRID)] join the sample's own curves."""
        before = self._samples.get(sample)
        known = 0 if before is None else len(before)
        steps = np.full((max(known, max(layers) + 1), len(BUDGET_GRID)), NOT_MEASURED, STEP_TYPE)
        if before is not None:
            steps[:known] = before
        old = steps[layers]
        mean = SAMPLE_DECAY * (old / STEPS) + (1 - SAMPLE_DECAY) * values
        steps[layers] = np.rint(np.where(old == NOT_MEASURED, values, mean) * STEPS)
        self._samples.put(sample, steps)

    def curves(self) -> CoverageCurves:
        """A frozen snapshot for planning; it shares the curves and so costs no more than a list of their names."""
        return CoverageCurves(self.block_size, dict(self._values), self._samples.snapshot())

    def state_dict(self) -> dict[str, Any]:
        """JSON-compatible state; numbers survive exactly."""
        return {"decay": self.decay, "curves": self.curves().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises:
        InputError: the state was saved under another block size.
        """
        curves = CoverageCurves.from_state_dict(state["curves"])
        check_block_size(curves.block_size, self.block_size)
        self.decay = state["decay"]
        self._values = dict(curves.values)
        self._samples.restore(curves.samples)
