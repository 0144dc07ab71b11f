"""Does budget that is moved to where other documents gained most from it cover more of documents never seen?

    python benchmarks/held_out.py --json benchmarks/results/held_out.json

Layers' budgets are chosen by the mean curves of one half of the documents that SmolLM2-135M-Instruct read, and judged
by the curves of each document of the other half. Attention time is analytic; nothing is trained.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from record import write_rows
from sparsebalance.planning.budgets import TuningStep, attention_ms
from sparsebalance.planning.coverage import STEP_TYPE, STEPS, CoverageCurves, mean_coverage
from sparsebalance.planning.decoder import Decoder
from sparsebalance.planning.hardware import named_device
from sparsebalance.planning.latency import RooflineModel
from sparsebalance.planning.measured_curves import BLOCK_SIZE, measured_curves, measured_documents
from sparsebalance.planning.micro_batches import micro_batches
from sparsebalance.planning.pipeline import PipelineModel
from sparsebalance.planning.plan import Sample, Segment, StepPlan, Topology
from sparsebalance.planning.waterfill import Waterfill

DECODER = Decoder(30, 576, 1536, 9, 3, 64, 49_152, tied=True)  # of the measured model
LONGEST = 8192  # tokens of a measured document
SHORTEST = 2048  # tokens; of shorter documents a usual budget reads nearly all
BUDGETS = (4, 8, 16, 32)
THRESHOLD = 0.2  # so that layers that give and layers that take can be 0.4 apart

FIGURES = (
    "attention_time", "coverage_uniform", "coverage", "coverage_expected", "attention_time_best", "coverage_best",
)  # fmt: skip


def rows() -> list[dict[str, Any]]:
    """One record per default budget and aim."""
    documents = [document for document in measured_documents("held_out") if document.tokens >= SHORTEST]
    layers = DECODER.layers
    own = {i: np.rint(document.router * STEPS).astype(STEP_TYPE) for i, document in enumerate(documents)}
    truth = CoverageCurves(BLOCK_SIZE, {}, own)
    known = measured_curves(layers, BLOCK_SIZE, "fit")
    model = RooflineModel(DECODER, named_device("h200"), BLOCK_SIZE)
    placement = (tuple((Segment.whole(Sample(i, d.tokens, 0)),) for i, d in enumerate(documents)),)
    found: list[dict[str, Any]] = []
    for default in BUDGETS:
        uniform = micro_batches(placement, [[(default,) * layers] * len(documents)], model, None)
        step = TuningStep(uniform, model, Topology(), PipelineModel(), default, known)
        for aim in ("coverage", "time"):
            # With every document's own curves and no limits nothing could be better: gains per step only fall.
            knowing = replace(step, coverage=truth)
            tuned = [
                micro_batches(placement, rule(one), model, None)
                for rule, one in (
                    (Waterfill(aim=aim, threshold=THRESHOLD), step),  # type: ignore[arg-type]
                    (Waterfill(aim=aim, threshold=1.0, max_budget=LONGEST // BLOCK_SIZE), knowing),  # type: ignore[arg-type]
                )
            ]
            before, after, best = (StepPlan(aim, Topology(), BLOCK_SIZE, ranks, 0.0) for ranks in (uniform, *tuned))
            ms = [
                _attention(step, np.array([unit.budgets for unit in plan.micro_batches]))
                for plan in (before, after, best)
            ]
            found.append(
                {
                    "kind": "simulated",
                    "variant": f"waterfill, {aim}",
                    "documents": len(documents),
                    "budget": default,
                    "coverage_uniform": mean_coverage(before, truth),
                    "coverage": mean_coverage(after, truth),
                    "coverage_expected": mean_coverage(after, known),
                    "attention_time": ms[1] / ms[0],
                    "coverage_best": mean_coverage(best, truth),
                    "attention_time_best": ms[2] / ms[0],
                }
            )
    return found


def _attention(step: TuningStep, budgets: np.ndarray) -> float:
    """Milliseconds of all attention layers at [units, layers] budgets."""
    tried, places = np.unique(budgets, return_inverse=True)
    return float(np.take_along_axis(attention_ms(step, tried).sum(0), places.reshape(budgets.shape), 1).sum())


def table(result: dict[str, Any]) -> str:
    """As a page shows it."""
    lines = [
        "| budget | aim | attention time | coverage, uniform | coverage | expected | at best: time | coverage |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        aim = row["variant"].split(", ")[1]
        lines.append(
            f"| {row['budget']} of {BLOCK_SIZE} keys | {aim} | {row['attention_time']:.0%} "
            f"| {row['coverage_uniform']:.3f} | {row['coverage']:.3f} | {row['coverage_expected']:.3f} "
            f"| {row['attention_time_best']:.0%} | {row['coverage_best']:.3f} |"
        )
    count = result["rows"][0]["documents"]
    return "\n".join(
        [
            *lines,
            "",
            f"{count} documents of {SHORTEST:,} to {LONGEST:,} tokens that the curves were not made of; budgets of "
            f"layers and documents by `waterfill`, threshold {THRESHOLD}; attention time against the uniform budget, "
            "analytic (H200); expected: coverage by the curves that the budgets were chosen by; at best: chosen by "
            "each document's own curves, without limits: no rule that sets budgets by layer and document can beat it.",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args()
    found = rows()
    shown = Table(box=None, header_style="bold")
    for name in ("budget", "variant", "time", "uniform", "coverage", "expected", "best time", "best coverage"):
        shown.add_column(name, justify="right")
    for row in found:
        numbers = (f"{row[name]:.3f}" for name in FIGURES)
        shown.add_row(str(row["budget"]), row["variant"], *numbers)
    Console().print(shown)
    if options.json:
        write_rows(options.json, found)


if __name__ == "__main__":
    main()
