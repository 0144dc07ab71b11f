"""Our attention inside transformers: boundaries from every source, isolation, refusals."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from sparsebalance.attention.interface import PackedLayout
from sparsebalance.attention.moba import MoBARouter
from sparsebalance.planning.errors import InputError
from sparsebalance.training.model import build_model
from sparsebalance.training.sparse_attention import SparseContext, _boundaries, activate
from tests.models import VOCABULARY, tiny_model

LENGTHS = (11, 1, 22, 6)


@pytest.fixture(scope="module", params=["token", "block"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_model(granularity=request.param)


def ids(*lengths: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (1, sum(lengths)), generator=torch.Generator().manual_seed(5))


def alone(model: PreTrainedModel, row: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    """Logits of every document run by itself."""
    return torch.cat([model(input_ids=part, use_cache=False).logits for part in row.split(lengths, dim=1)], dim=1)


def positions(*lengths: int) -> torch.Tensor:
    return torch.cat([torch.arange(n) for n in lengths])[None]


def context(lengths: tuple[int, ...], model: PreTrainedModel, budget: int = 3) -> SparseContext:
    settings = model.config.sparse_attention
    layout = PackedLayout.from_lengths(lengths, settings["block_size"])
    return SparseContext(layout, {0: budget, 1: budget}, MoBARouter(settings["granularity"]))


@torch.no_grad()
def test_documents_are_isolated_whichever_way_the_boundaries_arrive(model: PreTrainedModel) -> None:
    row = ids(*LENGTHS)
    expected = alone(model, row, LENGTHS)
    edges = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    everything = torch.ones_like(row)
    ways = {
        "position ids": {"position_ids": positions(*LENGTHS)},
        "cu_seq_lens": {
            "cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "max_length_q": 22, "max_length_k": 22,
            "position_ids": positions(*LENGTHS),
        },
        "plan": {"sparse": context(LENGTHS, model), "position_ids": positions(*LENGTHS)},
        "plan beside a mask": {
            "sparse": context(LENGTHS, model), "position_ids": positions(*LENGTHS), "attention_mask": everything,
        },
    }  # fmt: skip
    for way, arguments in ways.items():
        logits = model(input_ids=row, use_cache=False, **arguments).logits
        assert float((logits - expected).abs().max()) < 1e-10, way


@torch.no_grad()
@pytest.mark.parametrize("with_mask", [False, True])
def test_a_changed_token_moves_no_other_document(model: PreTrainedModel, with_mask: bool) -> None:
    row = ids(*LENGTHS)
    changed = row.clone()
    changed[0, 13] = (changed[0, 13] + 1) % VOCABULARY  # in the third document
    mask = {"attention_mask": torch.ones_like(row)} if with_mask else {}
    for arguments in ({}, {"sparse": context(LENGTHS, model)}):
        before, after = (
            model(input_ids=x, use_cache=False, position_ids=positions(*LENGTHS), **arguments, **mask).logits
            for x in (row, changed)
        )
        assert torch.equal(before[:, :12], after[:, :12])
        assert torch.equal(before[:, 34:], after[:, 34:])
        assert not torch.equal(before[:, 13:34], after[:, 13:34])


@torch.no_grad()
def test_the_plan_wins_over_wrong_position_ids(model: PreTrainedModel) -> None:
    """Boundaries come from the layout even where rotary positions run through the whole row."""
    row = ids(*LENGTHS)
    changed = row.clone()
    changed[0, 0] = (changed[0, 0] + 1) % VOCABULARY
    through = torch.arange(row.shape[1])[None]
    before, after = (
        model(input_ids=x, use_cache=False, position_ids=through, sparse=context(LENGTHS, model)).logits
        for x in (row, changed)
    )
    assert torch.equal(before[:, 11:], after[:, 11:])


@torch.no_grad()
def test_padding_takes_no_attention_and_changes_nothing(model: PreTrainedModel) -> None:
    """Right-padded batch: real tokens as if alone, whatever stands in the padding."""
    row = ids(21)
    expected = model(input_ids=row, use_cache=False).logits
    mask = torch.zeros(2, 30, dtype=torch.long)
    mask[0, :21], mask[1, :5] = 1, 1
    for filler in (0, 50):
        batch = torch.full((2, 30), filler)
        batch[0, :21], batch[1, :5] = row[0], row[0, :5]
        logits = model(input_ids=batch, attention_mask=mask, use_cache=False).logits
        assert float((logits[0, :21] - expected[0]).abs().max()) < 1e-10
        assert torch.isfinite(logits).all()


@torch.no_grad()
def test_a_large_budget_is_transformers_own_dense_attention(model: PreTrainedModel) -> None:
    row = ids(30)
    sparse = model(input_ids=row, use_cache=False, sparse=context((30,), model, budget=8)).logits
    few = model(input_ids=row, use_cache=False, sparse=context((30,), model, budget=2)).logits
    model.set_attn_implementation("sdpa")
    dense = model(input_ids=row, use_cache=False).logits
    settings = model.config.sparse_attention
    activate(model, settings["block_size"], settings["budget"], settings["granularity"])
    assert float((sparse - dense).abs().max()) < 1e-10
    assert float((few - dense).abs().max()) > 1e-4


@torch.no_grad()
@pytest.mark.parametrize("filler", [0, 1])
@pytest.mark.parametrize("with_mask", [False, True])
def test_a_padding_tail_behind_packed_documents_is_no_document(
    model: PreTrainedModel, with_mask: bool, filler: int
) -> None:
    """Documents stay apart whether the tail is told by a mask or only by its repeated positions."""
    row = ids(*LENGTHS)
    tokens, tail = row.shape[1], 9
    expected = alone(model, row, LENGTHS)
    padded = torch.nn.functional.pad(row, (0, tail), value=5)
    where = torch.nn.functional.pad(positions(*LENGTHS), (0, tail), value=filler)
    mask = {"attention_mask": (torch.arange(tokens + tail) < tokens).long()[None]} if with_mask else {}
    found = model(input_ids=padded, position_ids=where, use_cache=False, **mask).logits
    assert float((found[:, :tokens] - expected).abs().max()) < 1e-10
    assert torch.isfinite(found).all()


def boundaries(where: list[int], mask: list[int] | None = None) -> tuple[tuple[int, ...], int]:
    """Document lengths and number of ignored tokens of one row."""
    query = torch.zeros(1, 1, len(where), 2)
    given = None if mask is None else torch.tensor([mask]).bool()
    lengths_q, lengths_k, keep, _ = _boundaries(query, query, given, {"position_ids": torch.tensor([where])})
    assert lengths_q == lengths_k
    return lengths_q, 0 if keep is None else int((~keep).sum())


def test_boundaries_by_hand() -> None:
    assert boundaries([0, 1, 2, 0, 1]) == ((3, 2), 0)
    assert boundaries([0, 1, 2, 0, 0, 0, 0]) == ((3,), 4)  # one ignored tail, not four documents
    assert boundaries([0, 1, 1, 1]) == ((1,), 3)
    assert boundaries([0, 1, 0]) == ((2, 1), 0)
    assert boundaries([0, 0, 1, 2]) == ((1, 3), 0)  # a document of one token in front is a document
    assert boundaries([0]) == ((1,), 0)
    assert boundaries([0, 1, 2, 3, 4], [0, 0, 1, 1, 1]) == ((3,), 2)  # left padding
    assert boundaries([1, 1, 0, 1, 2], [0, 0, 1, 1, 1]) == ((3,), 2)
    assert boundaries([0, 1, 2, 3, 4], [1, 1, 0, 1, 1]) == ((4,), 1)  # a hole is no border
    assert boundaries([0, 1, 0, 1, 0], [1, 1, 1, 1, 0]) == ((2, 2), 1)


@torch.no_grad()
def test_cumulative_lengths_may_leave_a_tail(model: PreTrainedModel) -> None:
    row = ids(*LENGTHS)
    edges = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    padded = torch.nn.functional.pad(row, (0, 6))
    found = model(
        input_ids=padded,
        position_ids=torch.nn.functional.pad(positions(*LENGTHS), (0, 6)),
        cu_seq_lens_q=edges,
        cu_seq_lens_k=edges,
        max_length_q=22,
        max_length_k=22,
        use_cache=False,
    ).logits
    assert float((found[:, : row.shape[1]] - alone(model, row, LENGTHS)).abs().max()) < 1e-10


@torch.no_grad()
def test_generation_with_a_cache_equals_no_cache(model: PreTrainedModel) -> None:
    """At full budget a cached step attends what the whole row attends; also left-padded beside a longer row."""
    activate(model, 4, 64, model.config.sparse_attention["granularity"])
    row = torch.cat([ids(12), ids(13)[:, 1:]])
    mask = torch.ones_like(row)
    mask[1, :5] = 0
    with_cache, without = (
        model.generate(row, attention_mask=mask, max_new_tokens=4, do_sample=False, use_cache=cache, pad_token_id=0)
        for cache in (True, False)
    )
    activate(model, 4, 3, model.config.sparse_attention["granularity"])
    assert torch.equal(with_cache, without)


def test_what_the_attention_cannot_do_is_refused() -> None:
    model = tiny_model()
    row = ids(8)
    with pytest.raises(InputError, match="4-dimensional attention mask"):
        model(input_ids=row, attention_mask=torch.zeros(1, 1, 8, 8), use_cache=False)
    with pytest.raises(InputError, match="one packed row, but the batch has 2"):
        model(input_ids=row.repeat(2, 1), use_cache=False, sparse=context((8,), model))
    with pytest.raises(InputError, match="must both be at least 1"):
        activate(model, 4, 0, "token")
    model.config.layer_types = ["sliding_attention", "full_attention"]
    with pytest.raises(InputError, match="sliding_attention"):
        activate(model, 4, 2, "token")


def test_a_checkpoint_keeps_its_attention_settings(tmp_path: object) -> None:
    from sparsebalance.training.config import AttentionConfig, ModelConfig

    model = tiny_model(dtype="float32")
    model.save_pretrained(tmp_path)
    again = build_model(
        ModelConfig(path=tmp_path),
        AttentionConfig(block_size=4, budget=3),
        VOCABULARY,
        512,
        seed=99,  # type: ignore[arg-type]
    )
    row = ids(30)
    assert again.config.sparse_attention == model.config.sparse_attention
    with torch.no_grad():
        assert torch.equal(model(input_ids=row).logits, again(input_ids=row).logits)
