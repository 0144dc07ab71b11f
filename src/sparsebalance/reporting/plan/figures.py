"""The plots of the plan pages, but for the timeline: time, micro-batches and memory of the example step; topologies.

In: a forecast, or the choices of a sweep. Out: plotly figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sparsebalance.planner.forecast import Forecast, Recommendation, Row
from sparsebalance.planner.sweep import Choice
from sparsebalance.reporting.figures import FORWARD, WAIT
from sparsebalance.reporting.plan.console import TOO_LARGE, gigabytes, milliseconds, ranked, topology_name
from sparsebalance.reporting.plan.timeline import ALL_REDUCE, plan_title, stages_of

OURS, OTHERS = "#54a24b", "#8c8c8c"
STAGE_COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#eeca3b")
SMALL = 0.25  # share of the device's memory under which its limit is told, not drawn, so that curves stay readable


def time_spent(result: Forecast) -> go.Figure:
    """Per row, the example step of the mean device: computing, waiting, what shows of the all-reduce."""
    parts: dict[str, list[float]] = {"busy": [], "bubble": [], "all-reduce": []}
    for _, timeline in result.examples:
        busy = timeline.busy_fraction * timeline.step_ms
        exposed = timeline.step_ms - float(timeline.rank_ms.max())
        for name, ms in zip(parts, (busy, timeline.step_ms - busy - exposed, exposed)):
            parts[name].append(ms)
    names = [row.name for row in result.rows]
    figure = go.Figure()
    for (name, values), color in zip(parts.items(), (FORWARD, WAIT, ALL_REDUCE)):
        totals = [timeline.step_ms for _, timeline in result.examples]
        figure.add_bar(
            orientation="h",
            y=names,
            x=values,
            name=name,
            marker_color=color,
            customdata=[value / total if total else 0.0 for value, total in zip(values, totals)],
            hovertemplate=f"%{{y}}, {name}: %{{x:,.1f}} ms (%{{customdata:.0%}})<extra></extra>",
        )
    figure.update_layout(barmode="stack", height=120 + 24 * len(names), bargap=0.25, legend_traceorder="normal")
    figure.update_xaxes(title_text="milliseconds of the example step", tickformat=",")
    _name_axis(figure, names)
    return figure


def unit_latencies(result: Forecast) -> go.Figure:
    """Per row, the example step's micro-batches: boxes with whiskers from 5 % to 95 %, and the slowest one."""
    figure = go.Figure()
    names = [row.name for row in result.rows]
    values = [
        np.array([unit.latency.total_ms for unit in plan.micro_batches if unit.segments]) for plan, _ in result.examples
    ]
    for ours, label, color in ((False, "baselines", OTHERS), (True, "ours", OURS)):
        places = [i for i, row in enumerate(result.rows) if row.ours == ours]
        if not places:
            continue
        low, q1, middle, q3, high = np.array([np.quantile(values[i], (0.05, 0.25, 0.5, 0.75, 0.95)) for i in places]).T
        figure.add_box(
            orientation="h",
            y=[names[i] for i in places],
            lowerfence=low.tolist(),
            q1=q1.tolist(),
            median=middle.tolist(),
            q3=q3.tolist(),
            upperfence=high.tolist(),
            name=label,
            marker_color=color,
        )
    figure.add_scatter(
        x=[float(own.max()) for own in values],
        y=names,
        mode="markers",
        name="slowest micro-batch",
        marker={"symbol": "diamond", "size": 8, "color": "#c44"},
        customdata=[len(own) for own in values],
        hovertemplate="%{y}: slowest of %{customdata:,} micro-batches, %{x:,.1f} ms<extra></extra>",
    )
    figure.update_layout(height=120 + 24 * len(names))
    figure.update_xaxes(title_text="milliseconds of a micro-batch over all stages", rangemode="tozero", tickformat=",")
    _name_axis(figure, names)
    return figure


def _name_axis(figure: go.Figure, names: list[str]) -> None:
    figure.update_yaxes(
        categoryorder="array",
        categoryarray=names,
        range=[len(names) - 0.4, -0.6],
        tickmode="linear",
        ticksuffix=" ",
        automargin=True,
    )


def memory_curves(result: Forecast, advice: Recommendation, capacity_mb: float | None) -> go.Figure:
    """Activations over time on every worker of the slowest rank: `random` and the recommended plan."""
    places = list(dict.fromkeys((0, result.rows.index(advice.row))))
    figure = make_subplots(
        rows=1,
        cols=len(places),
        shared_yaxes=True,
        horizontal_spacing=0.04,
        subplot_titles=[
            f"{plan_title(result, advice, place)}, rank {int(np.argmax(result.examples[place][1].rank_ms))}"
            for place in places
        ],
    )
    end = max(result.examples[place][1].step_ms for place in places)
    most = 0.0
    for column, place in enumerate(places, start=1):
        timeline = result.examples[place][1]
        curves = timeline.memory_mb(int(np.argmax(timeline.rank_ms)))
        for worker, ((times, mb), stages) in enumerate(zip(curves, stages_of(timeline))):
            label = f"stage {', '.join(map(str, stages))}"
            # Of two values at one time the later one holds; the other would draw a spike.
            held = dict(zip(times.round(4).tolist(), np.maximum(mb / 1e3, 0.0).round(6).tolist()))
            figure.add_scatter(
                x=[0.0, *held, timeline.step_ms],
                y=[0.0, *held.values(), 0.0],
                mode="lines",
                line={"shape": "hv", "width": 1.6, "color": STAGE_COLORS[worker % len(STAGE_COLORS)]},
                name=label,
                legendgroup=label,
                showlegend=column == 1,
                hovertemplate=f"{label}: %{{y:,.2f}} GB at %{{x:,.1f}} ms<extra></extra>",
                row=1,
                col=column,
            )
            most = max(most, float(mb.max(initial=0.0)))
    if capacity_mb is not None and most > SMALL * capacity_mb:
        figure.add_hline(
            y=capacity_mb / 1e3,
            line={"color": "#c44", "dash": "dash", "width": 1.5},
            annotation_text=f"{gigabytes(capacity_mb)} GB usable, weights and optimiser included",
            annotation_position="top left",
        )
        figure.update_yaxes(range=[0, 1.1 * max(capacity_mb, most) / 1e3])
    else:
        figure.update_yaxes(rangemode="tozero")
    figure.update_xaxes(title_text="milliseconds since the step began", range=[0, 1.02 * end], tickformat=",")
    figure.update_yaxes(title_text="activations, GB", col=1)
    figure.update_layout(height=400)
    return figure


