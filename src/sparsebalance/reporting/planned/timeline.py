"""One step on a time axis: every worker's plan in light colours, right above what happened in full ones.

In: one step. Out: a plotly figure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import plotly.graph_objects as go

from sparsebalance.reporting.figures import BACKWARD, FORWARD, INPUT, SPAN_NAMES, WEIGHT
from sparsebalance.reporting.planned.records import TERMS, Step, Times, Unit, WorkerStep, worker_label

COLORS = {
    "forward": (FORWARD, "#b3cbe3"),
    "backward": (BACKWARD, "#fcd3a4"),
    "input gradient": (INPUT, "#f5c4c3"),
    "weight gradient": (WEIGHT, "#cde6e3"),
    "waiting": ("#cfcfcf", "#ececec"),
    "all-reduce": ("#9a7fb8", "#dccfe8"),
}
"""Kind of bar -> colour as it happened, colour as planned."""

ROUNDING_MS = 0.01  # shorter waits are clocks' rounding
HALVES = ("input gradient", "weight gradient")


@dataclass(frozen=True, slots=True)
class Bar:
    kind: str
    start_ms: float
    took_ms: float
    text: str  # inside the bar
    hover: str


def timeline(step: Step) -> go.Figure:
    """Two lanes a worker: planned above actual; those of a pipeline say how much of the step it waited.

    Dashed lines mark the predicted and the measured end of the step.
    """
    figure = go.Figure()
    lanes: list[tuple[float, str]] = []
    shown: dict[tuple[str, bool], list[tuple[float, Bar]]] = {}
    for index, worker in enumerate(step.workers):
        label = worker_label(worker.key, step.stages)
        for actual in (False, True):
            y = 2.5 * index + actual
            lanes.append(
                (y, f"{'actual' if actual else f'<b>{label}</b>  planned'}{_waits(step, worker, actual)} \u00a0")
            )
            for bar in measured_bars(step, worker) if actual else planned_bars(step, worker):
                shown.setdefault((bar.kind, actual), []).append((y, bar))
    for kind, colors in COLORS.items():
        if kind in HALVES and not any((kind, actual) in shown for actual in (True, False)):
            continue
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
    end = max(step.step_ms, step.predicted_step_ms, step.planned_end_ms)
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
    """As planned: actions, waiting until the last worker of its stage is done, the all-reduce, waiting for others."""
    yield from _action_bars(step, worker, actual=False)
    own = max(other.planned_end_ms for other in step.workers if other.stage == worker.stage)
    yield from _wait(worker.planned_end_ms, own - worker.planned_end_ms, "planned waiting for the slowest")
    exchange = step.predicted_step_ms - step.planned_end_ms  # every stage's takes as long
    if exchange > ROUNDING_MS:
        yield Bar("all-reduce", own, exchange, "", f"planned all-reduce: {exchange:,.1f} ms")
    yield from _wait(own + exchange, step.planned_end_ms - own, "planned waiting for other stages")


def measured_bars(step: Step, worker: WorkerStep) -> Iterator[Bar]:
    """As measured: actions, the pauses between them, waiting before the all-reduce, the all-reduce itself, waiting for
    other stages."""
    yield from _action_bars(step, worker, actual=True)
    exchange, end = step.exchange_ms, worker.measured_end_ms
    # Stages reduce on their own, as soon as they are done.
    reduced = step.finished_ms if step.stages == 1 else end + worker.all_reduce_ms
    together = max(end, reduced - exchange)
    yield from _wait(end, together - end, "waiting for the slowest")
    if exchange > 0:
        yield Bar("all-reduce", together, exchange, "", f"all-reduce: {exchange:,.1f} ms")
    yield from _wait(together + exchange, step.finished_ms - together - exchange, "waiting for other stages")


def _action_bars(step: Step, worker: WorkerStep, actual: bool) -> Iterator[Bar]:
    hovers = {unit.index: _hover(unit) for unit in worker.units}
    spans = [(span.measured if actual else span.planned, span) for span in worker.spans]
    for (start, took), span in spans:
        where = f", stage {span.stage}" if step.stages > 1 else ""
        what = f"{SPAN_NAMES[span.kind]} of unit {span.unit}{where}: {took:,.1f} ms{hovers[span.unit]}"
        yield Bar(SPAN_NAMES[span.kind], start, took, f"{span.kind}{span.unit}", what)
    free = 0.0
    for start, took in sorted(times for times, _ in spans):
        yield from _wait(free, start - free, "pause" if step.stages == 1 else "waiting for another stage")
        free = max(free, start + took)


def _waits(step: Step, worker: WorkerStep, actual: bool) -> str:
    if step.stages == 1:
        return ""
    if actual:
        return f", waits {step.waiting_ms(worker) / step.step_ms:.0%}"
    return f", waits {step.planned_waiting_ms(worker) / max(step.predicted_step_ms, ROUNDING_MS):.0%}"


def _wait(start_ms: float, took_ms: float, what: str) -> Iterator[Bar]:
    if took_ms > ROUNDING_MS:
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
