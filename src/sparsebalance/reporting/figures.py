"""The comparison's plots. In: step records (see `sparsebalance.comparison.run`). Out: plotly figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sparsebalance.reporting.planned.records import chunk_of

Record = dict[str, Any]

FORWARD, BACKWARD, WAIT = "#4c78a8", "#f58518", "#dddddd"
_BASELINE_COLORS = ("#7f7f7f", "#9ecae9", "#b279a2", "#d6a5c9", "#bab0ac", "#83bcb6", "#9d755d", "#c7b3e5")
_OUR_COLORS = {"sab": "#54a24b", "dst": "#e45756", "sab_dst": "#1b7837"}


def policy_colors(names: Sequence[str]) -> dict[str, str]:
    """One colour per policy, the same in every plot: strong ones for ours."""
    others = [name for name in names if name not in _OUR_COLORS]
    return {name: _BASELINE_COLORS[i % len(_BASELINE_COLORS)] for i, name in enumerate(others)} | _OUR_COLORS


def timeline(record: Record, names: Sequence[str]) -> go.Figure:
    """One step's ranks under each policy on a common time axis: forward, backward, waiting."""
    figure = make_subplots(rows=len(names), cols=1, shared_xaxes=True, vertical_spacing=0.05, subplot_titles=names)
    for row, name in enumerate(names, start=1):
        step = record["policies"][name]
        for kind, color in (("forward", FORWARD), ("backward", BACKWARD), ("waiting", WAIT)):
            bars = [bar for rank, units in enumerate(step["units"]) for bar in _bars(kind, rank, units, step)]
            figure.add_bar(
                orientation="h",
                y=[f"rank {rank}" for rank, _, _, _ in bars],
                base=[start for _, start, _, _ in bars],
                x=[took for _, _, took, _ in bars],
                hovertext=[text for _, _, _, text in bars],
                hoverinfo="text",
                marker={"color": color, "line": {"color": "white", "width": 0.6}},
                name=kind,
                legendgroup=kind,
                showlegend=row == 1,
                row=row,
                col=1,
            )
    figure.update_layout(barmode="overlay", height=70 + 105 * len(names), bargap=0.25)
    figure.update_xaxes(title_text="milliseconds (measured)", row=len(names), col=1)
    figure.update_yaxes(autorange="reversed")
    figure.update_annotations(x=0, xanchor="left", font_size=13)
    return figure


def _bars(kind: str, rank: int, units: Sequence[Record], step: Record) -> list[tuple[int, float, float, str]]:
    """(rank, start, duration, hover text) of one kind."""
    if kind == "waiting":
        end = max(_backward_start(unit) + unit["backward_ms"] for unit in units)
        wait = step["all_reduce_ms"][rank]
        return [(rank, end, wait, f"gradient all-reduce, waiting included: {wait:.0f} ms")]
    bars = []
    for unit in units:
        if unit["tokens"]:
            text = (
                f"{unit['tokens']:,} tokens, {unit['targets']:,} targets, {_held(unit)}<br>"
                f"budgets {unit['budgets']}, predicted {unit['predicted_ms']:.0f} ms, "
                f"measured {unit_ms(unit):.0f} ms"
            )
            start = unit["start_ms"] if kind == "forward" else _backward_start(unit)
            bars.append((rank, start, unit[f"{kind}_ms"], text))
    return bars


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
