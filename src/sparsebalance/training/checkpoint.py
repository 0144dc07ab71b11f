"""Checkpoints: written whole or not at all, and enough to go on exactly as if the run had not stopped.

A checkpoint directory holds the model as a plain transformers checkpoint (config.json + safetensors, one file a
pipeline worker), the optimiser by parameter names, and the trainer's state: step, data position (a function of the
step), coverage estimator, the curves that the next plan uses, and every rank's random state. Nothing in it depends on
how the model is cut, so a run may go on with other numbers of ranks and stages. `checkpoint_writer` makes them while
training goes on.

torch's own distributed checkpoint would do for the optimiser, by names and without waiting, but transformers cannot
read what it writes: the weights would need this layout beside it, and a run two ways to be cut and put together.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from sparsebalance.planning.errors import InputError
from sparsebalance.training.engine import Engine
from sparsebalance.training.parallel import Ranks, set_rng_state

PREFIX = "checkpoint-"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def complete(folder: Path) -> list[Path]:
    """All checkpoints under `folder`, the newest last; one that is still written is not among them."""
    found = [path for path in folder.glob(f"{PREFIX}*") if path.name[len(PREFIX) :].isdigit()]
    return sorted(found, key=lambda path: int(path.name[len(PREFIX) :]))


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint under `folder`."""
    return next(reversed(complete(folder)), None)


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


def read_state(path: Path) -> dict[str, Any]:
    """The trainer's state of a checkpoint."""
    state: dict[str, Any] = json.loads((path / "trainer.json").read_text())
    return state


def writers(ranks: Ranks) -> range:
    """The ranks that write what a pipeline worker holds: in the first pipeline, the first of each worker's."""
    per_stage = ranks.topology.sp * ranks.topology.tp
    return range(0, ranks.topology.pp * per_stage, per_stage)


@dataclass(frozen=True)
class Part:
    """A copy of what one pipeline worker holds, by the names of the whole model.

    Attributes:
        weights: of the model. states: of the optimiser.
    """

    weights: dict[str, Tensor]
    states: dict[str, dict[str, Tensor]]


def take_part(ranks: Ranks, engine: Engine, optimizer: torch.optim.Optimizer) -> Part | None:
    """Copy weights and optimiser state for a checkpoint; None on ranks that leave writing to another one.

    Ranks that share parameters out put their parts together: all call it at once.
    """
    first = ranks.rank - ranks.rank % ranks.topology.tp
    if first not in writers(ranks) and ranks.shards is None:
        return None
    writes, part = ranks.rank in writers(ranks), Part({}, {})
    tied = engine.tied_elsewhere if ranks.stage_worker else None  # the first stage writes it
    for name, parameter in engine.named_parameters.items():
        if name == tied:
            continue
        state = optimizer.state.get(parameter, {})
        weight = _whole(engine, name, parameter, parameter.detach())
        whole = {key: _whole(engine, name, parameter, value) for key, value in state.items()}
        if writes:
            part.weights[name] = weight
            if whole:
                part.states[name] = whole
    return part if writes else None


def _whole(engine: Engine, name: str, parameter: nn.Parameter, value: Tensor) -> Tensor:
    """A copy in memory of a parameter, or of the optimiser's state of one; whole where it is cut over ranks.

    Of what is not cut, the first rank's is the whole.
    """
    if isinstance(value, DTensor):
        value = value.full_tensor()
    split = None if engine.tensor is None else engine.tensor.splits[name]
    if engine.tensor is None or split is None or split.dim is None or value.shape != parameter.shape:
        return value.to("cpu", copy=True).contiguous()
    return engine.tensor.whole(name, value).to("cpu")


def write_part(folder: Path, part: Part, place: int, count: int) -> None:
    """Files of pipeline worker `place` of `count`, on disk when it returns."""
    # As transformers names the files of a checkpoint.
    model = "model.safetensors" if count == 1 else f"model-{place + 1:05d}-of-{count:05d}.safetensors"
    save_file(part.weights, folder / model, {"format": "pt"})
    torch.save(part.states, folder / f"optimizer-{place}.pt")
    flush(folder / model, folder / f"optimizer-{place}.pt")


