"""Typed configuration of a run: nested dataclasses, read from YAML, checked before anything starts."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, get_type_hints

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from sparsebalance.planning.anchor import AnchorKind, AnchorLevel
from sparsebalance.planning.budget_schedule import ScheduleKind
from sparsebalance.planning.budgets import Timing
from sparsebalance.planning.composition import Tail
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.pipeline import ScheduleName
from sparsebalance.planning.plan import Topology
from sparsebalance.planning.slack import SlackAim
from sparsebalance.planning.units import check_unit_size
from sparsebalance.planning.work import Granularity

_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class ModelConfig:
    """The decoder.

    Attributes:
        path: a local checkpoint directory (config.json + safetensors); the sizes below then do not count.
        layers: of a randomly initialised Qwen2-family decoder.
        hidden: its width, a multiple of heads.
        intermediate: width of its feed-forward layers.
        heads: query heads.
        kv_heads: key/value heads; heads is a multiple of it.
        rope_theta: base of the rotary position embedding.
        dtype: of weights and activations.
        checkpointing: recompute activations in the backward, to save memory.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    path: Path | None = None
    layers: int = 4
    hidden: int = 128
    intermediate: int = 384
    heads: int = 4
    kv_heads: int = 2
    rope_theta: float = 1_000_000.0
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    checkpointing: bool = False


