"""Tensor parallelism: one decoder layer's heads and feed-forward spread over ranks, from outside.

In: a Qwen2-, Qwen3- or Llama-family decoder of transformers, whole or a pipeline stage, with or without LoRA layers of
peft. Out: the same modules with this rank's part of each matrix, and `TensorParallel`, which knows the parts.
Projections into heads and feed-forward are split by rows, those back by columns, embedding and head by vocabulary
(Shoeybi et al. 2019, Megatron-LM, section 3); everything between is split by tokens (see `token_shards`).

Parameters stay plain tensors, and the collectives are our own. torch's DTensor styles take a row of 7 tokens on two
ranks for one of 8 or 6, because a shard's length tells them the whole's: the ranks then wait for messages of different
sizes. And gradients that are DTensors could not be views of one flat buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from sparsebalance.attention.clock import TermClock
from sparsebalance.planning.errors import InputError
from sparsebalance.training.token_shards import gather_tokens, scatter_tokens
from sparsebalance.training.vocabulary_loss import vocabulary_parallel_cross_entropy

BY_ROWS = (
    ("self_attn", "q_proj"),
    ("self_attn", "k_proj"),
    ("self_attn", "v_proj"),
    ("mlp", "gate_proj"),
    ("mlp", "up_proj"),
)
BY_COLUMNS = (("self_attn", "o_proj"), ("mlp", "down_proj"))
WAY_OUT = "use a dense Qwen2-, Qwen3- or Llama-family decoder, or set parallel.tp to 1"
Kind = Literal["rows", "columns", "replicated", "first"]
Named = Iterable[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class Split:
    """How one parameter is spread over the ranks.

    Attributes:
        kind: "rows" and "columns" are cut in nearly equal, consecutive parts. Of a "replicated" one every rank holds
            all, and its gradient on a rank is a part of the sum. "first" is the bias of a layer whose outputs are
            summed over ranks: on rank 0 all of it, on the others zeros that do not train.
        shape: of the whole.
        trainable: whether the whole is, and so has moments in an optimiser: on every rank that trains a part of it.
    """

    kind: Kind
    shape: tuple[int, ...]
    trainable: bool

    @property
    def dim(self) -> int | None:
        """The dimension that is cut."""
        return {"rows": 0, "columns": 1}.get(self.kind)


@dataclass(frozen=True)
class TensorParallel:
    """One rank of a tensor-parallel model. Methods that say so are collective: every rank of the group calls them.

    Attributes:
        group, rank, degree: the ranks that share the model, this one's place, and their number.
        vocabulary: rows of the whole embedding and head.
        splits: parameter name -> how it is spread; a tied weight under both of its names.
    """

    group: dist.ProcessGroup
    rank: int
    degree: int
    vocabulary: int
    splits: dict[str, Split]

    def cross_entropy(self, hidden: Tensor, weight: Tensor, targets: Tensor, clock: TermClock | None = None) -> Tensor:
        """In place of `linear_cross_entropy`, with this rank's part of the head's weight; collective."""
        first = _edge(self.vocabulary, self.rank, self.degree)
        return vocabulary_parallel_cross_entropy(hidden, weight, targets, first, self.group, clock)

    def complete_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Sum the gradients of replicated parameters over the ranks, in place; collective.

        Once a step, after the last backward: all other gradients are complete for this rank's part without it.

        Args:
            gradients: by parameter name; the same names and shapes on all ranks.
        """
        partial = [gradient for name, gradient in gradients.items() if self.splits[name].kind == "replicated"]
        if not partial:
            return
        summed = torch.cat([gradient.flatten() for gradient in partial])
        dist.all_reduce(summed, group=self.group)
        for gradient, part in zip(partial, summed.split([gradient.numel() for gradient in partial])):
            gradient.copy_(part.view_as(gradient))

    def counted_once(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those that count on this rank in a sum over ranks: replicated parameters do on rank 0 alone."""
        return {
            name: gradient
            for name, gradient in gradients.items()
            if self.splits[name].kind != "replicated" or self.rank == 0
        }

    def whole(self, name: str, part: Tensor) -> Tensor:
        """The ranks' parts of a parameter, or of anything of its shape such as an optimiser's moment, put together
        on every rank; collective. Of a "first" one rank 0's part is the whole, and others' values do not matter.
        """
        split = self.splits[name]
        if split.dim is None:
            whole = part.clone()
            if split.kind == "first":
                dist.broadcast(whole, group=self.group, group_src=0)
            return whole
        lengths = [stop - start for start, stop in (self._range(split, rank) for rank in range(self.degree))]
        longest = max(lengths)
        rows = part.movedim(split.dim, 0)
        padded = rows.new_zeros(longest, *rows.shape[1:])
        padded[: rows.shape[0]] = rows
        gathered = rows.new_empty(self.degree * longest, *rows.shape[1:])
        dist.all_gather_single(gathered, padded, group=self.group)
        parts = [one[:length] for one, length in zip(gathered.split(longest), lengths)]
        return torch.cat(parts).movedim(0, split.dim).contiguous()

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a whole parameter, or of anything of its shape; a copy.

        Raises:
            InputError: a tensor of another shape.
        """
        split = self.splits[name]
        if tuple(whole.shape) != split.shape:
            raise InputError(
                f"{name} has shape {list(whole.shape)}, but the model's is {list(split.shape)}; "
                "give the whole tensor of the same model"
            )
        if split.kind == "first" and self.rank > 0:
            return torch.zeros_like(whole)
        if split.dim is None:
            return whole.clone()
        start, stop = self._range(split, self.rank)
        return whole.narrow(split.dim, start, stop - start).clone()

    def whole_state(self, parameters: Named) -> Iterator[tuple[str, Tensor]]:
        """Name and whole tensor of each, one at a time, so that a rank need not hold them all; collective."""
        for name, parameter in parameters:
            yield name, self.whole(name, parameter.detach())

    @torch.no_grad()
    def load(self, parameters: Named, state: Mapping[str, Tensor]) -> None:
        """Fill the parameters with this rank's parts of whole tensors.

        Raises:
            InputError: a tensor is missing, or has another shape.
        """
        for name, parameter in parameters:
            if name not in state:
                raise InputError(f"the state has no {name}; give the whole tensors of the same model")
            parameter.copy_(self.part(name, state[name]))

    def _range(self, split: Split, rank: int) -> tuple[int, int]:
        size = split.shape[split.dim or 0]
        return _edge(size, rank, self.degree), _edge(size, rank + 1, self.degree)


def check_tensor_degree(heads: int, kv_heads: int, degree: int) -> None:
    """Raises:
    InputError: whole heads cannot be shared out over `degree` ranks.
    """
    if degree >= 1 and heads % degree == 0 and kv_heads % degree == 0:
        return
    possible = [str(d) for d in range(1, kv_heads + 1) if heads % d == 0 and kv_heads % d == 0]
    raise InputError(
        f"{heads} query heads and {kv_heads} key/value heads cannot be split over tp {degree}; "
        f"set parallel.tp to {' or '.join(possible)}"
    )


def parallelize(model: PreTrainedModel, group: dist.ProcessGroup) -> TensorParallel:
    """Leave this rank's part of each parameter in `model`, and let its layers exchange tokens.

    Every rank of `group` calls it with the same whole weights, after peft has put its layers in, and before gradients
    or an optimiser refer to the parameters; then all ranks run the same micro-batches. The whole model may be cut in
    stages afterwards, or `model` may be a stage; of several on one worker, the whole goes first (a tied weight would
    be split twice). It is called with the whole row's `input_ids` and `position_ids` [1, T], as in one process:

    - Hidden states between stages are shards, [1, shard_tokens(T, degree), hidden]: what a stage without the final
      norm returns, and what one without embedding takes as `inputs_embeds`. A rank sends them to the rank of the same
      place in the next stage, and gets back a gradient that is complete for its shard.
    - After the final norm every rank has all tokens, [1, T or a few more, hidden]: padding follows the T tokens.
    - The loss is `TensorParallel.cross_entropy`; the head's own forward would give this rank's logits alone.

    Args:
        group: of the tensor-parallel ranks; of a device mesh, `mesh["tp"].get_group()`.

    Raises:
        InputError: heads, feed-forward or vocabulary do not go round, or the model has matrices that are not known.
    """
    if not isinstance(model, PreTrainedModel):
        raise InputError(
            f"a {type(model).__name__} cannot be split, but a transformers model can, with its LoRA layers inside; "
            "give peft_model.get_base_model()"
        )
    base, head = model.base_model, model.get_output_embeddings()
    layers: list[nn.Module] = list(getattr(base, "layers", []))
    kinds = _kinds(getattr(base, "embed_tokens", None), layers, head)
    splits = _splits(model, kinds)
    config, degree, rank = model.config, group.size(), group.rank()
    check_tensor_degree(config.num_attention_heads, config.num_key_value_heads, degree)
    for what, size in (("vocabulary", config.vocab_size), ("feed-forward width", config.intermediate_size)):
        if size < degree:
            raise InputError(f"a {what} of {size} cannot be split over tp {degree}; set parallel.tp to {size} or less")
    tensor = TensorParallel(group, rank, degree, config.vocab_size, splits)
    # In place: tied weights stay tied, and stages that were cut before go on sharing them.
    for name, parameter in model.named_parameters():
        parameter.data = tensor.part(name, parameter.data)
        if splits[name].kind == "first" and rank > 0:
            parameter.requires_grad_(False)
    _exchange_tokens(base, layers, group)
    if base.embed_tokens is not None:
        base.embed_tokens.forward = _lookup(base.embed_tokens, _edge(config.vocab_size, rank, degree), group)  # type: ignore[union-attr, arg-type, method-assign]
    return tensor


def _edge(size: int, place: int, degree: int) -> int:
    """Where part `place` of `degree` nearly equal parts begins."""
    return size * place // degree


def _kinds(
    embedding: nn.Module | None, layers: Iterable[nn.Module], head: nn.Module | None
) -> dict[nn.Parameter, Kind]:
    """How each matrix, and each bias of one, is spread."""
    kinds: dict[nn.Parameter, Kind] = {}
    for module, plain in ((embedding, nn.Embedding), (head, nn.Linear)):
        if module is None:
            continue
        if type(module) is not plain:
            raise InputError(
                f"embedding or head is a {type(module).__name__}, but tensor parallelism splits a plain "
                f"{plain.__name__}; leave it out of peft's target_modules and modules_to_save"
            )
        kinds[cast(nn.Parameter, module.weight)] = "rows"
    for layer in layers:
        for path in BY_ROWS:
            _mark(kinds, _member(layer, path), path[-1], summed=False)
        for path in BY_COLUMNS:
            _mark(kinds, _member(layer, path), path[-1], summed=True)
    return kinds


def _member(layer: nn.Module, path: tuple[str, str]) -> nn.Module:
    try:
        return layer.get_submodule(".".join(path))
    except AttributeError as error:
        raise InputError(
            f"{type(layer).__name__} has no {'.'.join(path)}, which tensor parallelism would split; {WAY_OUT}"
        ) from error


def _mark(kinds: dict[nn.Parameter, Kind], module: nn.Module, name: str, summed: bool) -> None:
    """A linear layer, plain or with LoRA beside it; `summed`: split by columns, its outputs summed over ranks."""
    base = getattr(module, "base_layer", module)
    plain_lora = hasattr(module, "lora_A") and not len(module.lora_magnitude_vector) and not module.lora_variant  # type: ignore[arg-type]
    if type(base) is not nn.Linear or not (base is module or plain_lora):
        raise InputError(
            f"{name} is a {type(module).__name__} of a {type(base).__name__}, but tensor parallelism splits plain "
            "linear layers with or without plain LoRA; leave DoRA, other adapters and quantization out"
        )
    _mark_linear(kinds, base, "columns" if summed else "rows", summed)
    # LoRA adds B A x: by rows of B where outputs are split, by columns of A, for parts of the sum, where they are not.
    for linear in getattr(module, "lora_A", {}).values():
        _mark_linear(kinds, linear, "columns" if summed else "replicated", summed)
    for linear in getattr(module, "lora_B", {}).values():
        _mark_linear(kinds, linear, "replicated" if summed else "rows", summed)


def _mark_linear(kinds: dict[nn.Parameter, Kind], linear: nn.Linear, kind: Kind, summed: bool) -> None:
    kinds[cast(nn.Parameter, linear.weight)] = kind
    if linear.bias is not None:
        kinds[linear.bias] = "first" if summed else "rows"


def _splits(model: nn.Module, kinds: Mapping[nn.Parameter, Kind]) -> dict[str, Split]:
    splits = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.ndim > 1 and parameter not in kinds:
            raise InputError(f"{name} is a matrix that tensor parallelism does not know; {WAY_OUT}")
        # Norms' weights: those between the layers see this rank's tokens, those of queries and keys its heads.
        kind = kinds.get(parameter, "replicated")
        splits[name] = Split(kind, tuple(parameter.shape), parameter.requires_grad)
    return splits


def _exchange_tokens(base: nn.Module, layers: Iterable[nn.Module], group: dist.ProcessGroup) -> None:
    """Gather tokens before attention and feed-forward, sum and cut after them, gather after the final norm."""

    def whole_row(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        # Padding must not reach attention. The row's length comes with the call: a recompute is of another row.
        tokens = kwargs["position_embeddings"][0].shape[1]
        hidden = gather_tokens(kwargs["hidden_states"], group)[:, :tokens]
        return args, {**kwargs, "hidden_states": hidden}

    def all_tokens(module: nn.Module, args: tuple[Tensor]) -> Tensor:
        return gather_tokens(args[0], group)

    def own_tokens(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return scatter_tokens(output, group)

    def after_norm(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return gather_tokens(output, group)

    for layer in layers:
        layer.get_submodule("self_attn").register_forward_pre_hook(whole_row, with_kwargs=True)
        layer.get_submodule("mlp").register_forward_pre_hook(all_tokens)
        for path in BY_COLUMNS:
            _member(layer, path).register_forward_hook(own_tokens)
    if not isinstance(base.norm, nn.Identity):
        base.norm.register_forward_hook(after_norm)  # type: ignore[operator, union-attr]


def _lookup(embedding: nn.Embedding, first: int, group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    """The embedding's forward: ids of the whole row -> this rank's tokens, rows of the vocabulary from all ranks."""
    rows, padding = embedding.weight.shape[0], embedding.padding_idx
    own_padding = padding - first if padding is not None and first <= padding < first + rows else None

    def forward(ids: Tensor) -> Tensor:
        row = ids - first
        elsewhere = (row < 0) | (row >= rows)
        found = functional.embedding(row.masked_fill(elsewhere, 0), embedding.weight, own_padding)
        return scatter_tokens(found.masked_fill(elsewhere[..., None], 0.0), group)

    return forward
