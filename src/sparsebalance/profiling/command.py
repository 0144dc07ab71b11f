"""`sparsebalance profile`: measure, write the table, show it, and check it."""

from __future__ import annotations

import statistics
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sparsebalance.planning.errors import InputError
from sparsebalance.planning.table import LatencyTable
from sparsebalance.planning.table_file import compare_tables, load_table, merge_tables, save_table
from sparsebalance.profiling.check import (
    CheckPoint,
    attention_error,
    check_points,
    held_out_work,
    mean_absolute_error,
    raw_error,
    share_within,
)
from sparsebalance.profiling.dense import measure_dense
from sparsebalance.profiling.measure import measure
from sparsebalance.profiling.network import measure_network
from sparsebalance.reporting.progress import follow, progress_bars
from sparsebalance.training.config import RunConfig, check_config
from sparsebalance.training.model import build_model, identity_of
from sparsebalance.training.parallel import Ranks
from sparsebalance.training.session import read_tokenizer

ROUNDS = 7  # more than at the start of a run: this table is kept


def profile(config: RunConfig, ranks: Ranks, path: Path, check: bool, console: Console) -> dict[str, Any] | None:
    """Measure the configured model in all processes at once and write its latency table to `path`.

    Args:
        check: also time held-out micro-batches and print the table's error on them.

    Returns:
        On rank 0 the table's place, its provenance, and with `check` the held-out errors.
    """
    vocabulary = len(read_tokenizer(config.data.tokenizer))
    longest = config.data.max_length
    model = build_model(config.model, config.attention, vocabulary, longest, config.seed)
    identity, max_budget = identity_of(model.config, config), 2 * config.attention.budget
    works = held_out_work(identity, longest, max_budget) if check else []
    progress = progress_bars(console) if ranks.is_first else None
    with progress or nullcontext():
        measurement = measure(
            model,
            identity,
            longest,
            max_budget,
            rounds=ROUNDS,
            limit_s=config.balance.measure_s,
            progress=follow(progress, "measuring this machine, s"),
            held_out=works,
            gather=ranks.gather,
        )
    table, points = (
        replace(measurement.table, network=measure_network(ranks), dense=measure_dense(identity, longest)),
        check_points(measurement, works),
    )
    if not ranks.is_first:
        return None
    save_table(table, path)
    print_latency_table(console, table)
    result: dict[str, Any] = {"table": str(path), "provenance": dict(table.provenance)}
    if ranks.world > 1:
        factors = ", ".join(f"{factor:.2f}" for factor in measurement.rank_factors)
        console.print(f"ranks against their mean, above 1 is slower: {factors}")
        result["rank_factors"] = list(measurement.rank_factors)
    if points:
        _print_check(console, points)
        result["heldout_mape"] = mean_absolute_error(points)
        result["heldout_mape_raw"] = raw_error(points)
        result["heldout_mape_attention"] = attention_error(points)
        result["heldout"] = [{**vars(point), "error": point.error} for point in points]
    console.print(f"table: {path}")
    return result


def check_profile(config: RunConfig) -> None:
    """Raises:
    InputError: a wrong setting, or no tokenizer.
    """
    check_config(config)
    read_tokenizer(config.data.tokenizer)
    if config.data.max_length < 2 * config.attention.block_size:
        raise InputError(
            f"data.max_length {config.data.max_length} is below two blocks of {config.attention.block_size}; "
            "there is nothing to interpolate between"
        )


