"""The trainer's parts without processes: batches, plan-ahead, schedule, optimiser, metrics, checkpoints."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from sparsebalance.planning.coverage import CoverageCurves
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.plan import StepPlan, Topology
from sparsebalance.training import checkpoint
from sparsebalance.training.config import OptimizerConfig, ParallelConfig
from sparsebalance.training.metrics import MetricsFile
from sparsebalance.training.parallel import FlatGradients, Ranks, start
from sparsebalance.training.sampler import GlobalBatches, PlanAhead
from sparsebalance.training.trainer import learning_rate, make_optimizer, update
from tests.conftest import samples_of
from tests.models import engine, example, tiny_model, unit

ALONE = Ranks(0, 1)


def test_an_epoch_uses_every_sample_once_and_the_next_one_in_another_order() -> None:
    batches = GlobalBatches(tuple(samples_of(*range(1, 13))), 4, seed=1)
    epochs = [[s.id for step in range(3 * e, 3 * e + 3) for s in batches.at(step)] for e in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(12))
    assert epochs[0] != epochs[1]
    assert batches.at(4) == GlobalBatches(tuple(samples_of(*range(1, 13))), 4, seed=1).at(4)
    assert batches.at(0) != GlobalBatches(tuple(samples_of(*range(1, 13))), 4, seed=2).at(0)


def test_the_tail_is_kept_or_dropped_as_asked() -> None:
    samples = tuple(samples_of(*range(1, 11)))
    assert GlobalBatches(samples, 4, 0).batches_per_epoch == 2
    kept = GlobalBatches(samples, 4, 0, tail="keep")
    assert [len(kept.at(step)) for step in range(4)] == [4, 4, 2, 4]


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(InputError, match="3 samples for 4 ranks; use at most 3 ranks"):
        GlobalBatches(tuple(samples_of(1, 2, 3)), 3, 0, ranks=4)
    with pytest.raises(InputError, match="fewer than one batch of 8"):
        GlobalBatches(tuple(samples_of(1, 2, 3)), 8, 0)


def test_plans_are_made_in_the_background_and_errors_arrive() -> None:
    names = []

    def plan(step: int, curves: CoverageCurves) -> StepPlan:
        names.append(threading.current_thread().name)
        if step == 2:
            raise InputError("no plan for step 2")
        return StepPlan(f"step {step}", Topology(), 4, (), 0.0)

    planner = PlanAhead(plan)
    curves = CoverageCurves(4, {})
    planner.prepare(1, curves)
    made, milliseconds = planner.take(1)
    assert made.policy == "step 1"
    assert milliseconds >= 0
    assert names[0].startswith("plan")
    planner.prepare(2, curves)
    with pytest.raises(InputError, match="no plan for step 2"):
        planner.take(2)
    with pytest.raises(RuntimeError, match="no plan was prepared for step 9"):
        planner.take(9)
    planner.close()


def test_warm_up_then_cosine_to_the_floor() -> None:
    config = OptimizerConfig(lr=1.0, min_lr_ratio=0.1, warmup_steps=4)
    rates = [learning_rate(config, step, 11) for step in range(11)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == pytest.approx(1.0)
    assert rates[7] == pytest.approx(0.55)
    assert rates[10] == pytest.approx(0.1)
    assert learning_rate(OptimizerConfig(lr=1.0, warmup_steps=0), 0, 1) == 1.0


def test_vectors_are_not_decayed() -> None:
    optimizer = make_optimizer(tiny_model(), OptimizerConfig(weight_decay=0.3))
    decayed, plain = optimizer.param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    assert all(p.ndim >= 2 for p in decayed["params"])
    assert all(p.ndim < 2 for p in plain["params"])


def test_flat_gradients_are_the_parameters_gradients() -> None:
    model = tiny_model()
    flat = FlatGradients(model)
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
    flat.zero()
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
        flat.zero()
        engine(model).run([unit(examples, 0, 1)], examples, 13)  # type: ignore[arg-type]
        update(optimizer, 1e-2)

    model = tiny_model("float32")
    optimizer, flat = make_optimizer(model, OptimizerConfig()), FlatGradients(model)
    one_step(model, optimizer, flat)
    checkpoint.save(tmp_path, ALONE, 1, model, optimizer, {"note": [0.1]}, keep_last=2)
    drawn = (random.random(), float(np.random.rand()), float(torch.rand(())))  # noqa: NPY002
    one_step(model, optimizer, flat)

    other = tiny_model("float32")
    other_optimizer, other_flat = make_optimizer(other, OptimizerConfig()), FlatGradients(other)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    state = checkpoint.load(found, ALONE, other, other_optimizer)
    assert (state["step"], state["note"]) == (1, [0.1])
    assert drawn == (random.random(), float(np.random.rand()), float(torch.rand(())))  # noqa: NPY002
    one_step(other, other_optimizer, other_flat)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_old_checkpoints_go_and_half_written_ones_never_count(tmp_path: Path) -> None:
    model = tiny_model("float32")
    optimizer = make_optimizer(model, OptimizerConfig())
    assert checkpoint.latest(tmp_path) is None
    for step in (2, 9, 10):
        checkpoint.save(tmp_path, ALONE, step, model, optimizer, {}, keep_last=2)
    (tmp_path / ".checkpoint-99.123").mkdir()
    (tmp_path / "checkpoint-old").mkdir()
    assert checkpoint.latest(tmp_path) == tmp_path / "checkpoint-10"
    assert not (tmp_path / "checkpoint-2").exists()
    assert (tmp_path / "checkpoint-9").exists()


def test_a_write_that_fails_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("float32")
    optimizer = make_optimizer(model, OptimizerConfig())
    checkpoint.save(tmp_path, ALONE, 1, model, optimizer, {}, keep_last=1)

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="no space"):
        checkpoint.save(tmp_path, ALONE, 2, model, optimizer, {}, keep_last=1)
    assert checkpoint.latest(tmp_path) == tmp_path / "checkpoint-1"


def test_checkpoints_of_another_run_are_refused(tmp_path: Path) -> None:
    model = tiny_model("float32")
    optimizer = make_optimizer(model, OptimizerConfig())
    path = checkpoint.save(tmp_path, ALONE, 1, model, optimizer, {}, keep_last=1)
    with pytest.raises(InputError, match=r"written by 1 ranks, but 2 are running; set parallel.dp to 1"):
        checkpoint.load(path, Ranks(0, 2), model, optimizer)
    from transformers import AutoModelForCausalLM, Qwen2Config

    other = AutoModelForCausalLM.from_config(
        Qwen2Config(vocab_size=97, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    with pytest.raises(InputError, match="does not fit the configured model"):
        checkpoint.load(path, ALONE, other, make_optimizer(other, OptimizerConfig()))


def test_processes_and_config_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(InputError, match=r"3 processes are running, but parallel\.dp is 2"):
        start(ParallelConfig(dp=2))