@dataclass(frozen=True)
class DataConfig:
    """The training data.

    Attributes:
        path: JSONL (.jsonl, .jsonl.gz) with `messages` or `text`, or a saved `datasets` directory.
        tokenizer: a local tokenizer directory.
        max_length: most tokens of a sample.
        on_long: what happens to longer ones.
        limit: read only the first so many rows.
        batch_size: samples of a global batch (one optimiser step).
        target_tokens: target tokens of a global batch, in place of a number of samples: consecutive samples, until
            their sum comes nearest to it.
        tail: what becomes of samples that do not fill an epoch's last batch: not trained on ("drop"), a smaller
            batch ("keep"), or filled up with samples from the start of the epoch ("fill").
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    path: Path = Path("data/longdoc_sft.jsonl.gz")
    tokenizer: Path = Path("data/tokenizer")
    max_length: int = 32768
    on_long: Literal["error", "truncate", "drop"] = "error"
    limit: int | None = None
    batch_size: int = 16
    target_tokens: int | None = None
    tail: Tail = "drop"


@dataclass(frozen=True)
class AttentionConfig:
    """Block-sparse attention.

    Attributes:
        block_size: keys per block.
        budget: default attention budget in blocks, own block included.
        schedule: of the default budget over the run: "constant", or it goes from `start_budget` to `budget` in
            `schedule_steps` steps, "linear" or "cosine", so that a model made for dense attention can settle.
        start_budget: blocks of the first step; "dense" reads everything.
        schedule_steps: steps after which `budget` holds; half of the run where unset.
        granularity: "token": every query routes for itself (MoBA's definition); "block": one choice for a
            block of queries, faster.
        probe_every: steps between coverage measurements; 0 never measures.
        probe_rows: queries per sample on which coverage is measured.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    block_size: int = 64
    budget: int = 8
    schedule: ScheduleKind = "constant"
    start_budget: int | Literal["dense"] = "dense"
    schedule_steps: int | None = None
    granularity: Granularity = "token"
    probe_every: int = 10
    probe_rows: int = 16


@dataclass(frozen=True)
class BalanceConfig:
    """What SparseBalance decides.

    Attributes:
        policy: `sab_dst` (recommended), `sab`, `dst`, a baseline's name, or a batching rule and a tuning joined by +:
            anchor, slack, waterfill or slack_waterfill, as in `kk_tokens+anchor`.
        token_cap: most tokens of a micro-batch; a longer sample has to run in chunks.
        unit_size: tokens of a micro-batch of `sab`, `sab_dst` and `dense_chunks`: longer samples run in chunks,
            shorter ones are packed; "whole" never cuts; "auto" takes what is predicted fastest for the first steps.
        keep_chunks: chunks of a sample whose activations are kept at once; earlier ones run forward twice, and
            memory follows the unit size instead of the longest sample. Unset, all are kept.
        mode: "strict": every sample stays in its own global batch; "window": samples may move between the steps of
            a look-ahead window, so that a few very long ones come together; "group_by_length": batches of like
            lengths, as transformers makes them, to compare with.
        window: steps of the look-ahead window.
        window_ranks: data-parallel ranks that a window's steps are made for; parallel.dp where unset. A run that
            goes on with another number of ranks keeps the first one's.
        anchor: latency that the published tuning moves micro-batches towards, of those of the step.
        level: "layer": that tuning bounds and chooses layer by layer; "global": one budget for all layers, whose mean
            coverage is bounded.
        aim: step time that the other tunings want: "hold" turns idle time into coverage; "balance" is as fast as can
            at no less coverage than the default budgets'; "fast" as fast as `threshold` allows.
        timing: "planned": budgets come with the plan, from coverage measured before; "online": each layer follows its
            own routing scores while it runs, towards the plan's targets.
        threshold: most that tuning may change (all but the published one: lower) a layer's coverage.
        min_budget: fewest blocks that tuning may give.
        max_budget: most blocks that it may give; 4 times the default budget where unset.
        correction: measured times correct the latency table while training, so that a rank that gets slower is
            given less work; plans then depend on measured times. Off, a run can be repeated bit by bit.
        table: a latency table from `sparsebalance profile`; without one, the run measures first.
        measure_s: seconds that this measuring may take; a coarse table is always finished.
        plans: file of plans: made and written by the first run, read by later ones with the same data and settings.
            Needs plans that nothing measured can change: a table, correction off, and probe_every 0.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    policy: str = "sab_dst"
    token_cap: int = 32768
    unit_size: int | Literal["auto", "whole"] = "auto"
    keep_chunks: int | None = None
    mode: Literal["strict", "window", "group_by_length"] = "strict"
    window: int = 16
    window_ranks: int | None = None
    anchor: AnchorKind = "mean"
    level: AnchorLevel = "layer"
    aim: SlackAim = "balance"
    timing: Timing = "planned"
    threshold: float = 0.1
    min_budget: int = 1
    max_budget: int | None = None
    correction: bool = True
    table: Path | None = None
    measure_s: float = 45.0
    plans: Path | None = None


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warm-up and cosine decay.

    Attributes:
        lr: peak learning rate.
        min_lr_ratio: last learning rate / peak.
        warmup_steps: of linear rise from 0.
        weight_decay: of matrices; vectors are not decayed.
        beta1: decay of the gradient's mean.
        beta2: decay of its square.
        clip_norm: largest gradient norm; larger gradients are scaled down to it.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    lr: float = 3e-4
    min_lr_ratio: float = 0.1
    warmup_steps: int = 10
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip_norm: float = 1.0


@dataclass(frozen=True)
class ParallelConfig:
    """Processes.

    Attributes:
        dp: data-parallel ranks; the command starts dp * pp * tp * sp processes itself unless torchrun already did.
        pp: pipeline stages.
        tp: processes that share out a stage's heads and matrices.
        sp: processes that share out a micro-batch's tokens, and in attention its heads (Ulysses).
        shard: of the dp x sp processes that hold the same parameters, so many share out parameters, gradients and
            optimiser state between steps (FSDP2; fewer than all: HSDP); while a step runs, each holds them whole.
        schedule: of the pipeline: "auto" takes what is simulated fastest for each step, of "1f1b" and "zero_bubble";
            or one of "gpipe", "1f1b", "interleaved" (two stages a process; whole samples only), "zero_bubble".
        threads: CPU threads of each process.
        timeout_s: a collective that waits longer ends the run on every rank.
        memory_gb: memory of each process in gigabytes; unset, what this host has free is shared out.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    dp: int = 2
    pp: int = 1
    tp: int = 1
    sp: int = 1
    shard: int = 1
    schedule: Literal["auto"] | ScheduleName = "auto"
    threads: int = 1
    timeout_s: int = 600
    memory_gb: float | None = None

    @property
    def topology(self) -> Topology:
        return Topology(self.dp, self.pp, self.tp, self.sp)


@dataclass(frozen=True)
class RunConfig:
    """One training run.

    Attributes:
        out: directory of metrics, checkpoints and reports.
        steps: optimiser steps.
        seed: of weights and data order.
        checkpoint_every: steps between checkpoints; 0 saves only at the end.
        keep_last: checkpoints to keep.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    out: Path = Path("runs/train")
    steps: int = 100
    seed: int = 0
    checkpoint_every: int = 50
    keep_last: int = 2
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)


@dataclass(frozen=True)
class CompareConfig(RunConfig):
    """A comparison of policies on the same weights and batches.

    Attributes:
        policies: the first is the baseline whose gradients train the model.
        time_limit_s: no step starts that would end later than this after the processes started; the first
            always runs. The table and the report then say how many steps there were.
    """

    out: Path = Path("runs/compare")
    steps: int = 8
    policies: tuple[str, ...] = (
        "random", "batch_rebalance", "kk_quadratic", "kk_tokens", "dense_chunks", "sab", "dst", "sab_dst",
    )  # fmt: skip
    time_limit_s: float | None = None


Config = TypeVar("Config", bound=RunConfig)


def load_config(path: Path, kind: type[Config]) -> Config:
    """Read a YAML file into `kind`; fields that it does not name keep their defaults.

    Raises:
        InputError: no such file, not a YAML mapping, an unknown field, a value of a wrong type or range.
    """
    if not path.is_file():
        raise InputError(f"no config file at {path}")
    try:
        record = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        raise InputError(f"config {path} is not valid YAML: {error}") from error
    if not isinstance(record, dict):
        raise InputError(f"config {path} must be a mapping of fields, but it is a {type(record).__name__}")
    try:
        config = TypeAdapter(kind).validate_python(record)
    except ValidationError as error:
        raise InputError(f"config {path}: {_explain(error, kind)}") from error
    return config


def _explain(error: ValidationError, kind: type) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        section: Any = kind
        for part in first["loc"][:-1]:
            section = get_type_hints(section)[str(part)]
        known = [f.name for f in fields(section)] if is_dataclass(section) else []
        near = difflib.get_close_matches(str(first["loc"][-1]), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known fields are {', '.join(known)}"
        return f"unknown field {where!r}; {hint}"
    return f"field {where!r} is {first.get('input')!r}: {first['msg'].lower()}"


def check_config(config: RunConfig) -> None:
    """Ranges and combinations that types cannot express.

    Raises:
        InputError: names the field, its value, the limit and the way out.
    """
    at_least = {
        "steps": (config.steps, 1),
        "checkpoint_every": (config.checkpoint_every, 0),
        "keep_last": (config.keep_last, 1),
        "data.max_length": (config.data.max_length, 1),
        "data.batch_size": (config.data.batch_size, 1),
        "attention.block_size": (config.attention.block_size, 1),
        "attention.budget": (config.attention.budget, 1),
        "attention.probe_every": (config.attention.probe_every, 0),
        "attention.probe_rows": (config.attention.probe_rows, 1),
        "balance.token_cap": (config.balance.token_cap, 1),
        "balance.window": (config.balance.window, 1),
        "parallel.dp": (config.parallel.dp, 1),
        "parallel.pp": (config.parallel.pp, 1),
        "parallel.tp": (config.parallel.tp, 1),
        "parallel.sp": (config.parallel.sp, 1),
        "parallel.shard": (config.parallel.shard, 1),
        "parallel.threads": (config.parallel.threads, 1),
        "parallel.timeout_s": (config.parallel.timeout_s, 1),
        "model.layers": (config.model.layers, 1),
    }
    for name, (value, limit) in at_least.items():
        if value < limit:
            raise InputError(f"{name} is {value}, but it must be at least {limit}")
    optional = {
        "data.target_tokens": config.data.target_tokens,
        "balance.keep_chunks": config.balance.keep_chunks,
        "balance.window_ranks": config.balance.window_ranks,
        "attention.schedule_steps": config.attention.schedule_steps,
        "attention.start_budget": None if config.attention.start_budget == "dense" else config.attention.start_budget,
    }
    for name, wished in optional.items():
        if wished is not None and wished < 1:
            raise InputError(f"{name} is {wished}, but it must be at least 1, or unset")
    if config.parallel.memory_gb is not None and not config.parallel.memory_gb > 0:
        raise InputError(f"parallel.memory_gb is {config.parallel.memory_gb}, but it must be above 0")
    if (config.parallel.dp * config.parallel.sp) % config.parallel.shard:
        raise InputError(
            f"parallel.shard is {config.parallel.shard}, but it must divide the dp {config.parallel.dp} x "
            f"sp {config.parallel.sp} processes that hold the same parameters"
        )
    if config.model.hidden % config.model.heads or config.model.heads % config.model.kv_heads:
        raise InputError(
            f"model: hidden {config.model.hidden} must be a multiple of heads {config.model.heads}, and heads "
            f"a multiple of kv_heads {config.model.kv_heads}"
        )
    if config.data.batch_size < config.parallel.dp and config.data.target_tokens is None:
        raise InputError(
            f"data.batch_size is {config.data.batch_size}, but parallel.dp has {config.parallel.dp} ranks; "
            "every rank needs at least one sample a step: raise batch_size or lower dp"
        )
    _check_balance(config)


def _check_balance(config: RunConfig) -> None:
    """Raises:
    InputError: settings that do not go together.
    """
    balance = config.balance
    if isinstance(balance.unit_size, int):
        check_unit_size(balance.unit_size, config.attention.block_size, balance.token_cap)
    if config.data.target_tokens is not None and balance.mode != "strict":
        raise InputError(
            f'balance.mode is "{balance.mode}", which moves samples between batches of equal number, but '
            f'data.target_tokens {config.data.target_tokens} makes batches of unequal number; set mode to "strict"'
        )
    if balance.plans is not None and (balance.correction or balance.table is None or config.attention.probe_every):
        raise InputError(
            f"balance.plans {balance.plans} needs plans that nothing measured can change; set balance.correction to "
            "false, balance.table to a latency table, and attention.probe_every to 0"
        )


def config_record(config: RunConfig) -> dict[str, Any]:
    """JSON-compatible copy of a config."""
    record: dict[str, Any] = TypeAdapter(type(config)).dump_python(config, mode="json")
    return record
