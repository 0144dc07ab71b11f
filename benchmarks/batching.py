"""Which batching is fastest? All policies on four length distributions and four topologies, by simulation.

    python benchmarks/batching.py --json benchmarks/results/batching.json

Analytic times of an H200 (Qwen2.5-3B, MoBA with 32 blocks of 256 keys, and the same with every block read), fixed
seeds. Every policy plans the same samples, so speed-ups are ratios of total time. Beside it: how far placements are
from the exact optimum on small cases, and the imbalance of rank sums over many batches.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console

from batching_tables import show
from record import write_rows
from sparsebalance.planner.forecast import global_batches
from sparsebalance.planner.scenario import Scenario
from sparsebalance.planning.baselines import BASELINES, DenseChunks
from sparsebalance.planning.batching import Batching, Placement, SparsityAware
from sparsebalance.planning.composition import Batch, Window, in_order
from sparsebalance.planning.decoder import named_decoder
from sparsebalance.planning.expected import ExpectedBudgets
from sparsebalance.planning.hardware import named_device
from sparsebalance.planning.imbalance import imbalance
from sparsebalance.planning.latency import Floats, LatencyModel
from sparsebalance.planning.lengths import read_lengths
from sparsebalance.planning.lower_bound import least_makespan
from sparsebalance.planning.pipeline import ScheduleName
from sparsebalance.planning.plan import Sample, Topology
from sparsebalance.planning.policy import Policy, plan_and_timeline
from sparsebalance.planning.units import cut
from sparsebalance.reporting.progress import follow, progress_bars

MODEL, DEVICE, BLOCK, BUDGET = "qwen2.5-3b", "h200", 256, 32
DISTRIBUTIONS = ("longalign-10k", "chatqa2", "longalpaca-12k", "real")
TOPOLOGIES = {Topology(4, 4): 16, Topology(8, 1): 16, Topology(2, 8): 16, Topology(64, 4): 256}  # -> global batch
UNIT_SIZES = (1024, 2048, 4096, 8192, 16384)
WINDOW_STEPS = 16
STEPS = 32  # of a cell, two windows; those of large global batches are one window
CHOOSING_SAMPLES = 64  # so many decide on the unit size: 4 global batches of 16, or one large one
SEED = 0
PROCESSES = 2
CASES = 200  # small placements that are solved exactly
IMBALANCE_BATCHES = 128

Attention = Literal["sparse", "dense"]
Row = dict[str, Any]
PLAIN = ("random", "batch_rebalance", "kk_quadratic", "kk_tokens", "kk_tokens_packed", "nextfit_packing", "binpack")
OURS = ("sab", "sab_window")
Compose = Callable[[Sequence[Sample], int, Floats | None], list[Batch]]


@dataclass(frozen=True)
class Contender:
    """A policy as it is simulated; `unit_size` is None where samples stay whole."""

    policy: str
    batching: Batching
    schedule: ScheduleName = "1f1b"
    unit_size: int | None = None
    compose: Compose = in_order


def by_length(order: Sequence[Sample], batch_size: int, costs: Floats | None) -> list[Batch]:
    """transformers' `group_by_length` with the whole run as its megabatch: at home it has 50 steps.

    `GroupByLength` is the same for a data set; in a run this short it would have only a quarter of its steps.
    """
    ordered = sorted(order, key=lambda sample: -sample.length)
    return [ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size)]


@dataclass(frozen=True)
class Cell:
    """One data set on one topology under one kind of attention, over so many global batches."""

    distribution: str
    topology: Topology
    attention: Attention
    steps: int

    @property
    def weight(self) -> int:
        """Samples, as a measure of how long it takes."""
        return self.steps * TOPOLOGIES[self.topology]


class Simulation:
    """The samples and the scenario of a cell."""

    def __init__(self, cell: Cell) -> None:
        lengths = read_lengths(cell.distribution)
        self.batch_size = TOPOLOGIES[cell.topology]
        self.batches = global_batches(lengths, self.batch_size, cell.topology.dp, cell.steps, SEED)
        self.token_cap = max(sample.length for batch in self.batches for sample in batch)
        # Dense attention is a budget under which every block is read.
        self.budget = BUDGET if cell.attention == "sparse" else -(-self.token_cap // BLOCK)
        self.scenario = Scenario(named_decoder(MODEL), named_device(DEVICE), cell.topology, BLOCK, self.budget)
        self.pipelines = {name: replace(self.scenario, schedule=name).pipeline for name in ("1f1b", "zero_bubble")}

    def run(self, contenders: Sequence[Contender], steps: int | None = None) -> list[Totals]:
        """All contenders on the first steps, all of them by default.

        They take turns at every step, because the model remembers the units that they have in common.
        """
        composed = [self.composed(contender)[:steps] for contender in contenders]
        found = [[self.step(*turn) for turn in zip(contenders, batches)] for batches in zip(*composed)]
        return [Totals.of(taken) for taken in zip(*found)]

    def composed(self, contender: Contender) -> list[Batch]:
        if contender.compose == in_order:
            return self.batches
        samples = [sample for batch in self.batches for sample in batch]
        return contender.compose(samples, self.batch_size, self.costs(samples, contender.unit_size))

    def step(self, contender: Contender, batch: Batch) -> Step:
        policy = Policy(contender.policy, contender.batching, self.budget, self.token_cap)
        scenario, pipeline = self.scenario, self.pipelines[contender.schedule]
        plan, timeline = plan_and_timeline(batch, scenario.model, scenario.topology, policy, None, pipeline)
        latencies = [[unit.latency.total_ms for unit in rank] for rank in plan.ranks]
        uneven = imbalance(latencies)
        work_ms = sum(map(sum, latencies)) / (scenario.topology.dp * scenario.topology.pp)
        return Step(timeline.step_ms, timeline.busy_fraction, work_ms, (uneven.all, uneven.slot, uneven.rank))

    def costs(self, samples: Sequence[Sample], unit_size: int | None) -> Floats:
        """Predicted milliseconds of each sample, in chunks where it is cut."""
        model, pieces = self.scenario.model, [cut(sample, unit_size, BLOCK) for sample in samples]
        units = [(part,) for parts in pieces for part in parts]
        ms = model.many_terms(units, np.full(model.layers, self.budget)).sum((0, 1))
        starts = np.cumsum([0, *map(len, pieces[:-1])])
        found: Floats = np.add.reduceat(ms, starts)
        return found

    def with_best_size(self, name: str, of_size: Callable[[int], Batching], schedule: ScheduleName) -> Contender:
        """The unit size that is fastest on the first global batches."""
        contenders = [Contender(name, of_size(size), schedule, size) for size in UNIT_SIZES if size <= self.token_cap]
        results = self.run(contenders, max(1, CHOOSING_SAMPLES // self.batch_size))
        return min(zip(contenders, results), key=lambda pair: pair[1].total_ms)[0]


@dataclass(frozen=True)
class Step:
    """One simulated step; `work_ms` is what each device would need if none ever waited."""

    ms: float
    busy: float
    work_ms: float
    imbalances: tuple[float, float, float]


@dataclass(frozen=True)
class Totals:
    """One contender over all steps of a cell.

    Attributes:
        total_ms, work_ms: sums over so many steps.
        busy: busy fraction of all the time. every, slot, rank: mean imbalances, see `Imbalance`.
    """

    total_ms: float
    work_ms: float
    steps: int
    busy: float
    every: float
    slot: float
    rank: float

    @classmethod
    def of(cls, steps: Sequence[Step]) -> Totals:
        total_ms = sum(step.ms for step in steps)
        busy = sum(step.busy * step.ms for step in steps) / total_ms
        every, slot, rank = np.mean([step.imbalances for step in steps], axis=0).tolist()
        return cls(total_ms, sum(step.work_ms for step in steps), len(steps), busy, every, slot, rank)


def contenders_of(simulation: Simulation) -> list[Contender]:
    """All but `sab_window`, peers first."""
    topology = simulation.scenario.topology
    schedules: list[ScheduleName] = ["1f1b", "zero_bubble"] if topology.pp > 1 else ["1f1b"]
    found = [Contender(name, BASELINES[name]) for name in PLAIN]
    found.insert(1, Contender("group_by_length", BASELINES["random"], compose=by_length))
    found += [simulation.with_best_size("dense_chunks", DenseChunks, schedule) for schedule in schedules]
    found.append(Contender("sab", SparsityAware()))
    found += [simulation.with_best_size("sab", SparsityAware, schedule) for schedule in schedules]
    return found


def cell_rows(cell: Cell) -> list[Row]:
    """Every policy of one cell, in the order of its contenders."""
    simulation = Simulation(cell)
    contenders = contenders_of(simulation)
    results = simulation.run(contenders)
    best_sab = min(
        (i for i, contender in enumerate(contenders) if contender.policy == "sab"), key=lambda i: results[i].total_ms
    )
    window = Window(WINDOW_STEPS, cell.topology.dp)
    contenders.append(replace(contenders[best_sab], policy="sab_window", compose=window))
    results += simulation.run(contenders[-1:])
    bound_ms = min(result.work_ms for result in results)  # packing saves fixed costs
    strict = [contender.compose == in_order for contender in contenders]
    peers = [i for i, contender in enumerate(contenders) if contender.policy not in OURS]
    # Who keeps every global batch is compared with peers that do; who moves samples, with all of them.
    rivals = {
        keeps: min((i for i in peers if strict[i] or not keeps), key=lambda i: results[i].total_ms)
        for keeps in (True, False)
    }
    best = [rivals[keeps] for keeps in strict]
    return [
        {
            "kind": "simulated",
            "what": "steps",
            "distribution": cell.distribution,
            "topology": f"dp{cell.topology.dp}pp{cell.topology.pp}",
            "batch_size": simulation.batch_size,
            "steps": result.steps,
            "mode": "strict" if keeps else "window",
            "schedule": contender.schedule,
            "policy": contender.policy,
            "attention": cell.attention,
            "unit_size": contender.unit_size,
            "step_ms": result.total_ms / result.steps,
            "speedup_vs_random": results[0].total_ms / result.total_ms,
            "speedup_vs_best_baseline": results[rival].total_ms / result.total_ms,
            "best_baseline": contenders[rival].policy,
            "best_baseline_schedule": contenders[rival].schedule,
            "imbalance_all": result.every,
            "imbalance_slot": result.slot,
            "imbalance_rank": result.rank,
            "busy_fraction": result.busy,
            "share_of_bound": bound_ms / result.total_ms,
        }
        for contender, result, keeps, rival in zip(contenders, results, strict, best)
    ]


PLACING = ("kk_quadratic", "kk_tokens", "sab")  # one sample on one rank each, so that an exact optimum exists


def gap_rows(cases: int) -> list[Row]:
    """Slowest rank of a placement / that of the best placement there is, over small cases of two distributions.

    A sample counts with the time that it takes alone; `sab` weighs it by nearly that (without a unit's fixed costs).
    """
    decoder, device = named_decoder(MODEL), named_device(DEVICE)
    model = Scenario(decoder, device, Topology(), BLOCK, BUDGET).model
    budgets = ExpectedBudgets((BUDGET,) * model.layers)
    rng = np.random.default_rng(SEED)
    pools = [read_lengths(name).values for name in ("longalign-10k", "real")]
    gaps: dict[str, list[float]] = {name: [] for name in PLACING}
    for case in range(cases):
        ranks = 2 + case % 3
        lengths = rng.choice(pools[case % len(pools)], size=int(rng.integers(ranks + 1, 13))).tolist()
        samples = [Sample(i, length, max(1, length // 10)) for i, length in enumerate(lengths)]
        costs = [model.latency(cut(sample, None, BLOCK), budgets.default).total_ms for sample in samples]
        least = least_makespan(costs, ranks)
        for name, found in gaps.items():
            rule = SparsityAware() if name == "sab" else BASELINES[name]
            placed = rule(samples, model, Topology(dp=ranks), budgets, max(lengths))
            sums = [sum(costs[segment.sample] for unit in rank for segment in unit) for rank in placed]
            found.append(max(sums) / least - 1)
    return [
        {
            "kind": "simulated",
            "what": "gap_to_optimum",
            "policy": name,
            "cases": cases,
            "gap_mean": float(np.mean(found)),
            "gap_p95": float(np.quantile(found, 0.95)),
            "gap_max": max(found),
            "optimal_share": float(np.mean(np.array(found) < 1e-5)),  # the optimum itself is known to 1e-6
        }
        for name, found in gaps.items()
    ]


def imbalance_rows(batches: int) -> list[Row]:
    """Imbalance of rank sums on LongAlign-10k at DP4, 16 samples a batch."""
    topology = Topology(4, 1)
    chosen = global_batches(read_lengths("longalign-10k"), 16, topology.dp, batches, SEED)
    cap = max(sample.length for batch in chosen for sample in batch)
    model = Scenario(named_decoder(MODEL), named_device(DEVICE), topology, BLOCK, BUDGET).model
    budgets = ExpectedBudgets((BUDGET,) * model.layers)
    rules: dict[tuple[str, int | None], Batching] = {(name, None): BASELINES[name] for name in PLAIN}
    rules[("sab", None)] = SparsityAware()
    rules[("sab", 2048)] = SparsityAware(2048)
    rows = []
    for (name, unit_size), rule in rules.items():
        ratios = [rank_imbalance(rule(batch, model, topology, budgets, cap), model, budgets) for batch in chosen]
        rows.append(
            {
                "kind": "simulated",
                "what": "rank_imbalance",
                "distribution": "longalign-10k",
                "topology": "dp4pp1",
                "policy": name,
                "unit_size": unit_size,
                "batches": len(ratios),
                "imbalance_rank": float(np.mean(ratios)),
                "imbalance_rank_max": max(ratios),
            }
        )
    return rows


def rank_imbalance(placement: Placement, model: LatencyModel, budgets: ExpectedBudgets) -> float:
    return imbalance([[model.latency(unit, budgets.default).total_ms for unit in rank] for rank in placement]).rank


def cells_of(steps: int, quick: bool) -> list[Cell]:
    distributions = ("longalign-10k", "real") if quick else tuple(DISTRIBUTIONS)
    return [
        Cell(name, topology, attention, WINDOW_STEPS if batch_size > 16 and not quick else steps)
        for attention in ("sparse", "dense")
        for name in distributions
        for topology, batch_size in TOPOLOGIES.items()
        if batch_size == 16 or not quick
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--steps", type=int, default=STEPS, help="global batches of 16 samples in each cell")
    parser.add_argument("--quick", action="store_true", help="two distributions, small global batches, few steps")
    options = parser.parse_args()
    cells = cells_of(4 if options.quick else options.steps, options.quick)
    results: dict[Cell, list[Row]] = {}
    # Workers start afresh: a copy of this process would hold half of the progress display's thread. Plans hold no
    # cycles, and looking for some takes a sixth of the time.
    with (
        ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn"), gc.disable) as pool,
        progress_bars(Console()) as progress,
    ):
        watch = follow(progress, "simulating, in samples") or (lambda *_: None)
        longest_first = sorted(cells, key=lambda cell: -cell.weight)
        running = {pool.submit(cell_rows, cell): cell for cell in longest_first}
        whole = sum(cell.weight for cell in cells)
        watch(0, whole)
        for done in as_completed(running):
            results[running[done]] = done.result()
            watch(sum(cell.weight for cell in results), whole)
    rows = [row for cell in cells for row in results[cell]]
    rows += gap_rows(20 if options.quick else CASES)
    rows += imbalance_rows(16 if options.quick else IMBALANCE_BATCHES)
    show(Console(width=max(Console().width, 132)), rows)
    if options.json:
        settings = {
            "model": MODEL,
            "device": DEVICE,
            "block_size": BLOCK,
            "budget": BUDGET,
            "window_steps": WINDOW_STEPS,
            "seed": SEED,
        }
        topologies = [{**asdict(topology), "batch_size": size} for topology, size in TOPOLOGIES.items()]
        write_rows(options.json, rows, settings={**settings, "topologies": topologies})


if __name__ == "__main__":
    main()
