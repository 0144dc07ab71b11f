"""What can be told of tensor parallelism without other ranks: what is refused, and a group of one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, MixtralConfig, PreTrainedConfig, PreTrainedModel

from sparsebalance.planning.errors import InputError
from sparsebalance.training.tensor_parallel import check_tensor_degree, parallelize
from sparsebalance.training.token_shards import gather_tokens, scatter_tokens
from tests.models import engine, example, gradients, largest_difference, tiny_model, unit


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "degree", "possible"),
    [
        (4, 2, 4, "1 or 2"),
        (28, 4, 8, "1 or 2 or 4"),
        (4, 2, 3, "1 or 2"),
        (6, 6, 4, "1 or 2 or 3 or 6"),
        (4, 4, 0, "1 or"),
    ],
)
def test_heads_that_do_not_go_round_are_refused(heads: int, kv_heads: int, degree: int, possible: str) -> None:
    message = f"^{heads} query heads and {kv_heads} key/value heads cannot be split over tp {degree}; .* {possible}"
    with pytest.raises(InputError, match=message):
        check_tensor_degree(heads, kv_heads, degree)


@pytest.mark.parametrize(("heads", "kv_heads", "degree"), [(4, 2, 1), (4, 2, 2), (28, 4, 4), (6, 6, 3)])
def test_whole_heads_go_round(heads: int, kv_heads: int, degree: int) -> None:
    check_tensor_degree(heads, kv_heads, degree)


def test_one_rank_alone_is_the_model_itself(group: dist.ProcessGroup) -> None:
    examples = [example(30, 9), example(1, 0), example(17, 1)]
    units = [unit(examples, 0, 1), unit(examples, 2)]
    model = tiny_model()
    wanted = engine(model).run(units, examples, 10).loss, gradients(model)
    tensor = parallelize(model, group)
    assert engine(model).run(units, examples, 10).loss == wanted[0]
    assert largest_difference(wanted[1], gradients(model)) == 0.0
    assert {split.kind for split in tensor.splits.values()} == {"rows", "columns", "replicated"}
    assert "lm_head.weight" in tensor.splits  # under both names, for a stage that has the head alone


def test_gathering_and_scattering_are_each_others_gradient(group: dist.ProcessGroup) -> None:
    row = torch.randn(1, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: gather_tokens(x, group), row)
    assert torch.autograd.gradcheck(lambda x: scatter_tokens(x, group), row)


def tiny(config: PreTrainedConfig) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def test_unknown_decoders_are_refused(group: dist.ProcessGroup) -> None:
    with pytest.raises(InputError, match=r"^transformer.wpe.weight is a matrix .* does not know; use a dense Qwen2"):
        parallelize(tiny(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=9, n_positions=8)), group)
    experts = MixtralConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=9, num_local_experts=2,
    )  # fmt: skip
    with pytest.raises(InputError, match=r"^MixtralDecoderLayer has no mlp.gate_proj, .* use a dense Qwen2"):
        parallelize(tiny(experts), group)


def test_a_matrix_beside_the_known_ones_is_refused(group: dist.ProcessGroup) -> None:
    model = tiny_model()
    model.base_model.layers[1].mlp.router = nn.Linear(32, 2)  # type: ignore[union-attr, operator, index]
    with pytest.raises(InputError, match=r"^model.layers.1.mlp.router.weight is a matrix"):
        parallelize(model, group)


def test_layers_that_are_not_plain_are_refused(group: dist.ProcessGroup) -> None:
    class Packed(nn.Linear):
        """Stands for a quantized layer."""

    model = tiny_model()
    model.base_model.layers[0].mlp.up_proj = Packed(32, 48)  # type: ignore[union-attr, operator, index]
    with pytest.raises(InputError, match=r"^up_proj is a Packed of a Packed, .* quantization"):
        parallelize(model, group)
    model = tiny_model()
    model.lm_head = Packed(32, 97)
    with pytest.raises(InputError, match=r"^embedding or head is a Packed"):
        parallelize(model, group)


def test_what_is_not_a_model_is_refused(group: dist.ProcessGroup) -> None:
    with pytest.raises(InputError, match=r"^a Sequential cannot be split, .* give peft_model.get_base_model"):
        parallelize(nn.Sequential(), group)  # type: ignore[arg-type]


def test_tensors_of_another_model_are_refused(group: dist.ProcessGroup) -> None:
    model = tiny_model()
    tensor = parallelize(model, group)
    state = dict(tensor.whole_state(model.named_parameters()))
    norm = state.pop("model.norm.weight")
    with pytest.raises(InputError, match=r"^the state has no model.norm.weight"):
        tensor.load(model.named_parameters(), state)
    with pytest.raises(InputError, match=r"^model.norm.weight has shape \[31\], but the model's is \[32\]"):
        tensor.load(model.named_parameters(), {**state, "model.norm.weight": norm[1:]})


def test_adapters_that_are_not_plain_lora_are_refused(group: dist.ProcessGroup) -> None:
    peft = pytest.importorskip("peft")
    model = tiny_model("float32")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True))
    with pytest.raises(InputError, match=r"^a PeftModel cannot be split"):
        parallelize(adapted, group)
    with pytest.raises(InputError, match=r"^q_proj is a Linear of a Linear, .* leave DoRA"):
        parallelize(adapted.get_base_model(), group)
    model = tiny_model("float32")
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(InputError, match=r"leave it out of peft's target_modules"):
        parallelize(model, group)
