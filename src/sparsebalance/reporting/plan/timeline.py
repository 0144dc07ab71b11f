"""The example step of a forecast on a time axis, and which plans, ranks and actions are shown of it.

In: a forecast and its recommendation. Out: a plotly figure; lists that the page and the trace share.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sparsebalance.planner.forecast import Forecast, Recommendation
from sparsebalance.planning.plan import MicroBatch, StepPlan
from sparsebalance.planning.timeline import Span, Timeline
from sparsebalance.reporting.figures import BACKWARD, FORWARD, INPUT, SPAN_NAMES, WEIGHT
from sparsebalance.reporting.plan.console import is_best, milliseconds

KIND_COLORS = {"F": FORWARD, "B": BACKWARD, "I": INPUT, "W": WEIGHT}
ALL_REDUCE = "#9a7fb8"
LANES = 16  # workers of one plan that are all drawn; of more, the slowest and the fastest rank's
SHORTEST_TEXT = 0.018  # share of the axis that a bar needs to have its name written in it


def shown_plans(result: Forecast, advice: Recommendation) -> list[int]:
    """Numbers of the rows that are drawn: `random`, the fastest baseline, the recommended one; each once."""
    best = next(i for i, row in enumerate(result.rows) if is_best(row, result))
    return list(dict.fromkeys((0, best, result.rows.index(advice.row))))


def plan_title(result: Forecast, advice: Recommendation, place: int) -> str:
    """Name and role of a row, and how long its example step takes."""
    row = result.rows[place]
    roles = [
        role
        for role, is_it in (
            ("fastest baseline", is_best(row, result)),
            ("recommended", row == advice.row),
        )
        if is_it
    ]
    extra = f" ({', '.join(roles)})" if roles else ""
    return f"{row.name}{extra}: {milliseconds(result.examples[place][1].step_ms)} ms"


def chosen_ranks(timeline: Timeline, most: int) -> list[int]:
    """At most so many (>= 2) ranks, evenly chosen from the slowest to the fastest; in the order of their numbers."""
    by_time = np.argsort(-timeline.rank_ms, kind="stable")
    places = np.linspace(0, len(by_time) - 1, min(most, len(by_time))).round().astype(int)
    return sorted(by_time[places].tolist())


def stages_of(timeline: Timeline) -> list[list[int]]:
    """Per worker, the stages that it holds: several under the interleaved schedule."""
    return [sorted({action.stage for action in own}) for own in timeline.runs[0].program.schedule]


def worker_spans(plan: StepPlan, timeline: Timeline, rank: int) -> list[Span]:
    """Actions of one rank, those of empty units left out."""
    return [span for span in timeline.spans(rank) if plan.ranks[rank][span.unit].segments]


def all_reduces(timeline: Timeline) -> list[tuple[int, float, float]]:
    """(stage, start, end) in ms, where there is one. Its parts may begin earlier, with pauses between them: this is
    the latest start from which it takes as long as it does."""
    ends, took = timeline.all_reduce_end_ms.tolist(), timeline.all_reduce_ms.tolist()
    return [(stage, max(0.0, end - ms), end) for stage, (end, ms) in enumerate(zip(ends, took)) if ms > 0]


def plan_timelines(result: Forecast, advice: Recommendation, shown: Sequence[int]) -> go.Figure:
    """The example step of plans (numbers of rows) on one time axis, worker by worker.

    A black line under the bars of the recommended plan follows its critical path.
    """
    end = max(result.examples[place][1].step_ms for place in shown)
    ranks = [_drawn_ranks(*result.examples[place]) for place in shown]
    counts = [len(own) * len(result.examples[place][1].bubble_ms[0]) for own, place in zip(ranks, shown)]
    lane = 24 if sum(counts) <= 24 else 17
    height = 150 + 45 * len(shown) + lane * sum(counts)
    figure = make_subplots(
        rows=len(shown),
        cols=1,
        shared_xaxes=True,
        row_heights=counts,
        vertical_spacing=45 / (height - 112),  # pixels of the height without the page's margins
        subplot_titles=[plan_title(result, advice, place) for place in shown],
    )
    legend: set[str] = set()
    for row, (place, own) in enumerate(zip(shown, ranks), start=1):
        plan, timeline = result.examples[place]
        _draw_plan(figure, row, plan, timeline, own, end, result.rows[place] == advice.row, legend)
    figure.update_layout(barmode="overlay", height=height, legend_traceorder="normal")
    figure.update_xaxes(range=[0, 1.02 * end], zeroline=False, tickformat=",")
    figure.update_xaxes(title_text="milliseconds since the step began (simulated)", row=len(shown), col=1)
    figure.update_annotations(x=0, xanchor="left", font_size=13)
    return figure


def _drawn_ranks(plan: StepPlan, timeline: Timeline) -> list[int]:
    return chosen_ranks(timeline, len(plan.ranks) if timeline.bubble_ms.size <= LANES else 2)


def _draw_plan(
    figure: go.Figure,
    row: int,
    plan: StepPlan,
    timeline: Timeline,
    ranks: Sequence[int],
    end_ms: float,
    with_path: bool,
    legend: set[str],
) -> None:
    stages, workers = stages_of(timeline), len(timeline.bubble_ms[0])
    lanes = {(rank, worker): i for i, (rank, worker) in enumerate((r, w) for r in ranks for w in range(workers))}
    bars: dict[str, list[tuple[int, float, float, str, str]]] = {}
    last = dict.fromkeys(lanes, 0.0)
    for rank in ranks:
        texts = [_hover(unit) for unit in plan.ranks[rank]]
        for span in worker_spans(plan, timeline, rank):
            took = span.end_ms - span.start_ms
            key = (rank, span.worker)
            last[key] = max(last[key], span.end_ms)
            name = f"{span.kind}{span.unit}"
            where = f"rank {rank}, stage {span.stage}"
            hover = f"{name}, {SPAN_NAMES[span.kind]}, {where}: {took:,.2f} ms<br>{texts[span.unit]}"
            shown = name if took > SHORTEST_TEXT * end_ms else ""
            bars.setdefault(span.kind, []).append((lanes[key], span.start_ms, took, shown, hover))
    homes = {stage: worker for worker, held in enumerate(stages) for stage in held}
    for stage, start, finish in all_reduces(timeline):
        for rank in ranks:
            key = (rank, homes[stage])
            visible = max(start, last[key])
            if finish > visible:
                hover = f"all-reduce of stage {stage}'s gradients, {finish - start:,.2f} ms, ends at {finish:,.1f} ms"
                bars.setdefault("all-reduce", []).append((lanes[key], visible, finish - visible, "", hover))
    for order, kind in enumerate((*SPAN_NAMES, "all-reduce")):
        own = bars.get(kind)
        if not own:
            continue
        figure.add_bar(
            orientation="h",
            y=[lane for lane, *_ in own],
            base=[round(start, 4) for _, start, *_ in own],
            x=[round(took, 4) for _, _, took, *_ in own],
            width=0.86,
            text=[text for _, _, _, text, _ in own],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            textfont={"color": "white", "size": 10},
            hovertext=[hover for *_, hover in own],
            hoverinfo="text",
            marker={
                "color": KIND_COLORS.get(kind, ALL_REDUCE),
                # Between bars of a few pixels, white would be most of what is seen.
                "line": {"color": "white", "width": [0.5 * (took > 0.004 * end_ms) for _, _, took, *_ in own]},
            },
            name=SPAN_NAMES.get(kind, kind),
            legendgroup=kind,
            legendrank=order,
            showlegend=kind not in legend,
            row=row,
            col=1,
        )
        legend.add(kind)
    if with_path:
        path = [span for span in timeline.critical_path() if (span.rank, span.worker) in lanes]
        figure.add_scatter(
            x=[round(ms, 4) for span in path for ms in (span.start_ms, span.end_ms)],
            y=[lanes[span.rank, span.worker] + 0.47 for span in path for _ in range(2)],
            mode="lines",
            line={"color": "#111", "width": 2.5},
            hoverinfo="skip",
            name="critical path",
            legendrank=len(SPAN_NAMES) + 1,
            row=row,
            col=1,
        )
    figure.update_yaxes(
        tickvals=list(lanes.values()),
        ticktext=[_lane_name(rank, stages[worker], worker, len(stages)) for rank, worker in lanes],
        tickfont={"size": 11},
        range=[len(lanes) - 0.4, -0.6],
        showgrid=False,
        zeroline=False,
        row=row,
        col=1,
    )


def _lane_name(rank: int, stages: Sequence[int], worker: int, workers: int) -> str:
    if workers == 1:
        return f"rank {rank} "
    stage = f"stage {','.join(map(str, stages))} "
    return f"<b>rank {rank}</b>  {stage}" if worker == 0 else stage


def _hover(unit: MicroBatch) -> str:
    segments = unit.segments
    if len(segments) == 1 and not segments[0].is_whole:
        part = segments[0]
        what = f"sample {part.sample}, tokens {part.start:,} to {part.end:,} of {part.sample_length:,}"
    else:
        listed = ", ".join(f"{s.sample} ({s.tokens:,})" for s in segments[:6])
        more = f", ... {len(segments)} in all" if len(segments) > 6 else ""
        what = f"{'sample' if len(segments) == 1 else 'samples'} {listed}{more}"
    low, high = min(unit.budgets), max(unit.budgets)
    budgets = f"budget {low:,} blocks" if low == high else f"budgets {low:,} to {high:,} blocks"
    return f"{unit.tokens:,} tokens, {budgets}, {unit.latency.total_ms:,.1f} ms over all stages<br>{what}"
