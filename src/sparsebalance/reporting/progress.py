"""Progress bars with elapsed and remaining time, for everything that takes longer than a few seconds."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
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
    """A bar fed by calls (done, total), shown from the first on; None where there is no display."""
    if progress is None:
        return None
    tasks: list[TaskID] = []

    def update(done: int, total: int) -> None:
        if not tasks:
            tasks.append(progress.add_task(description, total=total))
        progress.update(tasks[0], completed=done)

    return update
