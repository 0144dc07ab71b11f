"""Writes checkpoints in a thread while training goes on: the loop waits for a copy in memory, not for the disk.

In: steps done and the trainer's state, on all ranks at once. Out: checkpoint directories, renamed into place when
every part is on disk. What fails is raised by the next save, or by `finish`; the checkpoints before stay as they were.
The copy takes as much memory as weights and optimiser state.
"""

from __future__ import annotations

import datetime
import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sparsebalance.training import checkpoint
from sparsebalance.training.checkpoint import PREFIX, Part
from sparsebalance.training.engine import Engine
from sparsebalance.training.parallel import Ranks, rng_state

LONGEST = datetime.timedelta(hours=2)  # that writers wait for the slowest of them


class CheckpointWriter:
    """Of one run, on every rank; those that do not write take part in what is collective."""

    def __init__(
        self, folder: Path, ranks: Ranks, engine: Engine, optimizer: torch.optim.Optimizer, keep_last: int
    ) -> None:
        """Collective.

        Args:
            keep_last: complete checkpoints to keep.
        """
        self._folder, self._ranks, self._engine, self._optimizer = folder, ranks, engine, optimizer
        self._keep_last = keep_last
        writers = checkpoint.writers(ranks)
        # Of their own: what the threads say to each other must not get between the messages of training.
        self._group = dist.new_group(list(writers), timeout=LONGEST, backend="gloo") if len(writers) > 1 else None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        if ranks.is_first:
            for stale in folder.glob(f".{PREFIX}*"):  # of a run that was killed
                shutil.rmtree(stale)

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Begin to write checkpoint-STEP (steps done so far); returns when a copy is taken. Collective.

        Args:
            state: JSON-compatible trainer state.

        Raises:
            RuntimeError: the checkpoint before could not be written.
        """
        self.wait()
        process, rng = zip(*self._ranks.gather((os.getpid(), rng_state())), strict=True)
        part = checkpoint.take_part(self._ranks, self._engine, self._optimizer)
        if part is not None:
            temporary = self._folder / f".{PREFIX}{step}.{process[0]}"
            self._pending = self._thread.submit(self._write, temporary, step, part, {"step": step, **state}, list(rng))

    def wait(self) -> None:
        """Until everything begun is on disk.

        Raises:
            RuntimeError: it could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def check(self) -> None:
        """The same, without waiting."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def finish(self) -> None:
        """Wait on every rank until the last checkpoint is there. Collective.

        Raises:
            RuntimeError: it could not be written.
        """
        self.wait()
        self._ranks.barrier()

    def close(self) -> None:
        """Let what was begun end, well or not."""
        self._thread.shutdown()
        if self._group is not None and self._ranks.rank in checkpoint.writers(self._ranks):
            dist.destroy_process_group(self._group)

    def _write(
        self, temporary: Path, step: int, part: Part, state: dict[str, Any], rng: list[dict[str, object]]
    ) -> None:
        target = self._folder / f"{PREFIX}{step}"
        try:
            error: Exception | None = None
            try:
                temporary.mkdir(parents=True, exist_ok=True)
                checkpoint.write_part(temporary, part, self._ranks.stage_worker, self._ranks.topology.pp)
            except Exception as own:  # the others must know before it is raised
                error = own
            self._agree(error)
            if self._ranks.is_first:
                checkpoint.write_rest(temporary, self._engine, state, rng)
                shutil.rmtree(target, ignore_errors=True)
                os.replace(temporary, target)
                checkpoint.flush(self._folder)
                for old in checkpoint.complete(self._folder)[: -self._keep_last]:
                    shutil.rmtree(old)
        except Exception as failed:
            if self._ranks.is_first:
                shutil.rmtree(temporary, ignore_errors=True)
            raise RuntimeError(f"{target} could not be written: {type(failed).__name__}: {failed}") from failed

    def _agree(self, error: Exception | None) -> None:
        """All writers have written their parts, or all raise."""
        failed: list[str | None] = [None]
        if self._group is not None:
            failed = [None] * self._group.size()
            said = None if error is None else f"rank {self._ranks.rank}: {type(error).__name__}: {error}"
            dist.all_gather_object(failed, said, group=self._group)
        if error is not None:
            raise error
        for one in failed:
            if one is not None:
                raise OSError(one)
