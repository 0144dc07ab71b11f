"""`sparsebalance compare`: before, in and after the worker processes."""

from __future__ import annotations

import datetime
import json
import os
import shutil
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from sparsebalance.comparison.run import run_comparison
from sparsebalance.comparison.summary import (
    SCHEMA,
    Checks,
    check_strict,
    in_order,
    slowest_unit_error,
    summarise,
    unit_errors,
)
from sparsebalance.planning.errors import CheckFailed, InputError
from sparsebalance.planning.table import LatencyTable
from sparsebalance.planning.table_file import save_table
from sparsebalance.profiling.measure import host_kind
from sparsebalance.reporting.console import print_comparison
from sparsebalance.reporting.html import write_report
from sparsebalance.reporting.planned.command import write_planned_page, write_planned_trace
from sparsebalance.reporting.progress import follow, progress_bars
from sparsebalance.reporting.trace import write_trace
from sparsebalance.training.config import CompareConfig, config_record
from sparsebalance.training.parallel import Ranks
from sparsebalance.training.session import Session, configured_policy, open_session, preflight


def check_compare(config: CompareConfig) -> None:
    """Raises:
    InputError: besides `preflight`'s, a policy list that does not start with `random` or names one twice.
    """
    if not config.policies or config.policies[0] != "random":
        raise InputError(
            f"compare.policies starts with {config.policies[:1]}, but speed-ups are over `random`; put it first"
        )
    if len(set(config.policies)) != len(config.policies):
        raise InputError(f"policies {config.policies} name one twice")
    preflight(config, config.policies)


def compare(config: CompareConfig, ranks: Ranks, console: Console) -> dict[str, Any] | None:
    """Measure, run, check, and write everything under `config.out`; returns the summary on rank 0.

    Raises:
        CheckFailed: losses or gradient norms of strict policies differ; files are written all the same.
    """
    begin = time.perf_counter()
    session = open_session(config, ranks)
    progress = progress_bars(console) if ranks.is_first else None
    for note in session.data.report.notes() if ranks.is_first else ():
        console.print(f"note: {note}")
    with progress or nullcontext():
        table, rank_factors = session.latency_table(follow(progress, "measuring this machine, s"))
        session = session.staged(table)
        names = list(config.policies)
        total = config.steps * len(names)
        task = progress.add_task("comparing policies", total=total) if progress else None

        def on_policy(step: int, policy: str) -> None:
            if progress is not None and task is not None:
                progress.update(task, advance=1, description=f"step {step + 1}/{config.steps} {policy}")

        records, followed = run_comparison(session, config, table, rank_factors, begin, on_policy)
        if progress is not None and task is not None:
            progress.update(task, total=len(records) * len(names), description="comparing policies")
    if not ranks.is_first:
        return None
    tuned = [name for name in names if configured_policy(config, name).tuned]
    checks = check_strict(records, names[0], tuned)
    policies, best = summarise(records, names, tuned)
    error, error_at_step_speed = unit_errors(records)
    ordered, pairs = in_order(policies, records)
    summary = {
        "schema": SCHEMA,
        "machine": _machine(config, ranks),
        "topology": asdict(ranks.topology),
        "settings": _settings(session, config, len(records)),
        "baseline": names[0],
        "best_baseline": best,
        "policies": policies,
        "predictor": {
            "heldout_mape": error,
            "heldout_mape_at_step_speed": error_at_step_speed,
            "step_error_median": float(np.median([p["predictor_error"] for p in policies.values()])),
            "slowest_unit_error": slowest_unit_error(records),
            "pairs_in_order": ordered,
            "pairs": pairs,
        },
        "checks": checks.record(),
        "data": _data(session),
        "seconds": time.perf_counter() - begin,
    }
    _write(config.out, summary, records, followed, table)
    print_comparison(console, summary)
    console.print(f"report: {config.out / 'report.html'}")
    console.print(f"planned versus actual, {names[-1]}: {config.out / 'planned.html'}")
    _raise_if_failed(checks)
    return summary


def _machine(config: CompareConfig, ranks: Ranks) -> dict[str, Any]:
    return {
        "cpu": host_kind(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "threads": config.parallel.threads,
        "processes": ranks.world,
        "dtype": config.model.dtype,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _settings(session: Session, config: CompareConfig, steps: int) -> dict[str, Any]:
    identity, decoder = session.identity, session.identity.decoder
    return {
        "model": str(config.model.path) if config.model.path else "Qwen2 family, random weights",
        "parameters": sum(p.numel() for p in session.engine.named_parameters.values()),
        "layers": decoder.layers,
        "hidden": decoder.hidden,
        "heads": decoder.heads,
        "kv_heads": decoder.kv_heads,
        "head_dim": decoder.head_dim,
        "block_size": identity.block_size,
        "granularity": identity.granularity,
        "budget": config.attention.budget,
        "token_cap": config.balance.token_cap,
        "batch_size": config.data.batch_size,
        "steps": steps,
        "steps_configured": config.steps,
        "seed": config.seed,
        "data": str(config.data.path),
        "anchor": config.balance.anchor,
        "threshold": config.balance.threshold,
        "config": config_record(config),
    }


def _data(session: Session) -> dict[str, Any]:
    samples = session.batches.samples
    return {
        "samples": len(samples),
        "tokens": sum(sample.length for sample in samples),
        "targets": sum(sample.targets for sample in samples),
        "lengths": [sample.length for sample in samples],
    }


def _write(
    out: Path,
    summary: dict[str, Any],
    records: list[dict[str, Any]],
    followed: list[dict[str, Any]],
    table: LatencyTable,
) -> None:
    """All result files appear together: written beside `out`, then renamed into place."""
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    (temporary / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    (temporary / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    save_table(table, temporary / "latency_table.json")
    write_report(temporary / "report.html", summary, records)
    title = f"Planned versus actual: {followed[0]['policy']} in the comparison"
    write_planned_page(temporary / "planned.html", title, followed)
    write_planned_trace(temporary / "planned_trace.json", followed)
    slowest = max(records, key=lambda record: record["policies"]["random"]["step_ms"])
    write_trace(temporary / "trace.json", slowest)
    out.mkdir(parents=True, exist_ok=True)
    for path in temporary.iterdir():
        os.replace(path, out / path.name)
    temporary.rmdir()


def _raise_if_failed(checks: Checks) -> None:
    if not checks.passed:
        raise CheckFailed(
            f"strict policies differ from the baseline: loss by {checks.strict_loss_rel_diff_max:.2e} (limit "
            f"{checks.loss_limit:.0e}), gradient norm by {checks.strict_grad_norm_rel_diff_max:.2e} (limit "
            f"{checks.grad_norm_limit:.0e}); the plans did not train the same batch"
        )
