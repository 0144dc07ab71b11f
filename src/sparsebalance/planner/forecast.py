"""What policies would do with a data set: global batches planned and simulated, and compared.

In: sample lengths, a scenario, policies. Out: one `Row` per policy with step time, speed-ups, imbalances, busy
fraction, peak memory and the bound, all over the same global batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from sparsebalance.planner.scenario import Scenario
from sparsebalance.planning.anchor import Anchor
from sparsebalance.planning.coverage import mean_coverage
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.imbalance import imbalance
from sparsebalance.planning.lengths import Lengths
from sparsebalance.planning.plan import Sample, StepPlan
from sparsebalance.planning.policy import Policy, cuts, is_ours, named_policy, plan_and_timeline, tunes
from sparsebalance.planning.slack import SlackAim
from sparsebalance.planning.timeline import Timeline

BASELINE = "random"
ALIKE = 1.01  # rows whose step times differ by less than this factor take the same time
TARGET_SHARE = 0.1  # target tokens of a sample whose data does not say: a tenth, at most 1,024
Batches = Sequence[Sequence[Sample]]


@dataclass(frozen=True)
class Row:
    """One policy over all simulated steps; times in milliseconds.

    Attributes:
        policy, unit_size, schedule: what was planned.
        step_ms: mean over the steps. step_ms_p10, step_ms_p90: their spread.
        speedup: over `random` of the same schedule, by total time. speedup_vs_best: over the fastest baseline.
        imbalance_all, imbalance_slot, imbalance_rank: means over the steps, see `Imbalance`.
        busy_fraction: time in forwards and backwards / (devices x step time).
        share_of_bound: time without any bubble / step time; at most 1 where budgets are not tuned.
        peak_memory_mb: of the fullest device. fits: whether it has that much; None where it is not known.
        largest_unit: tokens. units: mean number of micro-batches of a step.
        mean_budget: blocks. coverage: mean over tokens and layers, by the scenario's curves.
        extrapolated: share of units outside of what a measured table covers.
    """

    policy: str
    unit_size: int | None
    schedule: str
    step_ms: float
    step_ms_p10: float
    step_ms_p90: float
    speedup: float
    speedup_vs_best: float
    imbalance_all: float
    imbalance_slot: float
    imbalance_rank: float
    busy_fraction: float
    share_of_bound: float
    peak_memory_mb: float
    fits: bool | None
    largest_unit: int
    units: float
    mean_budget: float
    coverage: float
    extrapolated: float

    @property
    def ours(self) -> bool:
        return is_ours(self.policy)

    @property
    def name(self) -> str:
        """As in tables."""
        size = "" if self.unit_size is None else f" {self.unit_size:,}"
        return f"{self.policy}{size}" + ("" if self.schedule == "1f1b" else f" {self.schedule}")


@dataclass(frozen=True)
class TuningSettings:
    """How a policy that tunes does so; see `named_policy`."""

    anchor: Anchor = field(default_factory=Anchor)
    aim: SlackAim = "balance"


@dataclass(frozen=True)
class Variant:
    """A policy with the scenario that it runs in (unit size, schedule)."""

    policy: str
    scenario: Scenario
    tuning: TuningSettings = field(default_factory=TuningSettings)

    def configured(self, token_cap: int) -> Policy:
        """Raises:
        InputError: no policy has that name, or see `Policy`.
        """
        return named_policy(
            self.policy,
            budget=self.scenario.budget,
            token_cap=token_cap,
            anchor=self.tuning.anchor,
            aim=self.tuning.aim,
            unit_size=self.scenario.unit_size,
        )


@dataclass(frozen=True)
class Forecast:
    """Attributes:
    rows: in the order of the variants.
    best_baseline: name of the fastest row whose policy is not ours, with its unit size and schedule.
    bound_ms: mean step time if no device ever waited.
    examples: per variant, its plan and timeline of the step on which `random` is slowest.
    example_step: that step's number.
    """

    rows: tuple[Row, ...]
    best_baseline: str
    bound_ms: float
    examples: tuple[tuple[StepPlan, Timeline], ...]
    example_step: int


def global_batches(lengths: Lengths, batch_size: int, dp: int, steps: int | None, seed: int) -> list[list[Sample]]:
    """Shuffled samples in batches, the rest dropped; at most `steps` of them.

    Raises:
        InputError: fewer samples than a batch, or a batch with fewer samples than ranks.
    """
    count = len(lengths.values)
    if batch_size < dp:
        raise InputError(
            f"a global batch of {batch_size} samples cannot feed dp {dp}; raise the batch size or lower dp"
        )
    if count < batch_size:
        raise InputError(
            f"{lengths.source} has {count} samples, fewer than one global batch of {batch_size}; lower the batch size"
        )
    order = np.random.default_rng(seed).permutation(count)
    batches = count // batch_size
    wanted = batches if steps is None else min(steps, batches)
    chosen = order[: wanted * batch_size].reshape(wanted, batch_size)
    values = lengths.values
    targets = lengths.targets
    if targets is None:
        targets = np.minimum(np.maximum(1, (values * TARGET_SHARE).astype(np.int64)), 1024)
        targets = np.minimum(targets, values)
    return [[Sample(int(i), int(values[i]), int(targets[i])) for i in row] for row in chosen]


def forecast(
    batches: Batches,
    variants: Sequence[Variant],
    token_cap: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Forecast:
    """Simulate every variant on every batch.

    Args:
        variants: the first is the baseline `random`; at least one is no policy of ours.
        token_cap: most tokens of a micro-batch.
        progress: called with (simulated steps so far, in all).

    Raises:
        InputError: a sample over the cap; see `Scenario` and `plan_step`.
    """
    results: list[list[_Step]] = [[] for _ in variants]
    bounds: list[float] = []
    example_step, slowest_ms = 0, -1.0
    examples: tuple[tuple[StepPlan, Timeline], ...] = ()
    for number, batch in enumerate(batches):
        planned = []
        for place, variant in enumerate(variants):
            planned.append(_planned(batch, variant, token_cap))
            results[place].append(_step(variant.scenario, *planned[-1]))
            progress(number * len(variants) + place + 1, len(batches) * len(variants))
        if results[0][-1].step_ms > slowest_ms:
            example_step, examples, slowest_ms = number, tuple(planned), results[0][-1].step_ms
        # The least work of any: packing saves fixed costs. Tuned budgets change the work itself.
        bounds.append(min(steps[-1].work_ms for v, steps in zip(variants, results) if not tunes(v.policy)))
    totals = [sum(step.step_ms for step in steps) for steps in results]
    baselines = [i for i, variant in enumerate(variants) if not is_ours(variant.policy)]
    best = min(baselines, key=lambda i: totals[i])
    rows = tuple(
        _row(variant, steps, totals[0] / total, totals[best] / total, sum(bounds))
        for variant, steps, total in zip(variants, results, totals)
    )
    return Forecast(
        rows=rows,
        best_baseline=rows[best].name,
        bound_ms=float(np.mean(bounds)),
        examples=examples,
        example_step=example_step,
    )


def plans(batches: Batches, variant: Variant, token_cap: int) -> Iterator[StepPlan]:
    """One variant's plan of every batch, made again: a forecast keeps that of its example step alone."""
    return (_planned(batch, variant, token_cap)[0] for batch in batches)


