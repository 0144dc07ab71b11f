"""The trainer's parts without processes: schedule, optimiser, metrics, checkpoints, feedback, unit sizes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparsebalance.planning.correction import Correction
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.plan import Sample, Topology
from sparsebalance.planning.policy import named_policy, plan_step
from sparsebalance.training import checkpoint
from sparsebalance.training.checkpoint_writer import CheckpointWriter
from sparsebalance.training.config import BalanceConfig, OptimizerConfig, ParallelConfig, RunConfig
from sparsebalance.training.engine import Engine
from sparsebalance.training.feedback import Feedback, Learner
from sparsebalance.training.gradients import FlatGradients
from sparsebalance.training.memory import sample_memory
from sparsebalance.training.metrics import MetricsFile
from sparsebalance.training.parallel import Ranks, start
from sparsebalance.training.session import possible_unit_sizes
from sparsebalance.training.trainer import learning_rate, make_optimizer, update
from tests.conftest import samples_of
from tests.models import engine, example, tiny_model, unit
from tests.unit.test_latency import IDENTITY, make_table

ALONE = Ranks(0, 1)


def save(
    folder: Path, ranks: Ranks, step: int, one: Engine, optimizer: torch.optim.Optimizer, state: Any, keep_last: int
) -> Path:
    """One checkpoint, on disk when it returns."""
    writer = CheckpointWriter(folder, ranks, one, optimizer, keep_last)
    try:
        writer.save(step, state)
        writer.finish()
    finally:
        writer.close()
    return folder / f"checkpoint-{step}"


def test_warm_up_then_cosine_to_the_floor() -> None:
    config = OptimizerConfig(lr=1.0, min_lr_ratio=0.1, warmup_steps=4)
    rates = [learning_rate(config, step, 11) for step in range(11)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == pytest.approx(1.0)
    assert rates[7] == pytest.approx(0.55)
    assert rates[10] == pytest.approx(0.1)
    assert learning_rate(OptimizerConfig(lr=1.0, warmup_steps=0), 0, 1) == 1.0


def test_vectors_are_not_decayed() -> None:
    optimizer = make_optimizer(dict(tiny_model().named_parameters()), OptimizerConfig(weight_decay=0.3))
    decayed, plain = optimizer.param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    assert all(p.ndim >= 2 for p in decayed["params"])
    assert all(p.ndim < 2 for p in plain["params"])


def test_flat_gradients_are_the_parameters_gradients() -> None:
    model = tiny_model()
    flat = FlatGradients(dict(model.named_parameters()), ALONE)
    examples = [example(20, 9)]
    engine(model).run([unit(examples, 0)], examples, 9)
    parts = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert torch.equal(parts, flat.buffer)
    before = flat.norm()
    assert before == pytest.approx(float(parts.norm()))
    assert flat.clip(before / 2) == before
    assert flat.norm() == pytest.approx(before / 2)
    assert flat.clip(before) == pytest.approx(before / 2)
    assert flat.norm() == pytest.approx(before / 2)
    flat.begin()
    assert all(float(p.grad.abs().max()) == 0 for p in model.parameters() if p.grad is not None)


def test_metrics_lines_of_repeated_steps_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    first = MetricsFile(path, writes=True)
    for step in range(4):
        first.write({"step": step, "loss": 1.0})
    first.close()
    with path.open("a") as file:
        file.write('{"step": 4, "lo')  # a killed run
    again = MetricsFile(path, writes=True, first_step=2)
    again.write({"step": 2, "loss": 2.0})
    again.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 0, "loss": 1.0}, {"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0},
    ]  # fmt: skip
    MetricsFile(tmp_path / "other.jsonl", writes=False).write({"step": 0})
    assert not (tmp_path / "other.jsonl").exists()


def test_a_checkpoint_restores_model_optimiser_and_random_state(tmp_path: Path) -> None:
    examples = [example(20, 9), example(30, 4)]

    def one_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, flat: FlatGradients) -> None:
        flat.begin()
        engine(model).run([unit(examples, 0, 1)], examples, 13)  # type: ignore[arg-type]
        update(optimizer, 1e-2)

    model = tiny_model("float32")
    optimizer, flat = (
        make_optimizer(dict(model.named_parameters()), OptimizerConfig()),
        FlatGradients(dict(model.named_parameters()), ALONE),
    )
    one_step(model, optimizer, flat)
    save(tmp_path, ALONE, 1, engine(model), optimizer, {"note": [0.1]}, keep_last=2)
    drawn = (random.random(), float(np.random.rand()), float(torch.rand(())))  # noqa: NPY002
    one_step(model, optimizer, flat)

    other = tiny_model("float32")
    other_optimizer, other_flat = (
        make_optimizer(dict(other.named_parameters()), OptimizerConfig()),
        FlatGradients(dict(other.named_parameters()), ALONE),
    )
    found = checkpoint.latest(tmp_path)
    assert found is not None
    state = checkpoint.load(found, ALONE, engine(other), other_optimizer)
    assert (state["step"], state["note"]) == (1, [0.1])
    assert drawn == (random.random(), float(np.random.rand()), float(torch.rand(())))  # noqa: NPY002
    one_step(other, other_optimizer, other_flat)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_old_checkpoints_go_and_half_written_ones_never_count(tmp_path: Path) -> None:
    model = tiny_model("float32")
    optimizer = make_optimizer(dict(model.named_parameters()), OptimizerConfig())
    assert checkpoint.latest(tmp_path) is None
    for step in (2, 9, 10):
        save(tmp_path, ALONE, step, engine(model), optimizer, {}, keep_last=2)
    (tmp_path / ".checkpoint-99.123").mkdir()
    (tmp_path / "checkpoint-old").mkdir()
    assert checkpoint.latest(tmp_path) == tmp_path / "checkpoint-10"
    assert not (tmp_path / "checkpoint-2").exists()
    assert (tmp_path / "checkpoint-9").exists()


def test_a_write_that_fails_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("float32")
    optimizer = make_optimizer(dict(model.named_parameters()), OptimizerConfig())
    save(tmp_path, ALONE, 1, engine(model), optimizer, {}, keep_last=1)

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(RuntimeError, match=r"checkpoint-2 could not be written: OSError: no space left on device"):
        save(tmp_path, ALONE, 2, engine(model), optimizer, {}, keep_last=1)
    assert checkpoint.latest(tmp_path) == tmp_path / "checkpoint-1"


def test_another_number_of_ranks_goes_on_without_the_random_state(tmp_path: Path) -> None:
    """The first of two ranks reads what one rank wrote; its own random state, of another process, stays."""
    model = tiny_model("float32")
    path = save(
        tmp_path,
        ALONE,
        7,
        engine(model),
        make_optimizer(dict(model.named_parameters()), OptimizerConfig()),
        {},
        keep_last=1,
    )
    other = tiny_model("float32")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    before = torch.rand(3).sum(), torch.get_rng_state()
    assert (
        checkpoint.load(
            path, Ranks(0, 2), engine(other), make_optimizer(dict(other.named_parameters()), OptimizerConfig())
        )["step"]
        == 7
    )
    assert torch.equal(torch.get_rng_state(), before[1])
    assert (
        checkpoint.load(path, ALONE, engine(other), make_optimizer(dict(other.named_parameters()), OptimizerConfig()))[
            "step"
        ]
        == 7
    )
    assert not torch.equal(torch.get_rng_state(), before[1])
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_checkpoints_of_another_run_are_refused(tmp_path: Path) -> None:
    model = tiny_model("float32")
    optimizer = make_optimizer(dict(model.named_parameters()), OptimizerConfig())
    path = save(tmp_path, ALONE, 1, engine(model), optimizer, {}, keep_last=1)
    from transformers import AutoModelForCausalLM, Qwen2Config

    other = AutoModelForCausalLM.from_config(
        Qwen2Config(vocab_size=97, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    with pytest.raises(InputError, match="does not fit the configured model"):
        checkpoint.load(path, ALONE, engine(other), make_optimizer(dict(other.named_parameters()), OptimizerConfig()))


def test_feedback_goes_on_with_another_number_of_ranks() -> None:
    """What was learned of terms, coverage and budgets stays; factors of ranks that are gone are not."""
    model = make_table()
    learner = Learner(model, Correction((0.5, 2.0)), correcting=True)
    plan = plan_step(samples_of(64, 100), model, Topology(dp=2), named_policy("sab_dst", budget=3, token_cap=200))
    learner.learn_budgets(plan)
    known = learner.feedback()
    again = Feedback.from_state_dict(json.loads(json.dumps(known.state_dict())))
    assert again.correction.ranks == (0.5, 2.0)
    for count in (1, 3):
        other = again.on_ranks(count)
        assert len(other.correction.ranks) == count
        assert np.prod(other.correction.ranks) == pytest.approx(1.0)
        assert other.correction.terms == known.correction.terms
        assert other.expected("sab_dst", samples_of(64, 100)) == known.expected("sab_dst", samples_of(64, 100)) != {}
        fresh = Learner(model, Correction((1.0,) * count), correcting=True)
        fresh.load_state_dict(json.loads(json.dumps(learner.state_dict())))
        assert len(fresh.feedback().correction.ranks) == count
        assert fresh.feedback().expected("sab_dst", samples_of(64, 100)) != {}
    assert again.on_ranks(2) == again


def sizes(policy: str, samples: list[Sample], limit_mb: float | None = None, **balance: Any) -> list[int | None]:
    return possible_unit_sizes(RunConfig(balance=BalanceConfig(**balance)), IDENTITY, samples, policy, limit_mb)


def test_unit_sizes_are_as_configured_and_for_policies_that_cut() -> None:
    samples = samples_of(20, 5000)
    assert sizes("sab", samples) == [1024, 2048, 4096, None]
    assert sizes("sab_dst", samples, unit_size=512) == [512]
    assert sizes("dense_chunks", samples, unit_size="whole") == [None]
    for policy in ("random", "kk_tokens_packed", "dst"):
        assert sizes(policy, samples, unit_size=512) == [None]
    assert sizes("sab", samples, token_cap=2048) == [1024, 2048]


def test_samples_over_the_cap_need_a_policy_that_cuts() -> None:
    for policy, size in (("random", "auto"), ("dst", 512), ("sab", "whole")):
        with pytest.raises(InputError, match=r"sample 1 has 5000 tokens, over the cap of 2048"):
            sizes(policy, samples_of(20, 5000), token_cap=2048, unit_size=size)


def test_unit_sizes_that_do_not_fit_in_memory_are_left_out() -> None:
    samples = samples_of(20, 5000)
    config = RunConfig(balance=BalanceConfig(keep_chunks=1))
    need = {size: sample_memory(config, IDENTITY, samples[1], size).total for size in (1024, 2048, 4096, None)}
    assert sizes("sab", samples, need[2048], keep_chunks=1) == [1024, 2048]
    with pytest.raises(InputError, match=r"sample 1 with 5,000 tokens needs"):
        sizes("random", samples, need[2048], keep_chunks=1)


def test_processes_and_config_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(InputError, match=r"3 processes are running, but parallel\.dp 2 x pp 1 x tp 1 x sp 1 needs 2"):
        start(ParallelConfig(dp=2))
