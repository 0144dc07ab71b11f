"""Every unit is given the time that the step leaves it: what nobody waits for is spent on coverage.

In: a step, and its timeline by the simulator. Out: budgets under which units that the step waits for read less, as far
as their coverage allows, and all others read more, until the step would wait for them too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

import numpy as np

from sparsebalance.planning.anchor import same_for_all
from sparsebalance.planning.budgets import (
    Choices,
    Flags,
    Floats,
    Ints,
    Limits,
    OnlineRanks,
    TuningStep,
    UnitBudgets,
)
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.pipeline import rank_pipelines
from sparsebalance.planning.simulator import simulate
from sparsebalance.planning.timeline import Timeline
from sparsebalance.planning.waterfill import Ladder, no_loss, online_at, summed

SlackAim = Literal["hold", "balance", "fast"]
ROUNDS = 3  # of setting times anew by the timeline that the budgets before led to
TRIES = 6  # halvings of the range in which the step time is looked for
ROUNDING = 1e-6  # relative; of times that were added up in another order
TOLERANCE = 1e-3  # relative; a step that takes so much longer than wanted still counts as that


@dataclass(frozen=True, kw_only=True)
class Slack(Limits):
    """Targets from the critical path.

    Whatever a stage does of a unit lies on paths through the step (what waits for what); let the longest of them take
    L. If everything takes at most wanted / L times as long as it does, no path takes longer than wanted: so these are
    the targets. Budgets follow them, the timeline follows the budgets, and so on a few times.

    Attributes:
        aim: the step time wanted. "hold": that of the default budgets, so that idle time becomes coverage. "balance":
            the least at which mean coverage is not below that of the default budgets. "fast": the least that
            `threshold` allows.
        threshold: most coverage that a layer of a unit may lose; what it gains is not bounded.
        share: layers share out their time where it covers most (`waterfill.Ladder`); on ranks without a pipeline,
            units do so too. Off, every layer gets the same time.
    """

    aim: SlackAim = "balance"
    share: bool = True

    def __post_init__(self) -> None:
        Limits.__post_init__(self)
        if self.aim not in get_args(SlackAim):
            raise InputError(f"slack aim is {self.aim!r}; choose one of {', '.join(get_args(SlackAim))}")

    def __call__(self, step: TuningStep) -> UnitBudgets:
        if not step.units:
            return step.budgets(np.zeros((0, step.model.layers), dtype=np.int64))
        return step.budgets(self._solved(step).blocks)

    def online(self, step: TuningStep) -> tuple[UnitBudgets, UnitBudgets, OnlineRanks]:
        """With `share` layers share out their unit's time by their own scores; else those bound each layer's wish."""
        if not self.share or not step.units:
            budgets = self(step)
            return budgets, budgets, same_for_all(step, self.online_tuning(step.default))
        found = self._solved(step)
        budgets = step.budgets(found.blocks)
        return budgets, budgets, online_at(step, self, found.price)

    def _solved(self, step: TuningStep) -> _Solution:
        search = _Search(step, self)
        if self.aim == "hold":
            return search.at(search.base.step_ms)
        if self.aim == "fast":
            return search.at(search.least_ms)
        low, high = search.least_ms, search.base.step_ms
        found = [search.default]
        for _ in range(TRIES):  # each from where the one before it ended, which is near
            found.append(search.next((low + high) / 2, found[-1]))
            low, high = (low, (low + high) / 2) if search.enough(found[-1]) else ((low + high) / 2, high)
        for _ in range(ROUNDS):
            found.append(search.next(high, found[-1]))
        best = min((one for one in found if search.enough(one)), key=lambda one: one.step_ms)
        if best.step_ms < search.base.step_ms * (1 - TOLERANCE):
            return best
        return search.at(search.base.step_ms)  # nothing is faster at this coverage, but idle time can still cover more


@dataclass(frozen=True, eq=False)
class _Solution:
    """Attributes:
    blocks, places: [units, layers] budgets, and where they are among the choices.
    timeline: simulated with them. worth: coverage x tokens, summed. price: [units] coverage x tokens per ms.
    """

    blocks: Ints
    places: Ints
    timeline: Timeline
    worth: float
    price: Floats

    @property
    def step_ms(self) -> float:
        return self.timeline.step_ms


class _Search:
    """What all step times that are tried have in common."""

    def __init__(self, step: TuningStep, rule: Slack) -> None:
        self._step, self._rule = step, rule
        self._choices = Choices.of(step, rule)
        self._allowed: Flags = no_loss(self._choices, rule.threshold)
        # The order of actions stays that of the default budgets while budgets are looked for.
        pipelines = rank_pipelines(step.ranks, step.model, step.topology, step.pipeline)
        self._pipelines = [pipeline.compiled() for pipeline in pipelines]
        stages = step.pipeline.split(step.model.layers, step.topology)
        counts = [stage.layers for stage in stages]
        self._stage_of = np.repeat(np.arange(len(stages)), counts)
        self._first_layer = np.cumsum([0, *counts[:-1]])
        filled = [np.array([bool(unit.segments) for unit in rank]) for rank in step.ranks]
        edges = np.cumsum([0, *(flags.sum() for flags in filled)])
        # Per rank, the place of each of its units among all that have something to compute; -1 for empty ones.
        self._places = [np.where(flags, edges[r] + np.cumsum(flags) - 1, -1) for r, flags in enumerate(filled)]
        self.base = simulate(self._pipelines, step.pipeline.network)
        self.default = self._solution(self._choices.defaults(), self.base, np.zeros(len(step.units)))

    @cached_property
    def least_ms(self) -> float:
        """Step time where every layer gives up all that it may."""
        return self._simulated(self._allowed.argmax(2)).step_ms

    def at(self, wanted_ms: float) -> _Solution:
        """Of the rounds, the one that covers most within the wanted time, or else the fastest."""
        found = [self.default]
        for _ in range(ROUNDS):
            found.append(self.next(wanted_ms, found[-1]))
        in_time = [one for one in found if one.step_ms <= wanted_ms * (1 + TOLERANCE)]
        if in_time:
            return max(in_time, key=lambda one: one.worth)
        return min(found, key=lambda one: one.step_ms)

    def next(self, wanted_ms: float, now: _Solution) -> _Solution:
        """Targets by the timeline of one solution, and what follows from them."""
        places, price = self._chosen(self._targets(wanted_ms, now.timeline, now.places))
        return self._solution(places, self._simulated(places), price)

    def enough(self, one: _Solution) -> bool:
        """Whether it covers no less than the default budgets."""
        return one.worth >= self.default.worth

    def _solution(self, places: Ints, timeline: Timeline, price: Floats) -> _Solution:
        return _Solution(self._choices.budgets[places], places, timeline, self._choices.worth_of(places), price)

    def _on_stages(self, values: Floats, places: Ints) -> Floats:
        """[units, stages] sums over a stage's layers of `values` [units, choices] at places [units, layers]."""
        found: Floats = np.add.reduceat(np.take_along_axis(values, places, 1), self._first_layer, axis=1)
        return found

    def _simulated(self, places: Ints) -> Timeline:
        choices, defaults = self._choices, self._choices.defaults()
        forward, backward = (
            self._on_stages(ms, places) - self._on_stages(ms, defaults)
            for ms in (choices.forward_ms, choices.backward_ms)
        )
        pipelines = []
        for own, pipeline in zip(self._places, self._pipelines):
            some, costs = own >= 0, pipeline.costs
            forward_ms, input_ms = costs.forward_ms.copy(), costs.input_ms.copy()
            forward_ms[:, some] = np.maximum(forward_ms[:, some] + forward[own[some]].T, 0.0)
            input_ms[:, some] = np.maximum(input_ms[:, some] + backward[own[some]].T, 0.0)
            pipelines.append(replace(pipeline, costs=replace(costs, forward_ms=forward_ms, input_ms=input_ms)))
        return simulate(pipelines, self._step.pipeline.network)

    def _targets(self, wanted_ms: float, timeline: Timeline, places: Ints) -> Floats:
        """[units, stages] ms that the attention of a unit may take on a stage."""
        shape = len(places), len(self._first_layer)
        taken, factor = np.zeros(shape), np.full(shape, np.inf)
        for rank, (own, run) in enumerate(zip(self._places, timeline.runs)):
            real = own[run.program.units] >= 0
            cells = own[run.program.units][real], run.program.stage_of[real]
            np.add.at(taken, cells, run.durations[real])
            longest = timeline.step_ms - timeline.slack(rank)[real]
            np.minimum.at(factor, cells, wanted_ms / longest)
        targets: Floats = taken * factor - (taken - self._on_stages(self._choices.attention_ms, places))
        return targets

    def _chosen(self, targets: Floats) -> tuple[Ints, Floats]:
        """Places [units, layers] within the targets, and [units] prices where time is shared out."""
        choices = self._choices
        if not self._rule.share:
            layers = np.bincount(self._stage_of)
            each = targets[:, self._stage_of] / layers[self._stage_of]  # [units, layers]
            fits = self._allowed & (choices.attention_ms[:, None] <= each[..., None] * (1 + ROUNDING))
            last = self._allowed.shape[2] - 1 - fits[..., ::-1].argmax(2)
            return np.where(fits.any(2), last, self._allowed.argmax(2)), np.zeros(len(targets))
        totals = summed(self._groups, targets, len(self._ladder.spent))
        chosen, prices = self._ladder.within(totals)
        # The hull's steps can be too coarse for a small group: then the default may be the better choice.
        defaults, groups = choices.defaults(), len(totals)
        fits = summed(self._groups, self._on_stages(choices.attention_ms, defaults), groups) <= totals * (1 + ROUNDING)
        better = summed(self._groups, self._worth(defaults) - self._worth(chosen), groups) > 0
        kept = (fits & better)[self._groups][:, self._stage_of]
        return np.where(kept, choices.default, chosen), prices[self._groups].mean(1)

    def _worth(self, places: Ints) -> Floats:
        """[units, stages] coverage x tokens at places [units, layers]."""
        covered = np.take_along_axis(self._choices.coverage, places[..., None], 2)[..., 0]
        found: Floats = np.add.reduceat(covered * self._choices.tokens[:, None], self._first_layer, axis=1)
        return found

    @cached_property
    def _groups(self) -> Ints:
        """[units, stages] who shares time: the layers of a unit on a stage, or without a pipeline all of a rank."""
        units, stages = len(self._step.units), len(self._first_layer)
        if stages > 1:
            return np.arange(units * stages).reshape(units, stages)
        place = np.unique(self._step.rank_of, return_inverse=True)[1]
        return place.reshape(units, 1).astype(np.int64)

    @cached_property
    def _ladder(self) -> Ladder:
        groups = self._groups
        return Ladder.of(self._choices, self._allowed, groups[:, self._stage_of], int(groups.max()) + 1)
