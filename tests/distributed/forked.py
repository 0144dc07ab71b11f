"""Real processes, forked from one that has imported everything: importing takes longer than most of what tests do.

`run` starts the workers of a module, as torchrun would; `command_line` starts `sparsebalance`, whose own launcher then
forks its ranks. That both work with newly started interpreters is tested where a test says so.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.conftest import ROOT

LIMIT_S = 200  # a hang, not a slow machine
IMPORTED = ("checkpoint", "gradient", "pipeline", "report", "sequence", "tensor", "training")

multiprocessing.set_forkserver_preload([f"tests.distributed.{name}_worker" for name in IMPORTED])


def run(module: str, processes: int, *arguments: str, **environment: str) -> str:
    """Run `main` of `tests.distributed.MODULE`, with the environment that torchrun gives; none of the processes
    outlives this call.

    Returns:
        What the first one wrote to standard output.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    place = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    common = {**os.environ, **environment, **{name: str(value) for name, value in place.items()}}
    with TemporaryDirectory() as folder:
        files = [(f"{folder}/out-{rank}", f"{folder}/err-{rank}") for rank in range(processes)]
        started = [
            _started(_work, (module, arguments), {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, files[rank])
            for rank in range(processes)
        ]
        end = time.monotonic() + LIMIT_S
        try:
            while any(one.exitcode is None for one in started) and not any(one.exitcode for one in started):
                assert time.monotonic() < end, f"{module} took more than {LIMIT_S} s\n{_said(err for _, err in files)}"
                time.sleep(0.05)
        finally:
            for one in started:
                one.kill()
                one.join()
        assert all(one.exitcode == 0 for one in started), _said(err for _, err in files)
        return Path(files[0][0]).read_text()


def command_line(
    arguments: Sequence[str], worker: str = "sparsebalance", **environment: str
) -> subprocess.CompletedProcess[str]:
    """`sparsebalance ARGUMENTS`, whose ranks run the module `worker`."""
    with TemporaryDirectory() as folder:
        out, err = f"{folder}/out", f"{folder}/err"
        process = _started(_command_line, (arguments, worker), {**os.environ, **environment}, (out, err))
        process.join(LIMIT_S)
        try:
            if process.exitcode is None:
                pytest.fail(f"sparsebalance {' '.join(arguments)} took more than {LIMIT_S} s\n{_said([err])}")
        finally:
            process.kill()  # its ranks then end by themselves
            process.join()
        assert process.exitcode is not None
        texts = [Path(file).read_text() for file in (out, err)]
        return subprocess.CompletedProcess(arguments, process.exitcode, *texts)


def _said(files: Any) -> str:
    return "\n".join(Path(file).read_text() for file in files if Path(file).exists())


def _started(
    target: Callable[..., None], given: tuple[Any, ...], environment: Mapping[str, str], output: tuple[str, str]
) -> ForkServerProcess:
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_become, args=(target, given, dict(environment), output))
    process.start()
    return process


def _become(
    target: Callable[..., None], given: tuple[Any, ...], environment: Mapping[str, str], output: tuple[str, str] | None
) -> None:
    """Run a target in this forked process with an environment of its own, and output unless None; end as it says."""
    for descriptor, path in enumerate(output or (), start=1):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND, 0o644), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT)]
    status = 1
    try:
        target(*given)
        status = 0
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _work(module: str, arguments: Sequence[str]) -> None:
    sys.argv[1:] = arguments
    importlib.import_module(f"tests.distributed.{module}").main()


def _command_line(arguments: Sequence[str], worker: str) -> None:
    from sparsebalance import cli
    from sparsebalance.training import launch

    launch.WORKER_MODULE = worker
    launch.subprocess = ForkedSubprocess  # type: ignore[attr-defined]
    sys.exit(cli.main(list(arguments)))


class ForkedSubprocess:
    """Stands in for the module in the launcher."""

    class Popen:
        """What the launcher uses of it, for `python -m MODULE ARGUMENTS`."""

        def __init__(self, command: Sequence[str], env: Mapping[str, str], start_new_session: bool) -> None:
            assert start_new_session
            sys.stdout.flush()
            sys.stderr.flush()
            self._status: int | None = None
            self.pid = os.fork()
            if not self.pid:
                os.setsid()
                signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the launcher's
                signal.signal(signal.SIGINT, signal.default_int_handler)
                _become(_run_module, (command[2:],), env, None)

        def poll(self) -> int | None:
            if self._status is None:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
                if ended:
                    self._status = os.waitstatus_to_exitcode(status)
            return self._status

        def wait(self) -> int:
            while self.poll() is None:
                time.sleep(0.01)
            assert self._status is not None
            return self._status

        def send_signal(self, number: int) -> None:
            os.kill(self.pid, number)


def _run_module(command: Sequence[str]) -> None:
    module, *arguments = command
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__")
