"""Chunks of long samples as micro-batches: the same loss and gradient as whole samples, one by one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebalance.attention.state import LayerState, SampleState
from sparsebalance.planning.batching import EMPTY, cut, pack_first_fit
from sparsebalance.planning.plan import Latency, MicroBatch
from sparsebalance.training.results import RankResult
from tests.models import engine, example, gradients, largest_difference, samples, tiny_model, unit

BLOCK = 4  # of tests.models.engine
NONE = Latency(0.0, 0.0)


def planned(lengths: list[int], size: int, keep: int, budgets: tuple[int, ...] = (3, 3)) -> list[MicroBatch]:
    """Samples over `size` in chunks, of which the first ones but `keep` are recomputed; the others packed."""
    examples = [example(n, n - 1, seed=i) for i, n in enumerate(lengths)]
    pieces = [cut(sample, size, BLOCK) for sample in samples(examples)]
    chunks = [parts for parts in pieces if len(parts) > 1]
    whole = [parts[0] for parts in pieces if len(parts) == 1]
    units = [
        MicroBatch((part,), budgets, NONE, recompute=place < len(parts) - keep)
        for parts in chunks
        for place, part in enumerate(parts)
    ]
    return units + [MicroBatch(packed, budgets, NONE) for packed in (pack_first_fit(whole, size) if whole else EMPTY)]


def run_both(
    lengths: list[int],
    size: int,
    keep: int,
    dtype: str,
    granularity: str,
    checkpointing: bool,
    budgets: tuple[int, ...] = (3, 3),
) -> tuple[tuple[RankResult, dict[str, torch.Tensor]], tuple[RankResult, dict[str, torch.Tensor]]]:
    examples = [example(n, n - 1, seed=i) for i, n in enumerate(lengths)]
    targets = sum(one.target_count for one in examples)
    model = tiny_model(dtype, granularity)  # type: ignore[arg-type]
    alone = engine(model, granularity).run(
        [unit(examples, i, budgets=budgets) for i in range(len(lengths))], examples, targets
    )  # type: ignore[arg-type]
    expected = alone, gradients(model)
    model = tiny_model(dtype, granularity, checkpointing=checkpointing)  # type: ignore[arg-type]
    run = engine(model, granularity, checkpointing)  # type: ignore[arg-type]
    return expected, (run.run(planned(lengths, size, keep, budgets), examples, targets), gradients(model))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-9), ("float32", 1e-5)])
@settings(deadline=None, max_examples=12)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=5),
    blocks=st.integers(1, 8),
    keep=st.integers(1, 30),
    granularity=st.sampled_from(["token", "block"]),
    checkpointing=st.booleans(),
)
def test_chunked_and_packed_is_the_same_as_one_by_one(
    dtype: str, tolerance: float, lengths: list[int], blocks: int, keep: int, granularity: str, checkpointing: bool
) -> None:
    # In fp32 the rounding of a row's matrix products depends on its length, and a near-tie between two blocks may fall
    # the other way; where there is nothing to choose, there is none.
    budgets = (3, 3) if dtype == "float64" else (1, 99)
    (alone, grads), (chunked, found) = run_both(
        lengths, blocks * BLOCK, keep, dtype, granularity, checkpointing, budgets
    )
    assert chunked.loss == pytest.approx(alone.loss, rel=tolerance)
    if any(float(grad.abs().max()) for grad in grads.values()):
        assert largest_difference(grads, found) < tolerance


@pytest.mark.parametrize("granularity", ["token", "block"])
@pytest.mark.parametrize("lengths", [[64, 30, 9], [1, 80], [50, 50, 7]])
def test_chunks_in_fp32_choose_the_same_blocks(granularity: str, lengths: list[int]) -> None:
    """On samples without a near-tie between blocks."""
    (alone, grads), (chunked, found) = run_both(lengths, 16, 2, "float32", granularity, False)
    assert chunked.loss == pytest.approx(alone.loss, rel=1e-5)
    assert largest_difference(grads, found) < 1e-5


@pytest.mark.parametrize("budget", [1, 2, 99])
def test_every_budget_reads_the_same_in_chunks(budget: int) -> None:
    examples = [example(70, 69)]
    model = tiny_model()
    run = engine(model)
    losses = [
        run.run(units, examples, 69).loss
        for units in (
            [unit(examples, 0, budgets=(budget, 3))],
            [MicroBatch((part,), (budget, 3), NONE) for part in cut(samples(examples)[0], 16, BLOCK)],
        )
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


def test_a_sample_whose_targets_all_lie_in_one_chunk() -> None:
    """Chunks without a target still carry the gradients of the chunks that read them."""
    examples = [example(64, 5)]
    model = tiny_model()
    run = engine(model)
    run.run([unit(examples, 0)], examples, 5)
    grads = gradients(model)
    run.run([MicroBatch((p,), (3, 3), NONE) for p in cut(samples(examples)[0], 16, BLOCK)], examples, 5)
    assert largest_difference(grads, gradients(model)) < 1e-9


def test_a_chunk_without_targets_runs_no_head() -> None:
    """It would hold a gradient of the output projection's size until its backward."""
    examples = [example(64, 5)]
    units = [MicroBatch((p,), (3, 3), NONE) for p in cut(samples(examples)[0], 16, BLOCK)]
    times = engine(tiny_model()).run(units, examples, 5).units
    assert [time.terms["head"] > 0 for time in times] == [False, False, False, True]


