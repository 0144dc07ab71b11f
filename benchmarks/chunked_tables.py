"""The tables of `benchmarks/chunked_step.py`, for the terminal and as Markdown, from its records alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from sparsebalance.planning.latency import TERMS

Row = Mapping[str, Any]
Cells = list[list[str]]

STEPS = (
    "contender", "ms/step (p10-p90)", "predicted ms", "vs random", "predicted", "off", "CPU time vs random",
    "vs best peer", "rank imbalance", "peak MB",
)  # fmt: skip
MEMORY = (
    "tokens", "how it runs", "checkpointing", "ms", "CPU ms", "peak MB", "predicted MB", "K, V state MB",
    "peak without state MB",
)  # fmt: skip
UNITS = (
    "unit size", "micro-batches", "number", "tokens", "linear", "router", "attend", "head", "all", "table ms each",
    "measured ms each",
)  # fmt: skip


def of(rows: Sequence[Row], what: str) -> list[Row]:
    return [row for row in rows if row["what"] == what]


def step_cells(rows: Sequence[Row]) -> Cells:
    cells = []
    for row in of(rows, "steps"):
        mark = " *" if row["contender"] == row["best_baseline"] else ""
        memory = "-" if row["peak_memory_mb"] is None else f"{row['peak_memory_mb']:,.0f}"
        cells.append(
            [
                row["contender"] + mark,
                f"{row['step_ms']:,.0f} ({row['step_ms_p10']:,.0f}-{row['step_ms_p90']:,.0f})",
                f"{row['predicted_step_ms']:,.0f}",
                f"{row['speedup_vs_random']:.2f}x",
                f"{row['predicted_speedup_vs_random']:.2f}x",
                f"{row['speedup_error']:+.1%}",
                f"{row['cpu_speedup_vs_random']:.2f}x",
                f"{row['speedup_vs_best_baseline']:.2f}x",
                f"{row['imbalance_rank']:.3f}",
                memory,
            ]
        )
    return cells


def memory_cells(rows: Sequence[Row]) -> Cells:
    cells = []
    for row in of(rows, "memory"):
        measured = [
            "-" if row[key] is None else f"{row[key]:,.0f}" for key in ("peak_memory_mb", "peak_without_state_mb")
        ]
        cells.append(
            [
                f"{row['tokens']:,}",
                ways(row),
                "yes" if row["checkpointing"] else "no",
                f"{row['ms']:,.0f}",
                f"{row['cpu_ms']:,.0f}",
                measured[0],
                f"{row['predicted_memory_mb']:,.0f}",
                f"{row['predicted_state_mb']:,.0f}",
                measured[1],
            ]
        )
    return cells


def ways(row: Row) -> str:
    if row["unit_size"] is None:
        return "whole"
    kept = "all kept" if row["keep_chunks"] is None else f"{row['keep_chunks']} kept"
    return f"chunks of {row['unit_size']:,}, {kept}"


def unit_cells(rows: Sequence[Row]) -> Cells:
    """Measured / table by term, as "forward backward"; "-" where the table says that nothing is done."""
    groups: dict[tuple[int | None, str], list[Row]] = {}
    for row in of(rows, "terms"):
        groups.setdefault((row["unit_size"], row["unit"]), []).append(row)

    def ratio(parts: Sequence[Row], side: str) -> str:
        table = sum(part[f"table_{side}_ms"] for part in parts)
        return f"{sum(part[f'{side}_ms'] for part in parts) / table:.2f}" if table else "-"

    cells = []
    for (size, kind), parts in groups.items():
        units = parts[0]["units"]
        by_term = [[part for part in parts if part["term"] == term] for term in TERMS]
        totals = [sum(part[f"{mark}{side}_ms"] for part in parts for side in ("forward", "backward")) / units
                  for mark in ("table_", "")]  # fmt: skip
        cells.append(
            [
                "whole" if size is None else f"{size:,}",
                kind,
                f"{units:,}",
                f"{parts[0]['mean_tokens']:,.0f}",
                *(f"{ratio(own, 'forward')} {ratio(own, 'backward')}" for own in [*by_term, parts]),
                *(f"{total:,.1f}" for total in totals),
            ]
        )
    return cells


def worst_speedup_error(rows: Sequence[Row]) -> Row:
    return max(of(rows, "steps"), key=lambda row: abs(row["speedup_error"]))


def largest_differences(rows: Sequence[Row]) -> tuple[float, float]:
    """Relative, of loss and of gradient norm to random's, over all contenders."""
    steps = of(rows, "steps")
    return max(row["loss_rel_diff_max"] for row in steps), max(row["grad_norm_rel_diff_max"] for row in steps)