def write_rest(folder: Path, engine: Engine, state: dict[str, Any], rng: list[dict[str, object]]) -> None:
    """What is of no worker: the model's config and index of files, the trainer's state, random states by rank."""
    engine.stages[0].model.config.save_pretrained(folder)
    _write_index(folder)
    torch.save(rng, folder / "rng.pt")
    (folder / "trainer.json").write_text(json.dumps(state))
    flush(*folder.iterdir(), folder)


def flush(*paths: Path) -> None:
    """Force files and directories to disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _write_index(folder: Path) -> None:
    """Which file holds which tensor, where there are several, as transformers reads it."""
    files = sorted(folder.glob("model-*.safetensors"))
    if not files:
        return
    places, size = {}, 0
    for file in files:
        with safe_open(file, "pt") as shard:
            places.update(dict.fromkeys(shard.keys(), file.name))
        size += file.stat().st_size
    record = {"metadata": {"total_size": size}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(record, indent=1))


def load(path: Path, ranks: Ranks, engine: Engine, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Restore what this rank holds of model and optimiser, and random state, in place; returns the trainer state.

    The checkpoint may come from another number of stages or ranks.

    Raises:
        InputError: the checkpoint is of another model.
    """
    state = read_state(path)
    named = engine.named_parameters
    tied = engine.stages[0].model.config.tie_word_embeddings
    found: set[str] = set()
    strange: list[str] = []
    known = engine.stages[0].names | set(named)
    for file in sorted(path.glob("model*.safetensors")):
        with safe_open(file, "pt") as shard:
            for name in shard.keys():  # noqa: SIM118 (not a dict)
                own = HEAD if tied and name == EMBEDDING and EMBEDDING not in named else name
                if own not in known:
                    strange.append(name)
                if own in named:
                    _fill(path, engine, own, named[own], shard.get_tensor(name))
                    found.add(own)
    missing = sorted(set(named) - found)
    if missing or strange:
        raise InputError(
            f"checkpoint {path} does not fit the configured model: missing {missing[:3]}, unexpected {strange[:3]}; "
            "resume with the same model settings"
        )
    _load_optimizer(path, engine, optimizer)
    rng = torch.load(path / "rng.pt", weights_only=False)  # our own file: Python and numpy states
    if len(rng) == ranks.world:  # other ranks are other processes: they keep the state that they started with
        set_rng_state(rng[ranks.rank])
    return state


@torch.no_grad()
def _fill(path: Path, engine: Engine, name: str, parameter: nn.Parameter, value: Tensor) -> None:
    shape = tuple(parameter.shape) if engine.tensor is None else engine.tensor.splits[name].shape
    if shape != tuple(value.shape):
        raise InputError(
            f"checkpoint {path} does not fit the configured model: {name} is {tuple(value.shape)}, but the model's is "
            f"{shape}; resume with the same model settings"
        )
    parameter.copy_(_share(parameter, value if engine.tensor is None else engine.tensor.part(name, value)))


def _share(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """This process's share of what has the shape of a parameter, where it is shared out."""
    if not isinstance(parameter, DTensor):
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _load_optimizer(path: Path, engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    named, tensor = engine.named_parameters, engine.tensor
    head = named.get(HEAD) if EMBEDDING not in named else None
    for file in sorted(path.glob("optimizer-*.pt")):
        for name, state in torch.load(file, weights_only=True).items():
            own = HEAD if name == EMBEDDING and head is not None else name
            if own not in named or not named[own].requires_grad:
                continue
            if tensor is not None:
                whole = tensor.splits[own].shape
                state = {k: tensor.part(own, v) if tuple(v.shape) == whole else v for k, v in state.items()}
            state = {k: _share(named[own], v) if v.shape == named[own].shape else v for k, v in state.items()}
            optimizer.state[named[own]] = state
