"""Stages of a decoder: some of its layers as a model of their own, with the embedding first and the head last.

In: a transformers decoder. Out: `Stage`s that share its parameters under the names that they have in the whole, so
that checkpoints know nothing of stages. transformers' own code runs them: a stage is the same model without the parts
that other stages hold.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, pairwise

from torch import Tensor, nn
from transformers import PreTrainedModel

from sparsebalance.attention.clock import TermClock
from sparsebalance.planning.errors import InputError
from sparsebalance.training.loss import linear_cross_entropy
from sparsebalance.training.packing import PackedRow
from sparsebalance.training.sparse_attention import SparseContext
from sparsebalance.training.weight_gradients import Splitter

CrossEntropy = Callable[[Tensor, Tensor, Tensor, TermClock | None], Tensor]


class Stage:
    """Consecutive layers of a decoder.

    Attributes:
        model: holds these layers, and embedding or final norm and head where the stage has them.
        place, count: of this stage among all of the model.
        layers: numbers of its layers in the whole model.
        names: of all parameters of the whole model.
        cross_entropy: of (hidden states, head's weight, targets, clock); another one under tensor parallelism.
        inside: calls a function that uses the model's parameters; another one where they are shared out.
    """

    def __init__(self, model: PreTrainedModel, place: int, count: int, layers: range, names: frozenset[str]) -> None:
        self.model, self.place, self.count, self.layers, self.names = model, place, count, layers, names
        self.cross_entropy: CrossEntropy = linear_cross_entropy
        self.inside: Callable[[Callable[[], Tensor]], Tensor] = _call

    @classmethod
    def whole(cls, model: PreTrainedModel) -> Stage:
        """The model as its only stage."""
        return cls(model, 0, 1, range(model.config.num_hidden_layers), _names(model))

    @property
    def is_first(self) -> bool:
        return self.place == 0

    @property
    def is_last(self) -> bool:
        return self.place == self.count - 1

    @property
    def width(self) -> int:
        """Of the hidden states that go from stage to stage."""
        return int(self.model.config.hidden_size)

    @cached_property
    def splitter(self) -> Splitter:
        """Puts weight gradients off, where asked to."""
        return Splitter(self.model)

    @property
    def head(self) -> nn.Parameter:
        """[vocabulary, hidden], of the last stage."""
        weight: nn.Parameter = self.model.get_output_embeddings().weight
        return weight

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Under their names in the whole model; a tied weight once."""
        yield from self.model.named_parameters()

    def hidden(self, row: PackedRow, context: SparseContext, received: Tensor | None = None) -> Tensor:
        """[T, hidden] after the stage's layers.

        Args:
            received: [T, hidden] from the stage before; None on the first.
        """
        return self.inside(lambda: self._hidden(row, context, received))

    def output(self, row: PackedRow, context: SparseContext, received: Tensor | None, denominator: int) -> Tensor:
        """What the stage's backward begins with: on the last one the part of a mean loss, else `hidden`."""

        def loss() -> Tensor:
            return self._loss_sum(row, context, self._hidden(row, context, received)) / denominator

        return self.inside(loss) if self.is_last else self.hidden(row, context, received)

    def _hidden(self, row: PackedRow, context: SparseContext, received: Tensor | None) -> Tensor:
        inputs = {"input_ids": row.input_ids} if received is None else {"inputs_embeds": received[None]}
        output = self.model.base_model(**inputs, position_ids=row.position_ids, use_cache=False, sparse=context)
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def _loss_sum(self, row: PackedRow, context: SparseContext, hidden: Tensor) -> Tensor:
        """Cross-entropy summed over the row's target tokens; exactly 0 where it has none."""
        if not row.targets.numel():  # a chunk may have none: it must not hold a gradient of the head's size for it
            return hidden[row.target_index].sum()
        with context.clock.measure("head"):
            return self.cross_entropy(hidden[row.target_index], self.head, row.targets, context.clock)


def _call(compute: Callable[[], Tensor]) -> Tensor:
    return compute()


def cut(model: PreTrainedModel, layers: Sequence[int]) -> list[Stage]:
    """The decoder in stages of so many layers each; parameters are shared with it, not copied.

    Raises:
        InputError: the numbers do not add up to the model's layers, or one is below 1.
    """
    total = model.config.num_hidden_layers
    if sum(layers) != total or min(layers) < 1:
        raise InputError(f"stages of {list(layers)} layers for a model of {total}; each needs one, and together all")
    edges, count = [*accumulate(layers, initial=0)], len(layers)
    if count == 1:
        return [Stage.whole(model)]
    return [
        Stage(_part(model, range(a, b), place == 0, place == count - 1), place, count, range(a, b), _names(model))
        for place, (a, b) in enumerate(pairwise(edges))
    ]


def _names(model: PreTrainedModel) -> frozenset[str]:
    return frozenset(name for name, _ in model.named_parameters())


def _part(model: PreTrainedModel, layers: range, first: bool, last: bool) -> PreTrainedModel:
    base = model.base_model
    own = nn.ModuleList()
    for number in layers:
        own.add_module(str(number), base.layers[number])  # type: ignore[arg-type, operator, union-attr, index]
    inner: dict[str, nn.Module | None] = {"layers": own}
    if not first:
        inner["embed_tokens"] = None
    if not last:
        inner["norm"] = nn.Identity()
    outer: dict[str, nn.Module | None] = {model.base_model_prefix: _with(base, inner)}
    if not last:
        outer["lm_head"] = None
    return _with(model, outer)  # type: ignore[return-value]


def _with(module: nn.Module, members: dict[str, nn.Module | None]) -> nn.Module:
    """The same module with other members; everything else is shared."""
    found = copy.copy(module)
    found.__dict__["_modules"] = {**module._modules, **members}
    return found


def tied_elsewhere(stages: Sequence[Stage]) -> nn.Parameter | None:
    """Of a worker's stages, the embedding or head that another worker holds as well, where the model ties them."""
    some = stages[0]
    ends = [stage.is_first or stage.is_last for stage in stages]
    if not some.model.config.tie_word_embeddings or some.count == 1 or sum(ends) != 1:
        return None
    end = stages[ends.index(True)]
    if end.is_last:
        return end.head
    embedding: nn.Parameter = end.model.get_input_embeddings().weight  # type: ignore[assignment]
    return embedding


def untie(stages: Sequence[Stage]) -> None:
    """Give a worker's last stage a head of its own where the model ties it to an embedding on another worker."""
    for stage in stages:
        if stage.is_last and not stage.is_first and tied_elsewhere(stages) is not None:
            head = stage.model.get_output_embeddings()
            head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
