"""Memory before anything runs: parameters and bytes by hand, what autograd really keeps, and the check of a run."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import accumulate
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
from sparsebalance.planning.schedule import Action, one_forward_one_backward
from sparsebalance.planning.table import Identity
from sparsebalance.planning.units import cut
from sparsebalance.planning.work import Granularity
from sparsebalance.training import memory as run_memory
from sparsebalance.training.config import (
    AttentionConfig,
    BalanceConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
)
from sparsebalance.training.engine import _Step
from sparsebalance.training.memory import (
    available_mb,
    chain_memory,
    describe,
    fitting_sizes,
    largest_chains,
    longest_whole,
    sample_memory,
    unit_memory,
)
from sparsebalance.training.model import build_model
from sparsebalance.training.packing import pack
from tests.models import VOCABULARY, engine, example, samples, unit

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
    # K and V of 2 heads x 2, and as much for their gradients; attention computes in fp32 at least.
    for dtype, size in (("bfloat16", 4), ("float32", 4), ("float64", 8)):
        assert model(dtype=dtype).state_mb(100, 3) == pytest.approx(100 * 3 * 2 * 2 * 2 * (size + size) / MB)
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


def test_a_chunked_sample_by_hand() -> None:
    """100 tokens in chunks of 40: one chunk works, all or the last ones keep activations, all keep K and V."""
    stage = StageLayers(4)
    unit = model().single_unit(40, 40, stage)
    for keep, alive in ((None, 100), (1, 40), (2, 80), (3, 100), (9, 100)):
        parts = model().chunked_sample(100, 70, stage, 40, keep)
        chosen = (100 - alive) * 4 * 4 * (4 / 3 * 3 * 8 + 4) / MB  # by 4 heads in 4 layers, see the activations
        others = model().activations_mb(alive - 40, 4, head=True)
        assert parts.activations == pytest.approx(unit.activations + others + chosen)
        assert parts.state == pytest.approx(model().state_mb(100, 4))
        assert (parts.weights, parts.head) == (unit.weights, unit.head)
    # No more targets than a chunk has, no chunks where the sample is not longer than one.
    assert model().chunked_sample(100, 5, stage, 40).head == model().single_unit(40, 5, stage).head
    assert model().chunked_sample(40, 40, stage, 40, 1) == unit
    tokens = [model().chunked_sample(length, 1, stage, 40, 1).total for length in (41, 400, 4000)]
    assert tokens == sorted(tokens)


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
        hidden = runner.stages[0].hidden(row, context)
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


def kept_by_chunks(granularity: Granularity, checkpointing: bool, keep_chunks: int | None) -> tuple[float, float]:
    """The same for a sample of 480 tokens in chunks of 96, between its last forward and its first backward; half of
    the state is gradients, which come later."""
    layers, tokens, size = 3, 480, 96
    sizes = ModelConfig(
        layers=layers, hidden=32, intermediate=48, heads=4, kv_heads=2, dtype="float32", checkpointing=checkpointing
    )
    network = build_model(
        sizes, AttentionConfig(block_size=4, budget=3, granularity=granularity), VOCABULARY, 512, seed=3
    )
    runner, examples = engine(network, granularity, checkpointing), [example(tokens, 0)]
    parts = cut(samples(examples)[0], size, 4)
    recomputed = [keep_chunks is not None and place < len(parts) - keep_chunks for place in range(len(parts))]
    units = [MicroBatch((part,), (3,) * layers, Latency(0.0, 0.0), again) for part, again in zip(parts, recomputed)]
    parameters = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage
        return tensor

    step = _Step(runner, units, examples, 1, 0, one_forward_one_backward((len(units),), 1))
    passes, graphs = [step._pass(Action("F", place, 0)) for place in range(len(units))], []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for one in passes:
            with torch.set_grad_enabled(not one.unit.recompute):
                graphs.append(one.stage.hidden(one.row, one.context))
    for one in passes:
        for selection in one.context._selections.values():
            for field in fields(selection):
                value = getattr(selection, field.name)
                if isinstance(value, torch.Tensor):
                    keep(value)
    state = passes[0].context.state
    assert state is not None
    for layer in state._layers.values():
        for value in (layer.keys, layer.values):
            keep(value)
    decoder = decoder_from_config(network.config.to_dict(), "tiny")
    formula = MemoryModel(decoder, 4, granularity, 3, "float32", checkpointing)
    whole = formula.chunked_sample(tokens, 0, StageLayers(layers), size, keep_chunks)
    predicted = whole.activations - formula.working_mb(size) + whole.state / 2
    return sum(storage.nbytes() for storage in kept.values()) / MB, predicted


@pytest.mark.parametrize("keep_chunks", [None, 1, 2])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_chunked_sample_keeps_what_is_predicted(checkpointing: bool, keep_chunks: int | None) -> None:
    kept, predicted = kept_by_chunks("block", checkpointing, keep_chunks)
    assert predicted == pytest.approx(kept, rel=0.15)


def test_recomputed_chunks_keep_the_blocks_that_their_tokens_chose() -> None:
    """Tiles of single queries are half empty in so small a model, so it is more than predicted, but not by much."""
    kept, predicted = kept_by_chunks("token", False, 1)
    assert 0.7 * kept < predicted < kept
    assert kept < kept_by_chunks("token", False, None)[0] / 2


def run_config(memory_gb: float | None = None, dp: int = 1, **changes: object) -> RunConfig:
    config = RunConfig(
        attention=AttentionConfig(block_size=4, budget=3), parallel=ParallelConfig(dp=dp, memory_gb=memory_gb)
    )
    return replace(config, **changes)  # type: ignore[arg-type]


def balanced(memory_gb: float | None = None, keep_chunks: int | None = None) -> RunConfig:
    return run_config(memory_gb, balance=BalanceConfig(keep_chunks=keep_chunks))


def test_the_longest_sample_must_fit_and_the_error_names_the_way_out() -> None:
    samples = [Sample(0, 10, 5), Sample(7, 9000, 100), Sample(8, 9000, 100), Sample(9, 30, 2)]
    need = unit_memory(run_config(), IDENTITY, 9000, 100).total
    assert fitting_sizes(run_config(), IDENTITY, samples, [None], need * 1.001) == [None]
    with pytest.raises(InputError) as error:
        fitting_sizes(run_config(), IDENTITY, samples, [None], need * 0.999)
    message = str(error.value)
    assert message.startswith("sample 7 with 9,000 tokens needs about 0.0 GB on its rank")
    for word in ("activations", "each has 0.0 GB", "data.max_length", "model.checkpointing", "parallel.memory_gb"):
        assert word in message
    assert "keep_chunks" not in message
    assert "\n" not in message
    assert fitting_sizes(run_config(), IDENTITY, samples[:1], [None], need * 0.999) == [None]


def test_a_sample_that_does_not_fit_whole_fits_in_chunks() -> None:
    samples = [Sample(0, 10, 5), Sample(7, 9000, 100)]
    lean = balanced(keep_chunks=1)
    whole, chunked, small = (sample_memory(lean, IDENTITY, samples[1], size).total for size in (None, 1024, 128))
    assert small < chunked < whole
    sizes = [128, 1024, None]
    assert fitting_sizes(lean, IDENTITY, samples, sizes, whole) == sizes
    assert fitting_sizes(lean, IDENTITY, samples, sizes, (whole + chunked) / 2) == [128, 1024]
    assert fitting_sizes(lean, IDENTITY, samples, sizes, (chunked + small) / 2) == [128]
    assert fitting_sizes(lean, IDENTITY, samples, sizes, None) == sizes  # not known: nothing to refuse
    with pytest.raises(InputError, match=r"^sample 7 with 9,000 tokens, in chunks of 128 needs about ") as error:
        fitting_sizes(lean, IDENTITY, samples, sizes, small * 0.999)
    assert "keep_chunks" not in str(error.value)  # it is set already


def test_keeping_all_chunks_the_error_says_that_fewer_can_be_kept() -> None:
    samples = [Sample(7, 9000, 100)]
    limit = sample_memory(balanced(keep_chunks=1), IDENTITY, samples[0], 1024).total * 1.001
    with pytest.raises(InputError, match=r"set balance\.keep_chunks, set model\.checkpointing, lower data\.max_length"):
        fitting_sizes(balanced(), IDENTITY, samples, [1024, None], limit)
    assert fitting_sizes(balanced(keep_chunks=1), IDENTITY, samples, [1024, None], limit) == [1024]


def test_a_shorter_sample_with_many_targets_is_looked_at_too() -> None:
    many = replace(IDENTITY, decoder=replace(TINY, vocabulary=100_000))
    samples = [Sample(0, 100, 0), Sample(1, 90, 90)]
    limit = unit_memory(run_config(), many, 100, 0).total * 1.01
    with pytest.raises(InputError, match="sample 1 with 90 tokens"):
        fitting_sizes(run_config(), many, samples, [None], limit)


def test_the_longest_whole_micro_batch_respects_cap_and_memory() -> None:
    config = run_config(balance=BalanceConfig(token_cap=5000))
    assert longest_whole(config, IDENTITY, 900, None) == 900
    assert longest_whole(config, IDENTITY, 9000, None) == 5000
    limit = unit_memory(config, IDENTITY, 700, 700).total
    assert longest_whole(config, IDENTITY, 9000, limit * 1.000001) == 700
    assert longest_whole(config, IDENTITY, 600, limit) == 600
    assert longest_whole(config, IDENTITY, 9000, 0.0) == 2 * IDENTITY.block_size
    assert longest_whole(config, IDENTITY, 3, 0.0) == 3


def test_what_is_shared_out_counts_whole_in_a_step_beside_the_share() -> None:
    alone, shared = (unit_memory(run_config(parallel=ParallelConfig(dp=4, shard=n)), IDENTITY, 100, 10) for n in (1, 4))
    assert shared.weights == pytest.approx(alone.weights * 5 / 4)
    assert shared.gradients == alone.gradients
    assert shared.optimizer == pytest.approx(alone.optimizer / 4)


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


def planned(*pieces: tuple[int, int], sample: int = 0) -> list[MicroBatch]:
    """(tokens, targets) of the chunks of one sample, or of a sample alone."""
    ends = list(accumulate(tokens for tokens, _ in pieces))
    return [
        MicroBatch((Segment(sample, end - tokens, end, ends[-1], targets),), (3,), Latency(0.0, 0.0))
        for (tokens, targets), end in zip(pieces, ends)
    ]


def test_the_largest_come_first_one_of_each_size() -> None:
    chains = [planned((5, 1)), planned((9, 1)), planned((9, 1), sample=2), planned((9, 4)), planned((7, 1))]
    chains.append([MicroBatch((), (3,), Latency(0.0, 0.0))])
    found = largest_chains(run_config(), IDENTITY, chains, 3)
    assert [(chain[0].tokens, chain[0].targets) for chain in found] == [(9, 4), (9, 1), (7, 1)]
    assert len(largest_chains(run_config(), IDENTITY, chains, 10)) == 4


def test_a_shorter_unit_with_many_targets_can_be_the_largest() -> None:
    many = replace(IDENTITY, decoder=replace(IDENTITY.decoder, vocabulary=100_000))
    (largest,) = largest_chains(run_config(), many, [planned((12, 0)), planned((9, 9))], 1)
    assert largest[0].targets == 9


def test_the_chunks_of_a_sample_need_memory_together() -> None:
    chunks, alone = planned((40, 0), (40, 0), (20, 7)), planned((60, 1))
    assert chain_memory(balanced(), IDENTITY, alone) == unit_memory(balanced(), IDENTITY, 60, 1)
    for keep in (None, 1):
        expected = sample_memory(balanced(keep_chunks=keep), IDENTITY, Sample(0, 100, 7), 40)
        assert chain_memory(balanced(keep_chunks=keep), IDENTITY, chunks) == expected
    assert largest_chains(balanced(), IDENTITY, [alone, chunks], 2) == [chunks, alone]
    long = planned((90, 1))
    assert largest_chains(balanced(keep_chunks=1), IDENTITY, [chunks, long], 2) == [long, chunks]


def test_parts_are_described_the_largest_first_without_empty_ones() -> None:
    parts = MemoryParts(weights=12.4, gradients=12.4, optimizer=1500.6, activations=0.7, state=0.0, head=0.2)
    assert describe(parts) == "optimizer 1,501 MB, weights 12 MB, gradients 12 MB, activations 1 MB"
