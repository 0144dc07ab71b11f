"""`sparsebalance train --dry-run`: the largest micro-batches of the planned steps, for real, before the run.

In: a run's config. Out: a table of predicted and measured memory. Nothing is trained and nothing is written.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from sparsebalance.planning.baselines import BASELINES
from sparsebalance.planning.expected import ExpectedBudgets
from sparsebalance.planning.hardware import named_device
from sparsebalance.planning.latency import RooflineModel
from sparsebalance.planning.memory import StageLayers
from sparsebalance.planning.plan import Latency, MicroBatch
from sparsebalance.profiling.memory import PeakMemory, memory_in_use
from sparsebalance.reporting.progress import progress_bars
from sparsebalance.training.config import RunConfig
from sparsebalance.training.memory import available_mb, describe, largest_units, memory_model, unit_memory
from sparsebalance.training.parallel import Ranks
from sparsebalance.training.session import Session, open_session, preflight
from sparsebalance.training.trainer import make_optimizer

UNITS = 3  # the largest ones, on every rank at once
LARGEST = {"sab": "kk_tokens_packed", "sab_dst": "kk_tokens_packed", "dst": "random"}  # packs as large as ours can be
PLANNED = 200  # steps that are looked through for them


def check_dry_run(config: RunConfig) -> None:
    """Raises:
    InputError: see `preflight`.
    """
    preflight(config, [config.balance.policy])


def dry_run(config: RunConfig, ranks: Ranks, console: Console) -> dict[str, Any] | None:
    """Every rank runs the largest micro-batches forward and backward; the figures, on rank 0."""
    before = memory_in_use() or 0
    session = open_session(config, ranks)
    optimizer = make_optimizer(session.engine.model, config.optimizer)
    _make_optimizer_state(optimizer)
    static_mb = (((memory_in_use() or 0) - before) / 1e6) if memory_in_use() is not None else None
    units, steps = _planned_units(session)
    progress = progress_bars(console) if ranks.is_first else None
    rows = []
    with progress or nullcontext():
        task = progress.add_task("largest micro-batches", total=len(units)) if progress else None
        for unit in units:
            rows.append(_run(session, unit))
            if progress is not None and task is not None:
                progress.advance(task)
    if not ranks.is_first:
        return None
    model, stage = memory_model(config, session.identity), StageLayers(session.identity.decoder.layers)
    limit = available_mb(config)
    result = {
        "steps_planned": steps,
        "available_mb": limit,
        "static_predicted_mb": sum(model.static(stage)),
        "static_measured_mb": static_mb,
        "units": rows,
    }
    _print(console, result)
    worst = unit_memory(config, session.identity, units[0].tokens, units[0].targets)
    console.print(f"largest micro-batch, predicted: {describe(worst)}")
    return result


def _make_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """An update that changes nothing: it allocates what every later one keeps."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates):
        group["lr"] = rate


def _planned_units(session: Session) -> tuple[list[MicroBatch], int]:
    """The largest micro-batches that the run's policy can make of the first steps, at the largest budget.

    How far `sab` packs depends on measured times; here it packs as far as the cap allows.
    """
    config, layers = session.config, session.identity.decoder.layers
    rule, cap, steps = (
        BASELINES[LARGEST.get(config.balance.policy, config.balance.policy)],
        config.balance.token_cap,
        min(config.steps, PLANNED),
    )
    budgets = (memory_model(config, session.identity).budget,) * layers
    # The peers' rules place by tokens, not by time: they need no latency model.
    model = RooflineModel(session.identity.decoder, named_device("h100"), session.identity.block_size)
    weighed = ExpectedBudgets(budgets)
    placed = [rule(session.batches.at(step), model, session.topology, weighed, cap) for step in range(steps)]
    units = [unit for placement in placed for rank in placement for unit in rank]
    made = [MicroBatch(unit, budgets, Latency(0.0, 0.0)) for unit in units]
    return largest_units(config, session.identity, made, UNITS), steps


def _run(session: Session, unit: MicroBatch) -> dict[str, Any]:
    begin = memory_in_use() or 0
    with PeakMemory() as peak:
        times = session.engine.run([unit], session.data.examples, max(unit.targets, 1)).units[0]
    session.gradients.zero()
    used = None if peak.megabytes is None else peak.megabytes * 2**20 / 1e6 - begin / 1e6
    measured = [mb for mb in session.ranks.gather(used) if mb is not None]
    parts = unit_memory(session.config, session.identity, unit.tokens, unit.targets)
    return {
        "samples": [segment.sample for segment in unit.segments],
        "tokens": unit.tokens,
        "targets": unit.targets,
        "ms": times.total_ms,
        "predicted_mb": parts.activations + parts.head,
        "measured_mb": max(measured, default=None),
    }


def _print(console: Console, result: dict[str, Any]) -> None:
    shown = Table(title=f"largest micro-batches of {result['steps_planned']} planned steps, run on every rank")
    for name in ("samples", "tokens", "targets", "ms", "predicted MB", "measured MB"):
        shown.add_column(name, justify="left" if name == "samples" else "right")
    for row in result["units"]:
        samples = ", ".join(map(str, row["samples"][:4])) + (", ..." if len(row["samples"]) > 4 else "")
        measured = "-" if row["measured_mb"] is None else f"{row['measured_mb']:,.0f}"
        shown.add_row(
            samples,
            f"{row['tokens']:,}",
            f"{row['targets']:,}",
            f"{row['ms']:,.0f}",
            f"{row['predicted_mb']:,.0f}",
            measured,
        )
    console.print(shown)
    static = "-" if result["static_measured_mb"] is None else f"{result['static_measured_mb']:,.0f}"
    limit = "unknown" if result["available_mb"] is None else f"{result['available_mb']:,.0f}"
    console.print(
        f"weights, gradients and optimiser: {result['static_predicted_mb']:,.0f} MB predicted, {static} MB measured "
        f"(data included); {limit} MB are there for each rank"
    )
