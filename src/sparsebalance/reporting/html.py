"""report.html of a comparison: one self-contained page.

In: the summary and the step records. Out: headline, table, plots, settings, and the words explained.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparsebalance.reporting import figures
from sparsebalance.reporting.console import COLUMNS, comparison_notes
from sparsebalance.reporting.lengths import length_figure
from sparsebalance.reporting.page import Section, escape, write_page

Record = dict[str, Any]

GLOSSARY = {
    "micro-batch": "what one forward call processes: one sample, several packed, or a chunk of a long one",
    "imbalance": "slowest / mean: over ranks' sums (rank), per slot over ranks (slot), over micro-batches (all)",
    "busy": "share of ranks x step time spent in forwards and backwards; the rest is waiting and the all-reduce",
    "budget": "key blocks that a query may read, its own block included",
    "coverage": "share of a query's softmax mass inside the blocks that it reads, measured on sampled queries",
    "strict": "every sample stays in its own global batch, so the gradient is the same up to rounding",
    "sab": "sparsity-aware batching: samples placed on ranks by predicted time, then packed or run in chunks",
    "dense_chunks": "a baseline: the micro-batches of sab, placed as if attention were dense (ChunkFlow)",
    "dst": "dynamic sparsity tuning: budgets moved towards an anchor latency, within a bound on coverage",
}


def write_report(path: Path, summary: Record, records: Sequence[Record]) -> None:
    """Args:
    summary, records: as in summary.json and metrics.jsonl.
    """
    names = list(summary["policies"])
    shown = [name for name in names if name in ("random", summary["best_baseline"], "sab", "dst", "sab_dst")]
    slowest = max(records, key=lambda record: record["policies"]["random"]["step_ms"])
    lane, others = "rank", "the other rank."
    if "workers" in slowest["policies"]["random"]:
        lane = "stage"
        others = "other stages and ranks; input and weight gradient are the halves of a backward."
    sections: list[Section] = [
        (
            f"Where the time goes: step {slowest['step']}, {lane} by {lane}",
            "The step on which <code>random</code> was slowest, as it really ran. Grey is waiting for " + others,
            figures.timeline(slowest, shown),
        ),
        ("Step times", "The same global batch under every policy.", figures.step_times(records, names)),
        (
            "Latencies before and after",
            "Each point is a micro-batch (left) or a rank in a step (right); 1 on the right is perfect balance.",
            figures.unit_latencies(records, names),
        ),
        (
            "Predicted and measured",
            f"Mean absolute error {summary['predictor']['heldout_mape']:.1%} over all micro-batches, none of which is "
            f"a measuring point of the latency table; {summary['predictor']['heldout_mape_at_step_speed']:.1%} once "
            "each step's predictions are scaled to the machine's speed in that step.",
            figures.predicted_and_measured(records, names),
        ),
        (
            "Loss",
            "All policies see the same weights, which the baseline's gradients train; strict policies at equal budgets "
            "lie on one line.",
            figures.losses(records, names),
        ),
        ("Attention budgets and what they cover", "", figures.coverages(summary["policies"])),
        (
            "The data",
            f"{summary['data']['samples']:,} samples, {summary['data']['tokens']:,} tokens, "
            f"{summary['data']['targets']:,} of them targets.",
            length_figure(summary["data"]["lengths"]),
        ),
    ]
    write_page(path, "SparseBalance: balancing compared", _lead(summary), sections, _tail(summary))


def headline(summary: Record) -> str:
    """The result in one sentence."""
    policies, best = summary["policies"], summary["best_baseline"]
    found = {
        name: f"{name} is {policies[name]['speedup_vs_random']:.2f}x random order and "
        f"{policies[name]['speedup_vs_best_baseline']:.2f}x the fastest baseline ({best})"
        for name in ("sab", "sab_dst")
        if name in policies
    }
    return "; ".join(found.values()) or f"the fastest policy is {best}"


def _lead(summary: Record) -> str:
    machine, settings = summary["machine"], summary["settings"]
    rows = "".join(_row(name, policy, summary["best_baseline"]) for name, policy in summary["policies"].items())
    head = "".join(f"<th>{escape(name)}</th>" for name in ("policy", *COLUMNS))
    notes = "".join(f"<p class='small'>{escape(note)}</p>" for note in comparison_notes(summary))
    return (
        f"<p class='lead'>{escape(headline(summary))}.</p>"
        f"<p>{settings['steps']} steps of {settings['batch_size']} samples from {escape(settings['data'])}, "
        f"{machine['processes']} processes of {machine['threads']} thread on {escape(machine['cpu'])} "
        f"({machine['cores']} cores), torch {escape(machine['torch'])}, {escape(machine['date'])}.</p>"
        f"<div class='wide'><table><tr>{head}</tr>{rows}</table></div>{notes}"
    )


def _row(name: str, policy: Record, best: str) -> str:
    kind = "ours" if policy["ours"] else "best" if name == best else ""
    label = f"{name} *" if name == best else name
    cells = "".join(f"<td>{escape(cell)}</td>" for cell in (label, *(show(policy) for show in COLUMNS.values())))
    return f"<tr class='{kind}'>{cells}</tr>"


def _tail(summary: Record) -> str:
    settings = {
        key: f"{value:,}" if isinstance(value, int) else value
        for key, value in summary["settings"].items()
        if key != "config"
    }
    return (
        f"<h2>Words</h2>{_definitions(GLOSSARY)}"
        f"<h2>Settings</h2>{_definitions(settings)}<p class='small'>summary.json holds every figure of this page, "
        "metrics.jsonl every step, trace.json one step for Perfetto (ui.perfetto.dev).</p>"
    )


def _definitions(entries: Record) -> str:
    return "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in entries.items()) + "</dl>"
