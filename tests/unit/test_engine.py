"""Micro-batches of a plan: the gradient does not depend on how the batch was cut, packed or placed."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from sparsebalance.planning.plan import Latency, MicroBatch, Segment
from sparsebalance.training.data import Example
from sparsebalance.training.packing import pack
from sparsebalance.training.sparse_attention import activate
from tests.models import engine, example, gradients, largest_difference, tiny_model, unit

EXAMPLES = [example(30, 9), example(1, 0), example(17, 1), example(70, 33), example(6, 0), example(12, 5)]
TARGETS = sum(one.target_count for one in EXAMPLES)


def test_pack_concatenates_and_keeps_targets_apart() -> None:
    row = pack(unit(EXAMPLES, 2, 1, 5), EXAMPLES)
    assert row.lengths_q == row.lengths_k == (17, 1, 12)
    assert row.position_ids[0].tolist() == [*range(17), 0, *range(12)]
    assert row.target_index.tolist() == [15, *range(24, 29)]
    ids = row.input_ids[0]
    assert row.targets.tolist() == [ids[i + 1] for i in row.target_index.tolist()]


def test_a_chunk_goes_on_at_its_position() -> None:
    segment = Segment(3, 32, 48, 70, 11)
    row = pack(MicroBatch((segment,), (3, 3), Latency(0, 0)), EXAMPLES)
    assert (row.lengths_q, row.lengths_k) == ((16,), (48,))
    assert row.position_ids[0].tolist() == list(range(32, 48))


def test_an_empty_unit_packs_to_an_empty_row() -> None:
    row = pack(MicroBatch((), (3, 3), Latency(0, 0)), EXAMPLES)
    assert row.input_ids.shape == (1, 0)
    assert row.targets.numel() == 0


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-9), ("float32", 1e-5)])
@pytest.mark.parametrize("granularity", ["token", "block"])
def test_loss_and_gradient_do_not_depend_on_the_packing(dtype: str, tolerance: float, granularity: str) -> None:
    model = tiny_model(dtype, granularity)  # type: ignore[arg-type]
    run = engine(model, granularity)  # type: ignore[arg-type]
    packings = [
        [unit(EXAMPLES, i) for i in range(6)],
        [unit(EXAMPLES, *range(6))],
        [unit(EXAMPLES, 5, 1, 3), MicroBatch((), (3, 3), Latency(0, 0)), unit(EXAMPLES, 4, 0), unit(EXAMPLES, 2)],
    ]
    results = [(run.run(units, EXAMPLES, TARGETS).loss, gradients(model)) for units in packings]
    for loss, grads in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=tolerance)
        assert largest_difference(results[0][1], grads) < tolerance


def test_budgets_change_the_loss_per_layer() -> None:
    model = tiny_model()
    run = engine(model)
    losses = {
        budgets: run.run([unit(EXAMPLES, 3, budgets=budgets)], EXAMPLES, TARGETS).loss
        for budgets in ((1, 1), (1, 9), (9, 1), (99, 99))
    }
    assert len(set(losses.values())) == 4


def test_the_loss_is_the_mean_over_target_tokens_of_the_global_batch() -> None:
    """Against transformers' own loss, one document at a time, at full budget."""
    model = tiny_model()
    found = engine(model).run([unit(EXAMPLES, *range(6), budgets=(99, 99))], EXAMPLES, TARGETS).loss
    total = 0.0
    for one in EXAMPLES:
        kept = one.targets >= 0
        wanted = torch.from_numpy(one.targets[kept].astype("int64"))
        total += float(torch.nn.functional.cross_entropy(dense_logits(model, one)[kept], wanted, reduction="sum"))
    assert found == pytest.approx(total / TARGETS, rel=1e-9)


def dense_logits(model: PreTrainedModel, one: Example) -> torch.Tensor:
    """Under transformers' own dense attention."""
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(one.input_ids.astype("int64"))[None], use_cache=False).logits[0]
    activate(model, 4, 3, "token")
    return logits


def test_units_without_targets_contribute_exactly_nothing() -> None:
    model = tiny_model()
    run = engine(model)
    result = run.run([unit(EXAMPLES, 1), unit(EXAMPLES, 4), unit(EXAMPLES, 1, 4)], EXAMPLES, TARGETS)
    assert result.loss == 0.0
    assert all(torch.equal(g, torch.zeros_like(g)) for g in gradients(model).values())
    assert run.run([], EXAMPLES, TARGETS).loss == 0.0
    assert run.run([unit(EXAMPLES, 1)], EXAMPLES, 0).loss == 0.0


def test_every_unit_is_timed_in_order() -> None:
    result = engine(tiny_model()).run(
        [unit(EXAMPLES, 0), MicroBatch((), (), Latency(0, 0)), unit(EXAMPLES, 3)], EXAMPLES, 9
    )
    assert [time.start_ms for time in result.units] == sorted(time.start_ms for time in result.units)
    assert result.units[1].forward_ms == result.units[1].backward_ms == 0.0
    assert result.busy_ms == sum(t.forward_ms + t.backward_ms for t in result.units) > 0


@pytest.mark.parametrize("granularity", ["token", "block"])
def test_recompute_attends_the_same_blocks_and_gives_the_same_gradient(granularity: str) -> None:
    plain, recomputed = (tiny_model(granularity=granularity, checkpointing=c) for c in (False, True))  # type: ignore[arg-type]
    results = []
    for model, checkpointing in ((plain, False), (recomputed, True)):
        run = engine(model, granularity, checkpointing)  # type: ignore[arg-type]
        loss = run.run([unit(EXAMPLES, 0, 3)], EXAMPLES, TARGETS).loss
        results.append((loss, gradients(model)))
    assert results[0][0] == results[1][0]
    assert largest_difference(results[0][1], results[1][1]) < 1e-12


def test_selections_are_kept_for_the_recompute_only() -> None:
    """Checkpointing calls attention twice: the router must run once per layer."""
    calls = 0

    def counting(original: object) -> object:
        def select(self: object, *arguments: object) -> object:
            nonlocal calls
            calls += 1
            return original(self, *arguments)  # type: ignore[operator]

        return select

    from sparsebalance.attention.moba import MoBARouter

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MoBARouter, "select", counting(MoBARouter.select))
        engine(tiny_model(checkpointing=True), checkpointing=True).run([unit(EXAMPLES, 3)], EXAMPLES, 9)
    assert calls == 2


def test_probing_measures_every_sample_and_layer_without_changing_anything() -> None:
    model = tiny_model()
    run = engine(model)
    plain = run.run([unit(EXAMPLES, 0, 3), unit(EXAMPLES, 1)], EXAMPLES, TARGETS)
    grads = gradients(model)
    probed = run.run([unit(EXAMPLES, 0, 3), unit(EXAMPLES, 1)], EXAMPLES, TARGETS, probe_rows=4)
    assert (plain.loss, plain.probes) == (probed.loss, {})
    assert plain.probe_ms == 0 < probed.probe_ms
    assert largest_difference(grads, gradients(model)) == 0.0
    assert set(probed.probes) == {(sample, layer) for sample in (0, 3, 1) for layer in (0, 1)}
    forward_only = run.probe([unit(EXAMPLES, 0, 3), unit(EXAMPLES, 1)], EXAMPLES, 4)
    assert forward_only == probed.probes
    assert all(torch.equal(g, torch.zeros_like(g)) for g in gradients(model).values())