def show(console: Console, record: Mapping[str, Any]) -> None:
    rows = record["rows"]
    tables = (
        (f"real steps, {record['settings']['steps']} of them", STEPS, step_cells(rows), 1),
        ("measured / uncorrected table by term (forward backward)", UNITS, unit_cells(rows), 2),
        ("one sample, memory above the resting state", MEMORY, memory_cells(rows), 3),
    )
    for title, names, cells, left in tables:
        shown = Table(title=title, box=None, padding=(0, 0, 0, 1), header_style="bold")
        for place, name in enumerate(names):
            shown.add_column(name, justify="left" if place < left else "right", no_wrap=place < 2)
        for line in cells:
            shown.add_row(*line, style="green" if line[0].startswith("sab") else None)
        console.print(shown)
    worst, losses, norms = worst_speedup_error(rows), *largest_differences(rows)
    factors = ", ".join(f"{name} {factor:.2f}" for name, factor in record["settings"]["term_factors"].items())
    console.print(
        f"* fastest peer. Predicted speed-ups are off by {abs(worst['speedup_error']):.1%} at most "
        f"({worst['contender']}). Losses differ by at most {losses:.0e}, gradient norms by {norms:.0e}. "
        f"Learned factors of the table's terms: {factors}",
        highlight=False,
    )


def table(record: Mapping[str, Any]) -> str:
    """Markdown of a result file: real steps, then memory."""
    rows, settings, machine = record["rows"], record["settings"], record["machine"]
    worst, date = worst_speedup_error(rows), record["date"][:10]
    ours = {row["contender"] for row in of(rows, "steps") if row["policy"] == "sab"}
    steps = [
        [f"**`{line[0]}`**" if line[0] in ours else f"`{line[0].removesuffix(' *')}`" + r" \*" * line[0].endswith(" *"),
         *line[1:]]
        for line in step_cells(rows)
    ]  # fmt: skip
    losses, norms = largest_differences(rows)
    lengths = settings["lengths"]
    return "\n".join(
        [
            *markdown(STEPS, steps),
            "",
            f"Measured wall time of {settings['steps']} steps of {settings['batch_size']} real samples of "
            f"{min(lengths):,} to {max(lengths):,} tokens, {settings['processes']} processes x {settings['threads']} "
            f"thread on {machine['cpu']} ({machine['cores']} shared cores), {date}; all run the same batches on the "
            "same weights. `sab 4096`: units of 4,096 tokens, longer samples cut, shorter ones packed; `keep 1`: one "
            "chunk's activations are kept, earlier chunks run forward twice. Speed-ups are ratios of total time, in "
            "CPU time those of the busiest rank's processor time, without what other programs took; \\* "
            f"fastest peer. Predicted speed-ups are off by {abs(worst['speedup_error']):.1%} at most "
            f"(`{worst['contender']}`). Losses differ by at most {losses:.0e}, gradient norms by {norms:.0e}.",
            "",
            *markdown(MEMORY, memory_cells(rows)),
            "",
            "One process runs one sample of random tokens; megabytes above the resting state, measured and predicted. "
            "However a sample is cut, its keys and values and their gradients stay until its end: the K, V state. "
            f"{machine['cpu']}, {date}.",
        ]
    )  # fmt: skip


def markdown(names: Sequence[str], cells: Cells) -> list[str]:
    return ["| " + " | ".join(names) + " |", "|---" * len(names) + "|", *("| " + " | ".join(c) + " |" for c in cells)]
