"""Run by forked.py in each tensor-parallel process: the split model against the whole one; JSON on rank 0."""

from __future__ import annotations

import contextlib
import copy
import datetime
import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from sparsebalance.attention.interface import PackedLayout
from sparsebalance.attention.moba import MoBARouter
from sparsebalance.attention.state import SampleState
from sparsebalance.planning.plan import MicroBatch, chain_lengths
from sparsebalance.training import vocabulary_loss
from sparsebalance.training.data import IGNORE, Example
from sparsebalance.training.loss import linear_cross_entropy
from sparsebalance.training.packing import PackedRow, pack
from sparsebalance.training.sparse_attention import SparseContext, activate
from sparsebalance.training.stage import Stage, cut
from sparsebalance.training.tensor_parallel import TensorParallel, parallelize
from sparsebalance.training.vocabulary_loss import vocabulary_parallel_cross_entropy
from sparsebalance.training.weight_gradients import Deferred, Splitter
from tests.models import VOCABULARY
from tests.unit.test_chunks import BLOCK, planned

PADDING = 60  # a token whose embedding does not train
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """Samples of these lengths; those over `size` run in chunks, of which all but the last `keep` run forward twice."""

    lengths: tuple[int, ...]
    size: int = 100
    keep: int = 99
    family: str = "qwen2"
    checkpointing: bool = False
    granularity: str = "token"
    dtype: torch.dtype = torch.float64
    lora: bool = False
    stages: int = 1
    put_off: bool = False  # weight gradients
    watched: bool = False  # the sizes of all tensors

    @property
    def examples(self) -> list[Example]:
        """Random tokens and targets; about two thirds of the places have one."""
        rng = np.random.default_rng(sum(self.lengths))
        ids = [rng.integers(0, VOCABULARY, n).astype(np.int32) for n in self.lengths]
        wanted = [rng.integers(0, VOCABULARY, n).astype(np.int32) for n in self.lengths]
        for one in wanted:
            one[1:][rng.random(len(one) - 1) < 1 / 3] = IGNORE
        ids[0][0] = PADDING
        return [Example(i, w) for i, w in zip(ids, wanted)]

    @property
    def units(self) -> list[MicroBatch]:
        return planned(list(self.lengths), self.size, self.keep)


PACKED, CHUNKED = (30, 1, 17, 9), (22, 9, 13, 3, 1)
CASES = {
    "packed": Case(PACKED, watched=True),
    "packed, checkpointing": Case(PACKED, checkpointing=True),
    "packed, blocks": Case(PACKED, granularity="block"),
    "7 tokens": Case((7,)),
    "3 tokens": Case((3,)),
    "1 token": Case((1,)),
    "7, 1 and 3 tokens packed": Case((7, 1, 3)),
    "chunks": Case(CHUNKED, 8),
    "chunks, one kept, checkpointing": Case(CHUNKED, 8, keep=1, checkpointing=True),
    "untied, biases": Case(CHUNKED, 8, family="llama"),
    "norms of heads": Case(PACKED, family="qwen3"),
    "stages": Case(CHUNKED, 8, stages=2),
    "stages, untied, checkpointing": Case(CHUNKED, 8, keep=2, family="llama", stages=2, checkpointing=True),
    "weight gradients put off": Case(PACKED, put_off=True),
    "lora": Case(CHUNKED, 8, lora=True),
    "lora, untied, biases, checkpointing": Case(CHUNKED, 8, keep=1, family="llama", lora=True, checkpointing=True),
    "fp32": Case(CHUNKED, 8, dtype=torch.float32),
}
# On three ranks the last ones hold nothing but padding of short rows, and nothing divides.
THREE = ("packed", "7 tokens", "3 tokens", "1 token", "chunks, one kept, checkpointing", "untied, biases", "stages")
HAS_PEFT = importlib.util.find_spec("peft") is not None


