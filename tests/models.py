"""Tiny models and data that several tests build."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter
from transformers import PreTrainedModel

from sparsebalance.planning.plan import Latency, MicroBatch, Sample, Segment
from sparsebalance.planning.table_file import save_table
from sparsebalance.planning.work import Granularity
from sparsebalance.training.config import AttentionConfig, ModelConfig, RunConfig
from sparsebalance.training.data import IGNORE, Example
from sparsebalance.training.engine import Engine
from sparsebalance.training.model import build_model, decoder_config, identity_of
from sparsebalance.training.session import read_tokenizer
from tests.conftest import ROOT
from tests.unit.test_latency import make_table

VOCABULARY = 97
TOKENIZER = ROOT / "data" / "tokenizer"


def tiny_model(
    dtype: str = "float64", granularity: Granularity = "token", budget: int = 3, checkpointing: bool = False
) -> PreTrainedModel:
    model = build_model(
        ModelConfig(
            layers=2, hidden=32, intermediate=48, heads=4, kv_heads=2, dtype=dtype, checkpointing=checkpointing,  # type: ignore[arg-type]
        ),
        AttentionConfig(block_size=4, budget=budget, granularity=granularity),
        VOCABULARY,
        512,
        seed=3,
    )  # fmt: skip
    # Default weights are so small that all attention is alike; larger ones make mistakes visible.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    return model


def engine(model: PreTrainedModel, granularity: Granularity = "token", checkpointing: bool = False) -> Engine:
    return Engine.whole(model, 4, granularity, checkpointing)


def example(length: int, targets: int, seed: int = 0) -> Example:
    """Random tokens; the last `targets` of them are to be predicted."""
    rng = np.random.default_rng(1000 * seed + length)
    ids = rng.integers(0, VOCABULARY, length).astype(np.int32)
    wanted = np.full(length, IGNORE, dtype=np.int32)
    if targets:
        wanted[length - 1 - targets : length - 1] = ids[length - targets :]
    return Example(ids, wanted)


def samples(examples: Sequence[Example]) -> list[Sample]:
    return [Sample(i, len(e.input_ids), e.target_count) for i, e in enumerate(examples)]


def unit(examples: Sequence[Example], *ids: int, budgets: tuple[int, ...] = (3, 3)) -> MicroBatch:
    """Whole samples packed in one micro-batch."""
    return MicroBatch(tuple(Segment.whole(samples(examples)[i]) for i in ids), budgets, Latency(0.0, 0.0))


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    found = {n: p.grad.clone() if p.grad is not None else torch.zeros_like(p) for n, p in model.named_parameters()}
    model.zero_grad()
    return found


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Over all gradients, relative to the largest one."""
    scale = max(float(x.abs().max()) for x in a.values())
    return max(float((a[n] - b[n]).abs().max()) for n in a) / scale


def write_rows(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat_rows(count: int = 24, seed: int = 0) -> list[dict[str, Any]]:
    """Conversations with a heavy tail of lengths, about 15 to 400 tokens."""
    rng = np.random.default_rng(seed)
    words = ("the", "model", "reads", "a", "block", "of", "keys", "and", "waits", "for", "no", "rank")

    def text(n: int) -> str:
        return " ".join(rng.choice(words, n))

    return [
        {
            "messages": [
                {"role": "user", "content": text(int(rng.pareto(1.0) * 10) % 350 + 3)},
                {"role": "assistant", "content": text(int(rng.integers(2, 20)))},
            ]
        }
        for _ in range(count)
    ]


def document_rows(*words: int) -> list[dict[str, Any]]:
    """Plain documents of about so many tokens, all of them targets but the first."""
    return [{"text": "word " * count} for count in words]


def question_rows(*words: int) -> list[dict[str, Any]]:
    """Conversations of a question with so many words and a short answer, so that few tokens are targets."""
    return [
        {"messages": [{"role": "user", "content": "word " * count}, {"role": "assistant", "content": "yes and no"}]}
        for count in words
    ]


def tiny_run(folder: Path, **changes: Any) -> dict[str, Any]:
    """A run's YAML record: tiny model, tiny data; `changes` replace whole sections or single fields."""
    data = folder / "chat.jsonl"
    if not data.exists():
        write_rows(data, chat_rows())
    record: dict[str, Any] = {
        "out": str(folder / "run"),
        "steps": 4,
        "checkpoint_every": 2,
        "model": {"layers": 2, "hidden": 32, "intermediate": 48, "heads": 2, "kv_heads": 1},
        "data": {"path": str(data), "tokenizer": str(TOKENIZER), "max_length": 1024, "batch_size": 6},
        "attention": {"block_size": 16, "budget": 3, "probe_every": 1, "probe_rows": 4},
        "balance": {"token_cap": 1024, "measure_s": 1.0},
        "optimizer": {"lr": 1e-3, "warmup_steps": 1},
        "parallel": {"dp": 2, "threads": 1, "timeout_s": 60},
    }
    for key, value in changes.items():
        record[key] = {**record[key], **value} if isinstance(value, dict) else value
    return record


def tiny_config(folder: Path, **changes: Any) -> RunConfig:
    """`tiny_run` as a config, with a latency table that is not measured (see `write_table`)."""
    table = folder / "table.json"
    balance = {"table": str(table), "correction": False, **changes.pop("balance", {})}
    record = tiny_run(folder, **{**changes, "balance": balance})
    config = TypeAdapter(RunConfig).validate_python(record)  # without a file: several ranks call this at once
    if not table.exists():
        write_table(config, table)
    return config


def write_table(config: RunConfig, path: Path) -> None:
    """A made-up latency table for a run's model; block size 16."""
    decoder = decoder_config(config.model, len(read_tokenizer(config.data.tokenizer)), config.data.max_length)
    save_table(make_table(identity=identity_of(decoder, config)), path)
