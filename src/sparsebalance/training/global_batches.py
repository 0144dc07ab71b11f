"""Step number -> samples of its global batch, and what a run has seen of its data by then.

In: the samples of a data set, a seed and a composition. Out: every step's samples over all epochs, a function of the
seed and the epoch alone, so that the position in the data is the step.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from sparsebalance.planning.composition import Batch, Composition, Tail, compose, in_order
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.plan import Sample

Int = NDArray[np.int64]


@dataclass(frozen=True)
class Seen:
    """What was trained on up to and including a step.

    Attributes:
        samples, tokens, targets: every time that a sample was used.
        unique_samples, unique_tokens: each sample counted once.
        epochs: epochs before this one, plus the part of this one's steps that are done.
    """

    samples: int
    unique_samples: int
    tokens: int
    unique_tokens: int
    targets: int
    epochs: float


@dataclass(frozen=True)
class GlobalBatches:
    """Samples shuffled every epoch by seed, then composed to batches. A batch may hold fewer samples than there are
    ranks, but at least one.

    Attributes:
        samples: of the whole data set, ids unique.
        batch_size: samples of a step; a composition by target tokens does not look at it.
        seed: of the shuffling.
        tail: what becomes of samples that do not fill an epoch's last batch: left out ("drop"), a smaller batch
            ("keep"), or filled up with samples from the start of the same epoch ("fill").
        composition: which samples form a batch.
        costs: predicted milliseconds of each sample, for a composition that looks at them; their tokens where None.
            The same on all ranks and when a run goes on, since they decide what a batch is.

    Raises:
        InputError: no samples, two with one id, less than one batch under "drop", or see `compose`.
    """

    samples: tuple[Sample, ...]
    batch_size: int
    seed: int
    tail: Tail = "drop"
    composition: Composition = in_order
    costs: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        count = len(self.samples)
        if not count:
            raise InputError("the data has no samples; a run needs at least one")
        if len({sample.id for sample in self.samples}) != count:
            raise InputError("two samples of the data share an id; give each its own, such as its index")
        if self.costs is not None and len(self.costs) != count:
            raise InputError(f"{len(self.costs)} costs for {count} samples; give one for each sample, or none")
        if self.tail not in get_args(Tail):
            raise InputError(f"tail is {self.tail!r}; choose one of {', '.join(get_args(Tail))}")
        if self.batch_size < 1:
            raise InputError(f"batch_size is {self.batch_size}, but a batch has at least 1 sample; raise it")
        if self.tail == "drop" and not self.composition.is_full(self.samples, self.batch_size):
            if self.composition.fixed_size:
                has = f"{count} samples, fewer than one batch of {self.batch_size}; lower data.batch_size"
            else:
                targets = sum(sample.targets for sample in self.samples)
                has = f"{targets} target tokens, too few for one batch of {self.composition}; lower its target tokens"
            raise InputError(f'the data has {has} or set data.tail to "keep"')

    def at(self, step: int) -> list[Sample]:
        """Samples of step 0, 1, 2, ... over all epochs, in the order of the data; ids are unique."""
        epoch, batch = self.locate(step)
        block, place = divmod(batch, self._batches_per_block)
        return list(self._block(epoch, block)[place])

    def batches_in(self, epoch: int) -> int:
        """Steps of an epoch; it differs between epochs only for compositions without a fixed size."""
        if not self.composition.fixed_size:
            return len(self._block(epoch, 0))
        whole, rest = divmod(len(self.samples), self.batch_size)
        return whole + (self.tail != "drop" and rest > 0)

    def first_step(self, epoch: int) -> int:
        """Number of the first step of an epoch."""
        if self.composition.fixed_size:
            return epoch * self.batches_in(0)
        return sum(self._count(earlier) for earlier in range(epoch))

    def locate(self, step: int) -> tuple[int, int]:
        """Step -> its epoch, and its place in it."""
        if self.composition.fixed_size:
            return divmod(step, self.batches_in(0))
        for epoch in itertools.count():
            if step < self._count(epoch):
                return epoch, step
            step -= self._count(epoch)
        raise AssertionError("an epoch has at least one step")

    def seen(self, step: int) -> Seen:
        """Exact counts up to and including this step; the first call in an epoch reads the epochs before it."""
        epoch, batch = self.locate(step)
        block, place = divmod(batch, self._batches_per_block)
        for earlier in range(epoch):  # each start needs the one before it, so none is computed recursively
            self._start(earlier)
        start = self._start(epoch)
        totals = start.totals + self._cumulative(epoch)[block * self._block_size] + self._sums(epoch, block)[place]
        samples, unique, tokens, unique_tokens, targets = totals.tolist()
        return Seen(
            samples, unique, tokens, unique_tokens, targets, epochs=epoch + (batch + 1) / self.batches_in(epoch)
        )

    def fingerprint(self) -> dict[str, Any]:
        """What decides every batch, JSON-compatible: two of them with equal fingerprints have equal batches."""
        shape = np.array([(s.id, s.length, s.targets) for s in self.samples], dtype=np.int64)
        return {
            "samples": len(self.samples),
            "lengths and targets": hashlib.sha256(shape.tobytes()).hexdigest(),
            "costs": None if self.costs is None else hashlib.sha256(np.array(self.costs).tobytes()).hexdigest(),
            "seed": self.seed,
            "batch_size": self.batch_size if self.composition.fixed_size else None,
            "composition": repr(self.composition),
            "tail": self.tail,
        }

    @property
    def _block_size(self) -> int:
        """Samples of an epoch's order that are composed at once."""
        return self.composition.block(self.batch_size) or len(self.samples)

    @property
    def _batches_per_block(self) -> int:
        block = self.composition.block(self.batch_size)
        # A composition of the whole order has one block; this is above any place of a batch.
        return len(self.samples) + 1 if block is None else block // self.batch_size

    @cached_property
    def _order(self) -> Callable[[int], Int]:
        """Epoch -> [n] places of `samples`, shuffled."""

        @lru_cache(maxsize=4)
        def order(epoch: int) -> Int:
            return np.random.default_rng([self.seed, epoch]).permutation(len(self.samples))

        return order

    @cached_property
    def _block(self) -> Callable[[int, int], list[Batch]]:
        """(epoch, block) -> its batches."""

        @lru_cache(maxsize=4)
        def block(epoch: int, number: int) -> list[Batch]:
            order = self._order(epoch)
            places = order[number * self._block_size : (number + 1) * self._block_size].tolist()
            costs = None if self.costs is None else np.array([self.costs[p] for p in places], dtype=np.float64)
            # No more than twice a batch is needed: a batch of other samples, besides those that are in it already.
            start = order[: 2 * self.batch_size] if self.composition.fixed_size else order
            return compose(
                [self.samples[p] for p in places],
                self.batch_size,
                self.composition,
                costs,
                self.tail,
                [self.samples[p] for p in start.tolist()] if self.tail == "fill" else [],
            )

        return block

    @cached_property
    def _count(self) -> Callable[[int], int]:
        return cache(self.batches_in)

    @cached_property
    def _place(self) -> dict[int, int]:
        return {sample.id: place for place, sample in enumerate(self.samples)}

    @cached_property
    def _start(self) -> Callable[[int], _Start]:
        """Epoch -> what was seen before it; reads the start of the epoch before."""

        @cache
        def start(epoch: int) -> _Start:
            count = len(self.samples)
            if epoch == 0:
                return _Start(np.zeros(5, dtype=np.int64), np.ones(count, dtype=bool))
            before = start(epoch - 1)
            block = (self.batches_in(epoch - 1) - 1) // self._batches_per_block
            sums = self._sums(epoch - 1, block)
            totals = before.totals + self._cumulative(epoch - 1)[block * self._block_size] + sums[-1]
            if not before.fresh.any():
                return _Start(totals, before.fresh)
            fresh = before.fresh.copy()
            in_block = sum(map(len, self._block(epoch - 1, block)))
            fresh[self._order(epoch - 1)[: block * self._block_size + in_block]] = False
            return _Start(totals, fresh)

        return start

    @cached_property
    def _cumulative(self) -> Callable[[int], Int]:
        """Epoch -> [n + 1, 5] figures of the first 0, 1, ... samples of its order."""

        @lru_cache(maxsize=2)
        def cumulative(epoch: int) -> Int:
            figures = self._figures(self._order(epoch), self._start(epoch).fresh)
            return np.concatenate([np.zeros((1, 5), dtype=np.int64), figures.cumsum(0)])

        return cumulative

    @cached_property
    def _sums(self) -> Callable[[int, int], Int]:
        """(epoch, block) -> [batches, 5] figures of the block's first 1, 2, ... batches."""

        @lru_cache(maxsize=4)
        def sums(epoch: int, block: int) -> Int:
            batches = self._block(epoch, block)
            places = np.array([self._place[sample.id] for batch in batches for sample in batch], dtype=np.int64)
            figures = self._figures(places, self._start(epoch).fresh)
            inside = min(self._block_size, len(self.samples) - block * self._block_size)
            figures[inside:, [1, 3]] = 0  # "fill" put these in again, after all others
            ends = np.cumsum([len(batch) for batch in batches])
            total: Int = figures.cumsum(0)[ends - 1]
            return total

        return sums

    def _figures(self, places: Int, fresh: NDArray[np.bool_]) -> Int:
        """[places, 5] of each sample: 1, 1 if fresh, tokens, tokens if fresh, targets."""
        lengths, targets = self._shape[places].T
        new = fresh[places].astype(np.int64)
        return np.stack([np.ones_like(new), new, lengths, new * lengths, targets], axis=1)

    @cached_property
    def _shape(self) -> Int:
        """[n, 2] lengths and targets."""
        return np.array([(sample.length, sample.targets) for sample in self.samples], dtype=np.int64)


@dataclass(frozen=True, eq=False)
class _Start:
    """Before an epoch: its [5] figures, see `GlobalBatches._figures`, and which samples were not used yet, [n]."""

    totals: Int
    fresh: NDArray[np.bool_]
