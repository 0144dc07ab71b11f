"""Progress bars with elapsed and remaining time, for everything that takes longer than a few seconds."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


def progress_bars(console: Console) -> Progress:
    """A rich progress display; use as a context manager."""
    return Progress(
        TextColumn("{task.description:32}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
        console=console,
    )


def follow(progress: Progress | None, description: str) -> Callable[[int, int], None] | None:
    """A bar fed by calls (done, total); None where there is no display (ranks other than the first)."""
    if progress is None:
        return None
    task = progress.add_task(description, total=None)
    return lambda done, total: progress.update(task, completed=done, total=total)
