"""`sparsebalance train` and `sparsebalance data stats`: what surrounds the training loop."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from sparsebalance.reporting.accounting import print_account
from sparsebalance.reporting.lengths import length_statistics, print_lengths, write_lengths_page
from sparsebalance.reporting.planned.command import write_run_trace
from sparsebalance.reporting.progress import follow, progress_bars
from sparsebalance.training import checkpoint
from sparsebalance.training.config import DataConfig, RunConfig
from sparsebalance.training.launch import launch_name, restarts
from sparsebalance.training.metrics import StepRecord
from sparsebalance.training.parallel import Ranks
from sparsebalance.training.session import preflight, read_data
from sparsebalance.training.stopping import StopRequest
from sparsebalance.training.trainer import train


def check_train(config: RunConfig, resume: bool) -> None:
    """Raises:
    InputError: see `preflight`; or nothing to resume, or a run that would be overwritten.
    """
    checkpoint.start_from(config.out, resume)
    preflight(config, [config.balance.policy])


def goes_on(out: Path, ranks: Ranks) -> bool:
    """Whether torchrun has started this run again, and the run had written a checkpoint; the same on every rank.

    The checkpoint must be of the same torchrun: a run that was refused because another one is there is started again
    as well, and must not go on with that.
    """
    found = checkpoint.latest(out) if ranks.is_first and restarts() else None
    return ranks.from_first(found is not None and checkpoint.read_state(found).get("launch") == launch_name())


def train_command(config: RunConfig, ranks: Ranks, resume: bool, console: Console) -> dict[str, Any] | None:
    """Train with a progress bar; the last figures, on rank 0. SIGTERM and SIGINT end it after the step that it is at,
    with a checkpoint."""
    progress = progress_bars(console) if ranks.is_first else None
    with progress or nullcontext(), StopRequest() as request:
        on_measure = follow(progress, "measuring this machine")
        task = progress.add_task("training", total=config.steps) if progress else None

        def on_step(record: StepRecord) -> None:
            if progress is not None and task is not None:
                text = f"loss {record.loss:.3f}  {record.step_ms:.0f} ms"
                progress.update(task, completed=record.step + 1, description=text)

        def announce(note: str) -> None:
            if ranks.is_first:
                console.print(f"note: {note}")

        trained = train(
            config,
            ranks,
            resume or goes_on(config.out, ranks),
            on_step,
            announce,
            on_measure,
            stop=lambda: request.requested,
            launch=launch_name(),
        )
    records, books = trained.records, trained.books
    if not ranks.is_first:
        return None
    if not records or books is None:
        console.print(f"nothing to do: {config.out} is at step {config.steps}")
        return {"steps": 0, "out": str(config.out)}
    trace = write_run_trace(config.out)
    last = records[-1]
    result = {
        "steps": len(records),
        "stopped": trained.stopped,
        "loss": last.loss,
        "step_ms": float(np.median([record.step_ms for record in records])),
        "imbalance_rank": float(np.mean([record.imbalance_rank for record in records])),
        "planning_share": sum(r.planning_ms for r in records) / sum(r.step_ms for r in records),
        "out": str(config.out),
        "data": books.record(),
    }
    print_account(console, books.account)
    for sentence in books.remarks():
        console.print(sentence, highlight=False, markup=False)
    console.print(
        f"{len(records)} steps, loss {last.loss:.4f}, median {result['step_ms']:.0f} ms a step, "
        f"slowest rank / mean {result['imbalance_rank']:.3f}; checkpoint and metrics in {config.out}"
    )
    if trained.stopped:
        console.print(
            f"stopped as asked after step {last.step + 1} of {config.steps}, with a checkpoint; --resume goes on"
        )
    console.print(f"planned and actual: {trace} (ui.perfetto.dev), or the page: sparsebalance report {config.out}")
    return result


def data_stats(path: Path, tokenizer: Path, html: Path | None, console: Console) -> dict[str, Any]:
    """Tokenise a data set and show how long its samples are."""
    config = DataConfig(path=path, tokenizer=tokenizer, max_length=2**31 - 1)
    data, _ = read_data(config)
    samples = data.samples()
    lengths = [sample.length for sample in samples]
    statistics = length_statistics(lengths, [sample.targets for sample in samples])
    print_lengths(console, statistics, str(path))
    for note in data.report.notes():
        console.print(f"note: {note}")
    if html is not None:
        write_lengths_page(html, lengths, str(path))
        console.print(f"page: {html}")
    return statistics
