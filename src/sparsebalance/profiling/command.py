"""`sparsebalance profile`: measure, write the table, show it, and check it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from sparsebalance.planning.table import LatencyTable
from sparsebalance.profiling.check import CheckPoint, check_points, held_out_work, mean_absolute_error
from sparsebalance.profiling.measure import measure
from sparsebalance.profiling.memory import keep_freed_memory
from sparsebalance.reporting.progress import follow, progress_bars
from sparsebalance.training.config import RunConfig, check_config
from sparsebalance.training.model import build_model, identity_of
from sparsebalance.training.session import read_tokenizer

ROUNDS, LIMIT_S = 7, 120.0  # more than at the start of a run: this table is kept


def profile(config: RunConfig, path: Path, check: bool, console: Console) -> dict[str, Any]:
    """Measure the configured model in this process and write its latency table to `path`.

    Returns:
        The table's place, its provenance, and with `check` the held-out errors.
    """
    check_config(config)
    torch.set_num_threads(config.parallel.threads)
    keep_freed_memory()
    vocabulary = len(read_tokenizer(config.data.tokenizer))
    longest = config.data.max_length
    model = build_model(config.model, config.attention, vocabulary, longest, config.seed)
    result: dict[str, Any] = {"table": str(path)}
    identity, max_budget = identity_of(model.config, config), 2 * config.attention.budget
    works = held_out_work(identity, longest, max_budget) if check else []
    with progress_bars(console) as progress:
        measurement = measure(
            model,
            identity,
            longest,
            max_budget,
            rounds=ROUNDS,
            limit_s=LIMIT_S,
            progress=follow(progress, "measuring this machine"),
            held_out=works,
        )
    table, points = measurement.table, check_points(measurement, works)
    table.save(path)
    _print_table(console, table)
    result["provenance"] = dict(table.provenance)
    if points:
        _print_check(console, points)
        result["heldout_mape"] = mean_absolute_error(points)
        result["heldout"] = [{**vars(point), "error": point.error} for point in points]
    console.print(f"table: {path}")
    return result


def _print_table(console: Console, table: LatencyTable) -> None:
    identity, provenance = table.identity, table.provenance
    console.print(
        f"{provenance['host']}, {identity.threads} thread(s), {identity.dtype}, torch {provenance['torch']}; "
        f"routing per {identity.granularity}, blocks of {identity.block_size}; median of "
        f"{provenance['rounds']} interleaved rounds"
    )
    budgets = sorted({point.budget for point in table.attention})
    shown = Table(title="one attention layer, forward + backward with routing, ms per sample")
    shown.add_column("tokens", justify="right")
    for budget in budgets:
        shown.add_column(f"k = {budget}", justify="right")
    times = {(p.length, p.budget): p.router_ms + p.forward_ms + p.backward_ms for p in table.attention}
    for length in sorted({point.length for point in table.attention}):
        cells = [times.get((length, budget)) for budget in budgets]
        shown.add_row(f"{length:,}", *("" if ms is None else f"{ms:.2f}" for ms in cells))
    console.print(shown)
    longest = table.linear[-1]
    console.print(
        f"everything else: {(longest.forward_ms + longest.backward_ms) / longest.count * 1e3:.1f} us a token "
        f"at {longest.count:,} tokens"
    )


def _print_check(console: Console, points: list[CheckPoint]) -> None:
    shown = Table(title="whole micro-batches that the table has no point for")
    for name in ("lengths", "budget", "predicted ms", "measured ms", "error"):
        shown.add_column(name, justify="left" if name == "lengths" else "right")
    for point in points:
        lengths = " + ".join(map(str, point.lengths))
        shown.add_row(
            lengths,
            str(point.budget),
            f"{point.predicted_ms:.1f}",
            f"{point.measured_ms:.1f}",
            f"{point.error:+.1%}",
        )
    console.print(shown)
    console.print(f"mean absolute error {mean_absolute_error(points):.1%} over {len(points)} micro-batches")
