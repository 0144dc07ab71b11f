"""What became of the samples, for the terminal and for a page.

In: an `Account`. Out: a table with its sentences, and a page's section with a figure.
"""

from __future__ import annotations

import plotly.graph_objects as go
from plotly.subplots import make_subplots
from rich.console import Console
from rich.table import Table

from sparsebalance.planning.accounting import Account
from sparsebalance.reporting.page import Section, escape

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


def account_section(found: Account) -> Section:
    """Heading, explanation and figure, as `write_page` takes them."""
    text = " ".join(escape(sentence) for sentence in found.sentences())
    return ("What became of the samples", text, account_figure(found))


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
    figure.update_yaxes(autorange="reversed", row=1, col=1)
    figure.update_xaxes(tickformat=",", row=1, col=1)
    figure.update_xaxes(title_text=f"tokens, % of {found.capacity:,} (dotted: mean)", range=[0, 100], row=1, col=2)
    figure.update_layout(height=340)
    return figure
