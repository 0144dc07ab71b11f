"""The comparison's result on the terminal, and the cells that the page shows too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

Record = dict[str, Any]

COLUMNS: dict[str, Callable[[Record], str]] = {
    "ms/step": lambda p: f"{p['step_ms']:,.0f}",
    "p10-p90": lambda p: f"{p['step_ms_p10']:,.0f}-{p['step_ms_p90']:,.0f}",
    "vs random": lambda p: f"{p['speedup_vs_random']:.2f}x",
    "vs best": lambda p: f"{p['speedup_vs_best_baseline']:.2f}x",
    "rank": lambda p: f"{p['imbalance']['rank']:.2f}",
    "slot": lambda p: f"{p['imbalance']['slot']:.2f}",
    "all": lambda p: f"{p['imbalance']['all']:.2f}",
    "busy": lambda p: f"{p['busy_fraction']:.0%}",
    "budget": lambda p: f"{p['mean_budget']:.1f}",
    "coverage": lambda p: f"{p['coverage']:.3f}",
    "loss": lambda p: f"{p['loss']:.3f}",
    "plan ms": lambda p: f"{p['planning_ms']:.1f}",
    "planning": lambda p: f"{p['planning_share']:.2%}",
    "MB": lambda p: "-" if p["peak_memory_mb"] is None else f"{p['peak_memory_mb']:,.0f}",
}
"""Heading -> cell of a policy's summary; rank, slot and all are the three imbalances."""

# What fits in 80 characters; the page shows every column.
ON_TERMINAL = ("ms/step", "vs random", "vs best", "rank", "busy", "coverage", "planning")


def print_comparison(console: Console, summary: Record) -> None:
    """The table, and the sentences that make it readable on its own."""
    console.print(comparison_table(summary))
    for line in comparison_notes(summary):
        console.print(line, highlight=False, soft_wrap=True)


def comparison_table(summary: Record) -> Table:
    """One row per policy; ours in green, the fastest baseline marked."""
    machine, settings = summary["machine"], summary["settings"]
    table = Table(
        title=f"{settings['steps']} steps of {settings['batch_size']} samples, {machine['processes']} processes x "
        f"{machine['threads']} thread, {machine['cpu']}",
        caption="rank: slowest rank / mean rank; planning: its share of the step time",
        box=None,
        padding=(0, 0, 0, 1),
        header_style="bold",
    )
    table.add_column("policy", no_wrap=True)
    for name in ON_TERMINAL:
        table.add_column(name, justify="right", no_wrap=True)
    for name, policy in summary["policies"].items():
        label = f"{name} *" if name == summary["best_baseline"] else name
        cells = [COLUMNS[column](policy) for column in ON_TERMINAL]
        table.add_row(label, *cells, style="green" if policy["ours"] else None)
    return table


def comparison_notes(summary: Record) -> list[str]:
    """What was compared, how exact it was, and how good the predictor is."""
    checks, predictor, settings = summary["checks"], summary["predictor"], summary["settings"]
    wanted = settings["steps_configured"]
    stopped = f" The time limit ended the run after {settings['steps']} of {wanted} steps."
    return [
        f"* fastest baseline: {summary['best_baseline']}. Every policy ran each of {settings['steps']} global batches "
        "on the same weights, in rotating order; speed-ups are per target token trained."
        + (stopped if settings["steps"] < wanted else ""),
        f"Strict policies train the same: loss differs by at most {checks['strict_loss_rel_diff_max']:.1e}, gradient "
        f"norm by {checks['strict_grad_norm_rel_diff_max']:.1e} (relative; limits {checks['loss_limit']:.0e} and "
        f"{checks['grad_norm_limit']:.0e}): {'passed' if checks['passed'] else 'FAILED'}.",
        f"Predictor: mean absolute error {predictor['heldout_mape']:.1%} over all micro-batches "
        f"({predictor['heldout_mape_at_step_speed']:.1%} at the machine's speed in each step), median "
        f"{predictor['slowest_unit_error']:.1%} on the slowest of a plan, {predictor['step_error_median']:.1%} on step "
        f"times; {predictor['pairs_in_order']} of {predictor['pairs']} pairs of policies in the measured order; "
        f"routing per {settings['granularity']}, "
        f"default budget {settings['budget']} blocks of {settings['block_size']}.",
    ]
