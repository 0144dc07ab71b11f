"""Planned versus actual on the terminal, 80 columns wide.

In: the run's figures. Out: a table of workers, the terms' errors, and the three worst steps with their reasons.
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from sparsebalance.reporting.planned.records import Record, worker_label

WORST = 3


def print_figures(console: Console, found: Record) -> None:
    """Args:
    found: see `sparsebalance.reporting.planned.totals.run_figures`.
    """
    console.print(_workers(found))
    console.print("Milliseconds a step; error: (planned - actual) / actual.", highlight=False)
    if found["bubble"] is not None:
        bubble = found["bubble"]
        console.print(
            f"Bubbles: stages waited {bubble['measured']:.1%} of the time, {bubble['planned']:.1%} as planned.",
            highlight=False,
        )
    if found["terms"]:
        terms = ", ".join(f"{name} {term['error_mean_abs']:.1%}" for name, term in found["terms"].items())
        console.print(f"Mean absolute error by term: {terms}.", highlight=False)
    console.print(
        f"Mean absolute error per micro-batch {found['unit_error_mean_abs']:.1%}; median step error "
        f"{found['step_error_median']:+.1%} ({found['step_error_median_abs']:.1%} absolute).",
        highlight=False,
    )
    console.print("Steps that lost most time:", highlight=False)
    worst = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    worst.add_column(justify="right", no_wrap=True)
    worst.add_column(justify="right", no_wrap=True)
    worst.add_column()
    for entry in found["worst"][:WORST]:
        worst.add_row(f"  step {entry['step']}", f"{entry['lost_ms']:,.0f} ms", entry["reason"])
    console.print(worst)
    for note in found["notes"]:
        console.print(f"note: {note}", highlight=False)
    console.print(found["verdict"], highlight=False)


def _workers(found: Record) -> Table:
    table = Table(
        title=f"{found['steps']} steps under {found['policy']}: planned and actual",
        box=None,
        padding=(0, 0, 0, 2),
        header_style="bold",
    )
    table.add_column("worker", no_wrap=True)
    pipelined = found["bubble"] is not None
    for heading in ("planned ms", "actual ms", "error", "waiting", *(["as planned"] if pipelined else [])):
        table.add_column(heading, justify="right", no_wrap=True)
    stages = len({worker["stage"] for worker in found["workers"]})
    for worker in found["workers"]:
        table.add_row(
            worker_label((worker["rank"], worker["stage"]), stages),
            f"{worker['planned_ms']:,.0f}",
            f"{worker['measured_ms']:,.0f}",
            f"{worker['error']:+.1%}",
            f"{worker['waiting_share']:.1%}",
            *([f"{worker['planned_waiting_share']:.1%}"] if pipelined else []),
        )
    return table
