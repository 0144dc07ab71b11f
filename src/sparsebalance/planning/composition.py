"""Which samples form which global batch: in order, in a look-ahead window, grouped by length, or by target tokens.

In: the samples of an epoch in shuffled order, the batch size and what each sample is predicted to cost. Out: the
epoch's batches in the order in which they are trained on. Pure: the same order gives the same batches on every rank.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from sparsebalance.planning.errors import InputError
from sparsebalance.planning.latency import Floats
from sparsebalance.planning.plan import Sample
from sparsebalance.planning.window_swaps import swapped

Batch = list[Sample]
Tail = Literal["drop", "keep", "fill"]


class Composition(Protocol):
    """Samples of an epoch -> its batches. Pure and deterministic; never drops a sample nor uses one twice."""

    @property
    def fixed_size(self) -> bool:
        """Whether every batch but the last has exactly the batch size."""
        ...

    def block(self, batch_size: int) -> int | None:
        """Samples that are composed without regard to all others; None where that takes the whole order."""
        ...

    def accepts(self, batch: Sequence[Sample], sample: Sample, batch_size: int) -> bool:
        """Whether an open batch should take one more sample, this one."""
        ...

    def is_full(self, batch: Sequence[Sample], batch_size: int) -> bool:
        """Whether the last batch of an order is as large as batches ought to be."""
        ...

    def __call__(self, order: Sequence[Sample], batch_size: int, costs: Floats | None) -> list[Batch]:
        """Batches in training order, only the last one smaller than it ought to be.

        Args:
            order: samples with unique ids, shuffled.
            costs: [n] float64 predicted milliseconds of the samples of `order`; their tokens where None.
        """
        ...


class _FixedSize:
    """What follows from batches of `batch_size` samples."""

    fixed_size: ClassVar[bool] = True

    def accepts(self, batch: Sequence[Sample], sample: Sample, batch_size: int) -> bool:
        return len(batch) < batch_size

    def is_full(self, batch: Sequence[Sample], batch_size: int) -> bool:
        return len(batch) >= batch_size


@dataclass(frozen=True)
class InOrder(_FixedSize):
    """Consecutive samples: strict, what every trainer does."""

    def block(self, batch_size: int) -> int | None:
        return batch_size

    def __call__(self, order: Sequence[Sample], batch_size: int, costs: Floats | None) -> list[Batch]:
        _check_size(batch_size)
        return _consecutive(order, batch_size)


in_order: Composition = InOrder()


@dataclass(frozen=True)
class GroupByLength(_FixedSize):
    """transformers' `group_by_length` (LengthGroupedSampler), from its description: a baseline.

    Each megabatch of the shuffled order is sorted by falling length; then the longest sample of all changes places
    with the first one, so that a run that does not fit in memory fails in its first step. Steps of a megabatch get
    ever shorter: neighbours are alike, which is the price of its speed.

    Attributes:
        megabatch_steps: batches of a megabatch; fewer for little data, so that there are four megabatches.
    """

    megabatch_steps: int = 50

    def __post_init__(self) -> None:
        _check_at_least_one("megabatch_steps", self.megabatch_steps)

    def block(self, batch_size: int) -> int | None:
        return None

    def __call__(self, order: Sequence[Sample], batch_size: int, costs: Floats | None) -> list[Batch]:
        _check_size(batch_size)
        size = max(1, min(self.megabatch_steps, len(order) // (4 * batch_size))) * batch_size
        megabatches = [
            sorted(order[start : start + size], key=lambda sample: -sample.length)
            for start in range(0, len(order), size)
        ]
        flat = list(itertools.chain(*megabatches))
        if flat:
            longest = max(range(0, len(flat), size), key=lambda first: flat[first].length)
            flat[0], flat[longest] = flat[longest], flat[0]
        return _consecutive(flat, batch_size)


@dataclass(frozen=True)
class Window(_FixedSize):
    """Ours: swap samples between the steps of a look-ahead window until no rank waits for one costly sample.

    A step is estimated to take the longer of its costliest sample and an equal share of its work (`step_ms`). Where
    the costliest sample decides, other ranks wait: that step swaps samples with another step of the window, so that
    giants come together, about one for each rank, and nearly all other samples stay where the shuffle put them
    (`swapped`). A step keeps its place and its number of samples, so a sample moves by fewer than `steps` steps.

    Attributes:
        steps: of a window.
        dp: data-parallel ranks that a step's samples are placed on. It is part of what a batch is: a run that goes on
            with another number of ranks keeps it.
    """

    steps: int
    dp: int

    def __post_init__(self) -> None:
        _check_at_least_one("steps", self.steps)
        _check_at_least_one("dp", self.dp)

    def block(self, batch_size: int) -> int | None:
        return self.steps * batch_size

    def __call__(self, order: Sequence[Sample], batch_size: int, costs: Floats | None) -> list[Batch]:
        """Raises:
        InputError: a cost that is not a finite number, 0 or above, or not one for each sample.
        """
        _check_size(batch_size)
        weights = _checked_costs(order, costs)
        size = self.steps * batch_size
        batches: list[Batch] = []
        for start in range(0, len(order), size):
            window = order[start : start + size]
            chosen = swapped(weights[start : start + size], batch_size, self.dp, _generator(window))
            batches += _consecutive([window[i] for i in chosen], batch_size)
        return batches


@dataclass(frozen=True)
class ByTargetTokens:
    """Consecutive samples until a batch holds the wished number of target tokens; the batch size does not count.

    A sample joins the open batch if that brings the batch's total nearer to the wish, else it begins the next one.

    Attributes:
        target_tokens: of a global batch.
    """

    target_tokens: int
    fixed_size: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_at_least_one("target_tokens", self.target_tokens)

    def block(self, batch_size: int) -> int | None:
        return None

    def accepts(self, batch: Sequence[Sample], sample: Sample, batch_size: int) -> bool:
        return self._takes(sum(member.targets for member in batch), sample)

    def _takes(self, total: int, sample: Sample) -> bool:
        missing = self.target_tokens - total
        return missing > 0 and abs(missing - sample.targets) <= missing

    def is_full(self, batch: Sequence[Sample], batch_size: int) -> bool:
        return sum(sample.targets for sample in batch) >= self.target_tokens

    def __call__(self, order: Sequence[Sample], batch_size: int, costs: Floats | None) -> list[Batch]:
        return list(self.batches(order))

    def batches(self, samples: Iterable[Sample]) -> Iterator[Batch]:
        """Reads one sample further than it yields."""
        batch: Batch = []
        total = 0
        for sample in samples:
            if batch and not self._takes(total, sample):
                yield batch
                batch, total = [], 0
            batch.append(sample)
            total += sample.targets
        if batch:
            yield batch


def by_target_tokens(order: Sequence[Sample], target_tokens: int) -> list[Batch]:
    """See `ByTargetTokens`."""
    return list(ByTargetTokens(target_tokens).batches(order))


def compose(
    order: Sequence[Sample],
    batch_size: int,
    composition: Composition,
    costs: Floats | None = None,
    tail: Tail = "drop",
    start: Sequence[Sample] | None = None,
) -> list[Batch]:
    """The batches of an epoch, its last one by the tail rule.

    Args:
        tail: of the samples that do not fill a batch, "drop" leaves them out (the last of the order, before
            anything is moved or sorted); "keep" makes a smaller batch of them; "fill" adds samples from the start of
            the epoch, none that is in the batch already.
        start: the samples that "fill" takes, `order` by default.

    Raises:
        InputError: no such tail, a batch size below 1, or see `Window`.
    """
    if tail not in get_args(Tail):
        raise InputError(f"tail is {tail!r}; choose one of {', '.join(get_args(Tail))}")
    _check_size(batch_size)
    if composition.fixed_size and tail == "drop":
        whole = len(order) // batch_size * batch_size
        order, costs = order[:whole], None if costs is None else costs[:whole]
    batches = composition(order, batch_size, costs)
    if tail == "keep" or not batches or composition.is_full(batches[-1], batch_size):
        return batches
    last = batches.pop()
    if tail == "fill":
        batches.append(_filled(last, order if start is None else start, batch_size, composition))
    return batches


def _filled(batch: Batch, start: Sequence[Sample], batch_size: int, composition: Composition) -> Batch:
    filled = list(batch)
    inside = {sample.id for sample in batch}
    for sample in start:
        if sample.id not in inside:
            if not composition.accepts(filled, sample, batch_size):
                break
            filled.append(sample)
    return filled


def stream_batches(
    samples: Iterable[Sample],
    batch_size: int,
    composition: Composition,
    cost: Callable[[Sample], float] | None = None,
    tail: Literal["drop", "keep"] = "drop",
) -> Iterator[Batch]:
    """`compose` for data of unknown length: the same batches, with a look-ahead of one window.

    Never reads further than the window (for target tokens: one sample) whose batches it yields.

    Args:
        samples: in the order in which they come, already shuffled.
        cost: predicted milliseconds of a sample; its tokens where None.
        tail: of the last samples; a stream's start is gone, so there is nothing to fill a batch with.

    Raises:
        InputError: a composition that needs the whole data set, another tail, a batch size below 1, or see `Window`.
    """
    if tail not in ("drop", "keep"):
        raise InputError(f'tail is {tail!r}, but the start of a stream is gone; choose "drop" or "keep"')
    _check_size(batch_size)
    if isinstance(composition, ByTargetTokens):
        return _stream_by_targets(samples, composition, tail)
    size = composition.block(batch_size)
    if size is None:
        raise InputError(
            f"{composition} needs the whole data set, but a stream has no known end; use Window, or read the data first"
        )
    return _stream_blocks(samples, size, batch_size, composition, cost, tail)


def _stream_blocks(
    samples: Iterable[Sample],
    size: int,
    batch_size: int,
    composition: Composition,
    cost: Callable[[Sample], float] | None,
    tail: Tail,
) -> Iterator[Batch]:
    rest = iter(samples)
    while block := list(itertools.islice(rest, size)):
        costs = None if cost is None else np.array([cost(sample) for sample in block])
        yield from compose(block, batch_size, composition, costs, tail)


def _stream_by_targets(samples: Iterable[Sample], composition: ByTargetTokens, tail: Tail) -> Iterator[Batch]:
    batches = composition.batches(samples)
    batch = next(batches, None)
    while batch is not None:
        following = next(batches, None)
        if following is not None or tail == "keep" or composition.is_full(batch, 1):
            yield batch
        batch = following


def _generator(window: Sequence[Sample]) -> np.random.Generator:
    """Random numbers that depend on the window alone, so that a stream and a resumed run draw the same ones."""
    ids = np.array([sample.id for sample in window], dtype=np.int64)
    return np.random.default_rng(zlib.crc32(ids.tobytes()))


def _consecutive(order: Sequence[Sample], batch_size: int) -> list[Batch]:
    return [list(order[start : start + batch_size]) for start in range(0, len(order), batch_size)]


def _checked_costs(order: Sequence[Sample], costs: Floats | None) -> NDArray[np.float64]:
    if costs is None:
        return np.array([sample.length for sample in order], dtype=np.float64)
    if costs.shape != (len(order),):
        raise InputError(f"costs have shape {list(costs.shape)} for {len(order)} samples; give one for each sample")
    wrong = np.flatnonzero(~(np.isfinite(costs) & (costs >= 0)))
    if len(wrong):
        raise InputError(
            f"sample {order[wrong[0]].id}: its predicted cost is {costs[wrong[0]]}, but it must be a finite number of "
            "milliseconds, 0 or above; check the latency model"
        )
    return costs.astype(np.float64)


def _check_size(batch_size: int) -> None:
    _check_at_least_one("batch_size", batch_size)


def _check_at_least_one(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name} is {value!r}, but it must be a whole number >= 1; raise it")
