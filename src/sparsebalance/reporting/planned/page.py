"""report.html of a training run: what was planned, what happened, and why they differ.

In: steps and the run's figures. Out: one self-contained page.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sparsebalance.reporting.page import Section, escape, write_page
from sparsebalance.reporting.planned import figures
from sparsebalance.reporting.planned.records import Record, Step
from sparsebalance.reporting.planned.timeline import timeline

WORDS = {
    "chunk": "part of a long sample that is a micro-batch; chunks run forward in order, then backward last to first",
    "planned": "what the latency table, with the online correction of that moment, predicted before the step ran",
    "error": "(predicted - measured) / measured; below 0 where it took longer than predicted",
    "linear": "matrix products of the layers, and everything else that grows with the tokens alone",
    "router": "choosing which key blocks every query reads",
    "attend": "attention over the chosen blocks",
    "head": "logits and loss of the target tokens",
    "F, B, I, W": "forward and backward of a micro-batch on a stage; a backward may run in two halves, the gradient of "
    "its input (I), which the stage before waits for, and that of its weights (W), which can fill gaps",
    "bubble": "share of all workers' time in which a pipeline's stages waited, for each other or before the all-reduce",
    "waiting": "pauses between forwards and backwards (coverage is probed in them), and the time before the last rank "
    "came to the all-reduce",
    "all-reduce": "summing gradients over ranks, without the waiting before it",
    "lost": "step time beyond the prediction, or the ranks' mean waiting, whichever is more",
    "correction": "how much slower than the table says each rank and each term has been lately; plans use it",
}

IN_PIPELINES = ("F, B, I, W", "bubble")

_STYLE = """<style>
.tiles { display: flex; flex-wrap: wrap; gap: .7rem; margin: 1.1rem 0; }
.tile { flex: 1 1 9rem; border: 1px solid #ddd; border-radius: 8px; padding: .55rem .9rem; }
.tile b { display: block; font-size: 1.55rem; line-height: 1.25; font-variant-numeric: tabular-nums; }
.tile span { color: #666; font-size: .85rem; }
p.lead { font-size: 1.3rem; line-height: 1.45; max-width: 68ch; }
td.reason { text-align: left; white-space: normal; min-width: 22rem; } th.reason { text-align: left; }
</style>"""


def write_planned(path: Path, title: str, steps: Sequence[Step], found: Record, samples: Section | None = None) -> None:
    """Args:
    found: see `sparsebalance.reporting.planned.totals.run_figures`.
    samples: what became of the run's samples, where that is known.
    """
    by_time = sorted(steps, key=lambda step: step.step_ms)
    slowest, median = by_time[-1], by_time[(len(by_time) - 1) // 2]
    sections: list[Section] = [
        (
            f"The slowest step, {slowest.step}: planned above actual",
            "Light bars are the plan, full ones what happened, on the same time axis. F and B are the forward and "
            f"backward of a micro-batch; hover for its samples, budgets and terms.{_chunked(slowest)}{_staged(found)}",
            timeline(slowest),
        )
    ]
    if median is not slowest:
        sections.append((f"A typical step, {median.step}", "The step of median time.", timeline(median)))
    if found["bubble"] is not None:
        sections.append(
            (
                "Bubbles, stage by stage",
                "Share of the step in which a stage waited, for other stages or before the all-reduce: light as "
                "planned, full as it went. What was planned is the price of the schedule; the rest came as it ran.",
                figures.bubbles(found),
            )
        )
    sections += [
        (
            "Where the time went",
            f"The mean step of every {_who(found)}. The black triangle is the compute time that was planned.",
            figures.time_spent(found),
        ),
        (
            "Which part of the prediction was off",
            "Signed errors of micro-batches; boxes hold the middle half, whiskers reach from 5% to 95%. "
            "Below 0, it took longer than predicted.",
            figures.errors_by_term(steps, found),
        ),
        (
            "How the error moved",
            "The correction learns from measured steps: where a rank turns slow, the error drops below 0 and comes "
            "back once the correction has followed.",
            figures.errors_over_steps(steps, found),
        ),
        (
            "Predicted and measured micro-batches",
            f"Each point is a micro-batch{'' if found['bubble'] is None else ' on a stage'}; on average they are "
            f"{found['unit_error_mean_abs']:.1%} off."
            + (f" {figures.POINTS:,} evenly chosen ones at most." if found["micro_batches"] > figures.POINTS else ""),
            figures.predicted_and_measured(steps),
        ),
        *([samples] if samples is not None else []),
    ]
    write_page(path, title, _lead(found), sections, _tail(found))


def _who(found: Record) -> str:
    return "rank" if found["bubble"] is None else "stage"


def _staged(found: Record) -> str:
    if found["bubble"] is None:
        return ""
    return " I and W are the halves of a split backward. Grey is a bubble: the stage waits."


def _chunked(step: Step) -> str:
    if not any(unit.chunk is not None for worker in step.workers for unit in worker.units):
        return ""
    return " Chunks of a long sample run forward one after another, then backward last to first."


def headline(found: Record) -> str:
    """The run in one sentence."""
    shares = found["shares"]
    error = found["step_error_median"]
    tended = "took longer" if error < 0 else "took less"
    return (
        f"Half of the steps came within {found['step_error_median_abs']:.1%} of their predicted time (the median one "
        f"{tended}, by {abs(error):.1%}), micro-batches were {found['unit_error_mean_abs']:.1%} off on average; "
        f"{_who(found)}s computed for {found['compute_share']:.0%} of the time and waited for {shares['waiting']:.0%}, "
        f"and planning took {found['planning_share']:.1%} of a step's time."
    )


def _lead(found: Record) -> str:
    shares = found["shares"]
    tiles = (
        (f"{found['step_ms']:,.0f} ms", "median step time"),
        (f"{found['step_error_median']:+.1%}", f"median step error, {found['step_error_median_abs']:.1%} absolute"),
        (f"{found['unit_error_mean_abs']:.1%}", f"mean error of {found['micro_batches']:,} micro-batches"),
        (f"{found['compute_share']:.0%}", "of the time computing"),
        (f"{shares['waiting']:.0%}", f"waiting{_planned(found)}, and {shares['all_reduce']:.0%} in the all-reduce"),
        (f"{found['planning_share']:.1%}", "planning time / step time"),
    )
    boxes = "".join(
        f"<div class='tile'><b>{escape(value)}</b><span>{escape(what)}</span></div>" for value, what in tiles
    )
    notes = "".join(f"<p class='small'>Note: {escape(note)}.</p>" for note in found["notes"])
    steps = "1 step" if found["steps"] == 1 else f"{found['steps']:,} steps"
    return (
        f"{_STYLE}<p class='lead'><b>{escape(found['verdict'])}</b> {escape(headline(found))}</p>"
        f"<div class='tiles'>{boxes}</div>"
        f"<p class='small'>{steps} under the policy {escape(found['policy'])}.</p>{notes}"
    )


def _planned(found: Record) -> str:
    return "" if found["bubble"] is None else f" ({found['bubble']['planned']:.0%} planned)"


def _tail(found: Record) -> str:
    head = "".join(f"<th>{name}</th>" for name in ("step", "planned ms", "actual ms", "lost ms", "waiting"))
    rows = "".join(
        f"<tr><td>{entry['step']}</td><td>{entry['predicted_step_ms']:,.0f}</td><td>{entry['step_ms']:,.0f}</td>"
        f"<td>{entry['lost_ms']:,.0f}</td><td>{entry['waiting_share']:.0%}</td>"
        f"<td class='reason'>{escape(entry['reason'])}</td><td>{entry['reason_ms']:,.0f}</td></tr>"
        for entry in found["worst"]
    )
    words = "".join(f"<dt>{escape(word)}</dt><dd>{escape(meaning)}</dd>" for word, meaning in _words(found).items())
    return (
        "<h2>The steps that lost most time, and why</h2>"
        "<p>The reason is the one without which the step would have been shortest; its price is in the last column.</p>"
        f"<div class='wide'><table><tr>{head}<th class='reason'>main reason</th><th>its ms</th></tr>"
        f"{rows}</table></div>"
        f"<h2>Words</h2><dl>{words}</dl>"
        "<p class='small'>metrics.jsonl holds every step, trace.json up to 20 of them for Perfetto "
        "(ui.perfetto.dev).</p>"
    )


def _words(found: Record) -> dict[str, str]:
    if found["bubble"] is None:
        return {word: meaning for word, meaning in WORDS.items() if word not in IN_PIPELINES}
    return WORDS | {
        "waiting": "gaps between a stage's actions, and the time before the last stage came to the all-reduce",
        "compute, not split": "the rest of the actions: packing rows, probing coverage",
    }
