"""Memory before anything runs: parameters and bytes by hand, what autograd really keeps, and the check of a run."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsebalance.planning.decoder import PRESETS, Decoder, decoder_from_config
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.memory import MB, MemoryModel, MemoryParts, StageLayers
from sparsebalance.planning.pipeline import split_layers
from sparsebalance.planning.plan import Latency, MicroBatch, Sample, Segment
from sparsebalance.planning.table import Identity
from sparsebalance.planning.work import Granularity
from sparsebalance.training import memory as run_memory
from sparsebalance.training.config import (
    AttentionConfig,
    BalanceConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
)
from sparsebalance.training.memory import available_mb, check_memory, describe, largest_units, unit_memory
from sparsebalance.training.model import build_model
from sparsebalance.training.packing import pack
from tests.models import VOCABULARY, engine, example, unit

TINY = Decoder(layers=4, hidden=8, intermediate=16, heads=4, kv_heads=2, head_dim=2, vocabulary=10, tied=True)
LAYER = 8 * 2 * (2 * 4 + 2 * 2) + 3 * 8 * 16 + 2 * 8  # 192 + 384 + 16
MATRIX = 10 * 8
IDENTITY = Identity(TINY, block_size=4, granularity="token", device="cpu", dtype="float32", threads=1)


def model(**changes: object) -> MemoryModel:
    return replace(MemoryModel(TINY, 4, "token", 3, "float32"), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["smollm2-135m", "llama-3.1-8b"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_the_stages_hold_the_decoders_parameters(name: str, stages: int) -> None:
    """All but the last norm; a tied embedding is held twice once the first and the last stage differ."""
    decoder = PRESETS[name]
    held = sum(MemoryModel(decoder, 256, "token", 8).parameters(s) for s in split_layers(decoder.layers, stages))
    twice = decoder.vocabulary * decoder.hidden if decoder.tied and stages > 1 else 0
    assert held == decoder.parameters - decoder.hidden + twice


def test_parameters_of_first_middle_last_and_only_stage() -> None:
    assert LAYER == TINY.layer_parameters == 592
    stages = [StageLayers(2, True, False), StageLayers(1, False, False), StageLayers(1, False, True), StageLayers(4)]
    counts = [2 * LAYER + MATRIX, LAYER, LAYER + MATRIX, 4 * LAYER + MATRIX]
    assert [model().parameters(stage) for stage in stages] == counts
    untied = model(decoder=replace(TINY, tied=False))
    assert untied.parameters(StageLayers(4)) == 4 * LAYER + 2 * MATRIX


def test_weights_gradients_and_optimizer_by_hand() -> None:
    stage, count = StageLayers(2, True, False), (2 * LAYER + MATRIX) / MB
    assert model().static(stage) == pytest.approx((4 * count, 4 * count, 8 * count))
    # Below fp32 the optimiser keeps an fp32 copy of the weights besides its two fp32 moments.
    assert model(dtype="bfloat16").static(stage) == pytest.approx((2 * count, 2 * count, 12 * count))
    assert model(dtype="float64").static(stage) == pytest.approx((8 * count, 8 * count, 16 * count))


def test_zero_spreads_the_optimizer_alone_and_tensor_ranks_spread_everything() -> None:
    stage = StageLayers(4)
    whole = model().static(stage)
    assert model(shards=4).static(stage) == pytest.approx((whole[0], whole[1], whole[2] / 4))
    assert model(tp=2).static(stage) == pytest.approx([mb / 2 for mb in whole])
    assert model(sp=2).static(stage) == whole  # every sequence rank holds the whole layer


def test_activations_by_hand() -> None:
    """Per token and layer: 6 x 8 hidden, 2 x 4 x 2 query and output, 2 x 2 x 2 key and value, 4 x 16 feed-forward;
    and per head 3 block indices of 8 bytes, a third more with tiles' empty places, and a 4-byte log-sum-exp."""
    selection = 4 * (4 / 3 * 3 * 8 + 4)
    assert model().activations_mb(100, 2) == pytest.approx(100 * 2 * ((48 + 16 + 8 + 64) * 4 + selection) / MB)
    # One choice for a block of 4 queries.
    shared = model(granularity="block").activations_mb(100, 2)
    assert shared == pytest.approx(100 * 2 * ((48 + 16 + 8 + 64) * 4 + 4 * (3 / 4 * 8 + 4)) / MB)


