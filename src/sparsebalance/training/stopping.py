"""Signals that ask a run to end: the first is a request, a second one ends the process at once.

In: SIGTERM and SIGINT, and the end of the process that launched this one. Out: `StopRequest.requested`, for a loop
that finishes what it is at.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# A batch system signals all processes of a job, and the one that launched them passes its signal on: what arrives
# within this time is one request.
SAME_REQUEST_S = 1.0


class StopRequest:
    """Context manager; while it is open, signals are noted. Outside of the main thread it notes none."""

    def __init__(self, insist_ends: bool = True) -> None:
        """Args:
        insist_ends: a second signal ends this process at once; else it is noted as `insisted`.
        """
        self._insist_ends = insist_ends
        self._first: tuple[signal.Signals, float] | None = None
        self._before: dict[signal.Signals, object] = {}
        # An orphan would go on writing where a new run may start. torchrun and `launch` set the variable.
        self._parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self.insisted = False

    @property
    def requested(self) -> bool:
        return self._first is not None or (self._parent is not None and os.getppid() != self._parent)

    @property
    def signal(self) -> signal.Signals | None:
        """The first that arrived."""
        return None if self._first is None else self._first[0]

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup and background jobs set it
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = signal.Signals(number), now
        elif now - self._first[1] > SAME_REQUEST_S:
            self.insisted = True
            if self._insist_ends:
                os._exit(128 + number)
