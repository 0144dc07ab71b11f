"""Starts the data-parallel processes of a command on this machine, unless torchrun already did.

In: the command's own arguments and the number of processes. Out: its exit status. When one process fails,
torch's elastic agent ends all others at once, and the first failure is printed in one sentence.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, get_error_handler
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from sparsebalance.planning.errors import CheckFailed, InputError

WORKER_MODULE = "sparsebalance"


def is_worker() -> bool:
    """Whether torchrun, or `launch`, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def record_failure(error: Exception) -> None:
    """Leave the error where the launching process finds it; print the traceback of an unexpected one."""
    get_error_handler().record_exception(error)
    if not isinstance(error, (InputError, CheckFailed)):
        traceback.print_exception(error)


def launch(arguments: Sequence[str], processes: int) -> int:
    """Run `python -m sparsebalance ARGUMENTS` in `processes` processes; returns the exit status."""
    # The agent logs a page about every failure; the sentence below says what a user needs.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # each worker then sets parallel.threads itself
    with tempfile.TemporaryDirectory(prefix="sparsebalance-") as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=f"sparsebalance-{os.getpid()}",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        try:
            elastic_launch(config, sys.executable)("-m", WORKER_MODULE, *arguments)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            print(f"error: rank {rank} failed: {_reason(failure)}; all ranks were stopped", file=sys.stderr)
            return 2 if failure.exitcode == 2 else 1
        except SignalException as stopped:  # the agent has ended all ranks
            print(f"stopped by {stopped.sigval.name}; all ranks were stopped", file=sys.stderr)
            return 128 + int(stopped.sigval)
    return 0


def _reason(failure: ProcessFailure) -> str:
    if failure.exitcode < 0:
        return f"it was ended by signal {-failure.exitcode}"
    # What `record_failure` left is a record; a process that died without it has a sentence of the agent's.
    recorded: Any = failure.message
    message = recorded["message"] if isinstance(recorded, dict) else recorded
    text = str(message).strip().removeprefix("InputError: ").removeprefix("CheckFailed: ")
    return text or f"exit status {failure.exitcode}"
