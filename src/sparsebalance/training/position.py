"""Where each process is, for the one that launched it: a killed or stuck process cannot say it itself.

In: step and action, as training goes on. Out: a few bytes of shared memory for each process, backed by a file in a
folder that the launching process names in the environment; without it, nothing happens. Writing costs microseconds.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = "SPARSEBALANCE_POSITIONS"
SIZE = 256  # bytes; longer texts are cut


@dataclass(frozen=True)
class Seen:
    """What a process last wrote.

    Attributes:
        text: e.g. "step 5, F3 of stage 1"; empty where it has not said anything.
        since: by time.time().
    """

    text: str = ""
    since: float = 0.0


class Position:
    """This process's own."""

    def __init__(self, page: mmap.mmap | None) -> None:
        self._page, self._where = page, ""

    def enter(self, where: str) -> None:
        """E.g. a step."""
        self._where = where
        self._write(where)

    @contextmanager
    def at(self, what: str) -> Iterator[None]:
        """E.g. an action, inside of what was entered. An error leaves it as it is: that is where it was raised."""
        if self._page is not None:
            self._write(f"{self._where}, {what}")
        yield
        self._write(self._where)

    def _write(self, text: str) -> None:
        if self._page is not None:
            line = f"{time.time():.3f} {text}".encode()[:SIZE]
            self._page[:] = line.ljust(SIZE, b"\0")


@cache
def here() -> Position:
    """The position of this process; `prepare` was called with its folder and rank."""
    folder = os.environ.get(FOLDER)
    if folder is None:
        return Position(None)
    with _file(Path(folder), int(os.environ["RANK"])).open("r+b") as file:
        return Position(mmap.mmap(file.fileno(), SIZE))


def prepare(folder: Path, rank: int) -> None:
    """Make the file of a process that is about to start."""
    _file(folder, rank).write_bytes(bytes(SIZE))


def read(folder: Path, rank: int) -> Seen:
    """What a process last wrote, whether it still runs or not."""
    line = _file(folder, rank).read_bytes().rstrip(b"\0").decode(errors="replace")
    since, _, text = line.partition(" ")
    return Seen(text, float(since)) if text else Seen()


def _file(folder: Path, rank: int) -> Path:
    return folder / f"position-{rank}"
