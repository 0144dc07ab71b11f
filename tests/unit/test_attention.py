"""The fast attention against the naive reference, over awkward shapes, outputs and gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsebalance.attention.cpu import attend
from sparsebalance.attention.interface import Granularity, PackedLayout, budget_per_segment
from sparsebalance.attention.moba import MoBARouter, top_blocks
from sparsebalance.attention.reference import attend_reference, block_means, selected_blocks
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.work import past_reads

GRANULARITIES: tuple[Granularity, ...] = ("token", "block")

# (lengths_q, lengths_k, block, budgets): one token, one block, partial blocks, packs, chunks, one giant.
SHAPES = {
    "one token": ((1,), (1,), 4, 1),
    "shorter than a block": ((3,), (3,), 8, 2),
    "exactly a block": ((8,), (8,), 8, 2),
    "one over": ((9,), (9,), 8, 2),
    "nothing divides": ((37,), (37,), 5, 3),
    "own block alone": ((30,), (30,), 4, 1),
    "pack": ((5, 1, 13, 8), (5, 1, 13, 8), 4, 2),
    "pack with own budgets": ((17, 21, 9), (17, 21, 9), 4, (1, 3, 50)),
    "later chunk": ((8,), (24,), 4, 3),
    "last partial chunk": ((7,), (31,), 4, 3),
    "chunk beside whole": ((6, 11), (30, 11), 6, 2),
    "one query at the end": ((1,), (40,), 4, 3),
    "one giant": ((1, 1, 200, 2), (1, 1, 200, 2), 16, 4),
    "block of one": ((12,), (12,), 1, 4),
}  # fmt: skip
HEADS = ((1, 1), (2, 2), (4, 2), (6, 1))


def inputs(
    layout: PackedLayout, heads: int, kv_heads: int, dtype: torch.dtype, dim: int = 8
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = ((layout.tokens_q, heads), (layout.tokens_k, kv_heads), (layout.tokens_k, kv_heads))
    q, k, v = (torch.randn(*shape, dim, dtype=torch.float64, generator=generator) for shape in shapes)
    return q.to(dtype).requires_grad_(), k.to(dtype).requires_grad_(), v.to(dtype).requires_grad_()


def fast(
    q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, budget: object, granularity: Granularity
) -> tuple[Tensor, Tensor]:
    router = MoBARouter(granularity)
    blocks = budget_per_segment(budget, layout)  # type: ignore[arg-type]
    return attend(q, k, v, router.select(router.score(q, k, layout), blocks), layout)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("heads", HEADS, ids=lambda h: f"{h[0]}over{h[1]}")
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_gradients_equal_the_reference(
    shape: str, heads: tuple[int, int], granularity: Granularity
) -> None:
    lengths_q, lengths_k, block, budget = SHAPES[shape]
    layout = PackedLayout(lengths_q, lengths_k, block)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        q, k, v = inputs(layout, *heads, torch.float64)
        blocks = budget_per_segment(budget, layout)
        expected, expected_lse = attend_reference(q, k, v, layout, blocks, granularity)
        weight = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        expected_grads = torch.autograd.grad((expected * weight).sum(), (q, k, v))
        # The choice is made in fp64 for both: near-ties that fp32 decides otherwise are no error of the kernel.
        router = MoBARouter(granularity)
        selection = router.select(router.score(q, k, layout), blocks)
        x = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
        out, lse = attend(*x, selection, layout)
        grads = torch.autograd.grad((out * weight.to(dtype)).sum(), x)
        assert not lse.requires_grad
        pairs = [(out, expected), (lse, expected_lse), *zip(grads, expected_grads, strict=True)]
        for found, wanted in pairs:
            scale = max(1.0, float(wanted.detach().abs().max()))
            assert float((found.double() - wanted).detach().abs().max()) <= tolerance * scale


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 4)), min_size=1, max_size=4),
    block=st.integers(1, 9),
    budgets=st.lists(st.integers(1, 8), min_size=4, max_size=4),
    heads=st.sampled_from(HEADS),
    granularity=st.sampled_from(GRANULARITIES),
)
def test_any_packed_row_equals_the_reference(
    lengths: list[tuple[int, int]], block: int, budgets: list[int], heads: tuple[int, int], granularity: Granularity
) -> None:
    layout = PackedLayout(tuple(n for n, _ in lengths), tuple(n + earlier * block for n, earlier in lengths), block)
    blocks = torch.tensor(budgets[: layout.segments])
    q, k, v = inputs(layout, *heads, torch.float64, dim=4)
    expected, _ = attend_reference(q, k, v, layout, blocks, granularity)
    out, _ = fast(q, k, v, layout, blocks, granularity)
    assert float((out - expected).detach().abs().max()) < 1e-12


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("budget", [10, 11, 10_000])
def test_full_budget_is_dense_causal_attention(budget: int, granularity: Granularity) -> None:
    layout = PackedLayout.from_lengths([79], 8)
    q, k, v = inputs(layout, 4, 2, torch.float64)
    dense = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, enable_gqa=True
    )[0].transpose(0, 1)
    weight = torch.randn(dense.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    out, _ = fast(q, k, v, layout, budget, granularity)
    assert float((out - dense).detach().abs().max()) < 1e-13
    for found, wanted in zip(
        torch.autograd.grad((out * weight).sum(), (q, k, v)), torch.autograd.grad((dense * weight).sum(), (q, k, v))
    ):
        assert float((found - wanted).abs().max()) < 1e-12


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_budget_one_reads_the_own_block_alone(granularity: Granularity) -> None:
    layout = PackedLayout.from_lengths([20], 5)
    q, k, v = inputs(layout, 2, 1, torch.float64)
    out, _ = fast(q, k, v, layout, 1, granularity)
    alone, _ = fast(q, k, v, PackedLayout.from_lengths([5] * 4, 5), 1, granularity)
    assert torch.equal(out, alone)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_packed_equals_one_by_one(granularity: Granularity) -> None:
    lengths = (13, 1, 40, 6)
    layout = PackedLayout.from_lengths(lengths, 4)
    q, k, v = inputs(layout, 4, 2, torch.float64)
    packed, _ = fast(q, k, v, layout, 3, granularity)
    parts = [
        fast(*part, PackedLayout.from_lengths([n], 4), 3, granularity)[0]
        for n, part in zip(lengths, zip(*(x.split(lengths) for x in (q, k, v))))
    ]
    assert float((packed - torch.cat(parts)).detach().abs().max()) < 1e-13


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_chunks_equal_the_whole(granularity: Granularity) -> None:
    q, k, v = inputs(PackedLayout.from_lengths([46], 4), 4, 2, torch.float64)
    whole, _ = fast(q, k, v, PackedLayout.from_lengths([46], 4), 3, granularity)
    weight = torch.randn(whole.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wanted = torch.autograd.grad((whole * weight).sum(), (q, k, v))
    chunks = [
        fast(q[a:b], k[:b], v[:b], PackedLayout((b - a,), (b,), 4), 3, granularity)[0]
        for a, b in itertools.pairwise((0, 16, 20, 40, 46))
    ]
    found = torch.autograd.grad((torch.cat(chunks) * weight).sum(), (q, k, v))
    assert float((whole - torch.cat(chunks)).detach().abs().max()) < 1e-13
    for a, b in zip(found, wanted, strict=True):
        assert float((a - b).abs().max()) < 1e-12


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_no_token_moves_another_document(granularity: Granularity) -> None:
    layout = PackedLayout.from_lengths([10, 22, 7], 4)
    q, k, v = (x.detach() for x in inputs(layout, 4, 2, torch.float64))
    before, _ = fast(q, k, v, layout, 3, granularity)
    for x in (q, k, v):
        x[10:32] += 1.0
    after, _ = fast(q, k, v, layout, 3, granularity)
    assert torch.equal(before[:10], after[:10])
    assert torch.equal(before[32:], after[32:])
    assert not torch.equal(before[10:32], after[10:32])


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_nothing_read_comes_from_the_future(granularity: Granularity) -> None:
    """v of later tokens never matters; k of later blocks never matters, not even for the choice."""
    layout = PackedLayout.from_lengths([30], 4)
    q, k, v = (x.detach() for x in inputs(layout, 2, 1, torch.float64))
    before, _ = fast(q, k, v, layout, 3, granularity)
    v[17:] += 5.0
    k[20:] += 5.0
    after, _ = fast(q, k, v, layout, 3, granularity)
    assert torch.equal(before[:17], after[:17])


def test_a_partial_block_mean_divides_by_its_real_keys() -> None:
    k = torch.ones(10, 1, 2, dtype=torch.float64)
    layout = PackedLayout.from_lengths([10], 4)
    means = MoBARouter().score(k, k, layout).keys
    assert torch.equal(means, block_means(k, 4))
    assert torch.equal(means, torch.ones_like(means))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_ties_go_to_the_lowest_block(granularity: Granularity) -> None:
    """All scores equal: besides its own block a query reads blocks 0, 1, ..."""
    layout = PackedLayout.from_lengths([24], 4)
    q = torch.ones(24, 2, 4)
    router = MoBARouter(granularity)
    v = torch.zeros(24, 1, 4)
    for block in range(6):
        v[block * 4 : block * 4 + 4, 0, :] = float(10**block) if block < 4 else 0.0
    out, _ = attend(q, q[:, :1], v, router.select(router.score(q, q[:, :1], layout), torch.tensor([3])), layout)
    # Query 20 (first of block 5) reads itself and blocks 0 and 1: 4 keys of value 1, 4 of value 10, 1 of value 0.
    assert out[20, 0, 0] == pytest.approx(44 / 9)
    chosen = selected_blocks(q, q[:, :1], 4, 3, granularity)
    assert chosen[20, 0].nonzero().flatten().tolist() == [0, 1, 5]


def test_top_blocks_breaks_ties_and_marks_what_is_not_there() -> None:
    inf = float("inf")
    scores = torch.tensor([[1.0, 3, 3, 3], [2, 2, 2, 2], [5, -inf, -inf, -inf], [0, 1, 0, 1]])
    found = [sorted(row) for row in top_blocks(scores, 2).tolist()]
    assert found == [[1, 2], [0, 1], [-1, 0], [1, 3]]
    assert top_blocks(scores, 9).shape == (4, 4)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(-2, 2), min_size=6, max_size=6), min_size=1, max_size=5), st.integers(1, 6))
def test_top_blocks_equals_sorting(rows: list[list[int]], count: int) -> None:
    found = top_blocks(torch.tensor(rows, dtype=torch.float32), count)
    for row, chosen in zip(rows, found.tolist()):
        assert set(chosen) == set(sorted(range(6), key=lambda j: (-row[j], j))[:count])


@pytest.mark.parametrize("budget", [1, 2, 5, 30])
def test_token_selection_reads_exactly_its_budget(budget: int) -> None:
    """Reads listed by the router = the closed form that the latency model counts."""
    layout = PackedLayout.from_lengths([61], 4)
    q, k, _ = inputs(layout, 2, 1, torch.float64)
    router = MoBARouter("token")
    selection = router.select(router.score(q, k, layout), torch.tensor([budget]))
    in_tiles = int((selection.tile_rows < 61 * 2).sum())
    rows = layout.queries_per_block.repeat(2)
    dense_past = int(((selection.dense_counts - 1) * rows).sum())
    assert in_tiles + dense_past == 2 * int(past_reads(0, 61, budget, 4))


def test_no_gradient_flows_through_the_selection() -> None:
    layout = PackedLayout.from_lengths([20], 4)
    q, k, _ = inputs(layout, 2, 1, torch.float64)
    scores = MoBARouter().score(q, k, layout)
    assert not scores.queries.requires_grad
    assert not scores.keys.requires_grad


def test_low_precision_is_computed_in_fp32() -> None:
    layout = PackedLayout.from_lengths([50], 8)
    q, k, v = (x.detach() for x in inputs(layout, 2, 1, torch.bfloat16))
    out, _ = fast(q, k, v, layout, 3, "block")
    assert out.dtype == torch.bfloat16
    router = MoBARouter("block")
    selection = router.select(router.score(q, k, layout), torch.tensor([3]))
    exact, _ = attend(q.float(), k.float(), v.float(), selection, layout)
    assert torch.equal(out, exact.to(torch.bfloat16))


def test_an_empty_row_gives_an_empty_output() -> None:
    layout = PackedLayout((), (), 4)
    q = torch.empty(0, 2, 4)
    assert (layout.tokens_q, layout.segments) == (0, 0)
    assert layout.cu_seqlens_q.tolist() == [0]
    assert q.shape[0] == layout.tokens_q


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((4,), (4,), 0), "block_size is 0"),
        (((4, 2), (4,), 4), "do not match"),
        (((0,), (4,), 4), "segment 0"),
        (((5,), (4,), 4), "segment 0"),
    ],
)
def test_impossible_layouts_are_refused(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        PackedLayout(*arguments)  # type: ignore[arg-type]


def test_wrong_budgets_and_granularities_are_refused() -> None:
    layout = PackedLayout.from_lengths([4, 4], 4)
    with pytest.raises(InputError, match="budget 0 is below 1"):
        budget_per_segment([1, 0], layout)
    with pytest.raises(InputError, match="3 budgets for 2 segments"):
        budget_per_segment([1, 1, 1], layout)
    with pytest.raises(InputError, match="granularity is 'page'"):
        MoBARouter("page")  # type: ignore[arg-type]
