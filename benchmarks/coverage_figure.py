"""The plot of measured coverage: over layers at a few budgets, and over budgets in a few layers.

In: measured documents. Out: an SVG of those at the longest length, means over documents.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sparsebalance.planning.coverage import BUDGET_GRID
from sparsebalance.planning.measured_curves import MeasuredDocument

Floats = NDArray[np.float64]
BUDGETS = (1, 4, 8, 16, 32)  # of the left panel
COLORS = ("#7f7f7f", "#4c78a8", "#1b7837", "#e08214", "#b2182b")
TOP, WIDTH, HEIGHT = 40, 400, 320
LEFT, RIGHT = 60, 620  # where the panels begin


def figure(documents: Sequence[MeasuredDocument]) -> str:
    """Router coverage drawn through, oracle coverage dashed."""
    tokens = max(document.tokens for document in documents)
    longest = [document for document in documents if document.tokens == tokens]
    router: Floats = np.mean([document.router for document in longest], axis=0)
    oracle: Floats = np.mean([document.oracle for document in longest], axis=0)
    layers = len(router)
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1180 430" font-family="sans-serif" font-size="12">',
        '<rect width="1180" height="430" fill="white"/>',
        text(LEFT + WIDTH / 2, 20, f"coverage in each layer, {len(longest)} documents of {tokens:,} tokens", "middle"),
        text(RIGHT + WIDTH / 2, 20, "coverage over the budget, in five layers", "middle"),
        *axes(LEFT, [(layer / (layers - 1), str(layer)) for layer in range(0, layers, 5)], "layer"),
        *axes(RIGHT, [(share(budget), str(budget)) for budget in BUDGET_GRID if budget & (budget - 1) == 0], "budget"),
    ]
    for place, budget in enumerate(BUDGETS):
        at, across = BUDGET_GRID.index(budget), np.arange(layers) / (layers - 1)
        parts += lines(LEFT, across, router[:, at], oracle[:, at], COLORS[place])
        parts += legend(LEFT, place, f"k = {budget}")
    # From the layer that a budget of 8 covers least to the one that it covers most.
    order = np.argsort(router[:, BUDGET_GRID.index(8)], kind="stable")
    across = np.array([share(budget) for budget in BUDGET_GRID])
    for place, layer in enumerate(order[np.linspace(0, layers - 1, len(COLORS)).round().astype(int)]):
        parts += lines(RIGHT, across, router[layer], oracle[layer], COLORS[place])
        parts += legend(RIGHT, place, f"layer {layer}")
    for left in (LEFT, RIGHT):
        parts.append(text(left + WIDTH + 14, TOP + 150, "through: router", "start"))
        parts.append(text(left + WIDTH + 14, TOP + 170, "dashed: oracle", "start"))
    return "\n".join([*parts, "</svg>", ""])


def share(budget: int) -> float:
    """Place of a budget on its logarithmic axis, 0 to 1."""
    return math.log(budget / BUDGET_GRID[0]) / math.log(BUDGET_GRID[-1] / BUDGET_GRID[0])


def text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" dy="4" text-anchor="{anchor}">{words}</text>'


def axes(left: int, ticks: Sequence[tuple[float, str]], name: str) -> list[str]:
    """Grid lines of coverage from 0 to 1, and the ticks of the axis below."""
    parts = []
    for tenth in range(0, 11, 2):
        y = TOP + HEIGHT * (1 - tenth / 10)
        parts.append(f'<polyline points="{left},{y:.1f} {left + WIDTH},{y:.1f}" stroke="#dddddd"/>')
        parts.append(text(left - 8, y, f"{tenth / 10:.1f}", "end"))
    parts += [text(left + WIDTH * place, TOP + HEIGHT + 18, words, "middle") for place, words in ticks]
    return [*parts, text(left + WIDTH / 2, TOP + HEIGHT + 40, name, "middle")]


def lines(left: int, across: Floats, router: Floats, oracle: Floats, color: str) -> list[str]:
    parts = []
    for values, dashes in ((router, ""), (oracle, ' stroke-dasharray="4 3"')):
        x, y = left + WIDTH * across, TOP + HEIGHT * (1 - values)
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.6"{dashes}/>')
    return parts


def legend(left: int, place: int, words: str) -> list[str]:
    x, y = left + WIDTH + 14, TOP + 14 + 22 * place
    mark = f'<rect x="{x}" y="{y - 3}" width="16" height="5" fill="{COLORS[place]}"/>'
    return [mark, text(x + 22, y, words, "start")]
