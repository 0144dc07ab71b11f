"""CPU block-sparse attention, routing included, against torch's dense causal attention.

    python benchmarks/attention.py --json benchmarks/results/attention.json

Contenders alternate within every round, after one warm-up round; figures are medians. Also fits time over the
budget (is it linear?) and measures the peak memory at 32K tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from record import write_rows
from sparsebalance.attention.cpu import attend
from sparsebalance.attention.interface import GRANULARITIES, Granularity, PackedLayout, budget_per_segment
from sparsebalance.attention.moba import MoBARouter
from sparsebalance.profiling.memory import PeakMemory, keep_freed_memory, memory_in_use

HEADS, HEAD_DIM, BLOCK = 4, 64, 64
LENGTHS = (512, 1024, 2048, 4096, 8192)
BUDGETS = (1, 2, 4, 8, 12, 16)  # at the longest length; the others run 4 and 8
MEMORY_LENGTH, MEMORY_BUDGET = 32768, 8

Key = tuple[int, Granularity | None, int]  # length, granularity (None: dense), budget


def inputs(length: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(length, HEADS, HEAD_DIM, generator=generator).requires_grad_() for _ in range(3))
    return q, k, v


def dense(length: int) -> Callable[[], tuple[float, float]]:
    q, k, v = inputs(length)

    def run() -> tuple[float, float]:
        t0 = time.perf_counter()
        heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        t1 = time.perf_counter()
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        return (t1 - t0) * 1e3, (time.perf_counter() - t1) * 1e3

    return run


def sparse(length: int, granularity: Granularity, budget: int) -> Callable[[], tuple[float, float]]:
    q, k, v = inputs(length)

    def run() -> tuple[float, float]:
        t0 = time.perf_counter()
        layout = PackedLayout.from_lengths([length], BLOCK)
        router = MoBARouter(granularity)
        selection = router.select(router.score(q, k, layout), budget_per_segment(budget, layout))
        out, _ = attend(q, k, v, selection, layout)
        t1 = time.perf_counter()
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        return (t1 - t0) * 1e3, (time.perf_counter() - t1) * 1e3

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()

    runs: dict[Key, Callable[[], tuple[float, float]]] = {(n, None, 0): dense(n) for n in LENGTHS}
    for granularity in GRANULARITIES:
        for length in LENGTHS:
            for budget in BUDGETS if length == LENGTHS[-1] else (4, 8):
                runs[length, granularity, budget] = sparse(length, granularity, budget)
    times: dict[Key, list[tuple[float, float]]] = {key: [] for key in runs}
    for index in track(range(options.rounds + 1), "attention rounds"):
        for key, run in runs.items():
            measured = run()
            if index:  # the first round warms up
                times[key].append(measured)

    rows = [row for key in runs if key[1] is not None for row in rows_of(key, times)]
    memory = {granularity: peak_megabytes(granularity) for granularity in GRANULARITIES}
    rows += [memory_row(granularity, megabytes) for granularity, megabytes in memory.items()]
    fits = {granularity: linear_fit(granularity, times) for granularity in GRANULARITIES}
    show(rows, fits, options.threads)
    if options.json:
        write_rows(options.json, rows, threads=options.threads, rounds=options.rounds, r_squared_over_budget=fits)


def rows_of(key: Key, times: dict[Key, list[tuple[float, float]]]) -> list[dict[str, Any]]:
    """Forward (routing included), backward, and both together."""
    length, granularity, budget = key
    rows = []
    for name, part in (
        ("forward", lambda t: t[0]),
        ("backward", lambda t: t[1]),
        ("forward+backward", lambda t: t[0] + t[1]),
    ):
        ours, theirs = [part(t) for t in times[key]], [part(t) for t in times[length, None, 0]]
        ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
        rows.append(
            {
                "kind": "measured",
                "seq_len": length,
                "heads": HEADS,
                "head_dim": HEAD_DIM,
                "block_size": BLOCK,
                "granularity": granularity,
                "budget": budget,
                "pass": name,
                "ms": statistics.median(ours),
                "dense_ms": statistics.median(theirs),
                "speedup_vs_dense": statistics.median(ratios),
                "speedup_min": min(ratios),
                "speedup_max": max(ratios),
                "peak_memory_mb": None,
            }
        )
    return rows


def peak_megabytes(granularity: Granularity) -> float:
    """Most memory that one forward and backward holds beyond q, k, v themselves."""
    run = sparse(MEMORY_LENGTH, granularity, MEMORY_BUDGET)
    before = memory_in_use() or 0
    with PeakMemory() as peak:
        run()
    return (peak.megabytes or float("nan")) - before / 2**20


def memory_row(granularity: Granularity, megabytes: float) -> dict[str, Any]:
    return {
        "kind": "measured", "seq_len": MEMORY_LENGTH, "heads": HEADS, "head_dim": HEAD_DIM, "block_size": BLOCK,
        "granularity": granularity, "budget": MEMORY_BUDGET, "pass": "forward+backward", "ms": None, "dense_ms": None,
        "speedup_vs_dense": None, "peak_memory_mb": megabytes,
    }  # fmt: skip


def linear_fit(granularity: Granularity, times: dict[Key, list[tuple[float, float]]]) -> float:
    """R^2 of a straight line through forward + backward time over the budget, at the longest length."""
    y = np.array([statistics.median(sum(t) for t in times[LENGTHS[-1], granularity, budget]) for budget in BUDGETS])
    residual = y - np.polyval(np.polyfit(BUDGETS, y, 1), BUDGETS)
    return float(1 - (residual**2).sum() / ((y - y.mean()) ** 2).sum())


def show(rows: list[dict[str, Any]], fits: dict[Granularity, float], threads: int) -> None:
    console = Console()
    table = Table(title=f"{HEADS} heads x {HEAD_DIM}, block {BLOCK}, fp32, {threads} threads: forward + backward, ms")
    for name in ("tokens", "routing per", "k", "ms", "dense ms", "speed-up", "spread"):
        table.add_column(name, justify="right")
    for row in rows:
        if row["pass"] == "forward+backward" and row["ms"] is not None:
            table.add_row(
                f"{row['seq_len']:,}", row["granularity"], str(row["budget"]), f"{row['ms']:.1f}",
                f"{row['dense_ms']:.1f}", f"{row['speedup_vs_dense']:.2f}x",
                f"{row['speedup_min']:.2f}-{row['speedup_max']:.2f}",
            )  # fmt: skip
    console.print(table)
    for granularity, r_squared in fits.items():
        console.print(f"routing per {granularity}: time is linear in k with R^2 = {r_squared:.4f}")
    for row in rows:
        if row["peak_memory_mb"] is not None:
            console.print(
                f"routing per {row['granularity']}: peak {row['peak_memory_mb']:.0f} MB beyond q, k, v at "
                f"{row['seq_len']:,} tokens, k = {row['budget']}"
            )


if __name__ == "__main__":
    main()
