"""Length distributions: statistics, terminal table, and a self-contained page.

In: sample lengths in tokens. Out: a JSON-compatible record, and two ways to look at it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
from rich.console import Console
from rich.table import Table

from sparsebalance.reporting.page import escape, write_page

QUANTILES = (0.5, 0.75, 0.9, 0.95, 0.99)
BAR = 12  # characters of the longest bar on the terminal


def length_statistics(lengths: Sequence[int], targets: Sequence[int]) -> dict[str, Any]:
    """Counts, quantiles and power-of-two bins.

    Args:
        lengths: tokens of each sample, not empty.
        targets: target tokens of each sample.
    """
    values = np.asarray(lengths)
    return {
        "samples": len(values),
        "tokens": int(values.sum()),
        "targets": int(np.sum(targets)),
        "without_targets": int(np.sum(np.asarray(targets) == 0)),
        "min": int(values.min()),
        "mean": float(values.mean()),
        **{f"p{round(q * 100)}": float(np.quantile(values, q)) for q in QUANTILES},
        "max": int(values.max()),
        "bins": _bins(values),
    }


def _bins(values: np.ndarray[Any, Any]) -> list[dict[str, int]]:
    """[2^i, 2^(i+1)) from the shortest to the longest sample, empty bins in between included."""
    exponents = np.frexp(values)[1] - 1  # exact for integers, unlike a rounded logarithm
    bins = []
    for exponent in range(int(exponents.min()), int(exponents.max()) + 1):
        inside = values[exponents == exponent]
        bins.append(
            {"from": 2**exponent, "to": 2 ** (exponent + 1), "samples": len(inside), "tokens": int(inside.sum())}
        )
    return bins


def print_lengths(console: Console, statistics: dict[str, Any], title: str) -> None:
    """A table of the bins with bars, and one line of quantiles."""
    shown = Table(title=title)
    for name in ("tokens", "samples", "", "of all tokens", ""):
        shown.add_column(name, justify="left" if name == "" else "right", no_wrap=True)
    most = max(entry["samples"] for entry in statistics["bins"])
    shares = [entry["tokens"] / statistics["tokens"] for entry in statistics["bins"]]
    for entry, share in zip(statistics["bins"], shares):
        shown.add_row(
            f"{entry['from']:,}-{entry['to'] - 1:,}",
            f"{entry['samples']:,}",
            "█" * round(BAR * entry["samples"] / most),
            f"{share:.1%}",
            "█" * round(BAR * share / max(shares)),
        )
    console.print(shown)
    quantiles = ", ".join(f"p{round(q * 100)} {statistics[f'p{round(q * 100)}']:,.0f}" for q in QUANTILES)
    console.print(
        f"{statistics['samples']:,} samples, {statistics['tokens']:,} tokens, {statistics['targets']:,} of them "
        f"targets; length min {statistics['min']:,}, mean {statistics['mean']:,.0f}, {quantiles}, "
        f"max {statistics['max']:,}"
    )


def length_figure(lengths: Sequence[int]) -> go.Figure:
    """Histogram over logarithmic lengths, by number of samples and by number of tokens."""
    values = np.asarray(lengths)
    edges = np.geomspace(max(values.min(), 1), values.max() + 1, 41)
    counts, _ = np.histogram(values, edges)
    tokens, _ = np.histogram(values, edges, weights=values)
    middle = np.sqrt(edges[1:] * edges[:-1])
    figure = go.Figure()
    for name, shares, color in (
        ("samples", counts / counts.sum(), "#4c78a8"),
        ("tokens", tokens / tokens.sum(), "#e45756"),
    ):
        figure.add_bar(x=middle, y=shares, width=np.diff(edges), name=f"share of {name}", opacity=0.6)
        figure.data[-1].marker.color = color
    figure.update_layout(barmode="overlay", xaxis_title="sample length, tokens", yaxis_title="share")
    figure.update_xaxes(type="log", tickformat=",", dtick=1)
    figure.update_yaxes(tickformat=".0%")
    return figure


def write_lengths_page(path: Path, lengths: Sequence[int], title: str) -> None:
    """A page with the histogram; readable without a network."""
    values = np.asarray(lengths)
    text = (
        f"{len(values):,} samples, {int(values.sum()):,} tokens; half of the samples are at most "
        f"{np.median(values):,.0f} tokens long, the longest is {values.max():,}. "
        f"The longest tenth holds {_share_of_longest(values):.0%} of all tokens."
    )
    write_page(path, f"Lengths of {title}", f"<p>{escape(text)}</p>", [("", "", length_figure(lengths))])


def _share_of_longest(values: np.ndarray[Any, Any]) -> float:
    ordered = np.sort(values)[::-1]
    return float(ordered[: max(1, len(ordered) // 10)].sum() / ordered.sum())
