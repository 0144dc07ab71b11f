"""The pages of `sparsebalance plan`: one forecast in detail, or the topologies of a sweep. Each is one HTML file.

In: settings, results, sample lengths. Out: headline, table, plots of the example step, settings, words explained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sparsebalance.planner.forecast import Forecast, Recommendation
from sparsebalance.planner.sweep import Choice
from sparsebalance.planning.accounting import Account
from sparsebalance.reporting.accounting import account_section
from sparsebalance.reporting.lengths import length_figure
from sparsebalance.reporting.page import Section, escape, write_page
from sparsebalance.reporting.plan import figures
from sparsebalance.reporting.plan.console import (
    COLUMNS,
    TOO_LARGE,
    Settings,
    choice_notes,
    forecast_notes,
    gigabytes,
    is_best,
    milliseconds,
    ranked,
    scenario_title,
    skipped_groups,
    topology_name,
)
from sparsebalance.reporting.plan.timeline import LANES, plan_timelines, shown_plans

WORDS = {
    "analytic": "times follow from the model's sizes and a device's assumed rates; nothing was measured",
    "micro-batch": "what one forward call processes: samples packed one after another, or one chunk of a long sample",
    "random": "samples in shuffled order, one a micro-batch; what 'vs random' compares with",
    "sab": "sparsity-aware batching: samples packed or cut to units of so many tokens, placed by predicted time",
    "dense_chunks": "a baseline: the units of sab, placed as if attention were dense (ChunkFlow)",
    "dst": "dynamic sparsity tuning: budgets moved towards an anchor latency, which changes what attention reads",
    "zero_bubble": "backwards split in input gradients (I) and weight gradients (W), which fill the pipeline's gaps",
    "rank, slot, all": "imbalance, slowest / mean: over ranks' sums, over ranks in each slot, over micro-batches",
    "busy": "share of devices x step time spent in forwards and backwards",
    "bound": "step time if no device ever waited; only other budgets or another topology can go below it",
    "peak GB": "of the fullest device: weights, gradients, optimiser, activations, working memory",
    "critical path": "the chain of actions that ends last; the step gets no shorter unless this chain does",
    "front": "topologies that no other one beats in both step time and memory",
}
FORECAST_WORDS = tuple(word for word in WORDS if word != "front")
SWEEP_WORDS = ("analytic", "random", "sab", "dense_chunks", "zero_bubble", "bound", "peak GB", "front")

_STYLE = """<style>
p.lead { max-width: 80ch; } tr.chosen td { font-weight: 600; } td.large { color: #b3261e; }
th { white-space: normal; vertical-align: bottom; }
td.text, th.text { text-align: left; } td.reason { text-align: left; white-space: normal; min-width: 26rem; }
</style>"""


def write_plan_page(
    path: Path, settings: Settings, result: Forecast, advice: Recommendation, lengths: list[int], samples: Account
) -> None:
    """Args:
    settings: as `sparsebalance plan` returns them.
    lengths: tokens of every sample of the data.
    samples: what becomes of them under the recommended plan.
    """
    step = result.example_step
    drawn = shown_plans(result, advice)
    sizes = {result.examples[place][1].bubble_ms.size for place in drawn}
    only = "" if max(sizes) <= LANES else " Of the many workers only the slowest and the fastest rank's are shown."
    sections: list[Section] = [
        (
            f"The step, worker by worker: global batch {step}",
            "The simulated step on which <code>random</code> is slowest, on one time axis. White is waiting. "
            f"Hover for tokens, samples and budgets.{only}",
            plan_timelines(result, advice, drawn),
        ),
        (
            "Where the time goes",
            "The same step under every plan, averaged over devices. The all-reduce counts where nothing hides it.",
            figures.time_spent(result),
        ),
        (
            "Latencies of micro-batches",
            "Boxes hold the middle half of the step's micro-batches, whiskers reach from 5% to 95%. Where they "
            "are unequal, stages and ranks wait for the slowest.",
            figures.unit_latencies(result),
        ),
        (
            "Activations over time",
            f"Of the slowest rank, with the keys and values that chunks share.{_room(settings, advice)}",
            figures.memory_curves(result, advice, settings["capacity_mb"]),
        ),
        account_section(samples, [f"Under the recommended plan, {advice.row.name}:", *samples.sentences()]),
        (
            "The data",
            f"{len(lengths):,} samples, {sum(lengths):,} tokens, the longest {max(lengths):,}. "
            f"{escape(settings['provenance'])}",
            length_figure(lengths),
        ),
    ]
    if len(drawn) > 1:
        sections.insert(1, _close_up(result, advice))
    title = f"SparseBalance plan: {settings['model']}, {topology_name(settings['topology'])}"
    tail = _tail(settings, FORECAST_WORDS)
    write_page(path, title, _plan_lead(settings, result, advice), sections, tail)


def _close_up(result: Forecast, advice: Recommendation) -> Section:
    return (
        "The recommended plan, close up",
        "The same step. The black line is the critical path: the step gets no shorter unless it does. F forward, "
        "B backward, or its halves I (input gradient) and W (weight gradient), with the number of the micro-batch.",
        plan_timelines(result, advice, [result.rows.index(advice.row)]),
    )


def headline(settings: Settings, result: Forecast, advice: Recommendation) -> str:
    """The claim in one sentence, with where its figures come from."""
    row, random = advice.row, result.rows[0]
    best = next(other for other in result.rows if is_best(other, result))
    if row == random:
        over = "no other plan that fits and keeps its budgets is clearly faster"
    else:
        over = f"random order needs {milliseconds(random.step_ms)} ms ({row.speedup:.2f}x)"
    if best == row != random:
        over += ", and no baseline is faster"
    elif best != random:
        over += f", the fastest baseline, {best.name}, {milliseconds(best.step_ms)} ms ({row.speedup_vs_best:.2f}x)"
    return (
        f"{row.name} needs {milliseconds(row.step_ms)} ms a step; {over}. That is {row.share_of_bound:.0%} of what "
        f"is possible without any waiting ({settings['source']})."
    )


def _plan_lead(settings: Settings, result: Forecast, advice: Recommendation) -> str:
    rows = []
    for row in result.rows:
        kinds = ["ours" if row.ours else "best" if is_best(row, result) else ""]
        kinds += ["chosen"] if row == advice.row else []
        name = f"{'→ ' if row == advice.row else ''}{row.name}{' *' if is_best(row, result) else ''}"
        cells = "".join(_cell(heading, show(row)) for heading, show in COLUMNS.items())
        extra = f"<td>{row.units:,.0f}</td><td>{row.largest_unit:,}</td><td>{row.mean_budget:,.1f}</td>"
        spread = f"<td>{milliseconds(row.step_ms_p10)} - {milliseconds(row.step_ms_p90)}</td>"
        rows.append(f"<tr class='{' '.join(kinds).strip()}'><td>{escape(name)}</td>{cells}{spread}{extra}</tr>")
    headings = ("plan", *COLUMNS, "p10 - p90 ms", "units", "largest unit, tokens", "mean budget")
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    notes = "".join(f"<p class='small'>{escape(note)}</p>" for note in forecast_notes(settings, result))
    return (
        f"{_STYLE}<p class='lead'>{escape(headline(settings, result, advice))}</p>"
        f"<p>{escape(scenario_title(settings))}.</p>"
        f"<p><b>Recommended: {escape(advice.row.name)}</b>: {escape(advice.reason)}.</p>"
        f"<div class='wide'><table><tr>{head}</tr>{''.join(rows)}</table></div>{notes}"
        "<p class='small'>→ recommended; green rows are ours. dst and sab_dst change what attention reads, so they "
        "are not recommended on time alone.</p>"
    )


def _cell(heading: str, text: str) -> str:
    large = " class='large'" if heading == "peak GB" and TOO_LARGE in text else ""
    return f"<td{large}>{escape(text)}</td>"


def _limit(settings: Settings) -> str:
    capacity = settings["capacity_mb"]
    if capacity is None:
        return " How much memory a device has is not known."
    return f" A device has {gigabytes(capacity)} GB that can be used."


def _room(settings: Settings, advice: Recommendation) -> str:
    return (
        f"{_limit(settings)} With weights, gradients, optimiser and working "
        f"memory the recommended plan needs {gigabytes(advice.row.peak_memory_mb)} GB at its peak."
    )


def write_sweep_page(path: Path, settings: Settings, choices: Sequence[Choice]) -> None:
    """Args:
    settings: as `sparsebalance plan --sweep` returns them.
    """
    section: Section = (
        "Step time and memory",
        "Every topology with its best plan; hover for its figures. Lower left is better, and the dotted front holds "
        f"the ones to choose from.{_limit(settings)}",
        figures.pareto(choices, settings["capacity_mb"]),
    )
    title = f"SparseBalance plan: {settings['model']} on {settings['devices']:,} devices"
    tail = _sweep_table(choices) + _tail(settings, SWEEP_WORDS)
    write_page(path, title, _sweep_lead(settings, choices), [section], tail)


def _sweep_lead(settings: Settings, choices: Sequence[Choice]) -> str:
    found = ranked(choices)
    (choice, row), (last, slowest) = found[0], found[-1]
    sentence = (
        f"Of {len(choices)} topologies of {settings['devices']:,} devices, {topology_name(asdict(choice.topology))} "
        f"with {row.name} is the fastest: {milliseconds(row.step_ms)} ms a step, {choice.tokens_per_s:,.0f} tokens "
        f"per second and device, {row.speedup:.2f}x over random order there"
    )
    if last is not choice:
        sentence += (
            f"; the slowest that fits, {topology_name(asdict(last.topology))}, needs {milliseconds(slowest.step_ms)} ms"
        )
    notes = "".join(f"<p class='small'>{escape(note)}</p>" for note in choice_notes(settings, choices))
    return (
        f"{_STYLE}<p class='lead'>{escape(sentence)} ({escape(settings['source'])}).</p>"
        f"<p>{escape(scenario_title(settings))}.</p>{notes}"
    )


def _sweep_table(choices: Sequence[Choice]) -> str:
    headings = ("topology", "best plan", "step ms", "tokens/s a device", "vs random", "busy", "peak GB", "front")
    head = "".join(f"<th{' class=text' if h == 'best plan' else ''}>{escape(h)}</th>" for h in headings)
    rows = []
    for choice, row in ranked(choices):
        texts = (COLUMNS["vs random"](row), COLUMNS["busy"](row))
        rows.append(
            f"<tr class='{'ours' if choice.pareto else ''}'><td>{topology_name(asdict(choice.topology))}</td>"
            f"<td class='text'>{escape(row.name)}</td><td>{COLUMNS['step ms'](row)}</td>"
            f"<td>{choice.tokens_per_s:,.0f}</td>{''.join(f'<td>{text}</td>' for text in texts)}"
            f"{_cell('peak GB', COLUMNS['peak GB'](row))}<td>{'*' if choice.pareto else ''}</td></tr>"
        )
    table = f"<h2>All topologies</h2><div class='wide'><table><tr>{head}</tr>{''.join(rows)}</table></div>"
    skipped = [choice for group in skipped_groups(choices) for choice in group]
    if not skipped:
        return table
    reasons = "".join(
        f"<tr><td>{topology_name(asdict(choice.topology))}</td><td class='reason'>{escape(choice.skipped)}</td></tr>"
        for choice in skipped
    )
    return (
        f"{table}<h2>Skipped: {len(skipped)} of {len(choices)}</h2><div class='wide'><table>"
        f"<tr><th>topology</th><th class='text'>why</th></tr>{reasons}</table></div>"
    )


def _tail(settings: Settings, words: Sequence[str]) -> str:
    shown: dict[str, Any] = {}
    for key, value in settings.items():
        if key == "topology":
            if "devices" not in settings:  # a sweep has many
                shown[key] = topology_name(value)
        elif key == "capacity_mb":
            shown["usable GB of a device"] = "not known" if value is None else gigabytes(value)
        else:
            number = isinstance(value, int) and not isinstance(value, bool)
            shown[key.replace("_", " ")] = f"{value:,}" if number else value
    return f"<h2>Words</h2>{_definitions({w: WORDS[w] for w in words})}<h2>Settings</h2>{_definitions(shown)}"


def _definitions(entries: Mapping[str, Any]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in entries.items()) + "</dl>"
