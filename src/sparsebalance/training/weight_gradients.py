"""Weight gradients of linear layers put off, so that they run where a pipeline would wait (zero bubble).

In: a stage whose linear layers were made ready. Out: `Deferred`, which collects what the input gradients of a
micro-batch leave over, each layer's input and the gradient of its output, and adds the weight gradients later: the
same products as autograd's, in the same order (Qi et al. 2023, Zero Bubble Pipeline Parallelism, section 2). Norms,
biases' layers without a matrix, embedding and head have cheap gradients, which come with the input gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel


class Deferred:
    """Weight gradients of one micro-batch that have not been computed yet."""

    def __init__(self) -> None:
        self._layers: list[tuple[nn.Linear, Tensor, Tensor]] = []

    def add(self, layer: nn.Linear, inputs: Tensor, gradient: Tensor) -> None:
        """inputs [..., in] and gradient [..., out] of a layer's output."""
        self._layers.append((layer, inputs, gradient))

    @property
    def bytes(self) -> int:
        """Held until `run`; a tensor that several layers read counts once."""
        held = {tensor.data_ptr(): tensor.nbytes for _, *pair in self._layers for tensor in pair}
        return sum(held.values())

    @property
    def parameters(self) -> set[Tensor]:
        """To whose gradients `run` will add."""
        found = [parameter for layer, *_ in self._layers for parameter in (layer.weight, layer.bias)]
        return {parameter for parameter in found if parameter is not None and parameter.requires_grad}

    @torch.no_grad()
    def run(self, added: Callable[[Tensor], None] | None = None) -> None:
        """Add the gradients to those of the layers' weights and biases; `added` is told of each."""
        for layer, inputs, gradient in self._layers:
            rows = gradient.flatten(0, -2)
            if layer.weight.requires_grad:
                _add(layer.weight, rows.T @ inputs.flatten(0, -2), added)
            if layer.bias is not None and layer.bias.requires_grad:
                _add(layer.bias, rows.sum(0), added)
        self._layers.clear()


def _add(parameter: Tensor, gradient: Tensor, added: Callable[[Tensor], None] | None) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
    if added is not None:
        added(parameter)


class _Collector:
    """Where the linear layers of a model put what they leave over; nowhere while `into` is None."""

    into: Deferred | None = None


class _Linear(torch.autograd.Function):
    """A linear layer whose backward computes the input gradient alone."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, layer: nn.Linear, to: Deferred
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.layer, ctx.to = layer, to
        return functional.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        inputs, weight = ctx.saved_tensors
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            ctx.to.add(ctx.layer, inputs, gradient)
        return gradient @ weight if ctx.needs_input_grad[0] else None, None, None, None, None


class Splitter:
    """Makes the linear layers of a model able to put their weight gradients off.

    While `collecting`, what they compute is put off; otherwise they are as they were.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._collector = _Collector()
        head = model.get_output_embeddings()
        for module in model.modules():
            if isinstance(module, nn.Linear) and module is not head:
                module.forward = _forward_of(module, self._collector)  # type: ignore[method-assign]

    @contextmanager
    def collecting(self, into: Deferred) -> Iterator[None]:
        """Forwards in here are of a micro-batch whose weight gradients go to `into`."""
        before, self._collector.into = self._collector.into, into
        try:
            yield
        finally:
            self._collector.into = before


def _forward_of(layer: nn.Linear, collector: _Collector) -> Any:
    def forward(inputs: Tensor) -> Tensor:
        if collector.into is None or not torch.is_grad_enabled():
            return functional.linear(inputs, layer.weight, layer.bias)
        found: Tensor = _Linear.apply(inputs, layer.weight, layer.bias, layer, collector.into)
        return found

    return forward
