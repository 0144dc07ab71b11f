"""Do chunks and packs make real steps faster, at the times that were predicted? And what memory do chunks need?

    python benchmarks/chunked_step.py --json benchmarks/results/chunked_step.json

Trains nothing: two processes with one thread each run every contender's plan of the same global batches of real
samples on the same weights, in an order that rotates from step to step. The latency table is measured first, in the
same run, and measured times correct it online. Then single long samples run in a process of their own each
(`chunked_memory.py`), whole and in chunks, for their peak memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from chunked_memory import memory_rows
from chunked_records import Run, Step, relative_differences, step_rows, term_rows, timed_units
from chunked_tables import show
from record import write_rows
from sparsebalance.planning.correction import Correction
from sparsebalance.planning.errors import CheckFailed
from sparsebalance.planning.latency import LatencyModel
from sparsebalance.planning.pipeline import PipelineModel
from sparsebalance.planning.plan import Sample, StepPlan
from sparsebalance.planning.policy import Policy, plan_step
from sparsebalance.planning.table import LatencyTable
from sparsebalance.profiling.memory import PeakMemory
from sparsebalance.reporting.progress import follow, progress_bars
from sparsebalance.training.config import CompareConfig, load_config
from sparsebalance.training.feedback import Learner
from sparsebalance.training.launch import is_worker
from sparsebalance.training.parallel import start, stop
from sparsebalance.training.session import Session, configured_policy, open_session

PEERS = ("random", "kk_tokens", "kk_tokens_packed", "nextfit_packing", "binpack")
UNIT_SIZES = (2048, 4096, 8192)
KEPT_SIZE = 4096  # unit size that also runs with one chunk kept
STRIDE = 5  # contenders by which the order moves on
LIMIT = 1e-5  # relative difference of loss and gradient norm to random
QUICK_LENGTH, QUICK_BATCH, QUICK_MEASURE_S, QUICK_MINUTES = 16_384, 4, 15.0, 1.5


StepOf = TypeVar("StepOf")
Learned = TypeVar("Learned")
RunSteps = Callable[[Session, LatencyTable, tuple[float, ...], float, Callable[[], None]], tuple[list[StepOf], Learned]]
Record = Callable[[Session, LatencyTable, Sequence[StepOf], Learned], dict[str, Any]]


def demo(quick: bool) -> CompareConfig:
    """The demo's config; quick: shorter samples, half of the batch, a shorter measurement."""
    config = load_config(Path("examples/demo.yaml"), CompareConfig)
    if not quick:
        return config
    data = replace(config.data, max_length=QUICK_LENGTH, on_long="drop", batch_size=QUICK_BATCH)
    return replace(config, data=data, balance=replace(config.balance, measure_s=QUICK_MEASURE_S))


def contenders(config: CompareConfig) -> dict[str, Policy]:
    """By the name that the tables use; the first is what all others are compared with."""
    found = {name: configured_policy(config, name) for name in PEERS}
    found |= {f"dense_chunks {size}": configured_policy(config, "dense_chunks", size) for size in UNIT_SIZES}
    found["sab whole"] = configured_policy(config, "sab")
    found |= {f"sab {size}": configured_policy(config, "sab", size) for size in UNIT_SIZES}
    found[f"sab {KEPT_SIZE} keep 1"] = replace(found[f"sab {KEPT_SIZE}"], keep_chunks=1)
    return found


def run_steps(
    session: Session, table: LatencyTable, factors: tuple[float, ...], end: float, on_turn: Callable[[], None]
) -> tuple[list[Step], Correction]:
    """All contenders on one global batch after the other, at least two, until no more would be done at `end`.

    Raises:
        CheckFailed: a contender's loss or gradient norm is not that of `random`.
    """
    assert isinstance(session.config, CompareConfig)
    policies = contenders(session.config)
    learner, pipeline = Learner(table, Correction(factors), True), session.pipeline(table)
    names, longest_s = list(policies), 0.0
    steps: list[Step] = []
    while len(steps) < 2 or not session.ranks.from_first(time.perf_counter() + longest_s > end):
        begin, place = time.perf_counter(), len(steps)
        samples, model = session.batches.at(place), learner.corrected(learner.feedback())
        plans = {name: _plan(session, policy, model, samples, pipeline) for name, policy in policies.items()}
        if not steps:  # the largest micro-batch once untimed: its memory is then there for all
            run_plan(
                session, max(plans.values(), key=lambda plan: max(unit.tokens for unit in plan.micro_batches)), "first"
            )
        runs = {}
        for name in in_turn(names, place):
            runs[name] = run_plan(session, plans[name], f"step {place}, {name}")
            on_turn()
        steps.append({name: runs[name] for name in names})
        check_same_gradient(steps[-1])
        learner.learn_times([timed_units(runs.values(), rank) for rank in range(session.ranks.world)])
        longest_s = max(longest_s, time.perf_counter() - begin)
    return steps, learner.feedback().correction


def in_turn(names: Sequence[str], step: int) -> list[str]:
    """The order of a step: every two steps others come first, and the second of the two runs backwards, so that what a
    machine loses or gains steadily within a step hits all alike."""
    first = step // 2 * STRIDE % len(names)
    order = [*names[first:], *names[:first]]
    return order[::-1] if step % 2 else order


