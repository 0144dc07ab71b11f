"""How wrong is the latency table? Profiles a four-layer decoder here and checks it on micro-batches off its grid.

    python benchmarks/predictor.py --json benchmarks/results/predictor.json

One process with one thread. Held-out micro-batches run shuffled among the table's own points.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from record import write_rows
from sparsebalance.profiling.command import profile
from sparsebalance.profiling.memory import keep_freed_memory
from sparsebalance.training.config import CompareConfig, load_config
from sparsebalance.training.parallel import start

LAYERS, MAX_LENGTH = 4, 16384


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--seconds", type=float, default=240.0)
    options = parser.parse_args()
    demo = load_config(Path("examples/demo.yaml"), CompareConfig)
    config = replace(
        demo,
        model=replace(demo.model, layers=LAYERS),
        data=replace(demo.data, max_length=MAX_LENGTH),
        balance=replace(demo.balance, measure_s=options.seconds),
        parallel=replace(demo.parallel, dp=1),
    )
    keep_freed_memory()
    result = profile(config, start(config.parallel), Path("runs/predictor/latency_table.json"), True, Console())
    assert result is not None  # the only rank is the first one
    rows = [{"kind": "measured", **point} for point in result["heldout"]]
    if options.json:
        write_rows(
            options.json,
            rows,
            layers=LAYERS,
            heldout_mape=result["heldout_mape"],
            heldout_mape_raw=result["heldout_mape_raw"],
            heldout_mape_attention=result["heldout_mape_attention"],
            table=result["provenance"],
        )


if __name__ == "__main__":
    main()
