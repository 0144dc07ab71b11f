"""The comparison of `make demo`, longer: the source of the README's table.

    python benchmarks/comparison.py --minutes 20 --json benchmarks/results/comparison.json

Runs `sparsebalance compare` on the demo's config and keeps the figures of every policy.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from record import write_rows

KEPT = (
    "step_ms", "step_ms_p10", "step_ms_p90", "speedup_vs_random", "speedup_vs_random_p10", "speedup_vs_random_p90",
    "speedup_vs_best_baseline", "busy_fraction", "coverage", "oracle_coverage", "mean_budget", "loss", "planning_ms",
    "planning_share", "peak_memory_mb", "micro_batches", "predictor_error",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--out", type=Path, default=Path("runs/comparison"))
    options = parser.parse_args()
    command = [sys.executable, "-m", "sparsebalance", "compare", "--config", "examples/demo.yaml"]
    limits = ["--steps", "1000", "--time-limit-s", str(60 * options.minutes), "--out", str(options.out)]
    subprocess.run([*command, *limits], check=True)
    summary: dict[str, Any] = json.loads((options.out / "summary.json").read_text())
    rows = [
        {
            "kind": "measured",
            "policy": name,
            **{f"imbalance_{key}": value for key, value in policy["imbalance"].items()},
            **{key: policy[key] for key in KEPT},
        }
        for name, policy in summary["policies"].items()
    ]
    if options.json:
        write_rows(
            options.json,
            rows,
            steps=summary["settings"]["steps"],
            best_baseline=summary["best_baseline"],
            predictor=summary["predictor"],
            checks=summary["checks"],
            settings=summary["settings"]["config"],
        )


if __name__ == "__main__":
    main()
