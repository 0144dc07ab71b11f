"""Starts the processes of a command on this machine, unless torchrun already did, and watches over them.

In: the command's own arguments and the number of processes. Out: its exit status. When one process fails, is killed or
gets stuck, all others are ended, and one sentence names the rank at fault and where it was. SIGTERM and SIGINT are
passed on to all of them; a second signal ends them at once.

torch's elastic agent, which torchrun uses, ends the rest of a failed group with the signal that also asks for a
checkpoint and waits 30 seconds for it, and calls the first error that it sees the cause, which may be that of a rank
that had waited for the one at fault.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from sparsebalance.planning.errors import CheckFailed, InputError
from sparsebalance.training import position
from sparsebalance.training.faults import LostRank, described, is_lost
from sparsebalance.training.stopping import StopRequest

WORKER_MODULE = "sparsebalance"
POLL_S = 0.05
SETTLE_S = 5.0  # that others have to end by themselves after a first one failed; what they say tells of the cause


def is_worker() -> bool:
    """Whether torchrun, or `launch`, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def restarts() -> int:
    """How often torchrun has started this run again after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def launch_name() -> str | None:
    """The same for all processes, first and restarted ones, that one torchrun starts; None without any."""
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    # "none" is what torchrun says where it was given no name.
    return f"{socket.gethostname()}:{os.getppid()}" if run == "none" else run


def record_failure(error: Exception) -> None:
    """Leave the error where the launching process finds it; print the traceback of an unexpected one."""
    text = str(error)
    if is_lost(error) and not isinstance(error, LostRank):
        text = described(error)
    expected = isinstance(error, (InputError, CheckFailed)) or is_lost(error)
    folder = os.environ.get(position.FOLDER)
    if folder is not None:
        said = text if expected else f"{type(error).__name__}: {text}"
        record = {"time": time.time(), "text": said, "lost": is_lost(error)}
        _record_file(Path(folder), int(os.environ["RANK"])).write_text(json.dumps(record))
    else:
        get_error_handler().record_exception(error)
        if expected:
            print(f"error: rank {os.environ['RANK']}: {text}", file=sys.stderr)
    if not expected:
        traceback.print_exception(error)


def launch(arguments: Sequence[str], processes: int) -> int:
    """Run `python -m sparsebalance ARGUMENTS` in `processes` processes; returns the exit status."""
    with tempfile.TemporaryDirectory(prefix="sparsebalance-") as folder, StopRequest(insist_ends=False) as stop:
        # Where they find each other; here, so that no rank has to guess a free port.
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        workers: list[_Worker] = []
        try:
            for rank in range(processes):
                workers.append(_started(arguments, rank, processes, Path(folder), store.port))
            _watch(workers, stop)
        finally:
            for worker in workers:
                worker.end()
        return _outcome(workers, stop)


@dataclass
class _Worker:
    """One process.

    Attributes:
        status: as of subprocess; None while it runs.
        ended: by time.time().
        by_us: whether it was still running when all were ended.
    """

    rank: int
    process: subprocess.Popen[bytes]
    folder: Path
    status: int | None = None
    ended: float = 0.0
    by_us: bool = False

    def poll(self) -> int | None:
        if self.status is None:
            self.status, self.ended = self.process.poll(), time.time()
        return self.status

    def end(self) -> None:
        """At once, with the processes that it started."""
        if self.poll() is None:
            self.by_us = True
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.poll()

    @property
    def record(self) -> dict[str, Any]:
        """What it left with `record_failure`; empty where it could not."""
        file = _record_file(self.folder, self.rank)
        record: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
        return record


def _started(arguments: Sequence[str], rank: int, processes: int, folder: Path, port: int) -> _Worker:
    position.prepare(folder, rank)
    environment = {
        "OMP_NUM_THREADS": "1",  # each worker then sets parallel.threads itself
        **os.environ,
        position.FOLDER: str(folder),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        # As torchrun does: the store is the launching process's, not rank 0's.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": f"sparsebalance-{os.getpid()}",
    }
    command = [sys.executable, "-m", WORKER_MODULE, *arguments]
    # A session of its own: the terminal's Ctrl-C comes here alone.
    return _Worker(rank, subprocess.Popen(command, env=environment, start_new_session=True), folder)


def _watch(workers: Sequence[_Worker], stop: StopRequest) -> None:
    """Until all have ended, a second signal came, or one failed and the others had time to end by themselves."""
    deadline, told = float("inf"), False
    while running := [worker for worker in workers if worker.poll() is None]:
        if stop.insisted or time.monotonic() > deadline:
            return
        if stop.requested and not told:
            told = True
            for worker in running:
                worker.process.send_signal(signal.SIGTERM)
        if deadline == float("inf") and any(worker.status for worker in workers):
            deadline = time.monotonic() + SETTLE_S
        time.sleep(POLL_S)


def _outcome(workers: Sequence[_Worker], stop: StopRequest) -> int:
    """Exit status of the command; a failure is printed in one sentence."""
    failed = [worker for worker in workers if worker.status]
    if not failed:
        return 0
    if stop.signal is not None and (stop.insisted or not any(worker.record for worker in failed)):
        print(f"stopped by {stop.signal.name}; all ranks were stopped", file=sys.stderr)
        return 128 + int(stop.signal)
    worker, reason = _cause(workers)
    where = position.read(worker.folder, worker.rank).text
    step = where.split(",")[0]
    reason = reason.removeprefix(f"RuntimeError: {step}: ").removeprefix(f"{step}: ")
    place = f" in {where}" if where else ""
    print(f"error: rank {worker.rank} failed{place}: {reason}; all ranks were stopped", file=sys.stderr)
    return 2 if worker.status == 2 else 1


def _cause(workers: Sequence[_Worker]) -> tuple[_Worker, str]:
    """Who is at fault, and what is known of it.

    A rank that waited in vain only tells of another one. Where no other one failed by itself, it is the one that was
    still running, and of several the one that made no progress for longest.
    """
    waiting = [worker for worker in workers if worker.record.get("lost")]
    testimony = ""
    if waiting:
        first = min(waiting, key=lambda worker: worker.record["time"])
        testimony = f"rank {first.rank}: {first.record['text']}"
    own = [worker for worker in workers if worker.status and not worker.by_us and worker not in waiting]
    if own:
        killed = [worker for worker in own if worker.status == -signal.SIGKILL]  # never what another one's fault does
        worker = min(killed or own, key=lambda worker: worker.record.get("time", worker.ended))
        if worker.record:
            return worker, worker.record["text"]
        status = worker.status or 0
        said = f"it was ended by signal {-status}" if status < 0 else f"exit status {status}"
        return worker, f"{said} ({testimony})" if testimony else said
    stuck = [worker for worker in workers if worker.by_us]
    if stuck:
        worker = min(stuck, key=lambda worker: position.read(worker.folder, worker.rank).since)
        return worker, f"it is stuck ({testimony})"
    return first, first.record["text"]


def _record_file(folder: Path, rank: int) -> Path:
    return folder / f"failure-{rank}.json"