def test_checkpointing_keeps_the_layers_inputs_and_computes_one_layer_again() -> None:
    plain, lean = model(), model(checkpointing=True)
    selection = 4 * (4 / 3 * 3 * 8 + 4)
    assert lean.activations_mb(100, 4) == pytest.approx(100 * 4 * (8 * 4 + selection) / MB)
    assert lean.activations_mb(100, 4) < plain.activations_mb(100, 4)
    again = lean.working_mb(100) - plain.working_mb(100)
    assert again == pytest.approx(plain.activations_mb(100, 1))


def test_state_and_head_by_hand() -> None:
    # K and V of 2 heads x 2 in fp32, and as much for their gradients.
    assert model().state_mb(100, 3) == pytest.approx(100 * 3 * 2 * 2 * 2 * (4 + 4) / MB)
    assert model(dtype="bfloat16").state_mb(100, 3) == pytest.approx(100 * 3 * 2 * 2 * 2 * (2 + 4) / MB)
    assert model().head_mb(50) == pytest.approx((2 * 50 * 10 * 4 + 10 * 8 * 4 + 2 * 50 * 8 * 4) / MB)
    # Never the logits of more than a slice; nothing without targets.
    assert model().head_mb(1000) == pytest.approx((2 * 256 * 10 * 4 + 10 * 8 * 4 + 2 * 1000 * 8 * 4) / MB)
    assert model().head_mb(0) == 0.0


@given(tokens=st.integers(1, 10_000), tp=st.sampled_from([1, 2, 4]), sp=st.sampled_from([1, 2, 4]))
def test_tensor_and_sequence_ranks_share_what_belongs_to_tokens(tokens: int, tp: int, sp: int) -> None:
    for checkpointing in (False, True):
        alone, spread = model(checkpointing=checkpointing), model(checkpointing=checkpointing, tp=tp, sp=sp)
        for name in ("activations_mb", "state_mb"):
            assert getattr(spread, name)(tokens, 4) == pytest.approx(getattr(alone, name)(tokens, 4) / (tp * sp))
        assert spread.working_mb(tokens) == pytest.approx(alone.working_mb(tokens) / (tp * sp))


def test_a_single_unit_needs_the_larger_of_head_and_working_memory() -> None:
    stage = StageLayers(4)
    for tokens, targets in ((1000, 1), (2, 2), (100, 0)):
        parts = model().single_unit(tokens, targets, stage)
        most = max(model().working_mb(tokens), model().head_mb(targets))
        static = sum(model().static(stage))
        assert parts.total == pytest.approx(static + model().activations_mb(tokens, 4, head=True) + most)
        assert all(mb >= 0 for mb in vars(parts).values())
    assert model().single_unit(2, 2, replace(stage, head=False)).head == 0.0


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(InputError, match="dtype is 'float8'; choose one of float64, float32, bfloat16"):
        model(dtype="float8")


def kept_and_predicted(granularity: Granularity, checkpointing: bool, layers: int, tokens: int) -> tuple[float, float]:
    """Megabytes between forward and backward of a real model on the CPU, and of the formula.

    Real: every storage that autograd saves, once each, parameters left out; and the selections that
    recomputation reads again.
    """
    sizes = ModelConfig(
        layers=layers, hidden=32, intermediate=48, heads=4, kv_heads=2, dtype="float32", checkpointing=checkpointing
    )
    attention = AttentionConfig(block_size=4, budget=3, granularity=granularity)
    network = build_model(sizes, attention, VOCABULARY, 512, seed=3)
    runner, examples = engine(network, granularity, checkpointing), [example(tokens, 0)]
    planned = unit(examples, 0, budgets=(3,) * layers)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage
        return tensor

    row = pack(planned, examples)
    context = runner.context(planned, row)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = runner._hidden(row, context)
    assert hidden.requires_grad
    for selection in context._selections.values():
        for field in fields(selection):
            value = getattr(selection, field.name)
            if isinstance(value, torch.Tensor):
                keep(value)
    decoder = decoder_from_config(network.config.to_dict(), "tiny")
    formula = MemoryModel(decoder, 4, granularity, 3, "float32", checkpointing)
    predicted = formula.activations_mb(tokens, layers, head=True)
    return sum(storage.nbytes() for storage in kept.values()) / MB, predicted


@pytest.mark.parametrize("tokens", [64, 480])
@pytest.mark.parametrize("granularity", ["token", "block"])
def test_activations_are_what_autograd_keeps(granularity: Granularity, tokens: int) -> None:
    kept, predicted = kept_and_predicted(granularity, False, layers=2, tokens=tokens)
    assert predicted == pytest.approx(kept, rel=0.1)


