"""Attention budget goes where a millisecond of it covers most: over layers and micro-batches.

In: what units and layers can choose from, and how much time groups of them may take. Out: one choice for each. Every
unit and layer climbs the upper hull of its coverage over time, and of all next steps the one that covers most per
millisecond is taken first: for such gains, which only fall, nothing is better (Fox 1966, Discrete optimization via
marginal analysis).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from sparsebalance.planning.budgets import (
    SLOP,
    Choices,
    Flags,
    Floats,
    Ints,
    Limits,
    OnlineRanks,
    TuningStep,
    UnitBudgets,
    attention_ms,
)
from sparsebalance.planning.coverage import BUDGET_GRID
from sparsebalance.planning.errors import InputError

SLOPE = 1e-9  # relative; slopes, and times, that differ by less are equal
LEAST_MS = 1e-12  # of a step; where a measured table says that reading more takes no time
HALVINGS = 16  # of the range in which a time is looked for
FILLING = 16  # steps tried in what is left of a group's time, after the first that does not fit
Aim = Literal["coverage", "time"]


@dataclass(frozen=True, kw_only=True)
class Waterfill(Limits):
    """Budget moves between the layers and micro-batches of a step, without regard to which rank waits for which.

    Attributes:
        aim: "coverage" covers most in the attention time that the default budgets take; "time" takes least time at the
            mean coverage of the default budgets. Means are over tokens and layers.
        threshold: most coverage that a layer of a unit may lose; what it gains is not bounded.
    """

    aim: Aim = "coverage"

    def __post_init__(self) -> None:
        Limits.__post_init__(self)
        if self.aim not in get_args(Aim):
            raise InputError(f"waterfill aim is {self.aim!r}; choose one of {', '.join(get_args(Aim))}")

    def __call__(self, step: TuningStep) -> UnitBudgets:
        return self._solved(step)[0]

    def online(self, step: TuningStep) -> tuple[UnitBudgets, UnitBudgets, OnlineRanks]:
        """Each unit shares out its own time over its layers at the step's price."""
        budgets, price = self._solved(step)
        return budgets, budgets, online_at(step, self, np.full(len(step.units), price))

    def _solved(self, step: TuningStep) -> tuple[UnitBudgets, float]:
        """Budgets, and coverage per millisecond of the last one bought."""
        if not step.units:
            return step.budgets(np.zeros((0, step.model.layers), dtype=np.int64)), 0.0
        choices = Choices.of(step, self)
        group = np.zeros(choices.coverage.shape[:2], dtype=np.int64)
        ladder = Ladder.of(choices, no_loss(choices, self.threshold), group, 1)
        defaults = choices.defaults()
        if self.aim == "time":
            chosen, price = least_time(choices, ladder, choices.worth_of(defaults))
            if choices.attention_of(chosen).sum() > choices.attention_of(defaults).sum():
                chosen = defaults  # steps of the hull are too coarse for a gain
        else:
            chosen, prices = ladder.within(choices.attention_of(defaults).sum()[None])
            price = float(prices[0])
            if choices.worth_of(chosen) < choices.worth_of(defaults):
                chosen = defaults
        return step.budgets(choices.budgets[chosen]), price


def no_loss(choices: Choices, threshold: float) -> Flags:
    """[units, layers, choices]: what loses no more than `threshold` of a layer's coverage."""
    allowed: Flags = choices.possible[:, None] & (choices.change >= -threshold - SLOP)
    return allowed


