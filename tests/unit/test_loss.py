"""The sliced loss against torch's own."""

from __future__ import annotations

import pytest
import torch

from sparsebalance.training import loss as loss_module
from sparsebalance.training.loss import linear_cross_entropy


@pytest.mark.parametrize("targets", [1, 7, 16, 33])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_loss_and_gradients_equal_torch(
    targets: int, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_module, "SLICE_TARGETS", 16)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(targets, 12, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(50, 12, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    wanted = torch.randint(0, 50, (targets,), generator=generator)
    found = linear_cross_entropy(hidden, weight, wanted)
    expected = torch.nn.functional.cross_entropy(hidden.double() @ weight.double().T, wanted, reduction="sum")
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=tolerance)
    grads = torch.autograd.grad(found * 0.3, (hidden, weight))
    expected_grads = torch.autograd.grad(expected * 0.3, (hidden, weight))
    for a, b in zip(grads, expected_grads, strict=True):
        assert float((a - b).abs().max()) <= tolerance * max(1.0, float(b.abs().max()))


def test_huge_logits_do_not_overflow() -> None:
    hidden = torch.tensor([[1e4, -1e4]], requires_grad=True)
    weight = torch.eye(2, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.tensor([1]))
    assert float(loss.detach()) == pytest.approx(2e4)
    (grad,) = torch.autograd.grad(loss, hidden)
    assert grad.tolist() == [[1.0, -1.0]]


def test_no_target_is_exactly_zero_with_zero_gradients() -> None:
    hidden = torch.empty(0, 4, requires_grad=True)
    weight = torch.randn(9, 4, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.empty(0, dtype=torch.long))
    grads = torch.autograd.grad(loss, (hidden, weight))
    assert float(loss.detach()) == 0.0
    assert torch.equal(grads[1], torch.zeros_like(weight))


def test_bfloat16_accumulates_in_fp32() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(600, 8, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(30, 8, generator=generator).bfloat16().requires_grad_()
    wanted = torch.randint(0, 30, (600,), generator=generator)
    loss = linear_cross_entropy(hidden, weight, wanted)
    expected = torch.nn.functional.cross_entropy(hidden.float() @ weight.float().T, wanted, reduction="sum")
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-2)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16
