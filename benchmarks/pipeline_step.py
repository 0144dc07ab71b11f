"""Does running from the plan make a pipeline faster, as simulated? Real steps on two processes, one core each.

    python benchmarks/pipeline_step.py --json benchmarks/results/pipeline_step.json

A small decoder on two stages runs every variant of the same samples on the same weights, in an order that rotates:
first a heavy-tailed step, many times, then steps of real lengths, once each. All variants have the same router. Two
figures stand beside each other: wall time, which other programs on the machine disturb; and a replay, the simulator's
timeline with the processor time that every single action really took. A replay is not a measured step time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from pipeline_records import Run, show, variant_rows
from record import write_rows
from sparsebalance.planning.correction import Correction
from sparsebalance.planning.errors import CheckFailed
from sparsebalance.planning.latency import LatencyModel
from sparsebalance.planning.lengths import read_lengths
from sparsebalance.planning.memory import MemoryModel
from sparsebalance.planning.micro_batches import micro_batches
from sparsebalance.planning.pipeline import PipelineModel, ScheduleName, layers_by_time, rank_pipelines, simulate_plan
from sparsebalance.planning.plan import Latency, MicroBatch, Sample, Segment, StepPlan, Topology
from sparsebalance.planning.policy import named_policy, plan_step
from sparsebalance.planning.simulator import Network
from sparsebalance.planning.unit_size import fastest_unit_size
from sparsebalance.planning.units import longest_first, pack_sorted
from sparsebalance.profiling.measure import measure
from sparsebalance.profiling.memory import PeakMemory
from sparsebalance.profiling.network import measure_network
from sparsebalance.reporting.progress import follow, progress_bars
from sparsebalance.training.config import AttentionConfig, ModelConfig, OptimizerConfig, ParallelConfig, RunConfig
from sparsebalance.training.data import IGNORE, Example
from sparsebalance.training.engine import Engine
from sparsebalance.training.feedback import Feedback, Learner
from sparsebalance.training.launch import is_worker
from sparsebalance.training.model import build_model, identity_of
from sparsebalance.training.parallel import Ranks, start, stop
from sparsebalance.training.results import merged
from sparsebalance.training.topology import own_part

HEAVY = (16384, 4096, 2048, 8192, 1024, 3072, 512, 6144, 1536, 2048)
MODEL = ModelConfig(layers=4, hidden=128, intermediate=384, heads=4, kv_heads=2)
ATTENTION = AttentionConfig(block_size=64, budget=4, granularity="block")
VOCABULARY = 512
PACKED = 4096  # tokens of a pack of the packed baseline, which leaves longer samples whole
UNIT_SIZES = (512, 1024, 2048, 4096)
REAL_BATCH, REAL_LONGEST = 8, 8192  # samples of a step of real lengths, tokens of the longest
LONGEST = max(HEAVY)
TARGETS = 0.1  # share of a sample's tokens, its last ones, that are answers
TOPOLOGY = Topology(pp=2)
LIMIT = 1e-5  # relative difference of loss and gradient norm between variants with fixed budgets
SEED = 0


@dataclass(frozen=True)
class Amount:
    """How much is run: rounds of the heavy-tailed step, steps of real lengths, seconds to measure the table."""

    rounds: int
    steps: int
    measure_s: float


FULL, QUICK = Amount(3, 20, 45.0), Amount(1, 1, 15.0)


@dataclass(frozen=True)
class Variant:
    """Attributes:
    units: rule that makes micro-batches of samples without us; None plans by `policy`.
    """

    name: str
    schedule: ScheduleName
    units: Callable[[Sequence[Sample]], list[tuple[Segment, ...]]] | None = None
    policy: str = ""


def given(samples: Sequence[Sample]) -> list[tuple[Segment, ...]]:
    return [(Segment.whole(sample),) for sample in samples]


def sorted_units(samples: Sequence[Sample]) -> list[tuple[Segment, ...]]:
    return [(segment,) for segment in longest_first([Segment.whole(sample) for sample in samples])]


def packed(samples: Sequence[Sample]) -> list[tuple[Segment, ...]]:
    """Short samples together, longest first."""
    segments = longest_first([Segment.whole(sample) for sample in samples])
    long, short = ([s for s in segments if (s.tokens > PACKED) == which] for which in (True, False))
    units = [*((segment,) for segment in long), *pack_sorted(short, PACKED)]
    return sorted(units, key=lambda unit: -sum(segment.tokens for segment in unit))


VARIANTS = (
    Variant("given order", "1f1b", given),
    Variant("longest first", "1f1b", sorted_units),
    Variant("packed", "1f1b", packed),
    Variant("sab", "1f1b", policy="sab"),
    Variant("sab, split backwards", "zero_bubble", policy="sab"),
    Variant("sab_dst, split backwards", "zero_bubble", policy="sab_dst"),
)


class Bench:
    """One process: its stage, the latency table, and what earlier steps taught."""

    def __init__(self, ranks: Ranks, amount: Amount, progress: Callable[[int, int], None] | None) -> None:
        self.ranks = ranks
        config = RunConfig(model=MODEL, attention=ATTENTION, optimizer=OptimizerConfig())
        model = build_model(MODEL, ATTENTION, VOCABULARY, LONGEST, SEED)
        identity = identity_of(model.config, config)
        measured = measure(
            model, identity, LONGEST, 4 * ATTENTION.budget, limit_s=amount.measure_s, progress=progress,
            gather=ranks.gather,
        )  # fmt: skip
        self.table = replace(measured.table, network=measure_network(ranks))
        self.layers = layers_by_time([self.unit(HEAVY)], self.table, TOPOLOGY.pp)
        whole = Engine.whole(model, ATTENTION.block_size, ATTENTION.granularity)
        self.engine, self.gradients = own_part(whole, ranks, self.layers)
        self.memory = MemoryModel(
            identity.decoder, ATTENTION.block_size, ATTENTION.granularity, ATTENTION.budget, MODEL.dtype
        )
        self.learner = Learner(self.table, Correction((1.0,)), True)

    def unit(self, lengths: Sequence[int]) -> MicroBatch:
        segments = tuple(Segment.whole(sample) for sample in samples_of(lengths))
        return MicroBatch(segments, (ATTENTION.budget,) * MODEL.layers, Latency(0.0, 0.0))

    def pipeline(self, schedule: ScheduleName) -> PipelineModel:
        network = self.table.network
        assert network is not None  # there are two processes
        link = network.point_to_point
        return PipelineModel(schedule, Network(link.latency_ms, link.ms_per_mb), self.memory, self.layers)

    def plan(self, variant: Variant, samples: Sequence[Sample], known: Feedback) -> StepPlan:
        model, pipeline = self.learner.corrected(known), self.pipeline(variant.schedule)
        if variant.units is None:
            return self.planned(variant.policy, samples, model, pipeline, known)
        placement = (tuple(variant.units(samples)),)
        budgets = [[(ATTENTION.budget,) * MODEL.layers] * len(placement[0])]
        ranks = micro_batches(placement, budgets, model, None)
        step_ms = simulate_plan(ranks, model, TOPOLOGY, pipeline).step_ms
        return StepPlan(variant.name, TOPOLOGY, ATTENTION.block_size, ranks, step_ms)

    def planned(
        self, policy: str, samples: Sequence[Sample], model: LatencyModel, pipeline: PipelineModel, known: Feedback
    ) -> StepPlan:
        def of_size(some: Sequence[Sample], size: int | None) -> StepPlan:
            rule = named_policy(policy, budget=ATTENTION.budget, token_cap=LONGEST, unit_size=size)
            return plan_step(some, model, TOPOLOGY, rule, known.curves, pipeline)

        return of_size(samples, fastest_unit_size([samples], UNIT_SIZES, of_size))

    def run(self, plan: StepPlan, schedule: ScheduleName, examples: Sequence[Example], model: LatencyModel) -> Run:
        units = plan.ranks[0]
        (pipeline,) = rank_pipelines(plan.ranks, model, TOPOLOGY, self.pipeline(schedule))
        self.gradients.begin()
        self.ranks.barrier()
        with PeakMemory() as peak:
            begin, cpu = time.perf_counter(), time.thread_time()
            result = self.engine.run(units, examples, plan.targets, schedule=pipeline.schedule)
            cpu_ms, step_ms = (time.thread_time() - cpu) * 1e3, (time.perf_counter() - begin) * 1e3
        self.gradients.reduce()
        gathered = self.ranks.gather((result, step_ms, cpu_ms, peak.megabytes))
        results, times, cpu_times, memory = zip(*gathered, strict=True)
        return Run(plan, pipeline, list(results), list(times), list(cpu_times), list(memory), self.gradients.norm())


def example(sample: Sample) -> Example:
    """Random tokens."""
    ids = np.random.default_rng((SEED, sample.id, sample.length)).integers(0, VOCABULARY, sample.length, dtype=np.int32)
    targets = np.append(ids[1:], np.int32(IGNORE))
    targets[: sample.length - 1 - sample.targets] = IGNORE
    return Example(ids, targets)


def samples_of(lengths: Sequence[int]) -> list[Sample]:
    return [Sample(i, n, max(1, round(n * TARGETS))) for i, n in enumerate(lengths)]


def real_steps(count: int) -> list[list[Sample]]:
    """Lengths drawn from those of the real samples that are not too long."""
    lengths = [n for n in read_lengths("real").values.tolist() if 2 <= n <= REAL_LONGEST]
    order = np.random.default_rng(SEED).permutation(len(lengths))
    chosen = [lengths[place] for place in order[: count * REAL_BATCH]]
    return [samples_of(chosen[first : first + REAL_BATCH]) for first in range(0, len(chosen), REAL_BATCH)]


def in_turn(place: int) -> list[Variant]:
    first = place % len(VARIANTS)
    order = [*VARIANTS[first:], *VARIANTS[:first]]
    return order[::-1] if place % 2 else order


def run_all(bench: Bench, amount: Amount, on_turn: Callable[[], None]) -> tuple[dict[str, list[Run]], ...]:
    """By variant, runs of the heavy-tailed step under one plan each, and of the steps of real lengths.

    Raises:
        CheckFailed: variants with fixed budgets did not compute the same.
    """
    heavy: dict[str, list[Run]] = {variant.name: [] for variant in VARIANTS}
    real: dict[str, list[Run]] = {variant.name: [] for variant in VARIANTS}
    samples = samples_of(HEAVY)
    examples = [example(sample) for sample in samples]

    def learn(runs: Mapping[str, Run]) -> None:
        # Of all variants: chunks, packs and whole samples are off by different factors.
        pairs = [pair for run in runs.values() for pair in zip(run.plan.ranks[0], run.joined.units, strict=True)]
        bench.learner.learn_times([pairs])

    def one(place: int, plans: Mapping[str, StepPlan], some: Sequence[Example], known: Feedback) -> dict[str, Run]:
        model, found = bench.learner.corrected(known), {}
        for variant in in_turn(place):
            found[variant.name] = bench.run(plans[variant.name], variant.schedule, some, model)
            on_turn()
        check_same_gradient(found)
        return found

    # Untimed: brings code and memory there, and teaches coverage and how far the table is off.
    known = bench.learner.feedback()
    first = {variant.name: bench.plan(variant, samples, known) for variant in VARIANTS}
    probes = bench.ranks.gather(bench.engine.probe(first[VARIANTS[0].name].ranks[0], examples, 16))
    bench.learner.learn_coverage(first[VARIANTS[0].name], merged(probes))
    learn(one(0, first, examples, known))
    known = bench.learner.feedback()
    plans = {variant.name: bench.plan(variant, samples, known) for variant in VARIANTS}
    for place in range(amount.rounds):
        runs = one(place, plans, examples, known)
        for name, run in runs.items():
            heavy[name].append(run)
    learn(runs)
    for place, step in enumerate(real_steps(amount.steps)):
        known = bench.learner.feedback()
        plans = {variant.name: bench.plan(variant, step, known) for variant in VARIANTS}
        runs = one(place, plans, [example(sample) for sample in step], known)
        for name, run in runs.items():
            real[name].append(run)
        learn(runs)
    return heavy, real


def check_same_gradient(runs: Mapping[str, Run]) -> None:
    base = runs[VARIANTS[0].name]
    for variant in VARIANTS:
        run = runs[variant.name]
        if variant.policy != "sab_dst" and not max(
            abs(run.loss / base.loss - 1), abs(run.grad_norm / base.grad_norm - 1)
        ) <= LIMIT:  # fmt: skip
            raise CheckFailed(f"{variant.name}: loss {run.loss} and gradient norm {run.grad_norm}, but {base.name} has "
                              f"{base.loss} and {base.grad_norm}")  # fmt: skip


def work(out: Path, amount: Amount) -> None:
    ranks = start(ParallelConfig(dp=1, pp=TOPOLOGY.pp))
    progress = progress_bars(Console()) if ranks.is_first else None
    with progress or nullcontext():
        bench = Bench(ranks, amount, follow(progress, "measuring this machine, s"))
        turns = (amount.rounds + 1 + amount.steps) * len(VARIANTS)
        watch, done = follow(progress, "variants in turn") or (lambda *_: None), [0]

        def on_turn() -> None:
            done[0] += 1
            watch(done[0], turns)

        heavy, real = run_all(bench, amount, on_turn)
    if ranks.is_first:
        settings = {
            "processes": ranks.world,
            "model": {"layers": MODEL.layers, "hidden": MODEL.hidden, "heads": MODEL.heads, "kv_heads": MODEL.kv_heads},
            "layers_by_stage": list(bench.layers),
            "block_size": ATTENTION.block_size,
            "budget": ATTENTION.budget,
            "granularity": ATTENTION.granularity,
            "heavy": list(HEAVY),
            "rounds": amount.rounds,
            "real_steps": amount.steps,
            "real_batch": REAL_BATCH,
            "longest": REAL_LONGEST,
            "targets": TARGETS,
            "packed": PACKED,
            "term_factors": dict(bench.learner.feedback().correction.terms),
        }
        curves = bench.learner.feedback().curves
        network = bench.pipeline("1f1b").network
        rows = variant_rows("heavy-tailed", heavy, network, curves, same_plan=True)
        rows += variant_rows("real", real, network, curves, same_plan=False)
        out.write_text(json.dumps({"settings": settings, "rows": rows}))
    stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--quick", action="store_true", help="few rounds and steps")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker and is_worker():
        work(options.worker, QUICK if options.quick else FULL)
        return
    with tempfile.TemporaryDirectory(prefix="pipeline-step-") as folder:
        out = Path(folder) / "record.json"
        arguments = [__file__, "--worker", str(out), *(["--quick"] if options.quick else [])]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if status := subprocess.run([*launcher, *arguments], env=environment).returncode:
            raise SystemExit(f"the steps' processes ended with status {status}")
        record: dict[str, Any] = json.loads(out.read_text())
    show(Console(width=max(Console().width, 150)), record)
    if options.json:
        write_rows(options.json, record["rows"], settings=record["settings"])


if __name__ == "__main__":
    main()
