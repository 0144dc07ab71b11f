"""The comparison's plots. In: step records (see `sparsebalance.comparison.run`). Out: plotly figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sparsebalance.reporting.planned.records import chunk_of, spans_of, worker_label

Record = dict[str, Any]

FORWARD, BACKWARD, INPUT, WEIGHT, WAIT = "#4c78a8", "#f58518", "#e45756", "#72b7b2", "#dddddd"
SPAN_NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
KIND_COLORS = dict(zip((*SPAN_NAMES.values(), "waiting"), (FORWARD, BACKWARD, INPUT, WEIGHT, WAIT)))
_BASELINE_COLORS = ("#7f7f7f", "#9ecae9", "#b279a2", "#d6a5c9", "#bab0ac", "#83bcb6", "#9d755d", "#c7b3e5")
_OUR_COLORS = {"sab": "#54a24b", "dst": "#e45756", "sab_dst": "#1b7837"}


def policy_colors(names: Sequence[str]) -> dict[str, str]:
    """One colour per policy, the same in every plot: strong ones for ours."""
    others = [name for name in names if name not in _OUR_COLORS]
    return {name: _BASELINE_COLORS[i % len(_BASELINE_COLORS)] for i, name in enumerate(others)} | _OUR_COLORS


@dataclass(frozen=True, slots=True)
class _Bar:
    kind: str
    lane: str
    start_ms: float
    took_ms: float
    hover: str


def timeline(record: Record, names: Sequence[str]) -> go.Figure:
    """One step's ranks, and stages of their pipelines, under each policy on a common time axis, as measured."""
    bars = {name: _bars(record["policies"][name]) for name in names}
    titles = [_title(name, record["policies"][name]) for name in names]
    figure = make_subplots(rows=len(names), cols=1, shared_xaxes=True, vertical_spacing=0.05, subplot_titles=titles)
    kinds = {bar.kind for own in bars.values() for bar in own}
    for row, name in enumerate(names, start=1):
        for kind, color in KIND_COLORS.items():
            own = [bar for bar in bars[name] if bar.kind == kind]
            if kind not in kinds:
                continue
            figure.add_bar(
                orientation="h",
                y=[bar.lane for bar in own],
                base=[bar.start_ms for bar in own],
                x=[bar.took_ms for bar in own],
                hovertext=[bar.hover for bar in own],
                hoverinfo="text",
                marker={"color": color, "line": {"color": "white", "width": 0.6}},
                name=kind,
                legendgroup=kind,
                showlegend=row == 1,
                row=row,
                col=1,
            )
    lanes = list(dict.fromkeys(bar.lane for own in bars.values() for bar in own))
    figure.update_layout(barmode="overlay", height=70 + (45 + 30 * max(2, len(lanes))) * len(names), bargap=0.25)
    figure.update_xaxes(title_text="milliseconds (measured)", row=len(names), col=1)
    figure.update_yaxes(autorange="reversed", categoryorder="array", categoryarray=lanes)
    figure.update_annotations(x=0, xanchor="left", font_size=13)
    return figure


def _title(name: str, step: Record) -> str:
    if "bubble" not in step:
        return name
    shares = step["bubble"]
    waited = f"{shares['measured']:.0%} waiting, {shares['planned']:.0%} as planned"
    return f"{name}: {step['step_ms']:,.0f} ms, {waited}"


def _bars(step: Record) -> list[_Bar]:
    if "workers" in step:
        return [bar for worker in step["workers"] for bar in _stage_bars(worker, step)]
    return [bar for rank, units in enumerate(step["units"]) for bar in _rank_bars(rank, units, step)]


def _rank_bars(rank: int, units: Sequence[Record], step: Record) -> Iterator[_Bar]:
    """Forwards and backwards of a rank without a pipeline."""
    lane = f"rank {rank}"
    for unit in units:
        if unit["tokens"]:
            yield _Bar("forward", lane, unit["start_ms"], unit["forward_ms"], _hover(unit))
            yield _Bar("backward", lane, _backward_start(unit), unit["backward_ms"], _hover(unit))
    end, wait = max(_backward_start(unit) + unit["backward_ms"] for unit in units), step["all_reduce_ms"][rank]
    yield _Bar("waiting", lane, end, wait, f"gradient all-reduce, waiting included: {wait:.0f} ms")


def _stage_bars(worker: Record, step: Record) -> Iterator[_Bar]:
    """Actions of a pipeline's worker, and the gaps between them."""
    lane = worker_label((worker["rank"], worker["stage"]), 2)
    free = 0.0
    for span in spans_of(worker):
        start, took = span.measured
        if start > free:
            yield _Bar("waiting", lane, free, start - free, f"waiting for another stage: {start - free:.0f} ms")
        what = f"{span.kind}{span.unit} on stage {span.stage}: {took:.1f} ms, planned {span.planned[1]:.1f}<br>"
        hover = what + _hover(step["units"][worker["rank"]][span.unit])
        yield _Bar(SPAN_NAMES[span.kind], lane, start, took, hover)
        free = start + took
    wait = worker["all_reduce_ms"]
    yield _Bar("waiting", lane, free, wait, f"gradient all-reduce, waiting included: {wait:.0f} ms")


