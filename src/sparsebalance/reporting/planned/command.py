"""`sparsebalance report`: the planned-versus-actual page and trace of a training run.

In: a run's directory, or step records. Out: report.html, trace.json, a table on the terminal, the figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from sparsebalance.planning.errors import InputError
from sparsebalance.reporting.accounting import run_section
from sparsebalance.reporting.planned.console import print_figures
from sparsebalance.reporting.planned.page import write_planned
from sparsebalance.reporting.planned.records import Record, Step, parse_step, read_run
from sparsebalance.reporting.planned.totals import run_figures
from sparsebalance.reporting.planned.trace import write_trace


def report(run: Path, console: Console, html: Path | None = None) -> Record:
    """Read RUN/metrics.jsonl and, where there is one, RUN/data.json; write the page (RUN/report.html, or `html`) and
    RUN/trace.json; print a table.

    Returns:
        The figures, JSON-compatible: see `sparsebalance.reporting.planned.totals.run_figures`; and under "files" the
        paths that were written.

    Raises:
        InputError: no such run, a comparison instead of a run, a broken line or data.json, or no step with planned
            times.
    """
    steps, notes = read_run(run)
    samples = run_section(run)
    page, trace = html or run / "report.html", run / "trace.json"
    found = run_figures(steps, notes)
    write_planned(page, f"SparseBalance: planned and actual, {run.resolve().name}", steps, found, samples)
    write_trace(trace, steps)
    print_figures(console, found)
    console.print(f"report: {page}", highlight=False, soft_wrap=True)
    console.print(f"trace: {trace}", highlight=False, soft_wrap=True)
    return {**found, "files": {"report": str(page), "trace": str(trace)}}


def write_planned_page(path: Path, title: str, steps: Sequence[Record], notes: Sequence[str] = ()) -> Record:
    """The page alone, from step records as in metrics.jsonl; returns its figures.

    Args:
        notes: sentences that the page shows under its headline.

    Raises:
        InputError: no record, or one that is not a step record.
    """
    parsed = _parsed(steps)
    found = run_figures(parsed, notes)
    write_planned(path, title, parsed, found)
    return found


def write_planned_trace(path: Path, steps: Sequence[Record]) -> None:
    """The Chrome trace alone, from step records as in metrics.jsonl.

    Raises:
        InputError: no record, or one that is not a step record.
    """
    write_trace(path, _parsed(steps))


def write_run_trace(run: Path) -> Path:
    """RUN/trace.json from RUN/metrics.jsonl; every training run ends with it.

    Raises:
        InputError: see `report`.
    """
    steps, _ = read_run(run)
    write_trace(run / "trace.json", steps)
    return run / "trace.json"


def _parsed(records: Sequence[Record]) -> list[Step]:
    if not records:
        raise InputError("there are no step records to report; run at least one step")
    return [parse_step(record, f"record {index}") for index, record in enumerate(records)]
