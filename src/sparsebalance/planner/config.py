"""What `sparsebalance plan` can be told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from sparsebalance.planner.scenario import Precision
from sparsebalance.planning.pipeline import ScheduleName
from sparsebalance.planning.work import Granularity


@dataclass(frozen=True)
class PlanConfig:
    """What a training step would cost.

    Attributes:
        lengths: sample lengths: a .jsonl, .csv, .txt or .npy file, a saved `datasets` directory, - for standard
            input, or a built-in distribution (longalign-10k, longalpaca-12k, chatqa2, real).
        column: of the file, where it has several.
        limit: use only the first so many samples.
        model: a preset such as qwen2.5-3b, or a path to a transformers config.json or its directory.
        device: h100, h200, a100 or h20; its rates are analytic, not measured.
        table: a latency table from `sparsebalance profile`, instead of a model and a device.
        dp: data-parallel ranks.
        pp: pipeline stages.
        tp: tensor-parallel ranks.
        sp: sequence-parallel ranks.
        devices: with --sweep, the number of devices to share out; dp x pp x tp x sp where unset.
        batch_size: samples of a global batch; 4 for each data-parallel rank, and at least 16, where unset.
        block_size: keys per block.
        budget: attention budget in blocks, own block included.
        granularity: "token": every query routes for itself; "block": one choice for a block of queries.
        unit_size: tokens of a unit of `sab`, `sab_dst` and `dense_chunks`: longer samples run in chunks, shorter ones
            are packed; "whole" leaves samples whole; "auto" tries several, and all three get the fastest for `sab`.
        schedule: of the pipeline; those three are tried with split backwards (zero_bubble) besides 1f1b.
        policies: to compare; the first is always random.
        token_cap: most tokens of a micro-batch; the longest sample where unset.
        dtype: of weights and activations.
        checkpointing: recompute activations in the backward.
        zero: spread the optimiser's state over the data-parallel ranks (ZeRO-1).
        steps: global batches to simulate, drawn at random from the data; at most 24 where unset, 12 with --sweep.
        seed: of the shuffling.
        sweep: try every topology of the devices.
        html: write a page with timeline, memory and table.
        trace: write the simulated step as a Chrome trace (open it in ui.perfetto.dev).
    """

    lengths: tyro.conf.Positional[str]
    column: str | None = None
    limit: int | None = None
    model: str = "qwen2.5-3b"
    device: str = "h200"
    table: Path | None = None
    dp: int = 4
    pp: int = 1
    tp: int = 1
    sp: int = 1
    devices: int | None = None
    batch_size: int | None = None
    block_size: int = 256
    budget: int = 32
    granularity: Granularity = "token"
    unit_size: int | Literal["auto", "whole"] = "auto"
    schedule: ScheduleName = "1f1b"
    policies: tuple[str, ...] = (
        "random", "batch_rebalance", "kk_quadratic", "kk_tokens", "kk_tokens_packed", "nextfit_packing", "dense_chunks",
        "sab", "dst", "sab_dst",
    )  # fmt: skip
    token_cap: int | None = None
    dtype: Precision = "bfloat16"
    checkpointing: bool = True
    zero: bool = True
    steps: int | None = None
    seed: int = 0
    sweep: bool = False
    html: Path | None = None
    trace: Path | None = None
