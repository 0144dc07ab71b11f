"""The loss over parts of the vocabulary, on a group of one rank; several ranks are in the distributed tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from sparsebalance.attention.clock import TermClock
from sparsebalance.training import vocabulary_loss
from sparsebalance.training.loss import linear_cross_entropy
from sparsebalance.training.vocabulary_loss import vocabulary_parallel_cross_entropy


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("targets", [0, 1, 16, 33])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 2e-6), ("bfloat16", 1e-2)])
def test_loss_and_gradients_are_those_of_the_whole_vocabulary(
    targets: int, dtype: str, tolerance: float, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocabulary_loss, "SLICE_TARGETS", 16)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(rows, 12, generator=generator).to(getattr(torch, dtype)).requires_grad_() for rows in (targets, 50)
    )
    wanted = torch.randint(0, 50, (targets,), generator=generator)
    clock = TermClock()
    found = vocabulary_parallel_cross_entropy(hidden, weight, wanted, 0, group, clock)
    expected = linear_cross_entropy(hidden, weight, wanted)
    assert found.dtype == expected.dtype
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=tolerance)
    grads = torch.autograd.grad(found * 0.3, (hidden, weight))
    assert clock.take().keys() == {"head"}
    for a, b in zip(grads, torch.autograd.grad(expected * 0.3, (hidden, weight)), strict=True):
        assert a.dtype == b.dtype
        assert torch.allclose(a, b, rtol=tolerance, atol=tolerance)


def test_a_frozen_head_gets_no_gradient(group: dist.ProcessGroup) -> None:
    hidden = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(9, 4, dtype=torch.float64)
    wanted = torch.tensor([8, 0, 4])
    (found,) = torch.autograd.grad(vocabulary_parallel_cross_entropy(hidden, weight, wanted, 0, group), hidden)
    (expected,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, wanted), hidden)
    assert torch.allclose(found, expected, rtol=1e-12)
