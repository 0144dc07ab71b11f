"""One HTML file that needs nothing else: plots with the plotly library inlined, readable without a network."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go
import plotly.io

from sparsebalance.planning.files import write_whole

Section = tuple[str, str, go.Figure]  # heading, explanation (HTML), plot

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1240px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.7rem; margin-bottom: .3rem; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .2rem; }
p { max-width: 75ch; } .lead { font-size: 1.15rem; } .small { color: #666; font-size: .85rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .55rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th { border-bottom: 2px solid #999; font-weight: 600; } td:first-child, th:first-child { text-align: left; }
tr.ours td { background: #eef6ee; } tr.best td { background: #f5f1e6; } code { background: #f3f3f3; padding: 0 .2em; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; } dt { color: #666; } dd { margin: 0; }
"""


def escape(text: object) -> str:
    return html.escape(str(text))


def write_page(path: Path, title: str, lead: str, sections: Sequence[Section], tail: str = "") -> None:
    """Write atomically.

    Args:
        lead, tail: HTML before and after the plots; escape what comes from outside.
    """
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>",
        lead,
    ]
    for index, (heading, text, figure) in enumerate(sections):
        if heading:
            parts.append(f"<h2>{escape(heading)}</h2>")
        if text:
            parts.append(f"<p>{text}</p>")
        parts.append(_plot(figure, first=index == 0, number=index))
    parts += [tail, "</body></html>\n"]
    write_whole(path, "".join(parts))


def _plot(figure: go.Figure, first: bool, number: int) -> str:
    figure.update_layout(
        template="plotly_white",
        margin={"l": 70, "r": 20, "t": 62, "b": 50},
        height=figure.layout.height or 380,
        legend={"orientation": "h", "yref": "container", "y": 0.995, "yanchor": "top", "x": 0},
    )
    plot: str = plotly.io.to_html(
        figure,
        full_html=False,
        include_plotlyjs="inline" if first else False,
        div_id=f"plot-{number}",
        config={"displayModeBar": False, "responsive": True},
    )
    return plot
