"""`sparsebalance train --dry-run`: what needs most memory in the planned steps, for real, before the run.

In: a run's config. Out: a table of predicted and measured memory, of the largest micro-batches and of the samples whose
chunks together need most. Nothing is trained and nothing is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from sparsebalance.planning.budgets import Fixed
from sparsebalance.planning.hardware import named_device
from sparsebalance.planning.latency import RooflineModel
from sparsebalance.planning.memory import StageLayers
from sparsebalance.planning.plan import MicroBatch, chain_lengths
from sparsebalance.planning.policy import Policy, cuts, plan_step
from sparsebalance.profiling.memory import PeakMemory, memory_in_use
from sparsebalance.reporting.progress import progress_bars
from sparsebalance.training.config import RunConfig
from sparsebalance.training.memory import chain_memory, describe, largest_chains, memory_model, static_memory
from sparsebalance.training.parallel import Ranks
from sparsebalance.training.session import (
    Session,
    configured_policy,
    open_session,
    possible_unit_sizes,
    preflight,
)
from sparsebalance.training.trainer import make_optimizer

LARGEST = 3  # that are run, on every rank at once
PLANNED = 200  # steps that are looked through for them
UNIT_MS = 1e6  # fixed cost of a micro-batch: so high that the fewest are fastest, each packed as far as the cap allows

Chain = Sequence[MicroBatch]  # one micro-batch, or all chunks of one sample


def check_dry_run(config: RunConfig) -> None:
    """Raises:
    InputError: see `preflight`.
    """
    preflight(config, [config.balance.policy])


def dry_run(config: RunConfig, ranks: Ranks, console: Console) -> dict[str, Any] | None:
    """Every rank runs what needs most memory forward and backward; the figures, on rank 0."""
    before = memory_in_use() or 0
    session = open_session(config, ranks)
    session = session.staged(_uniform_model(session))
    optimizer = make_optimizer(session.engine.named_parameters, config.optimizer)
    _make_optimizer_state(session, optimizer)
    static_mb = (((memory_in_use() or 0) - before) / 1e6) if memory_in_use() is not None else None
    policy = _policy(session)
    steps = min(config.steps, PLANNED)
    chains = _largest_chains(session, policy, steps)
    progress = progress_bars(console) if ranks.is_first else None
    rows = []
    with progress or nullcontext():
        task = progress.add_task("largest micro-batches", total=len(chains)) if progress else None
        for chain in chains:
            rows.append(_run(session, chain))
            if progress is not None and task is not None:
                progress.advance(task)
    if not ranks.is_first:
        return None
    stages = session.engine.stages
    stage = StageLayers(len(session.engine.layers), stages[0].is_first, stages[-1].is_last)
    limit = session.memory_mb
    result = {
        "steps_planned": steps,
        "unit_size": policy.unit_size,
        "available_mb": limit,
        "static_predicted_mb": sum(static_memory(config, session.identity, stage)),
        "static_measured_mb": static_mb,
        "units": rows,
    }
    if config.balance.unit_size == "auto" and cuts(policy.name):
        size = "whole samples" if policy.unit_size is None else f"{policy.unit_size:,} tokens"
        console.print(f"unit size: {size}, the largest that fits; the run takes the fastest of it and smaller ones")
    _print(console, result)
    worst = chain_memory(config, session.identity, chains[0])
    console.print(f"the largest, predicted: {worst.total:,.0f} MB ({describe(worst)})")
    if limit is not None and worst.total > limit:
        console.print("that is more than is there: lower balance.unit_size or balance.token_cap")
    return result


def _make_optimizer_state(session: Session, optimizer: torch.optim.Optimizer) -> None:
    """An update that changes nothing: it allocates what every later one keeps."""
    session.gradients.begin()
    session.gradients.reduce()
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates):
        group["lr"] = rate


def _policy(session: Session) -> Policy:
    """The run's policy, with a budget that tuning will not exceed, and with the largest unit size that it may choose:
    which one is fastest is not known before times are measured."""
    config, identity = session.config, session.identity
    name = config.balance.policy
    sizes = possible_unit_sizes(config, identity, session.batches.samples, name, session.memory_mb)
    policy = configured_policy(config, name, sizes[-1])
    return replace(policy, budget=memory_model(config, identity).budget, tuning=Fixed())


def _uniform_model(session: Session) -> RooflineModel:
    """Analytic times under which a plan has the fewest micro-batches."""
    identity = session.identity
    device = replace(named_device("h100"), unit_ms=UNIT_MS)
    return RooflineModel(identity.decoder, device, identity.block_size, identity.granularity)


def _largest_chains(session: Session, policy: Policy, steps: int) -> list[Chain]:
    """What needs most memory of all that the policy makes of the first steps."""
    identity, model = session.identity, _uniform_model(session)
    plans = [plan_step(session.batches.at(step), model, session.topology, policy) for step in range(steps)]
    chains = [chain for plan in plans for units in plan.ranks for chain in _chains(units)]
    return largest_chains(session.config, identity, chains, LARGEST)


def _chains(units: Chain) -> list[Chain]:
    ends = list(accumulate(chain_lengths([unit.segments for unit in units]), initial=0))
    return [units[a:b] for a, b in pairwise(ends)]


def _run(session: Session, chain: Chain) -> dict[str, Any]:
    begin = memory_in_use() or 0
    targets = sum(unit.targets for unit in chain)
    with PeakMemory() as peak:
        times = session.engine.run(chain, session.data.examples, targets).units
    session.gradients.begin()
    used = None if peak.megabytes is None else peak.megabytes * 2**20 / 1e6 - begin / 1e6
    measured = [mb for mb in session.ranks.gather(used) if mb is not None]
    parts = chain_memory(session.config, session.identity, chain)
    return {
        "samples": [segment.sample for segment in chain[0].segments],
        "chunks": len(chain),
        "tokens": sum(unit.tokens for unit in chain),
        "targets": targets,
        "ms": sum(time.total_ms for time in times),
        "predicted_mb": parts.activations + parts.state + parts.head,
        "measured_mb": max(measured, default=None),
    }


def _print(console: Console, result: dict[str, Any]) -> None:
    shown = Table(title=f"what needs most memory in {result['steps_planned']} planned steps, run on every rank")
    for name in ("samples", "chunks", "tokens", "targets", "ms", "predicted MB", "measured MB"):
        shown.add_column(name, justify="left" if name == "samples" else "right")
    for row in result["units"]:
        samples = ", ".join(map(str, row["samples"][:4])) + (", ..." if len(row["samples"]) > 4 else "")
        measured = "-" if row["measured_mb"] is None else f"{row['measured_mb']:,.0f}"
        shown.add_row(
            samples,
            f"{row['chunks']:,}",
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
