"""Peak memory of one sample, whole and in chunks: one case in this process, or all cases in one process each.

In: tokens, unit size, chunks kept, checkpointing. Out: records with measured megabytes above the resting state (the
model, its gradients, and what a first run left) beside those that the memory model predicts, and milliseconds.

    python benchmarks/chunked_memory.py '{"tokens": 16384, "unit_size": 4096, "keep_chunks": 1, "checkpointing": false}'
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sparsebalance.planning.hardware import named_device
from sparsebalance.planning.latency import RooflineModel
from sparsebalance.planning.plan import Sample, Topology
from sparsebalance.planning.policy import plan_step
from sparsebalance.profiling.memory import PeakMemory, memory_in_use
from sparsebalance.profiling.points import random_example
from sparsebalance.training.config import CompareConfig, load_config
from sparsebalance.training.engine import Engine
from sparsebalance.training.gradients import FlatGradients
from sparsebalance.training.memory import sample_memory
from sparsebalance.training.model import build_model, identity_of
from sparsebalance.training.parallel import Ranks, start
from sparsebalance.training.session import configured_policy, read_tokenizer

TOKENS = (4096, 16_384, 65_536)
UNIT_SIZE = 4096
MOST_TARGETS = 1024  # a tenth of the sample, at most so many
TIMED, TIMED_S = 3, 3.0  # runs for the time and seconds for them, whichever comes first; always one run
WATCHED_S = 1.0  # under the watch of memory, which reads it 50 times a second

Row = dict[str, Any]


def cases(quick: bool) -> list[Row]:
    """Whole, in chunks that are all kept, in chunks of which one is kept; a sample of one unit is never cut."""
    found = []
    for checkpointing in (False, True):
        for tokens in TOKENS[:2] if quick else TOKENS:
            ways: list[tuple[int | None, int | None]] = [(None, None)]
            if tokens > UNIT_SIZE:
                ways += [(UNIT_SIZE, None), (UNIT_SIZE, 1)]
            for size, keep in ways:
                found.append({"tokens": tokens, "unit_size": size, "keep_chunks": keep, "checkpointing": checkpointing})
    return found


def memory_rows(quick: bool, progress: Callable[[int, int], None] | None = None) -> list[Row]:
    """All cases, each in a process of its own, so that no peak hides in what another one left.

    Raises:
        SystemExit: a process failed; it has said why.
    """
    rows, todo = [], cases(quick)
    for case in todo:
        done = subprocess.run([sys.executable, __file__, json.dumps(case)], stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit(f"the memory case {case} ended with status {done.returncode}")
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        if progress is not None:
            progress(len(rows), len(todo))
    return rows


def memory_row(case: Row) -> Row:
    """Measure one case in this process, with the demo's model."""
    demo = load_config(Path("examples/demo.yaml"), CompareConfig)
    tokens, unit_size = case["tokens"], case["unit_size"]
    config = replace(
        demo,
        model=replace(demo.model, checkpointing=case["checkpointing"]),
        parallel=replace(demo.parallel, dp=1),
        balance=replace(
            demo.balance, token_cap=tokens, keep_chunks=case["keep_chunks"], max_budget=demo.attention.budget
        ),
    )
    start(config.parallel)
    vocabulary = len(read_tokenizer(config.data.tokenizer))
    model = build_model(config.model, config.attention, vocabulary, tokens, config.seed)
    gradients, attention = FlatGradients(dict(model.named_parameters()), Ranks(0, 1)), config.attention
    identity = identity_of(model.config, config)
    engine = Engine.whole(model, attention.block_size, attention.granularity, config.model.checkpointing)
    sample = Sample(0, tokens, min(tokens // 10, MOST_TARGETS))
    examples = [random_example(tokens, sample.targets, vocabulary, np.random.default_rng(0))]
    # Where all runs on one rank, a plan needs no times: the analytic model stands for them.
    weigher = RooflineModel(identity.decoder, named_device("h100"), attention.block_size, attention.granularity)
    plan = plan_step([sample], weigher, Topology(), configured_policy(config, "sab", unit_size))

    def run() -> tuple[float, float]:
        """Milliseconds by the clock, and of the processor."""
        gradients.begin()
        begin = time.thread_time()
        ms = engine.run(plan.ranks[0], examples, sample.targets).busy_ms
        return ms, (time.thread_time() - begin) * 1e3

    run()
    times: list[tuple[float, float]] = []
    begin = time.perf_counter()
    while not times or (len(times) < TIMED and time.perf_counter() - begin < TIMED_S):
        times.append(run())
    resting = memory_in_use() or 0
    begin = time.perf_counter()
    with PeakMemory() as peak:
        run()
        while time.perf_counter() - begin < WATCHED_S:
            run()
    parts = sample_memory(config, identity, sample, unit_size)
    measured = None if peak.megabytes is None else (peak.megabytes * 2**20 - resting) / 1e6
    return {
        "kind": "measured",
        "what": "memory",
        **case,
        "targets": sample.targets,
        "micro_batches": len(plan.ranks[0]),
        "ms": statistics.median(ms for ms, _ in times),
        "cpu_ms": statistics.median(cpu_ms for _, cpu_ms in times),
        "peak_memory_mb": measured,
        "predicted_memory_mb": parts.activations + parts.state + parts.head,
        "predicted_state_mb": parts.state,
        "peak_without_state_mb": None if measured is None else measured - parts.state,
        "resting_mb": resting / 1e6,
    }


if __name__ == "__main__":
    print(json.dumps(memory_row(json.loads(sys.argv[1]))))
