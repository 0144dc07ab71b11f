"""The tables of `benchmarks/tuning.py`, for the terminal and as Markdown, from its records alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from chunked_tables import markdown, of

Row = Mapping[str, Any]
Cells = list[list[str]]

VARIANTS = (
    "variant", "imbalance all", "slot", "rank", "ms/step", "vs random", "overhead ms", "coverage", "change",
    "over micro-batches",
)  # fmt: skip
STEPS = (
    "contender", "ms/step (p10-p90)", "vs random (p10-p90)", "CPU time vs random", "imbalance slot", "rank",
    "mean budget", "coverage", "expected", "planning ms", "of the step", "tuning ms while it runs", "of the step",
)  # fmt: skip
TRAINING = (
    "variant", "final loss (seeds)", "against fixed (seeds)", "seconds (seeds)", "coverage", "mean budget",
    "planning ms", "probe ms", "share of probes",
)  # fmt: skip
PUBLISHED = ("variant", "imbalance all", "ms/step", "vs random", "overhead ms")
PUBLISHED_CELLS = [
    ["baseline", "1.81", "4,202", "1.00x", "-"],
    ["+ DST", "1.73", "3,902", "1.08x", "37"],
    ["+ SAB", "1.41", "3,471", "1.21x", "1.8"],
    ["length balancing", "-", "-", "1.23x", "-"],
    ["length balancing + DST", "-", "-", "1.28x", "-"],
    ["SAB + DST", "1.34", "3,108", "1.35x", "44"],
]
"""SparseBalance (arXiv 2604.13847), Qwen2.5-3B on LongAlign-10k at DP4 PP4 TP2 SP2."""
SOURCE = (
    "SparseBalance (arXiv 2604.13847): Qwen2.5-3B on LongAlign-10k, DP4 PP4 TP2 SP2, 16 samples a step, one a "
    "micro-batch, MoBA with 32 blocks of 256 keys, measured there; imbalance is the slowest micro-batch over the mean"
)


def part(rows: Sequence[Row], distribution: str) -> list[Row]:
    return [row for row in of(rows, "variants") if row["distribution"] == distribution]


def distributions(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["distribution"] for row in of(rows, "variants")))


def variant_cells(rows: Iterable[Row]) -> Cells:
    return [
        [
            row["variant"],
            f"{row['imbalance']:.2f}",
            f"{row['imbalance_slot']:.2f}",
            f"{row['imbalance_rank']:.2f}",
            f"{row['ms']:,.0f}",
            f"{row['speedup_vs_random']:.2f}x",
            "-" if row["overhead_ms"] is None else f"{row['overhead_ms']:,.0f}",
            f"{row['coverage']:.3f}",
            *("-" if row["overhead_ms"] is None else f"{row[key]:+.1%}"
              for key in ("coverage_change", "coverage_change_of_units")),
        ]
        for row in rows
    ]  # fmt: skip


def step_cells(rows: Sequence[Row]) -> Cells:
    return [
        [
            row["variant"],
            f"{row['ms']:,.0f} ({row['ms_p10']:,.0f}-{row['ms_p90']:,.0f})",
            f"{row['speedup_vs_random']:.2f}x ({row['speedup_vs_random_p10']:.2f}-{row['speedup_vs_random_p90']:.2f})",
            f"{row['cpu_speedup_vs_random']:.2f}x",
            f"{row['imbalance_slot']:.2f}",
            f"{row['imbalance_rank']:.3f}",
            f"{row['mean_budget']:.1f}",
            f"{row['coverage']:.4f}",
            f"{row['expected_coverage']:.4f}",
            f"{row['planning_ms']:,.1f}",
            f"{row['planning_share']:.2%}",
            *((f"{row['tune_ms']:,.1f}", f"{row['tune_share']:.2%}") if row["timing"] == "online" else ("-", "-")),
        ]
        for row in of(rows, "steps")
    ]


def training_cells(rows: Sequence[Row]) -> Cells:
    found = of(rows, "training")
    return [
        [
            row["variant"],
            f"{row['loss']:.3f} ({row['loss_min']:.3f}-{row['loss_max']:.3f})",
            "-"
            if row is found[0]
            else f"{row['loss_change']:+.2%} ({row['loss_change_min']:+.2%} to {row['loss_change_max']:+.2%})",
            f"{row['seconds']:,.0f} ({row['seconds_min']:,.0f}-{row['seconds_max']:,.0f})",
            f"{row['coverage']:.4f}",
            f"{row['mean_budget']:.1f}",
            f"{row['planning_ms']:,.1f}",
            f"{row['probe_ms']:,.1f}",
            f"{row['probe_share']:.2%}",
        ]
        for row in found
    ]


def show(console: Console, record: Mapping[str, Any]) -> None:
    rows = record["rows"]
    tables = [(f"simulated, {name}", VARIANTS, variant_cells(part(rows, name))) for name in distributions(rows)]
    if tables:
        tables.append(("published", PUBLISHED, PUBLISHED_CELLS))
    if of(rows, "steps"):
        tables.append((f"real steps, {of(rows, 'steps')[0]['steps']} of them", STEPS, step_cells(rows)))
    if of(rows, "training"):
        tables.append(("training", TRAINING, training_cells(rows)))
    for title, names, cells in tables:
        shown = Table(title=title, box=None, padding=(0, 0, 0, 1), header_style="bold")
        for place, name in enumerate(names):
            shown.add_column(name, justify="right" if place else "left", no_wrap=not place)
        for line in cells:
            shown.add_row(*line, style="green" if line[0].startswith("sab") else None)
        console.print(shown)
    for line in notes(record):
        console.print(line, highlight=False)


def notes(record: Mapping[str, Any]) -> list[str]:
    """What the tables' figures are of, a sentence or a few for each table."""
    rows, settings = record["rows"], record["settings"]
    found = []
    if distributions(rows):
        found.append(simulated_note(settings["simulated"]))
    if of(rows, "steps"):
        found.append(measured_note(settings["measured"]))
    if of(rows, "training"):
        found.append(training_note(settings["trained"]))
    return found


