"""A forecast or a sweep on the terminal, and the cells that the pages show too.

In: settings, rows, the recommendation. Out: a table with the sentences that make it readable on its own. It fits in
100 columns; on a narrower terminal it leaves out what `WIDE_ONLY` names.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sparsebalance.planner.forecast import Forecast, Recommendation, Row
from sparsebalance.planner.scenario import CURVES
from sparsebalance.planner.sweep import Choice

Settings = dict[str, Any]
TOO_LARGE = "✗"

COLUMNS: dict[str, Callable[[Row], str]] = {
    "step ms": lambda row: milliseconds(row.step_ms),
    "vs random": lambda row: f"{row.speedup:.2f}x",
    "vs best": lambda row: f"{row.speedup_vs_best:.2f}x",
    "rank": lambda row: f"{row.imbalance_rank:.2f}",
    "slot": lambda row: f"{row.imbalance_slot:.2f}",
    "all": lambda row: f"{row.imbalance_all:.2f}",
    "busy": lambda row: f"{row.busy_fraction:.0%}",
    "of bound": lambda row: f"{row.share_of_bound:.0%}",
    "peak GB": lambda row: f"{gigabytes(row.peak_memory_mb)}{f' {TOO_LARGE}' if row.fits is False else ''}",
    "cover": lambda row: f"{row.coverage:.1%}",
}
"""Heading -> cell of a row; rank, slot and all are the three imbalances, slowest / mean; cover is mean coverage."""

WIDE = 96  # columns from which the whole table fits
WIDE_ONLY = ("slot", "all", "cover")


def print_forecast(console: Console, settings: Settings, result: Forecast, advice: Recommendation | None) -> None:
    """One row per plan; ours in green, the fastest baseline marked *, the recommended one -> where one can be."""
    columns = [name for name in COLUMNS if console.width >= WIDE or name not in WIDE_ONLY]
    table = Table(title=Text(scenario_title(settings)), box=None, padding=(0, 0, 0, 1), header_style="bold")
    table.add_column("plan", no_wrap=True)
    for name in columns:
        table.add_column(name.replace(" ", "\n", 1), justify="right", no_wrap=True)
    for row in result.rows:
        chosen = advice is not None and row == advice.row
        style = "bold " * chosen + ("green" if row.ours else "")
        name = f"{'-> ' if chosen else ''}{row.name}{' *' if is_best(row, result) else ''}"
        table.add_row(Text(name), *(COLUMNS[c](row) for c in columns), style=style.strip())
    console.print(table)
    for line in forecast_notes(settings, result):
        console.print(line, highlight=False, markup=False)
    if advice is not None:  # on one line, however long: it is what people search for and copy
        console.print(f"recommended: {advice.row.name}: {advice.reason}", highlight=False, markup=False, soft_wrap=True)


def print_choices(console: Console, settings: Settings, choices: Sequence[Choice]) -> None:
    """One row per topology, the fastest first; under it those that were skipped, by reason."""
    table = Table(title=Text(scenario_title(settings)), box=None, padding=(0, 0, 0, 1), header_style="bold")
    table.add_column("topology", no_wrap=True)
    table.add_column("best plan", no_wrap=True)
    for name in ("step\nms", "tokens/s\n/device", "vs\nrandom", "peak\nGB", "front"):
        table.add_column(name, justify="right", no_wrap=True)
    for choice, row in ranked(choices):
        table.add_row(
            topology_name(asdict(choice.topology)),
            row.name,
            COLUMNS["step ms"](row),
            f"{choice.tokens_per_s:,.0f}",
            COLUMNS["vs random"](row),
            COLUMNS["peak GB"](row),
            "*" if choice.pareto else "",
            style="green" if choice.pareto else None,
        )
    console.print(table)
    for line in choice_notes(settings, choices):
        console.print(line, highlight=False, markup=False)
    _print_skipped(console, choices)


def _print_skipped(console: Console, choices: Sequence[Choice]) -> None:
    groups = skipped_groups(choices)
    if groups:
        console.print(f"skipped: {sum(map(len, groups))} of {len(choices)} topologies", highlight=False)
    for group in groups:
        example = "for instance " if len({choice.skipped for choice in group}) > 1 else ""
        console.print(Padding(Text(f"{len(group)} x {example}{group[0].skipped}"), (0, 0, 0, 2)))
        # A topology's name is not cut at its spaces.
        names = ", ".join(topology_name(asdict(choice.topology)).replace(" ", "\u00a0") for choice in group)
        for line in textwrap.wrap(names, console.width - 6):
            console.print(Text("      " + line.replace("\u00a0", " ")))


def scenario_title(settings: Settings) -> str:
    """What was planned, in one line."""
    devices = settings.get("devices")
    where = topology_name(settings["topology"]) if devices is None else f"topologies of {devices:,} devices"
    steps = f"{settings['steps']:,} of {settings['batches']:,} global batches"
    return (
        f"{settings['model']} on {settings['lengths']}, {where}, budget {settings['budget']:,} blocks of "
        f"{settings['block_size']:,}, {steps} of {settings['batch_size']:,}"
    )


def topology_name(degrees: Mapping[str, int]) -> str:
    """Such as DP4 PP4; degrees of 1 are left out, all but the first."""
    return " ".join(f"{name.upper()}{n}" for name, n in degrees.items() if n > 1 or name == "dp")


def is_best(row: Row, result: Forecast) -> bool:
    """Whether it is the fastest baseline."""
    return row.name == result.best_baseline


def forecast_notes(settings: Settings, result: Forecast) -> list[str]:
    """Where the times come from, what the marks mean, and what to be careful about."""
    capacity = settings["capacity_mb"]
    notes = [
        f"Times: {settings['source']}; means over the steps. Without any waiting a step would take "
        f"{milliseconds(result.bound_ms)} ms (bound).",
        f"* fastest baseline: {result.best_baseline}. rank, slot, all: imbalance, slowest / mean, over ranks' sums, "
        "over ranks in each slot, over all micro-batches. cover: what the budgets cover of the attention, on average; "
        f"{CURVES}.",
    ]
    if capacity is None:
        notes.append("The device's memory is not known, so no plan is checked against it; peaks are estimates.")
    elif any(row.fits is False for row in result.rows):
        notes.append(f"{TOO_LARGE} too large: a device has {gigabytes(capacity)} GB that can be used.")
    outside = [row for row in result.rows if row.extrapolated > 0]
    if outside:
        most = max(outside, key=lambda row: row.extrapolated)
        notes.append(
            f"{len(outside)} of {len(result.rows)} plans hold micro-batches outside of the measured table, at most "
            f"{most.extrapolated:.1%} of them ({most.name}); their times are extrapolated."
        )
    return notes


def choice_notes(settings: Settings, choices: Sequence[Choice]) -> list[str]:
    """Where the times come from, and the two ends of the front."""
    found = ranked(choices)
    fastest, least = found[0], min(found, key=lambda item: item[1].peak_memory_mb)
    return [
        f"Times: {settings['source']}. * on the front: no other topology is both faster and needs less memory.",
        f"fastest: {_described(*fastest)}; least memory: {_described(*least)}",
    ]


def ranked(choices: Sequence[Choice]) -> list[tuple[Choice, Row]]:
    """Those with a row, the fastest first."""
    found = [(choice, choice.row) for choice in choices if choice.row is not None]
    return sorted(found, key=lambda item: (item[1].step_ms, item[1].peak_memory_mb))


def skipped_groups(choices: Sequence[Choice]) -> list[list[Choice]]:
    """Skipped topologies whose reasons differ in nothing but numbers and details, the largest group first."""
    groups: dict[str, list[Choice]] = {}
    for choice in choices:
        if choice.row is None:
            kind = re.sub(r"[\d.,]+", "", choice.skipped.split(":")[0])  # details follow a colon
            groups.setdefault(kind, []).append(choice)
    return sorted(groups.values(), key=len, reverse=True)


def _described(choice: Choice, row: Row) -> str:
    name = topology_name(asdict(choice.topology))
    return f"{name} with {row.name}, {milliseconds(row.step_ms)} ms, {gigabytes(row.peak_memory_mb)} GB"


def milliseconds(ms: float) -> str:
    return f"{ms:,.1f}" if ms < 100 else f"{ms:,.0f}"


def gigabytes(mb: float) -> str:
    return f"{mb / 1e3:,.1f}"
