"""Memory of this process: keeping freed buffers for reuse, and the peak that something needs.

Training allocates and frees the same large tensors for every micro-batch. glibc hands them back to the system
each time, and every reuse then pays page faults, the more the larger the micro-batch; `keep_freed_memory`
stops that. What is in use is therefore asked of the allocator, not of the resident set, which never shrinks.
"""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

INTERVAL_S = 0.02
_STATM = Path("/proc/self/statm")
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # from malloc.h


class _MallInfo(ctypes.Structure):
    """struct mallinfo2 of glibc 2.33 and later."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()  # noqa: SIM905
        )
    ]


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory for the next micro-batch; False where the C library is another one."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))


def memory_in_use() -> int | None:
    """Bytes that this process has allocated (glibc), or else resident bytes; None where neither is told."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is not None:
        mallinfo.restype = _MallInfo
        info = mallinfo()
        return int(info.uordblks + info.hblkhd)
    if _STATM.exists():
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return None


class PeakMemory:
    """`with PeakMemory() as peak: ...`; afterwards `peak.megabytes`, or None where the system does not tell."""

    def __init__(self) -> None:
        self.megabytes: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="memory")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        peak = 0
        while (used := memory_in_use()) is not None:
            peak = max(peak, used)
            self.megabytes = peak / 2**20
            if self._stop.wait(INTERVAL_S):
                return
