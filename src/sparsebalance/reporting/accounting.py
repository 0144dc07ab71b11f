"""What became of the samples, for the terminal and for a page.

In: an `Account`, or a run's data.json. Out: a table with its sentences, and a page's section with a figure.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots
from rich.console import Console
from rich.table import Table

from sparsebalance.planning.accounting import Account, Share
from sparsebalance.planning.errors import InputError
from sparsebalance.reporting.page import Section, escape

RUN_FILE = "data.json"  # that a training run leaves beside its metrics

# Muted where nothing was done to a sample, strong where it was lost.
COLORS = {
    "packed": "#54a24b",
    "alone": "#4c78a8",
    "cut in chunks": "#f58518",
    "not used": "#bab0ac",
    "truncated": "#d6a5c9",
    "dropped": "#e45756",
}


def print_account(console: Console, found: Account) -> None:
    """The table, and the sentences that make it readable on its own."""
    console.print(account_table(found))
    for line in found.sentences():
        console.print(line, highlight=False, markup=False)


def account_table(found: Account) -> Table:
    """One row per fate; those above the sum add up to it. Repeats count in them as often as they are planned."""
    table = Table(title="What became of the samples", box=None, padding=(0, 0, 0, 2), header_style="bold")
    table.add_column("", no_wrap=True)
    for heading in ("samples", "micro-batches", "tokens"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, share in (("packed", found.packed), ("alone", found.alone), ("cut in chunks", found.cut)):
        table.add_row(name, f"{share.samples:,}", f"{share.micro_batches:,}", f"{share.tokens:,}")
    table.add_row(
        "planned",
        f"{found.samples + found.repeats:,}",
        f"{found.micro_batches:,}",
        f"{found.tokens + found.repeated_tokens:,}",
        style="bold",
    )
    if found.repeats:
        table.add_row("of these repeats", f"{found.repeats:,}", "", f"{found.repeated_tokens:,}")
    table.add_row("truncated", f"{found.truncated:,}", "", f"{found.truncated_tokens:,} cut off")
    table.add_row("dropped", f"{found.dropped:,}", "", f"{found.dropped_tokens:,}")
    table.add_row("not used", f"{found.not_used:,}", "", "")
    return table


def account_section(found: Account, sentences: Sequence[str] | None = None) -> Section:
    """Heading, explanation and figure, as `write_page` takes them.

    Args:
        sentences: what is said of the samples; the account's own where None.
    """
    lines = [escape(line.replace("->", "→")) for line in (found.sentences() if sentences is None else sentences)]
    return ("What became of the samples", "<br>".join(lines), account_figure(found))


def run_section(run: Path) -> Section | None:
    """The section of RUN/data.json with its sentences; None for a run that wrote none.

    Raises:
        InputError: the file is not what a run writes.
    """
    path = run / RUN_FILE
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        sentences = record["sentences"]
        if not isinstance(sentences, list) or not all(isinstance(sentence, str) for sentence in sentences):
            raise ValueError("its sentences are not a list of texts")
        return account_section(account_of(record["account"]), sentences)
    except KeyError as error:
        raise InputError(f"{path} has no {error}; delete it to get the page without its section") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise InputError(
            f"{path} is not the account of a run ({error}); delete it to get the page without its section"
        ) from error


def account_of(record: dict[str, Any]) -> Account:
    """The account that `dataclasses.asdict` made the record of, through JSON or not.

    Raises:
        KeyError, TypeError, ValueError: it is no such record.
    """
    names = ("samples", "micro_batches", "tokens")
    shares = {kind: Share(*(record[kind][name] for name in names)) for kind in ("alone", "packed", "cut")}
    found = Account(**{**record, **shares, "fill_bins": tuple(record["fill_bins"])})
    for name, value in _numbers(record):
        if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value >= 0):
            raise ValueError(f"its {name} is {value!r}, but must be a number from 0 on")
    if not found.fill_bins or found.capacity < 1:
        raise ValueError("it has no bins or no capacity")
    return found


def _numbers(record: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in record.items():
        if isinstance(value, dict):
            yield from _numbers(value)
        else:
            yield from ((name, entry) for entry in (value if isinstance(value, list | tuple) else [value]))


def account_figure(found: Account) -> go.Figure:
    """Samples by fate (left), micro-batches by how full they are (right)."""
    figure = make_subplots(rows=1, cols=2, subplot_titles=("samples", "micro-batches"), horizontal_spacing=0.12)
    fates = {
        "packed": (found.packed.samples, f"in {found.packed.micro_batches:,} micro-batches"),
        "alone": (found.alone.samples, "a micro-batch each"),
        "cut in chunks": (found.cut.samples, f"in {found.chunks:,} chunks"),
        "not used": (found.not_used, "in no batch of the steps planned"),
        "truncated": (found.truncated, f"{found.truncated_tokens:,} tokens cut off; counted above too"),
        "dropped": (found.dropped, f"{found.dropped_tokens:,} tokens"),
    }
    figure.add_bar(
        x=[count for count, _ in fates.values()],
        y=list(fates),
        orientation="h",
        text=[f"{count:,}" for count, _ in fates.values()],
        textposition="auto",
        hovertext=[f"{count:,} {name}: {note}" for name, (count, note) in fates.items()],
        hoverinfo="text",
        marker_color=[COLORS[name] for name in fates],
        showlegend=False,
    )
    width = 100 // len(found.fill_bins)
    edges = [width * index for index in range(len(found.fill_bins))]
    names = [f"{low}-{low + width}%" for low in edges[:-1]] + [f"{edges[-1]}% and more"]
    figure.add_bar(
        x=[low + width / 2 for low in edges],
        y=list(found.fill_bins),
        width=width * 0.94,
        hovertext=[f"{count:,} micro-batches, {name} full" for name, count in zip(names, found.fill_bins)],
        hoverinfo="text",
        marker_color="#4c78a8",
        showlegend=False,
        row=1,
        col=2,
    )
    figure.add_vline(x=100 * found.fill_mean, line_dash="dot", line_color="#444", row=1, col=2)
    figure.update_yaxes(autorange="reversed", ticksuffix=" ", row=1, col=1)
    figure.update_xaxes(tickformat=",", row=1, col=1)
    figure.update_yaxes(tickformat=",", row=1, col=2)
    figure.update_xaxes(title_text=f"tokens, % of {found.capacity:,} (dotted: mean)", range=[0, 100], row=1, col=2)
    figure.update_layout(height=340)
    return figure