def best_unit_size(batches: Batches, scenario: Scenario, sizes: Sequence[int | None], token_cap: int) -> int | None:
    """Of `sizes`, the one under which `sab` fits, if any does, and is fastest; of those alike the leanest."""
    if len(sizes) == 1:
        return sizes[0]
    rows = forecast(batches, variants_of(scenario, ["sab"], sizes), token_cap).rows[1:]
    return _fastest([row for row in rows if row.fits is not False] or rows).unit_size


@dataclass(frozen=True)
class _Step:
    """What is kept of one simulated step."""

    step_ms: float
    work_ms: float  # per device, if none waited
    imbalances: tuple[float, float, float]
    busy: float
    peak_mb: float
    largest: int
    units: int
    budget: float
    coverage: float
    extrapolated: int


def _planned(batch: Sequence[Sample], variant: Variant, token_cap: int) -> tuple[StepPlan, Timeline]:
    scenario, policy = variant.scenario, variant.configured(token_cap)
    return plan_and_timeline(batch, scenario.model, scenario.topology, policy, scenario.curves, scenario.pipeline)


def _step(scenario: Scenario, plan: StepPlan, timeline: Timeline) -> _Step:
    latencies = [[unit.latency.total_ms for unit in rank] for rank in plan.ranks]
    uneven = imbalance(latencies)
    units = [unit for unit in plan.micro_batches if unit.segments]
    largest = max(units, key=lambda unit: unit.tokens)
    table = scenario.table
    return _Step(
        step_ms=timeline.step_ms,
        work_ms=sum(map(sum, latencies)) / (len(latencies) * scenario.topology.pp),
        imbalances=(uneven.all, uneven.slot, uneven.rank),
        busy=timeline.busy_fraction,
        peak_mb=_peak_mb(scenario, timeline, largest.tokens, max(unit.targets for unit in units)),
        largest=largest.tokens,
        units=len(units),
        budget=plan.mean_budget,
        coverage=mean_coverage(plan, scenario.curves),
        extrapolated=sum(bool(table.predict(u.segments, u.budgets).extrapolated) for u in units) if table else 0,
    )


def _peak_mb(scenario: Scenario, timeline: Timeline, tokens: int, targets: int) -> float:
    """Fullest device: what it always holds, its activations at their peak, one unit's working memory, the head."""
    static = np.array(scenario.static_mb())
    working = scenario.memory.working_mb(tokens)
    extra = np.full(len(static), working)
    extra[-1] = max(working, scenario.memory.head_mb(targets))
    return float((static + timeline.peak_memory_mb.max(0) + extra).max())