def simulated_note(settings: Row) -> str:
    return (
        f"Simulated with analytic times of {settings['model']} on {settings['device']} at {settings['topology']}, "
        f"{settings['steps']} global batches of {settings['batch_size']} samples, {settings['budget']} blocks of "
        f"{settings['block_size']} keys, units of {settings['unit_size']:,} tokens for `sab`. Coverage: mean over "
        f"tokens and layers, by {settings['coverage']}; change against the fixed budget, once over tokens of all "
        "batches and once over micro-batches, each counting the same, of the first "
        f"{settings['timed_steps']}. Overhead: measured on these, median of what planning takes with tuning less what "
        "it takes without, on one core, with nothing kept from an earlier step."
    )


def measured_note(settings: Row) -> str:
    lengths = settings["lengths"]
    return (
        f"Measured wall time of {settings['steps']} steps of {settings['batch_size']} real samples of "
        f"{min(lengths):,} to {max(lengths):,} tokens, {settings['processes']} processes x {settings['threads']} "
        f"thread, {settings['budget']} blocks of {settings['block_size']} keys, units of {settings['unit_size']:,} "
        "tokens; all run the same batches on the same random weights, after "
        f"{settings['warm_up']} steps in which coverage was learned. Speed-ups are ratios of total time, in CPU time "
        "those of the busiest rank's processor time. Coverage is probed, by the router's choice at the budgets really "
        "used; expected: of the same budgets, by the curves that planning knew. A training run plans the "
        "next step while one runs."
    )


def training_note(settings: Row) -> str:
    return (
        f"Trained from random weights for {settings['steps']} steps of {settings['batch_size']} samples of at most "
        f"{settings['max_length']:,} tokens, {settings['seeds']} seeds, 2 processes; final loss: mean over the last "
        f"{settings['last']} steps, in brackets the smallest and largest of the seeds; against fixed: within each. "
        "Probe: of a step that measures coverage; its share is that of a run that does so at the default interval."
    )


def table(record: Mapping[str, Any]) -> str:
    """Markdown of a result file: whatever parts it has."""
    rows, settings, machine = record["rows"], record["settings"], record["machine"]
    where = f"{machine['cpu']} ({machine['cores']} shared cores), {record['date'][:10]}."
    lines: list[str] = []
    for name in distributions(rows):
        lines += [f"**{name}, simulated:**", "", *markdown(VARIANTS, bold(variant_cells(part(rows, name)))), ""]
    if lines:
        lines += [simulated_note(settings["simulated"]) + f" {where}", "", "**Published, for comparison:**", ""]
        lines += [*markdown(PUBLISHED, PUBLISHED_CELLS), "", f"{SOURCE}.", ""]
    if of(rows, "steps"):
        lines += ["**Real steps:**", "", *markdown(STEPS, bold(step_cells(rows))), ""]
        lines += [measured_note(settings["measured"]) + f" {where}", ""]
    if of(rows, "training"):
        lines += ["**Short training runs:**", "", *markdown(TRAINING, bold(training_cells(rows))), ""]
        lines += [training_note(settings["trained"]) + f" {where}", ""]
    return "\n".join(lines).rstrip()


def bold(cells: Cells) -> Cells:
    """Names as code, those of the recommended tuning in bold."""
    return [[f"**`{name}`**" if name.startswith("sab_dst") else f"`{name}`", *line] for name, *line in cells]
