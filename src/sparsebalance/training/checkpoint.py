"""Checkpoints: written whole or not at all, and enough to go on exactly as if the run had not stopped.

A checkpoint directory holds the model as a plain transformers checkpoint (config.json + safetensors), the
optimiser, and the trainer's state: step, data position (a function of the step), coverage estimator, the
curves that the next plan uses, and every rank's random state.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from sparsebalance.planning.errors import InputError
from sparsebalance.training.parallel import Ranks, rng_state, set_rng_state

PREFIX = "checkpoint-"


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint under `folder`."""
    found = [path for path in folder.glob(f"{PREFIX}*") if path.name[len(PREFIX) :].isdigit()]
    return max(found, key=lambda path: int(path.name[len(PREFIX) :]), default=None)


def start_from(folder: Path, resume: bool) -> Path | None:
    """The checkpoint that a run starts from; None for a new run.

    Raises:
        InputError: nothing to resume, or a run that would be overwritten.
    """
    found = latest(folder)
    if resume and found is None:
        raise InputError(f"no checkpoint under {folder} to resume from; run without --resume")
    if found is not None and not resume:
        raise InputError(f"{folder} already holds {found.name}; use --resume, or choose another --out")
    return found


def save(
    folder: Path,
    ranks: Ranks,
    step: int,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    keep_last: int,
) -> Path:
    """Write checkpoint-STEP (steps done so far) on rank 0, then drop all but the last `keep_last`.

    Args:
        state: JSON-compatible trainer state.
    """
    target = folder / f"{PREFIX}{step}"
    rng = ranks.gather(rng_state())
    if ranks.is_first:
        temporary = folder / f".{target.name}.{os.getpid()}"
        shutil.rmtree(temporary, ignore_errors=True)
        model.save_pretrained(temporary)
        torch.save(optimizer.state_dict(), temporary / "optimizer.pt")
        torch.save(rng, temporary / "rng.pt")
        (temporary / "trainer.json").write_text(json.dumps({"step": step, **state}))
        _flush(temporary)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(temporary, target)
        complete = sorted(folder.glob(f"{PREFIX}*"), key=lambda path: int(path.name[len(PREFIX) :]))
        for old in complete[:-keep_last]:
            shutil.rmtree(old)
    ranks.barrier()
    return target


def _flush(folder: Path) -> None:
    """Force files to disk before the rename makes them the checkpoint."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def load(path: Path, ranks: Ranks, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Restore model, optimiser and random state in place; returns the trainer state.

    Raises:
        InputError: the checkpoint is of another model.
    """
    from safetensors.torch import load_model

    state: dict[str, Any] = json.loads((path / "trainer.json").read_text())
    try:
        missing, unexpected = load_model(model, path / "model.safetensors", strict=False)
    except RuntimeError as error:
        raise InputError(f"checkpoint {path} does not fit the configured model: {error}") from error
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    if unexpected or set(missing) - tied:
        raise InputError(
            f"checkpoint {path} does not fit the configured model: missing {sorted(missing)[:3]}, "
            f"unexpected {sorted(unexpected)[:3]}; resume with the same model settings"
        )
    optimizer.load_state_dict(torch.load(path / "optimizer.pt", weights_only=True))
    rng = torch.load(path / "rng.pt", weights_only=False)  # our own file: Python and numpy states
    if len(rng) == ranks.world:  # other ranks are other processes: they keep the state that they started with
        set_rng_state(rng[ranks.rank])
    return state