def build(case: Case, degree: int) -> PreTrainedModel:
    """Two heads for each rank; random weights, norms and biases, so large that attention differs by place."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 16 * degree, "intermediate_size": 47, "num_hidden_layers": 2,
        "num_attention_heads": 2 * degree, "num_key_value_heads": degree, "max_position_embeddings": 512,
    }  # fmt: skip
    config = {
        "qwen2": lambda: Qwen2Config(**sizes, tie_word_embeddings=True, pad_token_id=PADDING),
        "llama": lambda: LlamaConfig(**sizes, tie_word_embeddings=False, attention_bias=True, mlp_bias=True),
        "qwen3": lambda: Qwen3Config(**sizes, tie_word_embeddings=False, head_dim=12),
    }[case.family]()
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=case.dtype)
    activate(model, BLOCK, 3, case.granularity)  # type: ignore[arg-type]
    if case.lora:
        from peft import LoraConfig, get_peft_model

        layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        adapted = get_peft_model(model, LoraConfig(r=3, target_modules=layers, lora_bias=case.family == "llama"))
        model = adapted.get_base_model()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            around = 1.0 if "norm" in name else 0.0
            spread = 0.1 if "lora" in name else 0.2
            parameter.copy_(around + spread * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    if case.checkpointing:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def run(case: Case, stages: Sequence[Stage], loss: Loss) -> float:
    """Forward and backward of all units, as the engine does; gradients add up in the parameters."""
    examples, units, total = case.examples, case.units, 0.0
    targets = sum(one.target_count for one in examples)
    splitters = [Splitter(stage.model) for stage in stages] if case.put_off else []

    def graph(row: PackedRow, context: SparseContext) -> list[tuple[Tensor | None, Tensor]]:
        """What each stage received and made; the last one the loss."""
        parts: list[tuple[Tensor | None, Tensor]] = []
        for stage in stages:
            received = parts[-1][1].detach().requires_grad_() if parts else None
            hidden = stage.hidden(row, context, received)
            if stage.is_last:
                hidden = loss(hidden[row.target_index], stage.head, row.targets) / targets
            parts.append((received, hidden))
        return parts

    first = 0
    for length in chain_lengths([unit.segments for unit in units]):
        chain, first = units[first : first + length], first + length
        state = SampleState(chain[0].segments[0].sample_length, BLOCK) if length > 1 else None
        running = []
        for unit in chain:
            row = pack(unit, examples)
            context = SparseContext(
                PackedLayout(row.lengths_q, row.lengths_k, BLOCK), unit.budgets,
                MoBARouter(case.granularity),  # type: ignore[arg-type]
                keep_selections=case.checkpointing or unit.recompute, state=state,
            )  # fmt: skip
            deferred = Deferred()
            if unit.recompute:
                with torch.no_grad():
                    graph(row, context)
                parts = None
            elif splitters:
                with splitters[0].collecting(deferred):
                    parts = graph(row, context)
            else:
                parts = graph(row, context)
            running.append((row, context, parts, deferred))
        for row, context, parts, deferred in reversed(running):
            parts = graph(row, context) if parts is None else parts
            gradient = None
            for received, made in reversed(parts):
                made.backward(gradient)
                gradient = None if received is None else received.grad
            deferred.run()
            total += float(parts[-1][1].detach())
    return total


class ShapesSeen(TorchDispatchMode):
    """The sizes of all tensors that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.sizes.update(size for one in tree_flatten(out)[0] if isinstance(one, Tensor) for size in one.shape)
        return out


def flat_gradients(model: PreTrainedModel) -> Tensor:
    """Gradients as views of one buffer, as a run holds them."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    buffer = torch.zeros(sum(parameter.numel() for parameter in parameters), dtype=parameters[0].dtype)
    for parameter, part in zip(parameters, buffer.split([parameter.numel() for parameter in parameters])):
        parameter.grad = part.view_as(parameter)
    return buffer


def largest(values: Sequence[float]) -> list[float]:
    """Each value's maximum over ranks."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()  # type: ignore[no-any-return]


def apart(found: Tensor, wanted: Tensor) -> float:
    """Relative to the largest value that is wanted."""
    if found.shape != wanted.shape:
        return float("inf")
    if not wanted.numel():
        return 0.0
    scale = float(wanted.abs().max())
    return float((found - wanted).abs().max()) / (scale or 1.0)