def pareto(choices: Sequence[Choice], capacity_mb: float | None) -> go.Figure:
    """Topologies by memory and time, both axes logarithmic; the front is joined, better is lower left."""
    figure = go.Figure()
    found = ranked(choices)
    x, y = [row.peak_memory_mb / 1e3 for _, row in found], [row.step_ms for _, row in found]
    labelled = _with_room(choices)
    for on_front, label, color, size in (
        (False, "other topologies", "#8c8c8c", 7),
        (True, "on the front", "#1b7837", 11),
    ):
        own = [(c, row) for c, row in found if c.pareto == on_front]
        figure.add_scatter(
            x=[row.peak_memory_mb / 1e3 for _, row in own],
            y=[row.step_ms for _, row in own],
            text=[_degrees(choice) if choice in labelled else "" for choice, _ in own],
            hovertext=[_choice_text(choice, row) for choice, row in own],
            hoverinfo="text",
            mode="lines+markers+text" if on_front else "markers+text",
            line={"color": color, "width": 1.5, "shape": "vh", "dash": "dot"},
            marker={"color": color, "size": size},
            textposition="bottom left" if on_front else "top right",
            textfont={"color": color, "size": 12 if on_front else 10},
            name=label,
        )
    if capacity_mb is not None and max(x) > capacity_mb / 2e3:
        x.append(capacity_mb / 1e3)
        figure.add_vline(
            x=capacity_mb / 1e3,
            line={"color": "#c44", "dash": "dash", "width": 1.5},
        )
        figure.add_annotation(
            x=float(np.log10(capacity_mb / 1e3)),  # on a logarithmic axis annotations, unlike lines, take the logarithm
            y=1,
            yref="paper",
            text=f"{gigabytes(capacity_mb)} GB usable ",
            showarrow=False,
            xanchor="right",
            yanchor="top",
        )
    figure.update_xaxes(title_text="peak GB of the fullest device", **_log_axis(x, 0.13, 0.1))
    figure.update_yaxes(title_text="step time, ms", **_log_axis(y, 0.08, 0.04))
    figure.update_layout(height=600)
    return figure


def _with_room(choices: Sequence[Choice]) -> list[Choice]:
    """The front, and the others whose labels touch no label chosen before; the rest are named on hover alone."""
    found = sorted(ranked(choices), key=lambda item: not item[0].pareto)
    points = np.log([[row.peak_memory_mb, row.step_ms] for _, row in found])
    points = (points - points.min(0)) / np.maximum(np.ptp(points, axis=0), 1e-9)
    room = np.array([0.1, 0.05])  # of the axes, for one label
    kept: list[int] = []
    for i, (choice, _) in enumerate(found):
        if choice.pareto or not any((np.abs(points[i] - points[j]) < room).all() for j in kept):
            kept.append(i)
    return [found[i][0] for i in kept]


def _log_axis(values: Sequence[float], before: float, after: float) -> dict[str, Any]:
    """A logarithmic axis with room for labels, in shares of its length, and ticks at round numbers."""
    low, high = (float(end) for end in np.log10([min(values), max(values)]))
    length = max(high - low, 0.2)
    span = [low - before * length, high + after * length]
    left, right = (10.0**end for end in span)
    if right < 3 * left:
        step = 10.0 ** np.floor(np.log10((right - left) / 4))
        step *= max(factor for factor in (1, 2, 5) if factor * step <= (right - left) / 4)
        ticks = (step * np.arange(np.ceil(left / step), np.floor(right / step) + 1)).tolist()
    else:
        exponents = range(int(np.floor(span[0])), int(np.ceil(span[1])) + 1)
        ticks = [digit * 10.0**e for e in exponents for digit in (1, 1.5, 2, 3, 4, 5, 6, 8)]
    return {"type": "log", "range": span, "tickvals": ticks, "tickformat": ",.6~r"}


def _degrees(choice: Choice) -> str:
    return topology_name(asdict(choice.topology))


def _choice_text(choice: Choice, row: Row) -> str:
    wrong = f" {TOO_LARGE}" if row.fits is False else ""
    return (
        f"{_degrees(choice)}: {row.name}<br>{milliseconds(row.step_ms)} ms a step, "
        f"{choice.tokens_per_s:,.0f} tokens/s a device<br>{gigabytes(row.peak_memory_mb)} GB{wrong}, "
        f"{row.speedup:.2f}x over random"
    )