def _hover(unit: Record) -> str:
    return (
        f"{unit['tokens']:,} tokens, {unit['targets']:,} targets, {_held(unit)}<br>"
        f"budgets {unit['budgets']}, predicted {unit['predicted_ms']:.0f} ms, "
        f"measured {unit_ms(unit):.0f} ms"
    )


def _backward_start(unit: Record) -> float:
    """Right behind the forward in runs that were recorded without it."""
    return float(unit.get("backward_start_ms", unit["start_ms"] + unit["forward_ms"]))


def _held(unit: Record) -> str:
    return str(chunk_of(unit) or f"samples {_short(unit['lengths'])}")


def _short(lengths: Sequence[int]) -> str:
    shown = ", ".join(map(str, lengths[:8]))
    return f"{shown}, ... ({len(lengths)})" if len(lengths) > 8 else shown


def step_times(records: Sequence[Record], names: Sequence[str]) -> go.Figure:
    """Every policy's step time over the steps."""
    figure, colors = go.Figure(), policy_colors(names)
    for name in names:
        figure.add_scatter(
            x=[record["step"] for record in records],
            y=[record["policies"][name]["step_ms"] for record in records],
            name=name,
            mode="lines+markers",
            line={"color": colors[name], "width": 3 if name in _OUR_COLORS else 1.5},
        )
    figure.update_layout(xaxis_title="step", yaxis_title="step time, ms", yaxis_rangemode="tozero")
    figure.update_xaxes(dtick=max(1, len(records) // 12))
    return figure


def unit_latencies(records: Sequence[Record], names: Sequence[str]) -> go.Figure:
    """Distributions: micro-batch latencies, and rank sums relative to the step's mean rank."""
    figure = make_subplots(
        rows=1, cols=2, subplot_titles=("micro-batch latency, ms", "rank time / mean rank time of its step")
    )
    colors = policy_colors(names)
    for name in names:
        units = [unit_ms(unit) for r in records for rank in r["policies"][name]["units"] for unit in rank]
        busy = [r["policies"][name]["rank_busy_ms"] for r in records]
        ranks = np.concatenate([np.array(ms) / max(np.mean(ms), 1e-9) for ms in busy])
        for column, values in ((1, [ms for ms in units if ms > 0]), (2, ranks.tolist())):
            figure.add_box(
                y=values,
                name=name,
                boxpoints="all",
                jitter=0.5,
                pointpos=0,
                marker={"color": colors[name], "size": 4, "opacity": 0.6},
                showlegend=False,
                row=1,
                col=column,
            )
    figure.update_yaxes(type="log", row=1, col=1)
    figure.update_layout(height=420)
    return figure


def predicted_and_measured(records: Sequence[Record], names: Sequence[str]) -> go.Figure:
    """Every micro-batch that ran: predicted against measured latency."""
    figure, colors = go.Figure(), policy_colors(names)
    most, least = 1.0, np.inf
    for name in names:
        units = [u for r in records for rank in r["policies"][name]["units"] for u in rank if u["tokens"]]
        x, y = [u["predicted_ms"] for u in units], [unit_ms(u) for u in units]
        most, least = max(most, *x, *y), min(least, *x, *y)
        figure.add_scatter(
            x=x,
            y=y,
            mode="markers",
            name=name,
            marker={"color": colors[name], "size": 6, "opacity": 0.7},
            hovertext=[f"{name}: {_held(u)}" for u in units],
        )
    figure.add_scatter(
        x=[least, most], y=[least, most], mode="lines", name="exact", line={"color": "#444", "dash": "dot", "width": 1}
    )
    figure.update_xaxes(type="log", title_text="predicted, ms")
    figure.update_yaxes(type="log", title_text="measured, ms")
    figure.update_layout(height=440)
    return figure


def losses(records: Sequence[Record], names: Sequence[str]) -> go.Figure:
    """Loss of every policy's forward, on the weights that the baseline's gradients train."""
    figure, colors = go.Figure(), policy_colors(names)
    dashes = ("solid", "dash", "dot", "dashdot", "longdash")
    for index, name in enumerate(names):
        figure.add_scatter(
            x=[record["step"] for record in records],
            y=[record["policies"][name]["loss"] for record in records],
            name=name,
            mode="lines+markers",
            line={"color": colors[name], "dash": dashes[index % len(dashes)]},
        )
    figure.update_layout(xaxis_title="step", yaxis_title="loss per target token")
    figure.update_xaxes(dtick=max(1, len(records) // 12))
    return figure


def coverages(policies: Record) -> go.Figure:
    """Mean coverage and mean budget of each policy."""
    names = list(policies)
    figure = make_subplots(
        rows=1, cols=2, subplot_titles=("coverage (share of softmax mass read)", "mean budget, blocks")
    )
    figure.add_bar(x=names, y=[p["coverage"] for p in policies.values()], name="router's choice", marker_color=FORWARD)
    figure.add_bar(
        x=names,
        y=[p["oracle_coverage"] for p in policies.values()],
        name="best choice (oracle)",
        marker_color="#9ecae9",
    )
    figure.add_bar(
        x=names,
        y=[p["mean_budget"] for p in policies.values()],
        marker_color=BACKWARD,
        showlegend=False,
        row=1,
        col=2,
    )
    figure.update_layout(barmode="group")
    return figure


def unit_ms(unit: Record) -> float:
    """Measured milliseconds of one micro-batch."""
    return float(unit["forward_ms"] + unit["backward_ms"])