def compare(case: Case, group: dist.ProcessGroup) -> dict[str, Any]:
    """Relative differences from one process: loss, each gradient, and the norm of all gradients."""
    alone = build(case, group.size())
    shared = copy.deepcopy(alone)
    wanted_loss = run(case, [Stage.whole(alone)], linear_cross_entropy)
    wanted = {n: p.grad for n, p in alone.named_parameters() if p.requires_grad}
    assert all(gradient is not None for gradient in wanted.values())

    tensor = parallelize(shared, group)
    stages = [Stage.whole(shared)] if case.stages == 1 else cut(shared, [1, 1])
    buffer = flat_gradients(shared)
    seen = ShapesSeen()
    with seen if case.watched else contextlib.nullcontext():
        loss = run(case, stages, tensor.cross_entropy)
    own = {n: p.grad for n, p in shared.named_parameters() if p.grad is not None}
    tensor.complete_gradients(own)

    gradients = {n: apart(gradient, tensor.part(n, wanted[n])) for n, gradient in own.items()}  # type: ignore[arg-type]
    squares = (g.double().square().sum() for g in tensor.counted_once(own).values())
    share = sum(squares, torch.zeros((), dtype=torch.float64))
    dist.all_reduce(share)
    norm = sum(float(g.double().square().sum()) for g in wanted.values()) ** 0.5  # type: ignore[union-attr]
    worst = largest([gradients.get(n, 0.0) for n in wanted])  # rank 0 alone has biases that are added once
    loss_apart, norm_apart = largest([abs(loss / wanted_loss - 1), abs(float(share) ** 0.5 / norm - 1)])
    return {
        "loss": loss_apart,
        "gradients": dict(zip(wanted, worst)),
        "norm": norm_apart,
        "in one buffer": {g.untyped_storage().data_ptr() for g in own.values()} == {buffer.data_ptr()},  # type: ignore[union-attr]
        "sizes": sorted(seen.sizes),
        "parameters": sum(p.numel() for p in shared.parameters()) / sum(p.numel() for p in alone.parameters()),
    }


def states(group: dist.ProcessGroup) -> dict[str, bool]:
    """Whole tensors out of a split model and into one."""
    case = Case((9,), family="llama")
    whole = build(case, group.size())
    before = {n: p.detach().clone() for n, p in whole.named_parameters()}
    tensor = parallelize(whole, group)
    out = dict(tensor.whole_state(whole.named_parameters()))
    doubled = {name: 2 * value for name, value in before.items()}
    tensor.load(whole.named_parameters(), doubled)
    again = dict(tensor.whole_state(whole.named_parameters()))
    moments = {n: tensor.whole(n, tensor.part(n, value)) for n, value in before.items()}
    return {
        "out": same(out, before),
        "in": same(again, doubled),
        "of the same shape": same(moments, before),
        "first rank's biases": biases_are_once(whole, tensor),
    }


def biases_are_once(model: PreTrainedModel, tensor: TensorParallel) -> bool:
    """Of layers whose outputs are summed: rank 0 has and trains them, the others add zeros."""
    biases = [p for n, p in model.named_parameters() if n.endswith(("o_proj.bias", "down_proj.bias"))]
    return len(biases) == 4 and all((p.requires_grad and bool(p.any())) == (tensor.rank == 0) for p in biases)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    equal = a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
    return largest([float(not equal)]) == [0.0]


def shard_sizes(group: dist.ProcessGroup) -> list[int]:
    """Of hidden states that a stage without a final norm returns, for rows of 7, 3 and 1 tokens."""
    sizes = []
    for tokens in (7, 3, 1):
        case = Case((tokens,))
        model = build(case, group.size())
        parallelize(model, group)
        stage = cut(model, [1, 1])[0]
        row = pack(case.units[0], case.examples)
        context = SparseContext(PackedLayout(row.lengths_q, row.lengths_k, BLOCK), (3, 3), MoBARouter("token"))
        sizes.append(stage.hidden(row, context).shape[0])
    return sizes


def far_apart(group: dist.ProcessGroup) -> list[Any]:
    """The loss where each rank's largest logit is far from the others', and its gradient by one hidden state."""
    rank = group.rank()
    hidden = torch.tensor([[1e4, -1e4, *[0.0] * (group.size() - 2)]], requires_grad=True)
    weight = torch.eye(group.size())[rank : rank + 1].clone().requires_grad_()
    loss = vocabulary_parallel_cross_entropy(hidden, weight, torch.tensor([1]), rank, group)
    loss.backward()
    assert hidden.grad is not None
    dist.all_reduce(hidden.grad)
    return [float(loss.detach()), hidden.grad[0].tolist()]


def main() -> None:
    torch.set_num_threads(1)
    vocabulary_loss.SLICE_TARGETS = 7
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank, degree = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None
    names = CASES if degree == 2 else THREE
    found: dict[str, Any] = {n: compare(CASES[n], group) for n in names if HAS_PEFT or not CASES[n].lora}
    found |= {"states": states(group), "shard sizes": shard_sizes(group), "far apart": far_apart(group)}
    if rank == 0:
        print(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
