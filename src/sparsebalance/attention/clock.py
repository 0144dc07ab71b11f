"""Where a micro-batch's time goes: milliseconds by term, collected while its layers run.

The router, the attention and the head report here; what they leave of the whole is the linear part.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class TermClock:
    """Adds up wall time per term; forward and backward are told apart by who reads it when."""

    def __init__(self) -> None:
        self._ms: dict[str, float] = {}

    @contextmanager
    def measure(self, term: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._ms[term] = self._ms.get(term, 0.0) + (time.perf_counter() - begin) * 1e3

    def take(self) -> dict[str, float]:
        """What was collected since the last call."""
        taken, self._ms = self._ms, {}
        return taken