def _row(variant: Variant, steps: Sequence[_Step], speedup: float, versus_best: float, bound_ms: float) -> Row:
    ms = np.array([step.step_ms for step in steps])
    every, slot, rank = np.mean([step.imbalances for step in steps], axis=0).tolist()
    peak, capacity = max(step.peak_mb for step in steps), variant.scenario.capacity_mb
    units = sum(step.units for step in steps)
    return Row(
        policy=variant.policy,
        unit_size=variant.scenario.unit_size if cuts(variant.policy) else None,
        schedule=variant.scenario.schedule,
        step_ms=float(ms.mean()),
        step_ms_p10=float(np.quantile(ms, 0.1)),
        step_ms_p90=float(np.quantile(ms, 0.9)),
        speedup=speedup,
        speedup_vs_best=versus_best,
        imbalance_all=every,
        imbalance_slot=slot,
        imbalance_rank=rank,
        busy_fraction=float(np.mean([step.busy for step in steps])),
        share_of_bound=bound_ms / float(ms.sum()),
        peak_memory_mb=peak,
        fits=None if capacity is None else peak <= capacity,
        largest_unit=max(step.largest for step in steps),
        units=units / len(steps),
        mean_budget=float(np.mean([step.budget for step in steps])),
        coverage=float(np.mean([step.coverage for step in steps])),
        extrapolated=sum(step.extrapolated for step in steps) / units,
    )


def check_static(scenario: Scenario) -> None:
    """Raises:
    InputError: weights, gradients and optimiser alone are too large; nothing needs to be simulated.
    """
    capacity, static = scenario.capacity_mb, max(scenario.static_mb())
    if capacity is not None and static > capacity:
        raise InputError(
            f"weights, gradients and optimiser alone need {static / 1e3:,.1f} of {capacity / 1e3:,.1f} GB a device; "
            "use more stages, tensor or data-parallel ranks, or a larger device"
        )


def variants_of(scenario: Scenario, policies: Sequence[str], unit_sizes: Sequence[int | None]) -> list[Variant]:
    """`random` first, then the policies, each once; those that make units of a size for every unit size, and under
    pipelines once more with split backwards."""
    found = [Variant(BASELINE, replace(scenario, unit_size=None))]
    for name in dict.fromkeys(policies):
        if name == BASELINE:
            continue
        sizes: Sequence[int | None] = unit_sizes if cuts(name) else (None,)
        found += [Variant(name, replace(scenario, unit_size=size)) for size in sizes]
        if cuts(name) and scenario.topology.pp > 1 and scenario.schedule == "1f1b":
            found += [
                Variant(name, replace(scenario, unit_size=size, schedule="zero_bubble")) for size in sizes if size
            ]
    return found


@dataclass(frozen=True)
class Recommendation:
    """A row to choose, and why, in one line."""

    row: Row
    reason: str


def recommend(rows: Sequence[Row], capacity_mb: float | None) -> Recommendation:
    """The fastest row that fits; among those within 1 % of it, the one that needs the least memory.

    Tuned rows (`dst`, `sab_dst`) change what attention reads, so they are not recommended on time alone. A baseline is
    recommended where it is more than 1 % faster than every row of ours, or there is none of ours.

    Raises:
        InputError: nothing fits in the device's memory.
    """
    fitting = [row for row in rows if row.fits is not False]
    if not fitting:
        least = min(rows, key=lambda row: row.peak_memory_mb)
        raise InputError(
            f"nothing fits: {least.name} needs the least, {least.peak_memory_mb / 1e3:,.1f} GB a device, of which "
            f"{(capacity_mb or 0) / 1e3:,.1f} GB are usable; its largest unit has {least.largest_unit:,} tokens. "
            "Use smaller units, more stages or tensor ranks, checkpointing, or a larger device"
        )
    strict = [row for row in fitting if not tunes(row.policy)] or fitting
    ours = min((row for row in strict if row.ours), key=lambda row: row.step_ms, default=None)
    faster = [row for row in strict if not row.ours and (ours is None or ALIKE * row.step_ms < ours.step_ms)]
    row = _fastest(faster or [row for row in strict if row.ours])
    reason = (
        f"{row.speedup:.2f}x over random and {row.speedup_vs_best:.2f}x over the best baseline, "
        f"{row.share_of_bound:.0%} of what is possible without a bubble"
    )
    if row.fits is not None and capacity_mb is not None:
        reason += f", {row.peak_memory_mb / 1e3:,.0f} of {capacity_mb / 1e3:,.0f} GB"
    if ours is not None and not row.ours:
        reason += f"; a baseline, because it is {ours.step_ms / row.step_ms:.2f}x as fast as ours ({ours.name})"
    rejected = [r for r in rows if r.fits is False and r.step_ms < row.step_ms]
    if rejected:
        reason += f"; {min(rejected, key=lambda r: r.step_ms).name} would be faster but does not fit"
    return Recommendation(row, reason)


def _fastest(rows: Sequence[Row]) -> Row:
    """Of the rows that are as fast as the fastest one, or nearly, the one that needs the least memory."""
    least = min(row.step_ms for row in rows)
    return min((row for row in rows if row.step_ms <= ALIKE * least), key=lambda row: (row.peak_memory_mb, row.step_ms))
