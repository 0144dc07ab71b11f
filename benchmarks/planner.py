"""How fast are simulator and planner, and what do they say about the README's example?

    python benchmarks/planner.py --json benchmarks/results/planner.json

Times the simulator on small and large steps and `sparsebalance plan` on 10,000 samples, and keeps the table of
`sparsebalance plan longalign-10k --model qwen2.5-3b --device h200 --dp 4 --pp 4` with its terminal output.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console

from record import write_rows
from sparsebalance.planner.command import plan
from sparsebalance.planner.config import PlanConfig
from sparsebalance.planning.list_schedule import zero_bubble
from sparsebalance.planning.schedule import one_forward_one_backward
from sparsebalance.planning.simulator import Pipeline, StageCosts, simulate

CALL = PlanConfig("longalign-10k", model="qwen2.5-3b", device="h200", dp=4, pp=4)
COMMAND = "sparsebalance plan longalign-10k --model qwen2.5-3b --device h200 --dp 4 --pp 4"


def costs(rng: np.random.Generator, stages: int, units: int) -> StageCosts:
    forward = np.exp(rng.normal(0, 0.5, (stages, units)))
    return StageCosts(forward, forward, forward)


def median_ms(call: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def simulations() -> list[dict[str, object]]:
    rng = np.random.default_rng(0)
    rows: list[dict[str, object]] = []
    for ranks, stages, units, rounds in ((4, 4, 16, 51), (1024, 16, 64, 3)):
        chains = (1,) * units
        schedule = one_forward_one_backward(chains, stages)
        per_rank = [costs(rng, stages, units) for _ in range(ranks)]
        ms = median_ms(lambda s=schedule, c=chains, p=per_rank: simulate([Pipeline(s, c, x) for x in p]), rounds)
        rows.append(
            {"kind": "measured", "what": "simulate", "ranks": ranks, "stages": stages, "units": units, "ms": ms}
        )
    one = costs(rng, 4, 32)
    ms = median_ms(lambda: zero_bubble((1,) * 32, one), 21)
    rows.append({"kind": "measured", "what": "zero_bubble schedule", "ranks": 1, "stages": 4, "units": 32, "ms": ms})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args()
    rows = simulations()
    for row in rows:
        print(row)
    lengths = np.exp(np.random.default_rng(0).normal(9.0, 1.0, 10_000)).astype(int) + 1
    text = Path("runs/planner/lengths.txt")
    text.parent.mkdir(parents=True, exist_ok=True)
    text.write_text("\n".join(map(str, lengths)) + "\n")
    begin = time.perf_counter()
    plan(PlanConfig(str(text), dp=4, pp=4), Console(quiet=True))
    seconds = time.perf_counter() - begin
    rows.append({"kind": "measured", "what": "plan 10,000 samples", "ranks": 4, "stages": 4, "ms": seconds * 1e3})
    print(rows[-1])
    shown = io.StringIO()
    with contextlib.redirect_stderr(io.StringIO()):
        result = plan(CALL, Console(file=shown, width=96))
    lines = [line.rstrip() for line in shown.getvalue().splitlines()]
    output = "\n".join(line for line in lines if line and not line.startswith("simulating"))
    print(output)
    rows += result["rows"]
    if options.json:
        write_rows(options.json, rows, command=COMMAND, output=output, recommendation=result["recommendation"])


if __name__ == "__main__":
    main()
