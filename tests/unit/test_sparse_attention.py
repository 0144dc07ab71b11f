"""Our attention inside transformers: boundaries from every source, isolation, refusals."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from sparsebalance.attention.interface import PackedLayout
from sparsebalance.attention.moba import MoBARouter
from sparsebalance.planning.errors import InputError
from sparsebalance.training.model import build_model
from sparsebalance.training.sparse_attention import SparseContext, activate
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
