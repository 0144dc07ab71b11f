"""Swaps between the steps of a look-ahead window, few of them, until no rank waits for one costly sample.

In: predicted costs of a window's samples, in their shuffled order. Out: which sample comes to each place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparsebalance.planning.latency import Floats

Swaps = list[tuple[int, int]]  # (place in one step, place in another)

MIN_GAIN = 0.01  # of a mean step: a swap that gains less is not worth moving two samples
NEARLY_BEST = 0.9  # of the best swap's gain: one of all such swaps is drawn, so that batches stay mixed


def step_ms(costs: Floats, dp: int) -> float:
    """Estimated milliseconds of a step: no rank is done before its costliest sample, nor before its share.

    Args:
        costs: predicted milliseconds of its samples, at least one. dp: ranks.
    """
    return max(float(costs.max()), float(costs.sum()) / dp)


def swapped(costs: Floats, batch_size: int, dp: int, generator: np.random.Generator) -> list[int]:
    """Lower the sum of the steps' `step_ms` by few swaps.

    The step in which ranks wait longest for a costly sample is changed first. One swap with another step is tried;
    where none helps, because several giants of both steps hold them up, several at once. Nothing is done that gains
    less than MIN_GAIN of a mean step per swap.

    Args:
        costs: [n] float64; place p belongs to step p // batch_size. generator: draws among equally good swaps.

    Returns:
        [n], the sample that comes to each place.
    """
    window = _Window.of(costs, batch_size, dp)
    steps = len(window.places)
    # Steps that wait alike are looked at in random order, or the first of every window would collect the giants.
    order = generator.permutation(steps)
    threshold = MIN_GAIN * float(costs.sum()) / (dp * steps)
    settled = np.zeros(steps, dtype=bool)
    while True:
        waits = np.where(settled, 0.0, window.largest - window.total / dp)
        slow = int(order[np.argmax(waits[order])])
        if waits[slow] <= threshold:  # no change of this step can gain more than its wait
            return [int(sample) for sample in window.chosen]
        swaps = window.one_swap(slow, threshold, generator) or window.several_swaps(slow, threshold, generator)
        settled[slow] = not swaps
        for here, there in swaps:
            window.swap(here, there)
        settled[[there // batch_size for _, there in swaps]] = False


@dataclass(frozen=True)
class _Window:
    """Attributes:
    dp: ranks.
    places: per step, its places.
    step_of: [n] the step of each place.
    chosen, value: [n] the sample at each place, and its cost.
    total, largest: [steps] of each step's costs.
    others: [n] the largest cost of the place's step without the place itself.
    """

    dp: int
    places: list[NDArray[np.int64]]
    step_of: NDArray[np.int64]
    chosen: NDArray[np.int64]
    value: Floats
    total: Floats
    largest: Floats
    others: Floats

    @classmethod
    def of(cls, costs: Floats, batch_size: int, dp: int) -> _Window:
        n = len(costs)
        places = [np.arange(start, min(n, start + batch_size)) for start in range(0, n, batch_size)]
        return cls(
            dp,
            places,
            np.arange(n) // batch_size,
            np.arange(n),
            costs.copy(),
            np.array([costs[p].sum() for p in places]),
            np.array([costs[p].max() for p in places]),
            np.concatenate([_largest_of_others(costs[p]) for p in places]),
        )

    @property
    def time(self) -> Floats:
        return np.maximum(self.largest, self.total / self.dp)

    def swap(self, here: int, there: int) -> None:
        self.value[[here, there]], self.chosen[[here, there]] = self.value[[there, here]], self.chosen[[there, here]]
        for step in self.step_of[[here, there]]:
            own = self.places[step]
            self.total[step], self.largest[step] = self.value[own].sum(), self.value[own].max()
            self.others[own] = _largest_of_others(self.value[own])

    def one_swap(self, slow: int, threshold: float, generator: np.random.Generator) -> Swaps:
        """One swap of a sample of this step with one of another step, nearly the best; none below the threshold."""
        own = self.places[slow]
        change = self.value[None, :] - self.value[own, None]  # [own place, any place]: work that the step would gain
        later = np.maximum(
            np.maximum(self.others[own, None], self.value[None, :]), (self.total[slow] + change) / self.dp
        ) + np.maximum(
            np.maximum(self.others[None, :], self.value[own, None]),
            (self.total[self.step_of][None, :] - change) / self.dp,
        )
        gain = self.time[slow] + self.time[self.step_of][None, :] - later
        gain[:, own] = 0.0
        best = float(gain.max())
        if best <= threshold:
            return []
        row, there = divmod(int(generator.choice(np.flatnonzero(gain >= NEARLY_BEST * best))), len(self.value))
        return [(int(own[row]), there)]

    def several_swaps(self, slow: int, threshold: float, generator: np.random.Generator) -> Swaps:
        """The costliest samples of one of two steps for as many of the cheaper half of the other, drawn at random."""
        by_cost = [own[np.argsort(-self.value[own], kind="stable")] for own in self.places]
        cheap = [generator.permutation(own[len(own) - len(own) // 2 :]) for own in by_cost]
        best, swaps = threshold, Swaps()
        for other in range(len(self.places)):
            if other == slow:
                continue
            for giver, taker in ((slow, other), (other, slow)):
                most = min(self.dp, len(by_cost[giver]) // 2, len(cheap[taker]))
                if most == 0:
                    continue
                gains = self._gains(giver, taker, by_cost[giver][: most + 1], cheap[taker][:most])
                if gains.max() > best:
                    count = int(gains.argmax()) + 1
                    best = float(gains[count - 1])
                    swaps = list(zip(by_cost[giver][:count].tolist(), cheap[taker][:count].tolist()))
        return [(a, b) if self.step_of[a] == slow else (b, a) for a, b in swaps]

    def _gains(self, giver: int, taker: int, given: NDArray[np.int64], taken: NDArray[np.int64]) -> Floats:
        """Per swap, for the first 1, 2, ... of `taken`; `given` is one longer: what the giver is left with."""
        count = np.arange(1, len(taken) + 1)
        out, back = self.value[given[: len(taken)]], self.value[taken]
        change = np.cumsum(out - back)
        giver_later = np.maximum(
            np.maximum(self.value[given[1:]], np.maximum.accumulate(back)), (self.total[giver] - change) / self.dp
        )
        taker_later = np.maximum(max(self.largest[taker], out[0]), (self.total[taker] + change) / self.dp)
        gains: Floats = (self.time[giver] + self.time[taker] - giver_later - taker_later) / count
        return gains


def _largest_of_others(values: Floats) -> Floats:
    """For each value the largest of the others; 0 where there are none."""
    others = np.full(len(values), values.max())
    first = int(values.argmax())
    others[first] = np.delete(values, first).max(initial=0.0)
    return others