def test_the_comparison_sees_a_missing_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what later chunks send back, gradients differ: the tests above can fail."""
    monkeypatch.setattr(LayerState, "gradients", lambda self, end: tuple(torch.zeros_like(x) for x in (self.keys,) * 2))
    (_, grads), (_, found) = run_both([64], 16, 9, "float64", "token", False)
    assert largest_difference(grads, found) > 1e-4


def test_a_recomputed_chunk_keeps_no_graph_and_routes_once() -> None:
    """Its forward is recorded as backward time, with the blocks of the first forward."""
    examples = [example(64, 63)]
    units = planned([64], 16, keep=1)
    assert [u.recompute for u in units[:4]] == [True, True, True, False]
    result = engine(tiny_model()).run(units[:4], examples, 63)
    assert [time.forward["head"] > 0 for time in result.units] == [False, False, False, True]
    assert all(time.backward["router"] == 0 for time in result.units)


def test_chunks_run_forward_in_order_and_backward_in_reverse() -> None:
    examples = [example(64, 63), example(9, 3)]
    result = engine(tiny_model()).run([*planned([64, 9], 16, keep=9)], examples, 66)
    starts = [time.start_ms for time in result.units[:4]]
    backwards = [time.backward_start_ms for time in result.units[:4]]
    assert starts == sorted(starts)
    assert backwards == sorted(backwards, reverse=True)
    assert max(starts) < min(backwards)
    assert result.units[4].start_ms > max(backwards)
    assert result.units[4].backward_start_ms > result.units[4].start_ms


@pytest.mark.parametrize("granularity", ["token", "block"])
def test_coverage_is_probed_on_the_last_chunk(granularity: str) -> None:
    examples = [example(70, 69)]
    run = engine(tiny_model(granularity=granularity), granularity)  # type: ignore[arg-type]
    units = [MicroBatch((p,), (3, 3), NONE) for p in cut(samples(examples)[0], 16, BLOCK)]
    probed = run.run(units, examples, 69, probe_rows=4).probes
    assert set(probed) == {(0, 0), (0, 1)}
    assert run.probe(units, examples, 4) == probed
    assert all(0 < value <= 1 for probe in probed.values() for value in probe.router)


def test_chunks_out_of_order_are_refused() -> None:
    examples = [example(64, 63)]
    units = planned([64], 16, keep=9)[:4]
    with pytest.raises(Exception, match="does not follow on the one before"):
        engine(tiny_model()).run([units[0], units[2]], examples, 63)
    state = SampleState(64, BLOCK).layer(0, torch.ones(16, 2, 8), torch.ones(16, 2, 8))
    with pytest.raises(RuntimeError, match="0 tokens ran before it"):
        state.write(16, torch.ones(16, 2, 8), torch.ones(16, 2, 8))
    with pytest.raises(RuntimeError, match="backward last to first"):
        state.gradients(16)


def test_a_second_write_changes_nothing() -> None:
    k = torch.arange(16.0).view(8, 1, 2)
    state = SampleState(10, BLOCK).layer(0, k, k)
    state.write(0, k, k)
    state.write(0, k + 1, k + 1)
    state.write(8, k[:2], k[:2])
    assert torch.equal(state.prefix(10), torch.cat([k, k[:2]]))
    assert torch.equal(state.means, torch.stack([k[:4].mean(0), k[4:].mean(0), k[:2].mean(0)]))


def test_low_precision_models_keep_their_state_in_the_computing_precision() -> None:
    k = torch.ones(4, 2, 8, dtype=torch.bfloat16)
    state = SampleState(8, BLOCK).layer(0, k, k)
    assert (state.keys.dtype, state.means.dtype) == (torch.float32, torch.bfloat16)
    examples = [example(64, 63)]
    model = tiny_model("bfloat16")
    whole = engine(model).run([unit(examples, 0)], examples, 63).loss
    chunked = engine(model).run(
        [MicroBatch((p,), (3, 3), NONE) for p in cut(samples(examples)[0], 16, BLOCK)], examples, 63
    )
    assert chunked.loss == pytest.approx(whole, rel=2e-2)