def print_latency_table(console: Console, table: LatencyTable) -> None:
    identity, provenance = table.identity, table.provenance
    console.print(
        f"{provenance['host']}, {provenance['processes']} process(es) x {identity.threads} thread(s), "
        f"{identity.dtype}, torch {provenance['torch']}; routing per {identity.granularity}, blocks of "
        f"{identity.block_size}; medians of {provenance['rounds']} interleaved round(s) over "
        f"{provenance['points']} micro-batches"
    )
    budgets = sorted({point.budget for point in table.attention})
    shown = Table(title="one attention layer, forward + backward with routing, ms per sample")
    shown.add_column("tokens", justify="right")
    for budget in budgets:
        shown.add_column(f"k = {budget}", justify="right")
    shown.add_column("dense", justify="right")
    times = {(p.length, p.budget): p.router_ms + p.forward_ms + p.backward_ms for p in table.attention}
    dense = {point.count: point.forward_ms + point.backward_ms for point in table.dense}
    for length in sorted({point.length for point in table.attention}):
        cells = [*(times.get((length, budget)) for budget in budgets), dense.get(length, dense.get(length + 1))]
        shown.add_row(f"{length:,}", *("" if ms is None else f"{ms:.2f}" for ms in cells))
    console.print(shown)
    if table.dense:
        found = {budget: table.crossover(budget) for budget in budgets}
        told = ", ".join(f"k = {k}: {'nowhere' if n is None else f'{n:,}'}" for k, n in found.items())
        console.print(f"faster than dense attention from so many tokens on (up to {table.dense[-1].count:,}): {told}")
    longest = table.linear[-1]
    console.print(
        f"everything else: {(longest.forward_ms + longest.backward_ms) / longest.count * 1e3:.1f} us a token "
        f"at {longest.count:,} tokens; whole micro-batches reproduced within {table.residual:.1%}"
    )
    if table.network is not None:
        network = table.network
        console.print(
            f"{network.ranks} processes: message {network.point_to_point.latency_ms:.2f} ms + "
            f"{network.point_to_point.ms_per_mb:.3f} ms per MB, all-reduce {network.all_reduce.latency_ms:.2f} ms + "
            f"{network.all_reduce.ms_per_mb:.3f} ms per MB"
        )


def _print_check(console: Console, points: list[CheckPoint]) -> None:
    shown = Table(title="whole micro-batches that the table has no point for")
    for name in ("lengths", "budget", "predicted ms", "measured ms", "error"):
        shown.add_column(name, justify="left" if name == "lengths" else "right")
    for point in points:
        shown.add_row(
            " + ".join(map(str, point.lengths)),
            str(point.budget),
            f"{point.predicted_ms:.1f} ± {point.error_ms:.1f}",
            f"{point.measured_ms:.1f}",
            f"{point.error:+.1%}",
        )
    console.print(shown)
    slowest = max(points, key=lambda point: point.measured_ms)
    console.print(
        f"mean absolute error {mean_absolute_error(points):.1%} over {len(points)} micro-batches at the machine's "
        f"usual speed ({raw_error(points):.1%} as the clock had it; attention alone {attention_error(points):.1%}), "
        f"{abs(slowest.error):.1%} on the slowest; {share_within(points, 2):.0%} within two of the table's own "
        "standard errors"
    )


def merge(paths: list[Path], out: Path, console: Console) -> dict[str, Any]:
    """`sparsebalance table merge`: one table from several of the same machine and model."""
    table = merge_tables([load_table(path) for path in paths])
    save_table(table, out)
    print_latency_table(console, table)
    console.print(f"table: {out}")
    return {"table": str(out), "points": len(table.attention), "merged": list(map(str, paths))}


def compare(first: Path, second: Path, console: Console) -> dict[str, Any]:
    """`sparsebalance table compare`: where two tables of one model differ."""
    rows = compare_tables(load_table(first), load_table(second))
    shown = Table(title="forward + backward ms where both tables have a point")
    for name in ("term", "place", first.name, second.name, "second / first"):
        shown.add_column(name, justify="left" if name == "term" else "right")
    for row in rows:
        shown.add_row(row.term, row.place, f"{row.first_ms:.2f}", f"{row.second_ms:.2f}", f"{row.ratio:.2f}x")
    console.print(shown)
    ratio = statistics.median(row.ratio for row in rows)
    console.print(f"median {ratio:.2f}x over {len(rows)} points")
    return {"median_ratio": ratio, "points": [{**vars(row), "ratio": row.ratio} for row in rows]}
