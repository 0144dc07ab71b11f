"""Gradients summed in buckets while the last backward runs: which go off when, and in which order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sparsebalance.planning.plan import chain_lengths
from sparsebalance.training import gradients
from sparsebalance.training.engine import Engine
from sparsebalance.training.gradients import FlatGradients
from sparsebalance.training.parallel import Ranks
from sparsebalance.training.stage import cut, untie
from tests.unit.test_stage import EXAMPLES, LAYERS, SCHEDULES, TARGETS, in_one_process, model_of, units_of

GROUP: Any = object()  # of data-parallel ranks; what would be exchanged is recorded instead


class Sent:
    """Stands for an all-reduce on its way; it doubles the bucket, as if another rank had the same gradients."""

    def __init__(self, bucket: Tensor) -> None:
        self.bucket, self.as_sent, self.waited = bucket, bucket.clone(), False
        bucket.mul_(2)

    def wait(self) -> None:
        self.waited = True


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Sent]:
    found: list[Sent] = []

    def all_reduce(bucket: Tensor, group: object, async_op: bool) -> Sent:
        assert group is GROUP
        assert async_op
        found.append(Sent(bucket))
        return found[-1]

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 8 * 5000)
    return found


def flat_of(engine: Engine) -> FlatGradients:
    return FlatGradients(engine.named_parameters, Ranks(0, 2, data=GROUP))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_complete_buckets_go_off_during_the_last_backwards(name: str, checkpointing: bool, sent: list[Sent]) -> None:
    """Nothing is added to a bucket that went off, and all go off before the end."""
    stages = cut(model_of(checkpointing=checkpointing), (2, 2))
    untie(stages[1:])  # as on a worker of its own
    engine = Engine(tuple(stages), 4, "token", checkpointing)
    flat = flat_of(engine)
    units = units_of(16, keep_chunks=1)
    chains = chain_lengths([unit.segments for unit in units])
    schedule = in_one_process(SCHEDULES[name](chains, 2), chains, 2)
    engine.run(units, EXAMPLES, TARGETS, schedule=schedule)
    assert sent == []
    alone = flat.buffer.clone()
    for _ in range(2):
        flat.begin()
        sent.clear()
        engine.run(units, EXAMPLES, TARGETS, schedule=schedule, reduction=flat)
        assert len(sent) == flat.buckets > LAYERS
        assert not any(one.waited for one in sent)
        flat.reduce()
        assert all(one.waited for one in sent)
        assert torch.equal(torch.cat([one.as_sent for one in reversed(sent)]), alone)
        assert torch.equal(flat.buffer, 2 * alone)


def test_buckets_go_off_one_by_one_from_the_last_layer(sent: list[Sent]) -> None:
    engine = Engine.whole(model_of(), 4, "token")
    flat = flat_of(engine)
    (stage,) = engine.stages
    last_layer = [p for key, p in stage.named_parameters() if ".layers.3." in key or key == "model.norm.weight"]
    with flat.last_action(stage, set()):  # all of it was complete before
        assert len(sent) == flat.buckets
    flat.begin()
    sent.clear()
    with flat.last_action(stage, set(last_layer)):
        assert sent == []  # those of the earlier layers wait, so that all ranks have one order
        for parameter in reversed(last_layer):
            flat.complete(parameter)
        assert len(sent) == flat.buckets


def test_a_rank_without_units_sums_the_same_buckets(sent: list[Sent]) -> None:
    engine = Engine.whole(model_of(), 4, "token")
    flat = flat_of(engine)
    engine.run(units_of(16), EXAMPLES, TARGETS, reduction=flat)
    flat.reduce()
    ran = [(one.bucket.data_ptr(), one.bucket.numel()) for one in sent]
    flat.begin()
    sent.clear()
    assert engine.run([], EXAMPLES, TARGETS, reduction=flat).loss == 0
    assert sent == []
    flat.reduce()
    assert [(one.bucket.data_ptr(), one.bucket.numel()) for one in sent] == ran
    assert all(not one.as_sent.any() for one in sent)


def test_a_gradient_that_grows_after_it_was_complete_is_an_error(sent: list[Sent]) -> None:
    engine = Engine.whole(model_of(), 4, "token")
    flat = flat_of(engine)
    (stage,) = engine.stages
    parameter = next(iter(stage.named_parameters()))[1]
    with flat.last_action(stage):
        flat.complete(parameter)
        with pytest.raises(RuntimeError, match=r"gradient of shape \[97, 32\] was added to twice"):
            flat.complete(parameter)
    assert len(sent) == flat.buckets
    parameter.sum().backward()  # outside, nothing listens


def test_nothing_listens_without_other_ranks() -> None:
    engine = Engine.whole(model_of(), 4, "token")
    flat = FlatGradients(engine.named_parameters, Ranks(0, 1))
    with flat.last_action(engine.stages[0]):
        assert not any(p._post_accumulate_grad_hooks for p in engine.named_parameters.values())
    flat.reduce()
