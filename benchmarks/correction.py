"""Does a run balance itself again when one rank turns slower? A busy loop takes a third of rank 1's core.

    python benchmarks/correction.py --json benchmarks/results/correction.json

Two ranks, each pinned to a core of its own, train with `sab` on random samples, one fresh global batch a step.
From step `--from-step` on, a busy loop runs on rank 1's core for two thirds of the time, which leaves the rank two
thirds of its speed: 1.5x slower. The same run without online correction, with the same table, stands beside it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from record import write_rows

PERIOD_S = 0.02
DUTY = 2 / 3  # at equal shares the rank then gets 1 - DUTY / 2 = 2/3 of its core


def load(core: int, duty: float) -> None:
    """Busy for `duty` of every period, on one core."""
    os.sched_setaffinity(0, {core})
    while True:
        end = time.perf_counter() + PERIOD_S * duty
        while time.perf_counter() < end:
            pass
        time.sleep(PERIOD_S * (1 - duty))


def write_data(path: Path, samples: int) -> None:
    """Conversations of 100 to 2,000 words with short answers: samples differ, and a step takes about a second."""
    rng = np.random.default_rng(0)
    words = np.array(["the", "model", "reads", "a", "block", "of", "keys", "and", "waits", "for", "no", "rank"])

    def text(count: int) -> str:
        return " ".join(rng.choice(words, count))

    def row(count: int) -> str:
        turns = [{"role": "user", "content": text(count)}, {"role": "assistant", "content": text(10)}]
        return json.dumps({"messages": turns}) + "\n"

    lengths = np.exp(rng.uniform(np.log(100), np.log(2000), samples)).astype(int).tolist()
    path.write_text("".join(map(row, lengths)))


def config(folder: Path, name: str, steps: int, table: Path | None, correction: bool) -> Path:
    record: dict[str, Any] = {
        "out": str(folder / name),
        "steps": steps,
        "checkpoint_every": 0,
        "model": {"layers": 2, "hidden": 64, "intermediate": 192, "heads": 2, "kv_heads": 1},
        "data": {"path": str(folder / "data.jsonl"), "tokenizer": "data/tokenizer", "max_length": 8192,
                 "on_long": "truncate", "batch_size": 16},
        "attention": {"block_size": 64, "budget": 8, "granularity": "block", "probe_every": 0},
        "balance": {"policy": "sab", "token_cap": 8192, "correction": correction},
        "optimizer": {"lr": 1e-3, "warmup_steps": 1},
        "parallel": {"dp": 2, "threads": 1},
    }  # fmt: skip
    if table is not None:
        record["balance"]["table"] = str(table)
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(record))
    return path


def run(path: Path, out: Path, from_step: int, slow: bool) -> list[dict[str, Any]]:
    """Train, pinning each rank to its core; the slow-down starts when `from_step` steps are done."""
    process = subprocess.Popen([sys.executable, "-m", "sparsebalance", "train", "--config", str(path)])
    disturber = None
    pinned: set[int] = set()
    try:
        while process.poll() is None:
            for pid, rank in _ranks(process.pid).items():
                if pid not in pinned:
                    os.sched_setaffinity(pid, {rank})
                    pinned.add(pid)
            if slow and disturber is None and _steps(out) >= from_step:
                disturber = multiprocessing.Process(target=load, args=(1, DUTY), daemon=True)
                disturber.start()
            time.sleep(0.1)
    finally:
        if disturber is not None:
            disturber.terminate()
    if process.returncode:
        raise SystemExit(f"training ended with status {process.returncode}")
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def _ranks(launcher: int) -> dict[int, int]:
    """Process id -> rank of the launcher's workers."""
    found = {}
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        try:
            environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        ranks = [entry for entry in environment if entry.startswith(b"RANK=")]
        if ranks:
            found[int(child)] = int(ranks[0].split(b"=")[1])
    return found


def _steps(out: Path) -> int:
    path = out / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.is_file() else 0


def imbalance(lines: list[dict[str, Any]]) -> float:
    return statistics.median(line["imbalance_rank"] for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--from-step", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("runs/correction"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    write_data(options.out / "data.jsonl", 400)
    rows, table = [], None
    for correction in (True, False):
        name = "corrected" if correction else "uncorrected"
        out = options.out / name
        shutil.rmtree(out, ignore_errors=True)
        path = config(options.out, name, options.steps, table, correction)
        lines = run(path, out, options.from_step, slow=True)
        table = out / "latency_table.json"
        after = options.from_step + 2  # the slow-down reaches its step, the next was already planned
        parts = {
            "before": lines[2 : options.from_step],
            "first_5_after": lines[after : after + 5],
            "after_20": lines[options.from_step + 20 :],
        }
        factors = lines[-1]["rank_factors"]
        row = {
            "kind": "measured",
            "correction": correction,
            **{f"imbalance_{key}": imbalance(part) for key, part in parts.items()},
            **{f"step_ms_{key}": statistics.median(line["step_ms"] for line in part) for key, part in parts.items()},
            "slowness_learned": factors[1] / factors[0],
        }
        rows.append(row)
        print(row)
    print(f"{'':14}{'before':>10}{'first 5':>10}{'after 20':>10}   slowest rank / mean, medians")
    for row in rows:
        cells = "".join(f"{row[f'imbalance_{key}']:10.3f}" for key in ("before", "first_5_after", "after_20"))
        print(f"{'corrected' if row['correction'] else 'uncorrected':14}{cells}")
    if options.json:
        write_rows(options.json, rows, steps=options.steps, slowed_from_step=options.from_step, duty=DUTY)


if __name__ == "__main__":
    main()
