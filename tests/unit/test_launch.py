"""Launched processes that fail, get stuck or are asked to stop; signals; where processes are."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from sparsebalance.training import launch, position, stopping
from sparsebalance.training.faults import LostRank, at_step, is_lost
from sparsebalance.training.stopping import StopRequest
from tests.conftest import ROOT

LIMIT_S = 60.0


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], int]:
    """Launches one process for each fate; see launched_worker.py."""
    monkeypatch.setattr(launch, "WORKER_MODULE", "tests.unit.launched_worker")
    monkeypatch.setattr(launch, "SETTLE_S", 1.5)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return lambda fates: launch.launch([fates, str(tmp_path)], len(fates.split(",")))


@pytest.mark.parametrize(
    ("fates", "status", "sentence"),
    [
        ("ok,ok", 0, ""),
        # Rank 0 notices first, but it only waited.
        (
            "wait,kill",
            1,
            "rank 1 failed in step 5, F3 of stage 1: it was ended by signal 9 (rank 0: step 5: waited 0.1 s for "
            "another rank)",
        ),
        ("wait,raise", 1, "rank 1 failed in step 5, F3 of stage 1: ValueError: no"),
        ("wait,hang", 1, "rank 1 failed in step 5, F3 of stage 1: it is stuck (rank 0: step 5: waited 0.1 s for "),
        ("ok,input", 2, "rank 1 failed in step 5, F3 of stage 1: the input is wrong"),
        ("wait,ok", 1, "rank 0 failed in step 5, F3 of stage 1: waited 0.1 s for another rank"),
    ],
)
def test_the_rank_at_fault_is_named(
    fates: str, status: int, sentence: str, launched: Callable[[str], int], capfd: pytest.CaptureFixture[str]
) -> None:
    assert launched(fates) == status
    said = capfd.readouterr().err
    if sentence:
        assert said.startswith(f"error: {sentence}")
        assert said.endswith("; all ranks were stopped\n")
    else:
        assert said == ""


def when_started(folder: Path, ranks: int, act: Callable[[], None]) -> threading.Thread:
    def wait() -> None:
        deadline = time.monotonic() + LIMIT_S
        while len(list(folder.iterdir())) < ranks and time.monotonic() < deadline:
            time.sleep(0.02)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_a_signal_is_passed_on_and_a_clean_end_is_one(
    launched: Callable[[str], int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    thread = when_started(tmp_path, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert launched("train,train") == 0
    thread.join()
    assert capfd.readouterr().err == ""


def test_a_second_signal_ends_ranks_that_do_not_listen(
    launched: Callable[[str], int], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "SAME_REQUEST_S", 0.1)

    done = threading.Event()

    def insist() -> None:  # on a busy machine two may come as one
        while not done.wait(0.3):
            os.kill(os.getpid(), signal.SIGINT)

    ignored = signal.signal(signal.SIGINT, lambda *_: None)  # what comes when all has ended
    thread = when_started(tmp_path, 2, insist)
    try:
        assert launched("deaf,train") == 128 + signal.SIGINT
    finally:
        done.set()
        thread.join()
        signal.signal(signal.SIGINT, ignored)
    assert capfd.readouterr().err == "stopped by SIGINT; all ranks were stopped\n"


def test_a_request_is_noted_once_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest(insist_ends=False) as request:
        assert not request.requested
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # the same request, from a batch system and the launching process
        assert request.requested
        assert request.signal == signal.SIGTERM
        assert not request.insisted
    assert signal.getsignal(signal.SIGTERM) is before


def test_signals_that_are_ignored_stay_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopRequest() as request:
            signal.raise_signal(signal.SIGINT)
            assert not request.requested
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_process_whose_launching_process_is_gone_is_asked_to_stop(tmp_path: Path) -> None:
    child = (
        "import sys, time; from pathlib import Path; from sparsebalance.training.stopping import StopRequest\n"
        "request = StopRequest(); Path(sys.argv[1], 'started').touch(); end = time.monotonic() + 30\n"
        "while not request.requested and time.monotonic() < end: time.sleep(0.02)\n"
        "Path(sys.argv[1], str(request.requested)).touch()"
    )
    parent = (
        "import subprocess, sys, time; from pathlib import Path\n"
        "subprocess.Popen([sys.executable, '-c', sys.argv[2], sys.argv[1]])\n"
        "while not Path(sys.argv[1], 'started').exists(): time.sleep(0.02)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TORCHELASTIC_RUN_ID": "one"}
    subprocess.run([sys.executable, "-c", parent, str(tmp_path), child], env=environment, check=True, timeout=LIMIT_S)
    deadline = time.monotonic() + LIMIT_S
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["True", "started"]


def test_a_position_says_nothing_before_it_is_entered(tmp_path: Path) -> None:
    position.prepare(tmp_path, 3)
    assert position.read(tmp_path, 3) == position.Seen("", 0.0)
    position.Position(None).enter("step 1")  # without a launching process


def test_an_action_is_left_when_it_is_done_and_kept_when_it_fails(tmp_path: Path) -> None:
    position.prepare(tmp_path, 0)
    with (tmp_path / "position-0").open("r+b") as file:
        here = position.Position(mmap.mmap(file.fileno(), position.SIZE))
    here.enter("step 1")
    with here.at("F0 of stage 1"):
        assert position.read(tmp_path, 0).text == "step 1, F0 of stage 1"
    assert position.read(tmp_path, 0).text == "step 1"
    with pytest.raises(ValueError, match="no"), here.at("B0 of stage 1"):
        raise ValueError("no")
    assert position.read(tmp_path, 0).text == "step 1, B0 of stage 1"


def test_failed_exchanges_are_told_from_own_errors() -> None:
    gloo = RuntimeError("[/gloo/transport/tcp/pair.cc:5] Connection closed by peer")
    assert is_lost(gloo)
    assert is_lost(dist.DistNetworkError("gone"))
    assert not is_lost(RuntimeError("no memory"))
    with pytest.raises(LostRank, match=r"step 4: not all other ranks came to an exchange: one is stuck, or gone"):  # noqa: SIM117
        with at_step(4):
            raise gloo
    with pytest.raises(LostRank, match=r"^step 4: waited 2 s for rank 1$"):  # noqa: SIM117
        with at_step(4):
            raise RuntimeError("step 4: RuntimeError: waited 2 s for rank 1") from gloo
    with pytest.raises(RuntimeError, match="no memory") as caught:  # noqa: SIM117
        with at_step(4):
            raise RuntimeError("no memory")
    assert not isinstance(caught.value, LostRank)
