"""Checkpoints written while training goes on: nothing waits for the disk, and what fails is told."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sparsebalance.training import checkpoint
from sparsebalance.training.checkpoint_writer import CheckpointWriter
from sparsebalance.training.command import goes_on
from sparsebalance.training.config import OptimizerConfig
from sparsebalance.training.parallel import Ranks
from sparsebalance.training.trainer import make_optimizer
from tests.models import engine, tiny_model

LIMIT_S = 30


class Disk:
    """Holds writing up until it is released; then fails with `error` where there is one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.reached, self.error = threading.Event(), threading.Event(), ""
        write = checkpoint.write_part

        def held(*arguments: object) -> None:
            self.reached.set()
            assert self.free.wait(LIMIT_S)
            if self.error:
                raise OSError(self.error)
            write(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(checkpoint, "write_part", held)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk(monkeypatch)
    yield disk
    disk.free.set()


def writer_of(folder: Path, keep_last: int = 2) -> tuple[CheckpointWriter, torch.nn.Module]:
    model = tiny_model("float32")
    optimizer = make_optimizer(dict(model.named_parameters()), OptimizerConfig())
    return CheckpointWriter(folder, Ranks(0, 1), engine(model), optimizer, keep_last), model


def test_what_is_written_is_of_the_moment_of_the_save(tmp_path: Path, disk: Disk) -> None:
    """Training changes the weights while the disk is slow."""
    writer, model = writer_of(tmp_path)
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    writer.save(3, {"note": 1})
    assert disk.reached.wait(LIMIT_S)
    assert checkpoint.latest(tmp_path) is None
    writer.check()  # nothing to tell yet
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    disk.free.set()
    writer.finish()
    writer.close()
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert checkpoint.read_state(found) == {"step": 3, "note": 1}
    other = tiny_model("float32")
    checkpoint.load(
        found, Ranks(0, 1), engine(other), make_optimizer(dict(other.named_parameters()), OptimizerConfig())
    )
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, expected[name])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3"]


def test_a_save_waits_for_the_one_before(tmp_path: Path, disk: Disk) -> None:
    writer, _ = writer_of(tmp_path)
    writer.save(1, {})
    second = threading.Thread(target=writer.save, args=(2, {}))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    disk.free.set()
    second.join(LIMIT_S)
    writer.finish()
    writer.close()
    assert [path.name for path in checkpoint.complete(tmp_path)] == ["checkpoint-1", "checkpoint-2"]


@pytest.mark.parametrize("by", ["check", "save", "finish"])
def test_a_write_that_failed_is_told_next_time(by: str, tmp_path: Path, disk: Disk) -> None:
    writer, _ = writer_of(tmp_path)
    disk.error = "no space left on device"
    writer.save(1, {})
    disk.free.set()

    def check() -> None:
        while True:
            writer.check()

    ask = {"check": check, "save": lambda: writer.save(2, {}), "finish": writer.finish}[by]
    with pytest.raises(RuntimeError, match=r"checkpoint-1 could not be written: OSError: no space left on device"):
        ask()
    writer.close()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_is_removed_and_the_checkpoints_before_stay(tmp_path: Path) -> None:
    writer, _ = writer_of(tmp_path, keep_last=1)
    writer.save(4, {})
    writer.finish()
    writer.close()
    half = tmp_path / ".checkpoint-6.77"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    assert checkpoint.latest(tmp_path) == tmp_path / "checkpoint-4"
    again, _ = writer_of(tmp_path)
    again.close()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]


def test_a_process_of_a_later_replica_or_of_the_same_stage_writes_nothing() -> None:
    from sparsebalance.planning.plan import Topology

    topology = Topology(dp=2, pp=2, sp=2)
    assert list(checkpoint.writers(Ranks(0, 8, topology))) == [0, 2]
    model = tiny_model("float32")
    optimizer = make_optimizer(dict(model.named_parameters()), OptimizerConfig())
    for rank in (1, 3, 4, 6):
        assert checkpoint.take_part(Ranks(rank, 8, topology), engine(model), optimizer) is None


def test_a_restarted_run_goes_on_from_its_own_checkpoint_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was refused because another one is there is started again too."""
    ranks = Ranks(0, 1)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not goes_on(tmp_path, ranks)  # killed before it wrote any: it begins anew
    for step, name in ((1, "mine"), (2, "another")):
        writer, _ = writer_of(tmp_path)
        writer.save(step, {"launch": name})
        writer.finish()
        writer.close()
        assert goes_on(tmp_path, ranks) == (name == "mine")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    assert goes_on(tmp_path, ranks)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert not goes_on(tmp_path, ranks)