def _plan(
    session: Session, policy: Policy, model: LatencyModel, samples: list[Sample], pipeline: PipelineModel
) -> StepPlan:
    plan = plan_step(samples, model, session.topology, policy, pipeline=pipeline)
    plan.validate(samples, policy.token_cap)
    session.check_same_plan(plan)
    return plan


def run_plan(session: Session, plan: StepPlan, where: str) -> Run:
    session.ranks.barrier()
    with PeakMemory() as peak:
        begin = time.thread_time()
        result, step_ms, _ = session.run(plan, where)
        cpu_ms = (time.thread_time() - begin) * 1e3
    gathered = session.ranks.gather((result, step_ms, cpu_ms, peak.megabytes))
    results, times, cpu_times, memory = zip(*gathered, strict=True)
    return Run(
        plan=plan,
        results=list(results),
        step_ms=max(times),
        cpu_ms=max(cpu_times),
        memory_mb=None if None in memory else max(memory),
        loss=sum(one.loss for one in results),
        grad_norm=session.gradients.norm(),
    )


def check_same_gradient(step: Step) -> None:
    loss, norm = relative_differences(step)
    for name in step:
        if not (loss[name] <= LIMIT and norm[name] <= LIMIT):  # a NaN fails too
            raise CheckFailed(
                f"{name}: loss differs from random's by {loss[name]:.1e} and gradient norm by {norm[name]:.1e}, over "
                f"{LIMIT:.0e}; its plan did not compute the same gradient"
            )


def work(
    out: Path, minutes: float, quick: bool, run_steps: RunSteps[StepOf, Learned], record: Record[StepOf, Learned]
) -> None:
    """In each process: measure the table, run the steps; the first one writes the record of what came out."""
    begin = time.perf_counter()
    config = demo(quick)
    ranks = start(config.parallel)
    session = open_session(config, ranks)
    progress = progress_bars(Console()) if ranks.is_first else None
    with progress or nullcontext():
        table, factors = session.latency_table(follow(progress, "measuring this machine, s"))
        watch, limit = follow(progress, "contenders in turn, s") or (lambda *_: None), round(60 * minutes)

        def on_turn() -> None:
            watch(min(round(time.perf_counter() - begin), limit), limit)

        steps, learned = run_steps(session, table, factors, begin + 60 * minutes, on_turn)
        watch(limit, limit)
    if ranks.is_first:
        out.write_text(json.dumps(record(session, table, steps, learned)))
    stop()


def _record(session: Session, table: LatencyTable, steps: Sequence[Step], correction: Correction) -> dict[str, Any]:
    config = session.config
    assert isinstance(config, CompareConfig)
    policies = contenders(config)
    lengths = [
        segment.tokens for step in steps for unit in step["random"].plan.micro_batches for segment in unit.segments
    ]
    settings = {
        "processes": session.ranks.world,
        "threads": config.parallel.threads,
        "layers": table.layers,
        "hidden": table.identity.decoder.hidden,
        "block_size": table.block_size,
        "budget": config.attention.budget,
        "batch_size": config.data.batch_size,
        "steps": len(steps),
        "lengths": lengths,
        "table": dict(table.provenance),
        "table_residual": table.residual,
        "term_factors": dict(correction.terms),
        "rank_factors": list(correction.ranks),
    }
    return {"settings": settings, "rows": step_rows(steps, policies) + term_rows(steps, policies, table)}


def measured_steps(script: Path, minutes: float, quick: bool) -> dict[str, Any]:
    """Start the processes, which run `script --worker FILE`, and wait for what the first one wrote.

    Raises:
        SystemExit: one of them failed; it has said why.
    """
    processes = demo(quick).parallel.dp
    with tempfile.TemporaryDirectory(prefix=f"{script.stem}-") as folder:
        out = Path(folder) / "steps.json"
        arguments = [str(script), "--worker", str(out), "--minutes", str(minutes), *(["--quick"] if quick else [])]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        # The launcher warns about the number of threads where it is not told.
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        status = subprocess.run([*launcher, *arguments], env=environment).returncode
        if status:
            raise SystemExit(f"the steps' processes ended with status {status}")
        record: dict[str, Any] = json.loads(out.read_text())
        return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--minutes", type=float, help="for the steps, measuring the table included (default 6)")
    parser.add_argument("--quick", action="store_true", help="shorter samples, few steps, fewer memory cases")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    minutes = options.minutes or (QUICK_MINUTES if options.quick else 6.0)
    if options.worker and is_worker():
        work(options.worker, minutes, options.quick, run_steps, _record)
        return
    record = measured_steps(Path(__file__), minutes, options.quick)
    console = Console(width=max(Console().width, 132))
    with progress_bars(console) as progress:
        rows = record["rows"] + memory_rows(options.quick, follow(progress, "memory of one sample, cases"))
    show(console, {**record, "rows": rows})
    if options.json:
        write_rows(options.json, rows, settings=record["settings"])


if __name__ == "__main__":
    main()
