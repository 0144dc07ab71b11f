"""Stages in one process: whatever the cut, the schedule and the split of backwards, loss and gradients are those of
the whole model run one sample after the other."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from transformers import PreTrainedModel

from sparsebalance.attention.interface import PackedLayout
from sparsebalance.planning.decoder import decoder_from_config
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.list_schedule import zero_bubble
from sparsebalance.planning.memory import MB, MemoryModel
from sparsebalance.planning.plan import Latency, MicroBatch, Segment, chain_lengths
from sparsebalance.planning.schedule import Schedule, compile_schedule, gpipe, interleaved, one_forward_one_backward
from sparsebalance.planning.simulator import StageCosts
from sparsebalance.planning.units import cut as cut_sample
from sparsebalance.training.config import AttentionConfig, ModelConfig
from sparsebalance.training.engine import Engine
from sparsebalance.training.gradients import FlatGradients
from sparsebalance.training.model import build_model
from sparsebalance.training.packing import pack
from sparsebalance.training.parallel import Ranks
from sparsebalance.training.stage import cut
from sparsebalance.training.weight_gradients import Deferred, Splitter
from tests.models import VOCABULARY, example, gradients, largest_difference, samples, tiny_model, unit

LAYERS = 4
EXAMPLES = [example(30, 9), example(1, 0), example(17, 16), example(70, 33), example(6, 0), example(12, 5)]
TARGETS = sum(one.target_count for one in EXAMPLES)


def model_of(layers: int = LAYERS, dtype: str = "float64", checkpointing: bool = False) -> PreTrainedModel:
    sizes = ModelConfig(
        layers=layers, hidden=32, intermediate=48, heads=4, kv_heads=2, dtype=dtype, checkpointing=checkpointing,  # type: ignore[arg-type]
    )  # fmt: skip
    model = build_model(sizes, AttentionConfig(block_size=4, budget=3), VOCABULARY, 512, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    return model


def units_of(unit_size: int, layers: int = LAYERS, keep_chunks: int | None = None) -> list[MicroBatch]:
    """Long samples in chunks, the rest packed in pairs, with an empty unit between."""
    found: list[MicroBatch] = []
    short: list[Segment] = []

    def add(segments: Sequence[Segment], recompute: bool = False) -> None:
        found.append(MicroBatch(tuple(segments), (3,) * layers, Latency(0, 0), recompute))

    for sample in samples(EXAMPLES):
        chunks = cut_sample(sample, unit_size, 4)
        if len(chunks) > 1:
            for place, chunk in enumerate(chunks):
                add([chunk], keep_chunks is not None and place < len(chunks) - keep_chunks)
        else:
            short += chunks
    add([])
    for first in range(0, len(short), 2):
        add(short[first : first + 2])
    return found


def reference(model: PreTrainedModel) -> tuple[float, dict[str, torch.Tensor]]:
    whole = [MicroBatch((Segment.whole(s),), (3,) * LAYERS, Latency(0, 0)) for s in samples(EXAMPLES)]
    loss = Engine.whole(model, 4, "token").run(whole, EXAMPLES, TARGETS).loss
    return loss, gradients(model)


def in_one_process(schedule: Schedule, chains: Sequence[int], stages: int) -> Schedule:
    """All workers' actions as one worker's, in an order in which nothing waits."""
    program = compile_schedule(schedule, chains, stages)
    return (tuple(program.actions[number] for number, *_ in program.steps),)


def split_schedule(chains: tuple[int, ...], stages: int) -> Schedule:
    ms = torch.ones(stages, sum(chains), dtype=torch.float64).numpy()
    return zero_bubble(chains, StageCosts(ms, 1.5 * ms, ms))


SCHEDULES = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "zero_bubble": split_schedule,
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("layers", [(4,), (2, 2), (1, 2, 1), (1, 1, 1, 1)])
@pytest.mark.parametrize(("unit_size", "keep_chunks"), [(512, None), (16, None), (16, 1)])
def test_stages_give_the_loss_and_gradient_of_the_whole(
    name: str, layers: tuple[int, ...], unit_size: int, keep_chunks: int | None
) -> None:
    model = model_of()
    loss, wanted = reference(model)
    units = units_of(unit_size, keep_chunks=keep_chunks)
    chains = chain_lengths([unit.segments for unit in units])
    engine = Engine(tuple(cut(model, layers)), 4, "token")
    schedule = in_one_process(SCHEDULES[name](chains, len(layers)), chains, len(layers))
    result = engine.run(units, EXAMPLES, TARGETS, schedule=schedule)
    assert result.loss == pytest.approx(loss, rel=1e-12)
    assert largest_difference(wanted, gradients(model)) < 1e-12
    assert [time.budgets for time in result.units] == [unit.budgets for unit in units]


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble"])
def test_stages_recompute_layers_under_checkpointing(name: str) -> None:
    model = model_of(checkpointing=True)
    loss, wanted = reference(model)
    units = units_of(16)
    chains = chain_lengths([unit.segments for unit in units])
    engine = Engine(tuple(cut(model, (2, 2))), 4, "token", checkpointing=True)
    schedule = in_one_process(SCHEDULES[name](chains, 2), chains, 2)
    assert engine.run(units, EXAMPLES, TARGETS, schedule=schedule).loss == pytest.approx(loss, rel=1e-12)
    assert largest_difference(wanted, gradients(model)) < 1e-12


def test_interleaved_stages_give_the_loss_and_gradient_of_the_whole() -> None:
    model = model_of()
    loss, wanted = reference(model)
    units = units_of(512)
    schedule = in_one_process(interleaved(len(units), 2, 2), (1,) * len(units), 4)
    engine = Engine(tuple(cut(model, (1, 1, 1, 1))), 4, "token")
    assert engine.run(units, EXAMPLES, TARGETS, schedule=schedule).loss == pytest.approx(loss, rel=1e-12)
    assert largest_difference(wanted, gradients(model)) < 1e-12


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble"])
def test_low_precision_stays_within_its_error(name: str) -> None:
    _, exact = reference(model_of())
    model = model_of(dtype="bfloat16")
    units = units_of(512)
    chains = chain_lengths([unit.segments for unit in units])
    whole = Engine.whole(model, 4, "token").run(units, EXAMPLES, TARGETS)
    plain = gradients(model)
    engine = Engine(tuple(cut(model, (2, 2))), 4, "token")
    found = engine.run(units, EXAMPLES, TARGETS, schedule=in_one_process(SCHEDULES[name](chains, 2), chains, 2))
    assert found.loss == pytest.approx(whole.loss, rel=1e-2)
    assert largest_difference(plain, gradients(model)) < 2e-2
    assert set(exact) == set(plain)


def test_every_stage_needs_the_document_boundaries() -> None:
    """Packed documents on a stage that took the row for one document would attend across them."""
    model = model_of()
    packed = MicroBatch(tuple(Segment.whole(s) for s in samples(EXAMPLES)), (99,) * LAYERS, Latency(0, 0))
    joined = MicroBatch((Segment(0, 0, 136, 136, TARGETS),), (99,) * LAYERS, Latency(0, 0))
    one = type(EXAMPLES[0])(
        torch.cat([torch.from_numpy(e.input_ids) for e in EXAMPLES]).numpy(),
        torch.cat([torch.from_numpy(e.targets) for e in EXAMPLES]).numpy(),
    )
    engine = Engine(tuple(cut(model, (1, 2, 1))), 4, "token")
    order = in_one_process(gpipe((1,), 3), (1,), 3)
    with_boundaries = engine.run([packed], EXAMPLES, TARGETS, schedule=order).loss
    without = engine.run([joined], [one], TARGETS, schedule=order).loss
    apart = [MicroBatch((segment,), (99,) * LAYERS, Latency(0, 0)) for segment in packed.segments]
    assert with_boundaries == pytest.approx(
        Engine.whole(model, 4, "token").run(apart, EXAMPLES, TARGETS).loss, rel=1e-12
    )
    assert abs(without - with_boundaries) > 1e-3


def test_stages_keep_the_names_of_the_whole_and_share_its_parameters() -> None:
    model = model_of()
    stages = cut(model, (1, 2, 1))
    named = dict(model.named_parameters())
    found: dict[str, torch.nn.Parameter] = {}
    for stage in stages:
        found.update(stage.named_parameters())
    assert set(found) - set(named) == {"lm_head.weight"}  # tied to the embedding: under its own name on the last stage
    assert all(found[name] is named[name] for name in named)
    assert [list(stage.layers) for stage in stages] == [[0], [1, 2], [3]]
    assert len(list(model.parameters())) == len(named)  # untouched
    assert len(model.base_model.layers) == LAYERS


@pytest.mark.parametrize("layers", [(2, 1), (4, 1), (4, 0)])
def test_a_cut_that_does_not_fit_is_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="for a model of 4"):
        cut(model_of(), layers)


def test_probes_of_stages_are_those_of_the_whole() -> None:
    model = model_of()
    units = [unit for unit in units_of(16) if unit.segments]
    whole = Engine.whole(model, 4, "token").probe(units, EXAMPLES, 4)
    stages = Engine(tuple(cut(model, (2, 2))), 4, "token").probe(units, EXAMPLES, 4)
    assert set(whole) == set(stages)
    for key, probe in whole.items():
        assert probe.router == pytest.approx(stages[key].router)


def test_frozen_weights_get_no_gradient_where_backwards_are_split() -> None:
    """As with adapters: a layer whose weights are frozen passes gradients on and keeps nothing for later."""
    model = model_of()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name or "bias" in name)
    units = units_of(16)
    Engine.whole(model, 4, "token").run(units, EXAMPLES, TARGETS)
    wanted = gradients(model)
    chains = chain_lengths([unit.segments for unit in units])
    engine = Engine(tuple(cut(model, (2, 2))), 4, "token")
    engine.run(units, EXAMPLES, TARGETS, schedule=in_one_process(split_schedule(chains, 2), chains, 2))
    assert largest_difference(wanted, gradients(model)) < 1e-12


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_frozen_first_stage_runs(name: str) -> None:
    model = model_of()
    for key, parameter in model.named_parameters():
        parameter.requires_grad_("layers.2" in key or "layers.3.mlp" in key)
    loss, wanted = reference(model)
    units = units_of(16, keep_chunks=1)
    chains = chain_lengths([unit.segments for unit in units])
    engine = Engine(tuple(cut(model, (2, 2))), 4, "token")
    schedule = in_one_process(SCHEDULES[name](chains, 2), chains, 2)
    assert engine.run(units, EXAMPLES, TARGETS, schedule=schedule).loss == pytest.approx(loss, rel=1e-12)
    assert largest_difference(wanted, gradients(model)) < 1e-12
    assert FlatGradients(dict(engine.stages[0].named_parameters()), Ranks(0, 1)).norm() == 0


def test_deferred_weight_gradients_hold_inputs_and_output_gradients_once() -> None:
    model = tiny_model()
    splitter, deferred = Splitter(model), Deferred()
    layer = model.base_model.layers[0].mlp
    x = torch.randn(5, 32, dtype=torch.float64, requires_grad=True)
    with splitter.collecting(deferred):
        out = layer(x)
        out.backward(torch.ones_like(out))
    # gate and up read one input of 32, down reads one of 48; their outputs' gradients are 48, 48 and 32 wide.
    assert deferred.bytes == 8 * 5 * (32 + 48 + 48 + 48 + 32)
    assert layer.up_proj.weight.grad is None
    whole = Deferred()
    inputs = torch.randn(1, 5, 32, dtype=torch.float64, requires_grad=True)
    position = model.base_model.rotary_emb(inputs, torch.arange(5)[None])
    context = Engine.whole(model, 4, "token").context(one := unit(EXAMPLES, 4), pack(one, EXAMPLES))
    context.layout = PackedLayout.from_lengths((5,), 4)
    with splitter.collecting(whole):
        output = model.base_model.layers[0](inputs, position_embeddings=position, attention_mask=None, sparse=context)
        output.sum().backward()
    decoder = decoder_from_config(model.config.to_dict(), "tiny")
    assert MemoryModel(decoder, 4, "token", 3, "float64").deferred_mb(5, 1) * MB == pytest.approx(whole.bytes)
    wanted = torch.autograd.grad(layer(x).sum(), list(layer.parameters()))
    deferred.run()
    assert deferred.bytes == 0
    for parameter, gradient in zip(layer.parameters(), wanted, strict=True):
        assert torch.allclose(parameter.grad, gradient, rtol=1e-13)  # type: ignore[arg-type]


def test_a_stage_of_everything_is_the_model() -> None:
    model = tiny_model()
    (stage,) = cut(model, (2,))
    assert stage.model is model
    assert (stage.place, stage.count, list(stage.layers)) == (0, 1, [0, 1])


def with_adapters(model: PreTrainedModel) -> PreTrainedModel:
    """LoRA beside some matrices, everything else frozen; its second matrix is not zero, so that both have gradients."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    names = ["q_proj", "v_proj", "o_proj", "down_proj"]
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=names)).get_base_model()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return adapted


@pytest.mark.parametrize("name", SCHEDULES)
def test_adapters_train_on_stages_as_on_the_whole(name: str) -> None:
    pytest.importorskip("peft", reason="adapters need the extra `lora`")
    model = with_adapters(model_of())
    loss, wanted = reference(model)
    units = units_of(16, keep_chunks=1)
    chains = chain_lengths([unit.segments for unit in units])
    engine = Engine(tuple(cut(model, (1, 2, 1))), 4, "token")
    schedule = in_one_process(SCHEDULES[name](chains, 3), chains, 3)
    assert engine.run(units, EXAMPLES, TARGETS, schedule=schedule).loss == pytest.approx(loss, rel=1e-12)
    assert sum(float(gradient.abs().max()) > 0 for gradient in wanted.values()) == 2 * 4 * LAYERS
    assert largest_difference(wanted, gradients(model)) < 1e-12