@pytest.mark.parametrize("tokens", [64, 480])
@pytest.mark.parametrize("granularity", ["token", "block"])
def test_checkpointed_activations_are_what_autograd_and_the_context_keep(granularity: Granularity, tokens: int) -> None:
    kept, predicted = kept_and_predicted(granularity, True, layers=8, tokens=tokens)
    assert predicted == pytest.approx(kept, rel=0.15)
    assert kept < kept_and_predicted(granularity, False, layers=8, tokens=tokens)[0] / 3


def run_config(memory_gb: float | None = None, dp: int = 1, **changes: object) -> RunConfig:
    config = RunConfig(
        attention=AttentionConfig(block_size=4, budget=3), parallel=ParallelConfig(dp=dp, memory_gb=memory_gb)
    )
    return replace(config, **changes)  # type: ignore[arg-type]


def test_the_longest_sample_must_fit_and_the_error_names_the_way_out() -> None:
    samples = [Sample(0, 10, 5), Sample(7, 9000, 100), Sample(8, 9000, 100), Sample(9, 30, 2)]
    need = unit_memory(run_config(), IDENTITY, 9000, 100).total
    check_memory(run_config(memory_gb=need / 1e3 * 1.001), IDENTITY, samples)
    with pytest.raises(InputError) as error:
        check_memory(run_config(memory_gb=need / 1e3 * 0.999), IDENTITY, samples)
    message = str(error.value)
    assert message.startswith("sample 7 with 9,000 tokens makes a micro-batch that needs about 0.0 GB on its rank")
    for word in ("activations", "each has 0.0 GB", "data.max_length", "model.checkpointing", "parallel.memory_gb"):
        assert word in message
    assert "\n" not in message
    check_memory(run_config(memory_gb=need / 1e3 * 0.999), IDENTITY, samples[:1])


def test_tuning_may_raise_the_budget_and_memory_is_checked_for_that() -> None:
    most = run_config(balance=BalanceConfig(max_budget=3))
    usual = unit_memory(run_config(), IDENTITY, 100, 0).activations  # up to 4 x 3 blocks
    assert usual - unit_memory(most, IDENTITY, 100, 0).activations == pytest.approx(100 * 4 * 4 * 8 * 9 * 4 / 3 / MB)


def test_available_memory_is_as_configured_or_what_the_host_has_free_shared_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert available_mb(run_config(memory_gb=2.5, dp=4)) == 2500.0
    told = tmp_path / "meminfo"
    told.write_text("MemTotal:       9000000 kB\nMemFree:         100000 kB\nMemAvailable:    2000000 kB\n")
    monkeypatch.setattr(run_memory, "_MEMINFO", told)
    assert available_mb(run_config(dp=4)) == pytest.approx(2_000_000 * 1024 / 1e6 / 4)
    told.write_text("MemTotal:       9000000 kB\n")
    assert available_mb(run_config()) is None
    monkeypatch.setattr(run_memory, "_MEMINFO", tmp_path / "none")
    assert available_mb(run_config()) is None
    check_memory(run_config(), IDENTITY, [Sample(0, 10**9, 1)])  # not known: nothing to refuse


def test_the_largest_units_come_first_one_of_each_size() -> None:
    def planned(sample: int, tokens: int, targets: int = 1) -> MicroBatch:
        return MicroBatch((Segment(sample, 0, tokens, tokens, targets),), (3,), Latency(0.0, 0.0))

    units = [planned(0, 5), planned(1, 9), planned(2, 9), planned(3, 9, 4), planned(4, 7)]
    units.append(MicroBatch((), (3,), Latency(0.0, 0.0)))
    config = run_config()
    assert [(u.tokens, u.targets) for u in largest_units(config, IDENTITY, units, 3)] == [(9, 4), (9, 1), (7, 1)]
    assert len(largest_units(config, IDENTITY, units, 10)) == 4


def test_a_shorter_unit_with_many_targets_can_be_the_largest() -> None:
    units = [
        MicroBatch((Segment(i, 0, tokens, tokens, targets),), (3,), Latency(0.0, 0.0))
        for i, (tokens, targets) in enumerate([(12, 0), (9, 9)])
    ]
    many = replace(IDENTITY, decoder=replace(IDENTITY.decoder, vocabulary=100_000))
    assert largest_units(run_config(), many, units, 1)[0].targets == 9


def test_parts_are_described_the_largest_first_without_empty_ones() -> None:
    parts = MemoryParts(weights=12.4, gradients=12.4, optimizer=1500.6, activations=0.7, state=0.0, head=0.2)
    assert describe(parts) == "optimizer 1,501 MB, weights 12 MB, gradients 12 MB, activations 1 MB"
