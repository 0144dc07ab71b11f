"""What does tuning attention budgets bring, and what does it cost? By simulation, on real steps, and in training.

    python benchmarks/tuning.py --train --json benchmarks/results/tuning.json

Simulated: every rule, alone and on top of batching, on two length distributions at DP4 PP4 with analytic times of an
H200 (Qwen2.5-3B, MoBA with 32 blocks of 256 keys). All variants plan the same global batches. The overhead is not
simulated: it is the time that planning takes with tuning, less the time without. Measured: `tuning_steps.py`, real
steps on two processes. Trained, where asked for: `tuning_runs.py`, short runs with fixed and with tuned budgets.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

import tuning_runs
import tuning_steps
from batching import BLOCK, BUDGET, DEVICE, MODEL, SEED
from chunked_step import measured_steps, work
from record import write_rows
from sparsebalance.planner.forecast import Row, TuningSettings, Variant, forecast, global_batches
from sparsebalance.planner.scenario import Scenario
from sparsebalance.planning.anchor import Anchor
from sparsebalance.planning.budgets import Fixed
from sparsebalance.planning.decoder import named_decoder
from sparsebalance.planning.hardware import named_device
from sparsebalance.planning.lengths import read_lengths
from sparsebalance.planning.pipeline import ScheduleName
from sparsebalance.planning.plan import Sample, StepPlan, Topology
from sparsebalance.planning.policy import Policy, cuts, plan_and_timeline, tunes
from sparsebalance.reporting.progress import follow, progress_bars
from sparsebalance.training.launch import is_worker
from tuning_tables import show

DISTRIBUTIONS = ("longalign-10k", "chatqa2")
TOPOLOGY, BATCH_SIZE = Topology(4, 4), 16
UNIT_SIZE = 1024
STEPS, TIMED_STEPS = 24, 8
QUICK_STEPS, QUICK_TIMED_STEPS = 4, 2
PART = 4  # steps that a process simulates at once
PROCESSES = 2
MINUTES, TRAIN_MINUTES = 4.0, 6.0

Batch = Sequence[Sample]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Contender:
    """A variant by the name that tables use."""

    name: str
    policy: str
    settings: TuningSettings = field(default_factory=TuningSettings)
    schedule: ScheduleName = "1f1b"

    def variant(self, scenario: Scenario) -> Variant:
        size = UNIT_SIZE if cuts(self.policy) else None
        return Variant(self.policy, replace(scenario, unit_size=size, schedule=self.schedule), self.settings)


def contenders() -> list[Contender]:
    """The ablation, the baseline first."""
    anchors = [Anchor(threshold=p) for p in (0.05, 0.1, 0.2, 0.3)]
    anchors += [Anchor(kind="min"), Anchor(kind="max"), Anchor(level="global")]
    return [
        Contender("random", "random"),
        *(Contender(f"random+anchor {said(one)}", "random+anchor", TuningSettings(one)) for one in anchors),
        Contender("random+slack", "random+slack"),
        Contender("random+waterfill", "random+waterfill"),
        Contender("random+slack_waterfill", "random+slack_waterfill"),
        Contender("kk_tokens", "kk_tokens"),
        Contender("kk_tokens+anchor mean 0.1", "kk_tokens+anchor"),
        Contender("kk_tokens+slack_waterfill", "kk_tokens+slack_waterfill"),
        Contender("sab", "sab"),
        Contender("sab+anchor mean 0.1", "sab+anchor"),
        Contender("sab+slack", "sab+slack"),
        Contender("sab+slack hold", "sab+slack", TuningSettings(aim="hold")),
        Contender("sab+waterfill", "sab+waterfill"),
        Contender("sab_dst", "sab_dst"),
        Contender("sab_dst hold", "sab_dst", TuningSettings(aim="hold")),
        Contender("sab_dst fast", "sab_dst", TuningSettings(aim="fast")),
        Contender("sab zero_bubble", "sab", schedule="zero_bubble"),
        Contender("sab_dst zero_bubble", "sab_dst", schedule="zero_bubble"),
    ]


def said(anchor: Anchor) -> str:
    return f"{anchor.kind} {anchor.threshold:g}" + (" global" if anchor.level == "global" else "")


@dataclass(frozen=True)
class Planned:
    """Measured milliseconds of planning one batch, and [units] coverage of each micro-batch."""

    fixed_ms: float
    tuned_ms: float
    fixed_coverage: Floats
    tuned_coverage: Floats


class Simulation:
    """The global batches of a distribution and the scenario that they are planned for."""

    def __init__(self, distribution: str, steps: int) -> None:
        lengths = read_lengths(distribution)
        self.batches: list[list[Sample]] = global_batches(lengths, BATCH_SIZE, TOPOLOGY.dp, steps, SEED)
        self.token_cap = max(sample.length for batch in self.batches for sample in batch)
        self.scenario = Scenario(named_decoder(MODEL), named_device(DEVICE), TOPOLOGY, BLOCK, BUDGET)

    def rows(self, first: int, steps: int) -> tuple[Row, ...]:
        """Of all contenders, over some of the batches."""
        variants = [contender.variant(self.scenario) for contender in contenders()]
        return forecast(self.batches[first : first + steps], variants, self.token_cap).rows

    def planned(self, contender: Contender, batch: Batch) -> Planned:
        """With budgets fixed and tuned, nothing kept from before."""
        policy = contender.variant(self.scenario).configured(self.token_cap)
        fixed_ms, fixed = self._timed(contender, replace(policy, tuning=Fixed()), batch)
        tuned_ms, tuned = self._timed(contender, policy, batch)
        return Planned(fixed_ms, tuned_ms, self._coverage(fixed), self._coverage(tuned))

    def _timed(self, contender: Contender, policy: Policy, batch: Batch) -> tuple[float, StepPlan]:
        scenario = contender.variant(self.scenario).scenario  # a new one, whose model remembers no unit
        model, pipeline, curves = scenario.model, scenario.pipeline, scenario.curves
        begin = time.perf_counter()
        plan, _ = plan_and_timeline(batch, model, TOPOLOGY, policy, curves, pipeline)
        return (time.perf_counter() - begin) * 1e3, plan

    def _coverage(self, plan: StepPlan) -> Floats:
        """[units] mean over tokens and layers."""
        units = [unit for unit in plan.micro_batches if unit.segments]
        budgets = np.array([unit.budgets for unit in units])
        tried, places = np.unique(budgets, return_inverse=True)
        covered = self.scenario.curves.of_units(budgets.shape[1], [unit.segments for unit in units], tried)
        found: Floats = np.take_along_axis(covered, places.reshape(*budgets.shape, 1), 2)[..., 0].mean(1)
        return found


def part_rows(distribution: str, steps: int, first: int) -> tuple[Row, ...]:
    """In a worker."""
    return Simulation(distribution, steps).rows(first, PART)


def distribution_rows(
    distribution: str, parts: Sequence[tuple[Row, ...]], planning: Mapping[str, Sequence[Planned]]
) -> list[dict[str, Any]]:
    """Args:
    parts: of equally many steps each, so that their means are those of all steps.
    planning: name -> the timed batches of a contender that tunes.
    """

    def mean(place: int, name: str) -> float:
        return float(np.mean([getattr(part[place], name) for part in parts]))

    base_ms, base_coverage = mean(0, "step_ms"), mean(0, "coverage")
    return [
        {
            "kind": "simulated",
            "what": "variants",
            "distribution": distribution,
            "schedule": contender.schedule,
            "variant": contender.name,
            "policy": contender.policy,
            "unit_size": parts[0][place].unit_size,
            "imbalance": mean(place, "imbalance_all"),
            "imbalance_slot": mean(place, "imbalance_slot"),
            "imbalance_rank": mean(place, "imbalance_rank"),
            "busy_fraction": mean(place, "busy_fraction"),
            "ms": mean(place, "step_ms"),
            "speedup_vs_random": base_ms / mean(place, "step_ms"),
            **planning_record(planning.get(contender.name, ())),
            "mean_budget": mean(place, "mean_budget"),
            "coverage": mean(place, "coverage"),
            "coverage_change": mean(place, "coverage") / base_coverage - 1,
        }
        for place, contender in enumerate(contenders())
    ]


def planning_record(timed: Sequence[Planned]) -> dict[str, float | None]:
    """Medians, and by how much the mean coverage of micro-batches changes."""
    if not timed:
        return dict.fromkeys(("planning_ms", "overhead_ms", "coverage_change_of_units"))
    before, after = (np.concatenate([getattr(one, f"{kind}_coverage") for one in timed]) for kind in ("fixed", "tuned"))
    return {
        "planning_ms": float(np.median([one.tuned_ms for one in timed])),
        "overhead_ms": float(np.median([one.tuned_ms - one.fixed_ms for one in timed])),
        "coverage_change_of_units": float(after.mean() / before.mean() - 1),
    }


def simulated(console: Console, quick: bool) -> dict[str, Any]:
    """Rows of all distributions and the settings behind them."""
    steps, timed_steps = (QUICK_STEPS, QUICK_TIMED_STEPS) if quick else (STEPS, TIMED_STEPS)
    parts: dict[tuple[str, int], tuple[Row, ...]] = {}
    # Workers start afresh: a copy of this process would hold half of the progress display's thread.
    with (
        ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn"), gc.disable) as pool,
        progress_bars(console) as progress,
    ):
        watch = follow(progress, "simulating, steps") or (lambda *_: None)
        running = {
            pool.submit(part_rows, name, steps, first): (name, first)
            for name in DISTRIBUTIONS
            for first in range(0, steps, PART)
        }
        watch(0, len(running) * PART)
        for done in as_completed(running):
            parts[running[done]] = done.result()
            watch(len(parts) * PART, len(running) * PART)
    rows: list[dict[str, Any]] = []
    with progress_bars(console) as progress:  # nothing else computes while plans are timed
        for name in DISTRIBUTIONS:
            planning = timed_planning(Simulation(name, steps), timed_steps, follow(progress, f"timing plans, {name}"))
            rows += distribution_rows(name, [parts[name, first] for first in range(0, steps, PART)], planning)
    scenario = Simulation(DISTRIBUTIONS[0], steps).scenario
    settings = {
        "model": MODEL,
        "device": DEVICE,
        "topology": f"dp{TOPOLOGY.dp}pp{TOPOLOGY.pp}",
        "batch_size": BATCH_SIZE,
        "block_size": BLOCK,
        "budget": BUDGET,
        "unit_size": UNIT_SIZE,
        "steps": steps,
        "timed_steps": timed_steps,
        "coverage": "curves measured on another model" if scenario.curves.values else "a prior, not measured",
        "seed": SEED,
    }
    return {"settings": settings, "rows": rows}


def timed_planning(
    simulation: Simulation, steps: int, watch: Callable[[int, int], None] | None
) -> dict[str, list[Planned]]:
    """Of all contenders that tune, on the first steps; they take turns at every step."""
    tuning = [contender for contender in contenders() if tunes(contender.policy)]
    found: dict[str, list[Planned]] = {contender.name: [] for contender in tuning}
    for step, batch in enumerate(simulation.batches[:steps]):
        for place, contender in enumerate(tuning, 1):
            found[contender.name].append(simulation.planned(contender, batch))
            if watch is not None:
                watch(step * len(tuning) + place, steps * len(tuning))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for the real steps, all in all (default 4)")
    parser.add_argument("--train", action="store_true", help="train with fixed and with tuned budgets too")
    parser.add_argument("--train-minutes", type=float, default=TRAIN_MINUTES, help="after which no seed starts anew")
    parser.add_argument("--simulate-only", action="store_true")
    parser.add_argument("--measure-only", action="store_true")
    parser.add_argument("--quick", action="store_true", help="few steps, shorter real samples")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker and is_worker():
        work(options.worker, options.minutes, options.quick, tuning_steps.run_steps, tuning_steps.record)
        return
    console = Console(width=max(Console().width, 132))
    settings: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    parts = {}
    if not options.measure_only:
        parts["simulated"] = lambda: simulated(console, options.quick)
    if not options.simulate_only:
        parts["measured"] = lambda: measured_steps(Path(__file__), options.minutes, options.quick)
    if options.train:
        parts["trained"] = lambda: tuning_runs.trained(console, options.train_minutes, options.quick)
    for name, run in parts.items():
        result = run()
        settings[name] = result["settings"]
        rows += result["rows"]
    show(console, {"settings": settings, "rows": rows})
    if options.json:
        write_rows(options.json, rows, settings=settings)


if __name__ == "__main__":
    main()
