"""Does tuning budgets change what training reaches? Short runs with fixed and tuned budgets, for `tuning.py`.

For every seed the same small decoder learns from the same global batches under each variant, on two processes. The
latency table is measured once for all runs. Runs are far too short to tell of a finished model: they would show a
tuning that harms training from the start.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.console import Console

from chunked_step import demo
from sparsebalance.reporting.progress import follow, progress_bars
from sparsebalance.training.config import AttentionConfig, CompareConfig, RunConfig, config_record

VARIANTS = {
    "sab": ("sab", "balance"),
    "sab_dst": ("sab_dst", "balance"),
    "sab_dst hold": ("sab_dst", "hold"),
}
"""Name in tables -> policy and aim; the first has fixed budgets, all others are compared with it."""
SEEDS = (0, 1, 2)
STEPS, QUICK_STEPS = 20, 6
LAST = 5  # steps over which the final loss is a mean
MAX_LENGTH, BATCH_SIZE, PROBE_EVERY = 8192, 4, 5


@dataclass(frozen=True)
class Run:
    """Attributes:
    loss: mean over the last steps. seconds: of all steps. coverage: router coverage at the budgets used, mean over the
        probed steps. mean_budget: blocks. probe_ms: of a probed step, mean. planning_ms: median.
    """

    loss: float
    seconds: float
    coverage: float
    mean_budget: float
    probe_ms: float
    planning_ms: float

    @classmethod
    def of(cls, metrics: Path) -> Run:
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
        probed = [record for record in records if record["probe"]]
        return cls(
            loss=float(np.mean([record["loss"] for record in records[-LAST:]])),
            seconds=sum(record["step_ms"] for record in records) / 1e3,
            coverage=float(np.mean([record["probe"]["router"] for record in probed])),
            mean_budget=float(np.mean([record["mean_budget"] for record in records])),
            probe_ms=float(np.mean([record["probe_ms"] for record in probed])),
            planning_ms=float(np.median([record["planning_ms"] for record in records])),
        )


def config_of(quick: bool) -> dict[str, Any]:
    """The demo's model, on samples short enough for many runs, as a training config."""
    full: CompareConfig = demo(False)
    record = config_record(
        replace(
            full,
            steps=QUICK_STEPS if quick else STEPS,
            checkpoint_every=0,
            data=replace(full.data, max_length=MAX_LENGTH, on_long="drop", batch_size=BATCH_SIZE),
            attention=replace(full.attention, probe_every=PROBE_EVERY),
            balance=replace(full.balance, unit_size=2048, measure_s=15.0),
        )
    )
    return {name: record[name] for name in config_record(RunConfig())}


def run(folder: Path, name: str, config: Path, *more: str) -> Path:
    """One training run; returns its directory.

    Raises:
        SystemExit: it failed; what it said is shown.
    """
    out = folder / name
    command = [sys.executable, "-m", "sparsebalance", "train", "--config", str(config), "--out", str(out), *more]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the training run {name} ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return out


def trained(console: Console, minutes: float, quick: bool) -> dict[str, Any]:
    """Rows and settings; no seed begins that would end later than the minutes allow, but the first always runs."""
    begin, longest_s = time.perf_counter(), 0.0
    found: dict[str, list[Run]] = {name: [] for name in VARIANTS}
    with tempfile.TemporaryDirectory(prefix="tuning-runs-") as place, progress_bars(console) as progress:
        folder = Path(place)
        config = folder / "config.yaml"
        record = config_of(quick)
        config.write_text(yaml.safe_dump(record))
        watch, count = follow(progress, "training, runs") or (lambda *_: None), len(SEEDS) * len(VARIANTS)
        watch(0, count)
        table = run(folder, "table", config, "--steps", "1") / "latency_table.json"
        for seed in SEEDS:
            seed_begin = time.perf_counter()
            if seed != SEEDS[0] and seed_begin + longest_s > begin + 60 * minutes:
                break
            for name, (policy, aim) in VARIANTS.items():
                chosen = ("--balance.policy", policy, "--balance.aim", aim, "--balance.table", str(table))
                out = run(folder, f"{name} {seed}", config, "--seed", str(seed), *chosen)
                found[name].append(Run.of(out / "metrics.jsonl"))
                watch(sum(map(len, found.values())), count)
            longest_s = max(longest_s, time.perf_counter() - seed_begin)
        watch(count, count)
    settings = {
        "steps": record["steps"],
        "last": LAST,
        "seeds": len(found["sab"]),
        "batch_size": BATCH_SIZE,
        "max_length": MAX_LENGTH,
        "block_size": record["attention"]["block_size"],
        "budget": record["attention"]["budget"],
        "unit_size": record["balance"]["unit_size"],
    }
    return {"settings": settings, "rows": rows_of(found, record["steps"])}


def rows_of(found: dict[str, list[Run]], steps: int) -> list[dict[str, Any]]:
    base = next(iter(found.values()))
    return [
        {
            "kind": "measured",
            "what": "training",
            "distribution": "real",
            "variant": name,
            "steps": steps,
            **spread("loss", [one.loss for one in runs]),
            # Seeds differ in weights and order, so what tuning does shows within a seed.
            **spread("loss_change", [one.loss / fixed.loss - 1 for one, fixed in zip(runs, base, strict=True)]),
            **spread("seconds", [one.seconds for one in runs]),
            "coverage": float(np.mean([one.coverage for one in runs])),
            "mean_budget": float(np.mean([one.mean_budget for one in runs])),
            "planning_ms": float(np.mean([one.planning_ms for one in runs])),
            "probe_ms": float(np.mean([one.probe_ms for one in runs])),
            "probe_share": float(
                np.mean([one.probe_ms / (1e3 * one.seconds / steps) / AttentionConfig().probe_every for one in runs])
            ),
        }
        for name, runs in found.items()
    ]


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Mean, smallest and largest."""
    return {name: float(np.mean(values)), f"{name}_min": min(values), f"{name}_max": max(values)}
