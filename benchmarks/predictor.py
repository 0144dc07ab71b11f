"""How wrong is the latency table? Profiles the demo's model here and checks it on micro-batches off its grid.

python benchmarks/predictor.py --json benchmarks/results/predictor.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from record import write_rows
from sparsebalance.profiling.command import profile
from sparsebalance.training.config import CompareConfig, load_config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--config", type=Path, default=Path("examples/demo.yaml"))
    options = parser.parse_args()
    config = load_config(options.config, CompareConfig)
    result = profile(config, Path("runs/predictor/latency_table.json"), True, Console())
    rows = [{"kind": "measured", **point} for point in result["heldout"]]
    if options.json:
        write_rows(options.json, rows, heldout_mape=result["heldout_mape"], table=result["provenance"])


if __name__ == "__main__":
    main()
