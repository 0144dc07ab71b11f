"""One step on a time axis: every worker's plan in light colours, right above what happened in full ones.

In: one step. Out: a plotly figure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import plotly.graph_objects as go

from sparsebalance.reporting.figures import BACKWARD, FORWARD
from sparsebalance.reporting.planned.records import TERMS, Step, Times, Unit, WorkerStep, worker_label

COLORS = {
    "forward": (FORWARD, "#b3cbe3"),
    "backward": (BACKWARD, "#fcd3a4"),
    "waiting": ("#cfcfcf", "#ececec"),
    "all-reduce": ("#9a7fb8", "#dccfe8"),
}
"""Kind of bar -> colour as it happened, colour as planned."""


@dataclass(frozen=True, slots=True)
class Bar:
    kind: str
    start_ms: float
    took_ms: float
    text: str  # inside the bar
    hover: str


def timeline(step: Step) -> go.Figure:
    """Two lanes a worker: planned above actual. Dashed lines mark the predicted and the measured end of the step."""
    figure = go.Figure()
    lanes: list[tuple[float, str]] = []
    shown: dict[tuple[str, bool], list[tuple[float, Bar]]] = {}
    for index, worker in enumerate(step.workers):
        label = worker_label(worker.key, step.stages)
        for actual in (False, True):
            y = 2.5 * index + actual
            lanes.append((y, "actual \u00a0" if actual else f"<b>{label}</b>  planned \u00a0"))
            for bar in measured_bars(step, worker) if actual else planned_bars(step, worker):
                shown.setdefault((bar.kind, actual), []).append((y, bar))
    for kind, colors in COLORS.items():
        for actual in (True, False):
            bars = shown.get((kind, actual), [])
            figure.add_bar(
                orientation="h",
                y=[y for y, _ in bars],
                base=[bar.start_ms for _, bar in bars],
                x=[bar.took_ms for _, bar in bars],
                width=0.92,
                text=[bar.text for _, bar in bars],
                textposition="inside",
                insidetextanchor="middle",
                textangle=0,
                textfont={"color": "white" if actual else "#555"},
                hovertext=[bar.hover for _, bar in bars],
                hoverinfo="text",
                marker={"color": colors[0 if actual else 1], "line": {"color": "white", "width": 0.7}},
                name=kind if actual else f"{kind}, planned",
            )
    end = max(step.step_ms, step.predicted_step_ms, *(worker.planned_end_ms for worker in step.workers))
    bottom = lanes[-1][0] + 0.55
    late = step.step_ms >= step.predicted_step_ms
    for x, text, color, right in (
        (step.predicted_step_ms, "planned end", "#8a8a8a", not late),
        (step.step_ms, "actual end", "#222222", late),
    ):
        figure.add_shape(
            type="line", x0=x, x1=x, y0=-0.95, y1=bottom, line={"color": color, "dash": "dash", "width": 1.5}
        )
        figure.add_annotation(
            x=x,
            y=-0.8,
            text=f"{text} {x:,.0f} ms",
            showarrow=False,
            xanchor="left" if right else "right",
            xshift=4 if right else -4,
            font={"color": color, "size": 12},
        )
    figure.update_layout(
        barmode="overlay",
        height=150 + 30 * len(lanes),
        uniformtext={"minsize": 9, "mode": "hide"},
        legend_traceorder="normal",
    )
    figure.update_xaxes(title_text="milliseconds since the step began", range=[0, 1.14 * end], zeroline=False)
    figure.update_yaxes(
        tickvals=[y for y, _ in lanes],
        ticktext=[text for _, text in lanes],
        range=[bottom, -1.1],
        showgrid=False,
        zeroline=False,
    )
    return figure


def planned_bars(step: Step, worker: WorkerStep) -> Iterator[Bar]:
    """As planned: units, waiting until the last worker is done, the all-reduce until the predicted end."""
    yield from _unit_bars(worker, actual=False)
    everyone = max(other.planned_end_ms for other in step.workers)
    yield from _wait(worker.planned_end_ms, everyone - worker.planned_end_ms, "planned waiting for the slowest")
    exchange = step.predicted_step_ms - everyone
    if exchange > 0:
        yield Bar("all-reduce", everyone, exchange, "", f"planned all-reduce: {exchange:,.1f} ms")


def measured_bars(step: Step, worker: WorkerStep) -> Iterator[Bar]:
    """As measured: units, the pauses between them, waiting before the all-reduce, and the all-reduce itself."""
    yield from _unit_bars(worker, actual=True)
    exchange, end = step.exchange_ms, worker.measured_end_ms
    together = max(end, step.finished_ms - exchange)
    yield from _wait(end, together - end, "waiting for the slowest")
    if exchange > 0:
        yield Bar("all-reduce", together, exchange, "", f"all-reduce: {exchange:,.1f} ms")


def _unit_bars(worker: WorkerStep, actual: bool) -> Iterator[Bar]:
    parts: list[tuple[float, float]] = []
    for unit in worker.units:
        times = unit.measured if actual else unit.planned
        hover = _hover(unit)
        forward = (times.start_ms, times.forward_ms)
        backward = (times.backward_start_ms, times.backward_ms)
        yield Bar("forward", *forward, f"F{unit.index}", f"forward of unit {unit.index}: {forward[1]:,.1f} ms{hover}")
        yield Bar(
            "backward", *backward, f"B{unit.index}", f"backward of unit {unit.index}: {backward[1]:,.1f} ms{hover}"
        )
        parts += [forward, backward]
    free = 0.0
    for start, took in sorted(parts):
        yield from _wait(free, start - free, "pause")
        free = max(free, start + took)


def _wait(start_ms: float, took_ms: float, what: str) -> Iterator[Bar]:
    if took_ms > 0.01:  # below that it is rounding
        yield Bar("waiting", start_ms, took_ms, "", f"{what}: {took_ms:,.1f} ms")


def _hover(unit: Unit) -> str:
    lines = [
        "",
        f"{unit.tokens:,} tokens, {unit.targets:,} targets, {unit.chunk or f'samples {_short(unit.lengths)}'}",
        f"budgets {_short(unit.budgets)}",
        f"planned {unit.planned.total_ms:,.1f} ms{_terms(unit.planned)}",
        f"actual {unit.measured.total_ms:,.1f} ms{_terms(unit.measured)}",
    ]
    return "<br>".join(lines)


def _terms(times: Times) -> str:
    if times.terms is None:
        return ""
    return ": " + ", ".join(f"{term} {times.terms[term]:,.1f}" for term in TERMS)


def _short(values: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, values[:8]))
    return f"{shown}, ... ({len(values)})" if len(values) > 8 else shown
