"""The plots of the planned-versus-actual page, run by run; `timeline.py` draws single steps.

In: steps and the run's figures. Out: plotly figures whose size does not grow with the number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sparsebalance.reporting.planned.records import (
    TERMS,
    Record,
    Step,
    Unit,
    Worker,
    all_workers,
    signed_error,
    worker_label,
)
from sparsebalance.reporting.planned.totals import step_term_error, term_errors, timed_units

PART_COLORS = {
    "linear": "#4c78a8",
    "router": "#72b7b2",
    "attend": "#e45756",
    "head": "#eeca3b",
    "compute": "#a0a0c0",
    "waiting": "#d5d5d5",
    "all_reduce": "#b79fd0",
    "outside": "#f0f0f0",
}
PART_NAMES = {"compute": "compute, not split", "all_reduce": "all-reduce", "outside": "rest of the step"}
WORKER_COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#eeca3b")
PLANNED_BUBBLE, BUBBLE = "#cfcfcf", "#6f6f6f"
POINTS = 4000  # of the scatter plot; more only make the file larger


def time_spent(found: Record) -> go.Figure:
    """Mean step of every worker as a stacked bar: milliseconds on the left, shares on the right."""
    workers = found["workers"]
    stages = len({worker["stage"] for worker in workers})
    labels = [worker_label((worker["rank"], worker["stage"]), stages) for worker in workers]
    places = np.arange(len(workers))
    figure = make_subplots(
        rows=1, cols=2, subplot_titles=("milliseconds a step", "share of the step"), horizontal_spacing=0.1
    )
    for part, color in PART_COLORS.items():
        if found["shares"][part] < (0.005 if part in ("compute", "outside") else 1e-9):  # clocks' rounding
            continue
        times = np.array([worker["parts_ms"][part] for worker in workers])
        shares = times / np.array([worker["step_ms"] for worker in workers])
        for column, values, text in ((1, times, ",.0f"), (2, shares, ".0%")):
            figure.add_bar(
                orientation="h",
                y=places,
                x=values,
                width=0.68,
                customdata=labels,
                text=[format(value, text) for value in values],
                textposition="inside",
                textangle=0,
                insidetextanchor="middle",
                hovertemplate=f"%{{customdata}}, {PART_NAMES.get(part, part)}: %{{x:{text}}}<extra></extra>",
                marker={"color": color, "line": {"color": "white", "width": 0.6}},
                name=PART_NAMES.get(part, part),
                legendgroup=part,
                showlegend=column == 1,
                row=1,
                col=column,
            )
    figure.add_scatter(
        x=[worker["planned_ms"] for worker in workers],
        y=places + 0.42,
        mode="markers",
        name="planned compute",
        marker={"symbol": "triangle-up", "size": 11, "color": "#111"},
        customdata=labels,
        hovertemplate="%{customdata}, planned compute: %{x:,.0f} ms<extra></extra>",
        row=1,
        col=1,
    )
    figure.update_layout(barmode="stack", height=170 + 44 * len(workers), uniformtext={"minsize": 10, "mode": "hide"})
    ticks = [f"{label} \u00a0" for label in labels]
    figure.update_yaxes(
        tickvals=places, ticktext=ticks, range=[len(workers) - 0.4, -0.5], showgrid=False, zeroline=False
    )
    figure.update_yaxes(showticklabels=False, col=2)
    figure.update_xaxes(range=[0, 1], tickformat=".0%", col=2)
    return figure


def bubbles(found: Record) -> go.Figure:
    """Share of the step that every worker waited: as planned, and as measured."""
    workers = found["workers"]
    labels = [worker_label((worker["rank"], worker["stage"]), 2) for worker in workers]
    figure = go.Figure()
    for key, name, color in (
        ("planned_waiting_share", "planned", PLANNED_BUBBLE),
        ("waiting_share", "actual", BUBBLE),
    ):
        shares = [worker[key] for worker in workers]
        figure.add_bar(
            orientation="h",
            y=[f"{label} \u00a0" for label in labels],
            x=shares,
            text=[f"{share:.0%}" for share in shares],
            textposition="outside",
            textangle=0,
            cliponaxis=False,
            hovertext=[f"{label}, {name} waiting: {share:.1%}" for label, share in zip(labels, shares)],
            hoverinfo="text",
            marker_color=color,
            name=name,
        )
    figure.update_layout(barmode="group", height=130 + 52 * len(workers), bargap=0.3, legend_traceorder="normal")
    figure.update_yaxes(autorange="reversed", showgrid=False)
    figure.update_xaxes(tickformat=".0%", rangemode="tozero")
    return figure


def errors_by_term(steps: Sequence[Step], found: Record) -> go.Figure:
    """Boxes of signed errors: one a term, one for whole micro-batches. Whiskers reach from 5 % to 95 %."""
    whole = np.array([signed_error(u.planned.total_ms, u.measured.total_ms) for u in timed_units(steps)])
    boxes = {term: term_errors(steps, term) for term in found["terms"]} | {"whole": whole}
    figure = go.Figure()
    for name, errors in boxes.items():
        if not len(errors):
            continue
        if name == "whole":
            label = f"<b>micro-batch</b><br>off by {np.abs(errors).mean():.1%}"
        else:
            term = found["terms"][name]
            label = f"<b>{name}</b><br>off by {term['error_mean_abs']:.1%}<br>{term['share']:.0%} of compute"
        low, q1, middle, q3, high = (float(q) for q in np.quantile(errors, (0.05, 0.25, 0.5, 0.75, 0.95)))
        color = "#444444" if name == "whole" else PART_COLORS[name]
        figure.add_box(
            x=[label],
            lowerfence=[low],
            q1=[q1],
            median=[middle],
            q3=[q3],
            upperfence=[high],
            mean=[float(errors.mean())],
            marker_color=color,
            width=min(0.5, 0.1 * len(boxes)),  # one box alone is no wider than one of five
            showlegend=False,
            name=name,
        )
    figure.add_hline(y=0, line={"color": "#444", "dash": "dot", "width": 1})
    figure.update_yaxes(title_text="(predicted - measured) / measured", tickformat="+~%", zeroline=False)
    figure.update_layout(height=430)
    return figure


def errors_over_steps(steps: Sequence[Step], found: Record) -> go.Figure:
    """Signed errors of every step, and below them the factors by which its plan was corrected."""
    figure = make_subplots(
        rows=2,
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.12,
        row_heights=[0.55, 0.45],
        subplot_titles=(
            "error of the step's time: below 0, it took longer than predicted",
            "correction with which the step was planned",
        ),
    )
    numbers = [step.step for step in steps]
    mode = "lines+markers" if len(steps) <= 60 else "lines"

    def line(row: int, name: str, values: Sequence[float | None], color: str, wide: bool, dash: str = "solid") -> None:
        figure.add_scatter(
            x=numbers,
            y=values,
            name=name,
            mode=mode,
            line={"color": color, "width": 3 if wide else 1.6, "dash": dash},
            marker={"size": 6 if wide else 4},
            legend="legend" if row == 1 else "legend2",
            row=row,
            col=1,
        )

    line(1, "whole step", [step.error for step in steps], "#222222", True)
    for term in found["terms"]:
        line(1, term, [step_term_error(step, term) for step in steps], PART_COLORS[term], False)
    for rank in range(max(len(step.rank_factors) for step in steps)):
        color = WORKER_COLORS[rank % len(WORKER_COLORS)]
        factors = [step.rank_factors[rank] if rank < len(step.rank_factors) else None for step in steps]
        line(2, f"rank {rank}", factors, color, True)
    for term in TERMS:
        if any(term in step.term_factors for step in steps):
            line(2, term, [step.term_factors.get(term) for step in steps], PART_COLORS[term], False, "dot")
    figure.add_hline(y=0, line={"color": "#444", "dash": "dot", "width": 1}, row=1, col=1)
    figure.add_hline(y=1, line={"color": "#444", "dash": "dot", "width": 1}, row=2, col=1)
    figure.update_yaxes(title_text="error", tickformat="+~%", zeroline=False, row=1, col=1)
    figure.update_yaxes(title_text="times slower than the table", ticksuffix="x", row=2, col=1)
    figure.update_xaxes(title_text="step", row=2, col=1)
    if len(steps) <= 15:
        figure.update_xaxes(dtick=1)
    figure.update_annotations(x=0, xanchor="left", font_size=13)
    place = {"orientation": "v", "x": 1.01, "xanchor": "left", "yanchor": "top", "yref": "paper"}
    # The page lays out "legend" itself, on top; both legends of this figure are its second and third.
    figure.for_each_trace(lambda trace: trace.update(legend="legend3" if trace.legend == "legend2" else "legend2"))
    figure.update_layout(height=620, legend2={**place, "y": 1.0}, legend3={**place, "y": 0.4}, showlegend=True)
    return figure


def predicted_and_measured(steps: Sequence[Step]) -> go.Figure:
    """Every micro-batch, or evenly chosen ones: measured against predicted time, coloured by worker."""
    every = max(1, -(-len(timed_units(steps)) // POINTS))
    points: dict[Worker, list[tuple[float, float, str]]] = {key: [] for key in all_workers(steps)}
    stages = max(step.stages for step in steps)
    number = 0
    for step in steps:
        for worker in step.workers:
            for unit in worker.units:
                if unit.measured.total_ms > 0 and unit.planned.total_ms > 0:
                    number += 1
                    if number % every == 0:
                        text = (
                            f"step {step.step}, {worker_label(worker.key, stages)}, unit {unit.index}<br>"
                            f"{unit.tokens:,} tokens, {unit.chunk or _samples(unit)}, {unit.ratio:.2f}x its prediction"
                        )
                        points[worker.key].append((unit.planned.total_ms, unit.measured.total_ms, text))
    figure = go.Figure()
    for index, (key, found) in enumerate(points.items()):
        figure.add_scatter(
            x=[x for x, _, _ in found],
            y=[y for _, y, _ in found],
            hovertext=[text for _, _, text in found],
            hoverinfo="text",
            mode="markers",
            name=worker_label(key, stages),
            marker={"color": WORKER_COLORS[index % len(WORKER_COLORS)], "size": 6, "opacity": 0.6},
        )
    values = [value for found in points.values() for x, y, _ in found for value in (x, y)] or [1.0, 10.0]
    ends = np.array([min(values) / 1.15, max(values) * 1.15])
    for name, factor, dash in (("exact", 1.0, "solid"), ("1.25x slower or faster", 1.25, "dot"), ("", 1 / 1.25, "dot")):
        figure.add_scatter(
            x=ends,
            y=ends * factor,
            mode="lines",
            name=name,
            showlegend=bool(name),
            hoverinfo="skip",
            line={"color": "#444", "dash": dash, "width": 1},
        )
    ticks = _log_ticks(float(ends[0]), float(ends[1]))
    bounds = np.log10(ends).tolist()
    axis = {"type": "log", "range": bounds, "tickvals": ticks, "ticktext": [f"{t:,g}" for t in ticks]}
    figure.update_xaxes(title_text="predicted, ms", **axis)
    figure.update_yaxes(title_text="measured, ms", **axis)
    figure.update_layout(height=560)
    return figure


def _samples(unit: Unit) -> str:
    return "1 sample" if len(unit.lengths) == 1 else f"{len(unit.lengths):,} samples"


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, ... inside the range; powers of ten alone where it is wide."""
    decades = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    digits = (1, 2, 5) if high / low < 1e4 else (1,)
    return [float(f"{digit}e{decade}") for decade in decades for digit in digits if low <= digit * 10.0**decade <= high]