@dataclass(frozen=True, eq=False)
class Ladder:
    """What each group would buy next, best first.

    Attributes:
        first: [units, layers] place of the cheapest choice, which each starts from.
        cell: [groups, steps] which unit and layer a step belongs to, as unit * layers + layer; steps of a group are in
            the order in which they are taken, a cell's own from cheap to costly. place: what the step leads to.
        ms, spent, worth: [groups, steps] ms of the step, of the group's attention after it, and coverage x tokens that
            it has won; infinite and 0 where a group has no such step.
        price: [groups, steps] coverage x tokens per ms of the step; 0 where there is none.
        spent_at_first, worth_at_first: [groups] ms, and coverage x tokens of all groups, before any step.
    """

    first: Ints
    cell: Ints
    place: Ints
    ms: Floats
    spent: Floats
    worth: Floats
    price: Floats
    spent_at_first: Floats
    worth_at_first: float

    @classmethod
    def of(cls, choices: Choices, allowed: Flags, group: Ints, groups: int) -> Ladder:
        """Args:
        allowed: [units, layers, choices], at least one choice each. group: [units, layers] of `groups`.
        """
        units, layers, options = allowed.shape
        worth = (choices.tokens[:, None, None] * choices.coverage).reshape(-1, options)
        # Reading more cannot take less time; where a measured table says so, it is noise.
        cost = np.repeat(np.maximum.accumulate(choices.attention_ms, 1), layers, axis=0)
        kept = upper_hull(cost, worth, allowed.reshape(-1, options))
        before = _kept_before(kept)
        cell, place = np.nonzero(kept & (before >= 0))
        start = before[cell, place]
        gain = worth[cell, place] - worth[cell, start]
        ms = cost[cell, place] - cost[cell, start]
        bought = gain > 0
        cell, place, gain, ms = cell[bought], place[bought], gain[bought], ms[bought]
        price = gain / np.maximum(ms, LEAST_MS)
        own = group.ravel()[cell]
        order = np.lexsort((place, cell, -price, own))
        own, cell, place = own[order], cell[order], place[order]
        gain, ms, price = gain[order], ms[order], price[order]
        counts = np.bincount(own, minlength=groups)
        row, column = own, np.arange(len(own)) - np.repeat(np.cumsum(counts) - counts, counts)
        shape = groups, int(counts.max(initial=0))

        def table(values: Floats | Ints, empty: float) -> Floats:
            found = np.full(shape, empty)
            found[row, column] = values
            return found

        first = allowed.argmax(2)
        base = np.take_along_axis(cost.reshape(units, layers, options), first[..., None], 2)
        base_ms = summed(group, base, groups)
        return cls(
            first=first,
            cell=table(cell, 0).astype(np.int64),
            place=table(place, 0).astype(np.int64),
            ms=table(ms, np.inf),
            spent=base_ms[:, None] + np.cumsum(table(ms, np.inf), axis=1),
            worth=np.cumsum(table(gain, 0.0), axis=1),
            price=table(price, 0.0),
            spent_at_first=base_ms,
            worth_at_first=float(np.take_along_axis(worth, first.reshape(-1, 1), 1).sum()),
        )

    def within(self, totals: Floats) -> tuple[Ints, Floats]:
        """Most coverage in the time that each group may take.

        Args:
            totals: [groups] ms of attention; a group whose cheapest choices take longer takes those.

        Returns:
            Places [units, layers], and [groups] the price of the first step that was not taken, 0 where there is none.
        """
        taken = self.spent <= totals[:, None] * (1 + SLOPE)
        counts, groups = taken.sum(1), np.arange(len(totals))
        if not self.price.shape[1]:
            return self.first, np.zeros(len(totals))
        padded = np.pad(self.price, ((0, 0), (0, 1)))
        price: Floats = padded[groups, counts]
        left = totals * (1 + SLOPE) - np.where(counts, self.spent[groups, counts - 1], self.spent_at_first)
        passed_by = np.zeros(self.first.size, dtype=bool)  # units and layers whose next step was too long
        for ahead in range(FILLING):
            column = np.minimum(counts + ahead, self.price.shape[1] - 1)
            cell, ms = self.cell[groups, column], self.ms[groups, column]
            buys = (counts + ahead < self.price.shape[1]) & (ms <= left) & ~passed_by[cell]
            taken[groups[buys], column[buys]] = True
            left -= np.where(buys, ms, 0.0)
            passed_by[cell[~buys]] = True
        return self._places(taken), price

    def _places(self, taken: Flags) -> Ints:
        places = self.first.copy().ravel()
        real = taken & np.isfinite(self.spent)
        np.maximum.at(places, self.cell[real], self.place[real])
        return places.reshape(self.first.shape)


