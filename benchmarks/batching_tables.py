"""The tables of `benchmarks/batching.py`, for the terminal and as Markdown, from its records alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

SHORT = {"longalign-10k": "align", "chatqa2": "chatqa", "longalpaca-12k": "alpaca", "real": "real"}
KINDS = ("sparse", "dense")
OURS = ("sab", "sab_window")

Row = Mapping[str, Any]
Column = tuple[str, str]  # distribution, topology


def label(row: Row) -> str:
    """A policy's name in tables, the same in every cell: unit sizes differ between them."""
    name: str = row["policy"]
    if name in ("sab", "dense_chunks"):
        name += " whole" if row["unit_size"] is None else " units"
    if name == "sab_window":  # runs under the faster schedule of each cell
        return name
    return name + (" zero_bubble" if row.get("schedule") == "zero_bubble" else "")


def speedups(rows: Sequence[Row], attention: str) -> dict[str, dict[Column, Row]]:
    """Label -> column -> row, all of one kind of attention, in the order of the contenders."""
    found: dict[str, dict[Column, Row]] = {}
    chosen = [row for row in rows if row["what"] == "steps" and row["attention"] == attention]
    # The cell with the most rows comes first, so that no row is added behind those that are below it.
    chosen.sort(key=lambda row: row["topology"].endswith("pp1"))
    for row in chosen:
        found.setdefault(label(row), {})[(row["distribution"], row["topology"])] = row
    return found


def columns_of(rows: Sequence[Row]) -> list[Column]:
    return list(dict.fromkeys((row["distribution"], row["topology"]) for row in rows if row["what"] == "steps"))


def is_best_peer(row: Row) -> bool:
    return row["policy"] == row["best_baseline"] and row["schedule"] == row["best_baseline_schedule"]


def table(record: Mapping[str, Any]) -> str:
    """Markdown of a result file: speed-ups over random per kind of attention, then what the summary rows say."""
    rows, settings = record["rows"], record["settings"]
    columns = columns_of(rows)
    reads = {"sparse": f"{settings['budget']} blocks of {settings['block_size']} keys", "dense": "every block read"}
    lines: list[str] = []
    for attention in KINDS:
        lines += [
            f"**Speed-up over `random`, {attention} attention ({reads[attention]}):**",
            "",
            "| policy | " + " | ".join(f"{name}<br>{place}" for name, place in columns) + " |",
            "|---|" + "---|" * len(columns),
        ]
        for name, cells in speedups(rows, attention).items():
            shown = [speedup(cells.get(column)) for column in columns]
            lines.append(f"| {f'**`{name}`**' if is_ours(cells) else f'`{name}`'} | " + " | ".join(shown) + " |")
        lines += ["", margins(rows, attention), ""]
    lines += [
        "\\* fastest peer of the column: of those that keep every global batch, and of all where that is another one. "
        "`units`: cut and packed to the size that is fastest in simulation. `sab_window` (look-ahead of "
        f"{settings['window_steps']} steps) and `group_by_length` (sorted over the whole run) move samples between "
        f"steps, all others keep every global batch. Simulated with analytic times of {settings['model']} on "
        f"{settings['device']}, not measured, {record['date'][:10]}.",
        "",
        *(f"- {line}" for line in summary(rows)),
    ]
    return "\n".join(lines)


def is_ours(cells: Mapping[Column, Row]) -> bool:
    return next(iter(cells.values()))["policy"] in OURS


def speedup(row: Row | None) -> str:
    if row is None:
        return "-"
    return f"{row['speedup_vs_random']:.2f}" + (r"\*" if is_best_peer(row) else "")


def margins(rows: Sequence[Row], attention: str) -> str:
    """How our fastest strict plan and our window do against the fastest peers, over all columns."""
    found = speedups(rows, attention).values()
    columns = [[cells[column] for cells in found if column in cells] for column in columns_of(rows)]
    strict = [
        max((row for row in column if row["policy"] == "sab"), key=lambda row: row["speedup_vs_random"])
        for column in columns
    ]
    window = [row for column in columns for row in column if row["policy"] == "sab_window"]

    def span(chosen: Sequence[Row], key: str) -> str:
        values = [row[key] for row in chosen]
        return f"{min(values):.2f} to {max(values):.2f}"

    return (
        f"`sab`, the fastest of each column: {span(strict, 'speedup_vs_random')} times as fast as random, "
        f"{span(strict, 'speedup_vs_best_baseline')} times as fast as the fastest peer that keeps every global batch; "
        f"{span(strict, 'share_of_bound')} of the speed without any wait. `sab_window`: "
        f"{span(window, 'speedup_vs_random')}, and {span(window, 'speedup_vs_best_baseline')} against the fastest "
        "peer of all."
    )


def summary(rows: Sequence[Row]) -> list[str]:
    """The summary rows in words."""
    lines = []
    gaps = {row["policy"]: row for row in rows if row["what"] == "gap_to_optimum"}
    if gaps:
        each = ", ".join(
            f"{name} {row['gap_mean']:.2%} (95 of 100 below {row['gap_p95']:.1%}, exact in {row['optimal_share']:.0%})"
            for name, row in reversed(gaps.items())
        )
        cases = next(iter(gaps.values()))["cases"]
        lines.append(f"Slowest rank above the exact optimum, mean of {cases} small cases: {each}.")
    uneven = [row for row in rows if row["what"] == "rank_imbalance"]
    if uneven:
        each = ", ".join(f"{label(row)} {row['imbalance_rank']:.3f}" for row in uneven)
        lines.append(
            f"Slowest rank / mean rank on LongAlign-10k at DP4, 16 samples a batch, mean of {uneven[0]['batches']} "
            f"batches: {each}."
        )
    return lines


def show(console: Console, rows: Sequence[Row]) -> None:
    """One table per kind of attention, the fastest peer of a column marked."""
    columns = columns_of(rows)
    for attention in KINDS:
        shown = Table(title=f"speed-up over random, {attention} attention", box=None, padding=(0, 0, 0, 1))
        shown.add_column("policy", no_wrap=True)
        for name, place in columns:
            shown.add_column(f"{SHORT[name]}\n{place.replace('pp', chr(10) + 'pp')}", justify="right")
        for name, cells in speedups(rows, attention).items():
            texts = [speedup(cells.get(column)).replace("\\", "") for column in columns]
            shown.add_row(name, *texts, style="green" if is_ours(cells) else None)
        console.print(shown)
        console.print(margins(rows, attention), highlight=False)
    for line in summary(rows):
        console.print(line, highlight=False)
    console.print(
        "* fastest peer of those that keep every global batch, and of all; simulated with analytic times, not measured",
        highlight=False,
    )
