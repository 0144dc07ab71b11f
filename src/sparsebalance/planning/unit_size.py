"""How large micro-batches should be: the unit size that is predicted fastest, among those that fit.

In: some global batches, and a planning function. Out: a unit size in tokens, or None for whole samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sparsebalance.planning.plan import Sample, StepPlan
from sparsebalance.planning.units import check_cap

SIZES = tuple(2**power for power in range(10, 18))  # tokens
TOLERANCE = 0.01  # of the step time: among sizes this close to the fastest, the smallest needs the least memory


def unit_sizes(samples: Sequence[Sample], block_size: int, token_cap: int) -> list[int | None]:
    """Sizes worth trying, ascending, then None for whole samples where none is over the cap; never an empty list.

    Sizes are whole blocks, below the longest sample and within the cap.

    Raises:
        InputError: samples longer than a cap that is smaller than a block.
    """
    longest = max(sample.length for sample in samples)
    rounded = sorted({-(-size // block_size) * block_size for size in SIZES})
    sizes: list[int | None] = [size for size in rounded if size < longest and size <= token_cap]
    if longest <= token_cap:
        return [*sizes, None]
    whole_blocks = token_cap // block_size * block_size
    if not whole_blocks:
        check_cap(samples, token_cap)
    return sizes or [whole_blocks]


def fastest_unit_size(
    steps: Sequence[Sequence[Sample]],
    sizes: Sequence[int | None],
    plan: Callable[[Sequence[Sample], int | None], StepPlan],
) -> int | None:
    """The first of `sizes` (ascending) whose predicted time over `steps` is within TOLERANCE of the least."""
    if len(sizes) == 1:
        return sizes[0]
    times = [sum(plan(samples, size).predicted_step_ms for samples in steps) for size in sizes]
    return next(size for size, ms in zip(sizes, times) if ms <= (1 + TOLERANCE) * min(times))