def least_time(choices: Choices, ladder: Ladder, goal: float) -> tuple[Ints, float]:
    """Of a single group, least time at coverage x tokens of `goal`, or as much as there is.

    Returns:
        Places [units, layers], and the price of the first step that was not taken.
    """
    needed = int(np.searchsorted(ladder.worth[0], goal - ladder.worth_at_first))
    low = float(ladder.spent_at_first[0])
    high = float(ladder.spent[0, : needed + 1][-1]) if ladder.spent.size else low
    best, price = ladder.within(np.array([high]))
    for _ in range(HALVINGS):  # what is left after the last step can still buy enough
        tried = (low + high) / 2
        found, last = ladder.within(np.array([tried]))
        if choices.worth_of(found) >= goal:
            best, price, high = found, last, tried
        else:
            low = tried
    return best, float(price[0])


def upper_hull(cost: Floats, worth: Floats, allowed: Flags) -> Flags:
    """[cells, choices]: the allowed choices on the upper hull of worth over cost, from the first to the last one.

    All cells at once, choice after choice: the last corner goes while it lies below the line from the one before it to
    the new one (Andrew 1979, Another efficient algorithm for convex hulls).
    """
    cells = np.arange(len(cost))
    cost, worth = np.ascontiguousarray(cost.T), np.ascontiguousarray(worth.T)  # [choices, cells]
    corners, count = np.zeros(cost.shape, dtype=np.int64), np.zeros(len(cells), dtype=np.int64)
    for choice in range(len(cost)):
        new = cells[allowed[:, choice]]
        new_cost, new_worth = cost[choice], worth[choice]
        open_ = new[count[new] > 1]
        while len(open_):
            last, before = corners[count[open_] - 1, open_], corners[count[open_] - 2, open_]
            start_cost, start_worth = cost[before, open_], worth[before, open_]
            rise = (worth[last, open_] - start_worth) * (new_cost[open_] - start_cost)
            line = (new_worth[open_] - start_worth) * (cost[last, open_] - start_cost)
            open_ = open_[rise < line - SLOPE * np.abs(line)]
            count[open_] -= 1
            open_ = open_[count[open_] > 1]
        corners[count[new], new] = choice
        count[new] += 1
    kept = np.zeros(allowed.shape, dtype=bool)
    real = np.nonzero(np.arange(len(cost))[:, None] < count)
    kept[real[1], corners[real]] = True
    return kept


def summed(group: Ints, values: Floats, groups: int) -> Floats:
    """[groups] sums of values by group, both of one shape."""
    return np.asarray(np.bincount(group.ravel(), weights=values.ravel(), minlength=groups), dtype=np.float64)


def _kept_before(kept: Flags) -> Ints:
    """[cells, choices] place of the kept choice before each, -1 where there is none."""
    last = np.maximum.accumulate(np.where(kept, np.arange(kept.shape[1]), -1), axis=1)
    found: Ints = np.pad(last[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    return found


def online_at(step: TuningStep, limits: Limits, price: Floats) -> OnlineRanks:
    """How units share out their time while they run, at [units] prices in coverage x tokens per millisecond."""
    if not step.units:
        return tuple((None,) * len(rank) for rank in step.ranks)
    grid = attention_ms(step, np.array(BUDGET_GRID)).sum(0).tolist()
    follow = iter(
        limits.online_tuning(step.default, one / unit.tokens, ms)
        for unit, one, ms in zip(step.units, price.tolist(), grid)
    )
    return tuple(tuple(next(follow) if unit.segments else None for unit in rank) for rank in step.ranks)
