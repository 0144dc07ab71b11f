"""How long does planning take, from 16 to 65,536 samples a step?

    python benchmarks/planning_time.py --json benchmarks/results/planning_time.json --figure docs/planning_time.svg

Times `sab` on one core with samples of LongAlign's lengths, 64 on each rank: batching alone, and the whole plan but its
simulation, with units of 2,048 tokens and with whole samples. Nothing is kept from one round to the next: each starts
with a latency model that has predicted nothing yet. Beside it Karmarkar-Karp on the tokens, which places alone.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from rich.console import Console
from rich.table import Table

from record import write_rows
from sparsebalance.planning import policy as planner
from sparsebalance.planning.baselines import karmarkar_karp
from sparsebalance.planning.decoder import named_decoder
from sparsebalance.planning.expected import ExpectedBudgets
from sparsebalance.planning.hardware import named_device
from sparsebalance.planning.latency import RooflineModel
from sparsebalance.planning.lengths import draw
from sparsebalance.planning.plan import Sample, Topology
from sparsebalance.reporting.progress import follow, progress_bars

SIZES = (16, 64, 256, 1024, 4096, 16_384, 65_536)  # samples of a step
QUICK_SIZES = SIZES[:4]
PER_RANK, LEAST_RANKS = 64, 4
UNIT_SIZES = (2048, None)
BLOCK, BUDGET = 256, 32
KARMARKAR_KARP_SAMPLES = 16_384  # samples x ranks entries: beyond, it needs minutes and gigabytes
FIT_FROM = 256  # samples; below, fixed costs decide
ROUNDS, SECONDS = 21, 4.0  # of each figure at most, whichever comes first; always one round

Row = dict[str, Any]
WHAT = ("batching", "plan", "karmarkar_karp")


def median_ms(call: Callable[[], Callable[[], object]]) -> tuple[float, int]:
    """Median milliseconds of the calls that `call` prepares, untimed; and their number."""
    times: list[float] = []
    started = time.perf_counter()
    while not times or (len(times) < ROUNDS and time.perf_counter() - started < SECONDS):
        ready = call()
        begin = time.perf_counter()
        ready()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times), len(times)


def measured(count: int) -> list[Row]:
    """All figures for a step of `count` samples."""
    lengths = draw("longalign-10k", count, seed=0).tolist()
    samples = [Sample(i, length, max(1, length // 10)) for i, length in enumerate(lengths)]
    topology = Topology(dp=max(LEAST_RANKS, count // PER_RANK))
    decoder, device, cap = named_decoder("qwen2.5-3b"), named_device("h200"), max(lengths)
    budgets = ExpectedBudgets((BUDGET,) * decoder.layers)

    def batching(policy: planner.Policy) -> Callable[[], object]:
        model = RooflineModel(decoder, device, BLOCK)
        return lambda: policy.batching(samples, model, topology, budgets, cap)

    def plan(policy: planner.Policy) -> Callable[[], object]:
        model = RooflineModel(decoder, device, BLOCK)
        return lambda: planner.plan_step(samples, model, topology, policy)

    rows: list[Row] = []

    def add(what: str, unit_size: int | None, call: Callable[[], Callable[[], object]]) -> None:
        ms, rounds = median_ms(call)
        row = {"what": what, "unit_size": unit_size, "samples": count, "ranks": topology.dp, "ms": ms, "rounds": rounds}
        rows.append({"kind": "measured", **row})

    for unit_size in UNIT_SIZES:
        policy = planner.named_policy("sab", budget=BUDGET, token_cap=cap, unit_size=unit_size)
        add("batching", unit_size, partial(batching, policy))
        with mock.patch.object(planner, "simulate_plan", return_value=SimpleNamespace(step_ms=0.0)):
            add("plan", unit_size, partial(plan, policy))
    if count <= KARMARKAR_KARP_SAMPLES:
        add("karmarkar_karp", None, lambda: lambda: karmarkar_karp(lengths, topology.dp))
    return rows


def curves(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int | None], list[tuple[int, float]]]:
    """(what, unit size) -> (samples, milliseconds), rising."""
    found: dict[tuple[str, int | None], list[tuple[int, float]]] = {}
    for row in sorted(rows, key=lambda row: (WHAT.index(row["what"]), row["unit_size"] is None, row["samples"])):
        found.setdefault((row["what"], row["unit_size"]), []).append((row["samples"], row["ms"]))
    return found


def fit(points: Sequence[tuple[int, float]]) -> dict[str, float]:
    """ms = c n log2 n by least squares of the logarithms: c in nanoseconds, and the largest factor off it.

    `exponent` is that of a free power law through the same points: 1 is linear, n log n lies a little above.
    """
    used = [point for point in points if point[0] >= FIT_FROM]
    factors = [math.log(ms / (n * math.log2(n))) for n, ms in used]
    mean = statistics.mean(factors)
    x, y = [math.log(n) for n, _ in used], [math.log(ms) for _, ms in used]
    return {
        "ns_per_n_log_n": math.exp(mean) * 1e6,
        "worst_factor": math.exp(max(abs(factor - mean) for factor in factors)),
        "exponent": statistics.linear_regression(x, y).slope,
    }


def name(what: str, unit_size: int | None) -> str:
    """As in tables and in the figure."""
    if what == "karmarkar_karp":
        return "karmarkar_karp, placement alone"
    units = "whole samples" if unit_size is None else f"units of {unit_size:,}"
    return f"{what}, {units}"


def table(record: Mapping[str, Any]) -> str:
    """Markdown: one row per curve, milliseconds over the number of samples, with the fits."""
    sizes = sorted({row["samples"] for row in record["rows"]})
    lines = [
        "| ms for samples (ranks) | " + " | ".join(f"{n:,} ({ranks_of(record, n):,})" for n in sizes) + " | exponent |",
        "|---|" + "---|" * (len(sizes) + 1),
    ]
    for key, points in curves(record["rows"]).items():
        ms = dict(points)
        cells = [f"{ms[n]:,.1f}" if n in ms else "-" for n in sizes]
        lines.append(f"| {name(*key)} | " + " | ".join(cells) + f" | {fit(points)['exponent']:.2f} |")
    batching = next(fit(points) for key, points in curves(record["rows"]).items() if key == ("batching", UNIT_SIZES[0]))
    lines += [
        "",
        f"Measured on one core of {record['machine']['cpu']}, {record['date'][:10]}, medians; no simulation, nothing "
        f"kept from an earlier step. Batching with units takes {batching['ns_per_n_log_n']:,.0f} ns x n log2 n, within "
        f"a factor of {batching['worst_factor']:.2f} from {FIT_FROM} samples on. Exponent: of a power law through the "
        "same points.",
    ]
    return "\n".join(lines)


def ranks_of(record: Mapping[str, Any], count: int) -> int:
    ranks: int = next(row["ranks"] for row in record["rows"] if row["samples"] == count)
    return ranks


COLORS = ("#1b7837", "#54a24b", "#4c78a8", "#9ecae9", "#7f7f7f")


def figure(rows: Sequence[Mapping[str, Any]]) -> str:
    """An SVG of all curves on two logarithmic axes, with the dashed n log n fits of batching."""
    found = curves(rows)
    every = [point for points in found.values() for point in points]
    left, top, width, height = 70, 20, 560, 330
    x_low, x_high = math.log10(min(n for n, _ in every)), math.log10(max(n for n, _ in every))
    y_low = math.floor(math.log10(min(ms for _, ms in every)))
    y_high = math.ceil(math.log10(max(ms for _, ms in every)))

    def at(n: float, ms: float) -> str:
        x = left + width * (math.log10(n) - x_low) / (x_high - x_low)
        y = top + height * (y_high - math.log10(ms)) / (y_high - y_low)
        return f"{x:.1f},{y:.1f}"

    def text(position: str, words: str, anchor: str = "end") -> str:
        x, y = position.split(",")
        return f'<text x="{x}" y="{y}" dy="4" text-anchor="{anchor}">{words}</text>'

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 400" font-family="sans-serif" font-size="12">',
        '<rect width="900" height="400" fill="white"/>',
    ]
    for power in range(y_low, y_high + 1):
        begin, end = at(10**x_low, 10.0**power), at(10**x_high, 10.0**power)
        parts.append(f'<polyline points="{begin} {end}" stroke="#dddddd"/>')
        parts.append(text(f"{left - 8},{begin.split(',')[1]}", f"{10.0**power:,g} ms"))
    for n in sorted({n for n, _ in every}):
        parts.append(text(f"{at(n, 1).split(',')[0]},{top + height + 18}", f"{n:,}", "middle"))
    parts.append(text(f"{left + width / 2},{top + height + 38}", "samples of a step", "middle"))
    for place, ((what, unit_size), points) in enumerate(found.items()):
        line, y = " ".join(at(n, ms) for n, ms in points), top + 14 + 22 * place
        color = COLORS[place % len(COLORS)]
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts.append(f'<rect x="{left + width + 24}" y="{y - 3}" width="16" height="5" fill="{color}"/>')
        parts.append(text(f"{left + width + 46},{y}", name(what, unit_size), "start"))
        if what == "batching":
            c = fit(points)["ns_per_n_log_n"] / 1e6
            dashes = " ".join(at(n, c * n * math.log2(n)) for n, _ in points)
            parts.append(f'<polyline points="{dashes}" fill="none" stroke="{color}" stroke-dasharray="3 4"/>')
    parts.append(text(f"{left + width + 46},{top + 14 + 22 * len(found)}", "dashed: c n log n", "start"))
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--figure", type=Path, help="draw the curves into this SVG file")
    parser.add_argument("--quick", action="store_true", help=f"up to {QUICK_SIZES[-1]:,} samples only")
    options = parser.parse_args()
    sizes = QUICK_SIZES if options.quick else SIZES
    console = Console()
    rows: list[Row] = []
    with progress_bars(console) as progress:
        watch = follow(progress, "timing, in samples of a step")
        for place, count in enumerate(sizes):
            rows += measured(count)
            if watch is not None:
                watch(sum(sizes[: place + 1]), sum(sizes))
    shown = Table(title="planning, milliseconds", box=None, padding=(0, 0, 0, 1), header_style="bold")
    shown.add_column("samples", no_wrap=True)
    for count in sizes:
        shown.add_column(f"{count:,}", justify="right", no_wrap=True)
    fits = []
    for key, points in curves(rows).items():
        ms = dict(points)
        shown.add_row(name(*key), *(f"{ms[n]:,.1f}" if n in ms else "-" for n in sizes))
        fits.append((key, fit(points)))
    console.print(shown)
    for key, one in fits:
        console.print(
            f"{name(*key)}: {one['ns_per_n_log_n']:,.0f} ns x n log2 n, within a factor of "
            f"{one['worst_factor']:.2f} from {FIT_FROM} samples on; power law n^{one['exponent']:.2f}",
            highlight=False,
            soft_wrap=True,
        )
    if options.figure:
        options.figure.parent.mkdir(parents=True, exist_ok=True)
        options.figure.write_text(figure(rows))
        print(f"figure: {options.figure}")
    if options.json:
        write_rows(options.json, rows, fits=[{"what": what, "unit_size": size, **one} for (what, size), one in fits])


if __name__ == "__main__":
    main()
