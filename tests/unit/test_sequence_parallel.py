"""Shards of a packed row: every token, position and target once, and at its place."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebalance.planning.errors import InputError
from sparsebalance.planning.plan import Latency, MicroBatch, Segment
from sparsebalance.training.data import IGNORE
from sparsebalance.training.packing import pack
from sparsebalance.training.sequence_parallel import shard
from tests.models import example, unit


def test_a_packed_row_by_hand() -> None:
    """Lengths 7, 1 and 3, all tokens but a sample's last with a target: 11 tokens over 2 ranks are 6 and 5 + 1 of
    padding. Token 5 is the last of rank 0, and its target, token 6, is on rank 1; token 6 has none."""
    examples = [example(7, 6), example(1, 0), example(3, 2)]
    row = pack(unit(examples, 0, 1, 2), examples)
    first, second = (shard(row, rank, 2) for rank in range(2))
    assert first.input_ids.tolist() == [examples[0].input_ids[:6].tolist()]
    assert second.input_ids.tolist() == [
        [examples[0].input_ids[6], examples[1].input_ids[0], *examples[2].input_ids, 0]
    ]
    assert first.position_ids.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert second.position_ids.tolist() == [[6, 0, 0, 1, 2, 0]]
    assert first.target_index.tolist() == [0, 1, 2, 3, 4, 5]
    assert first.targets.tolist() == examples[0].input_ids[1:].tolist()
    assert second.target_index.tolist() == [2, 3]
    assert second.targets.tolist() == examples[2].input_ids[1:].tolist()
    for part in (first, second):
        assert (part.lengths_q, part.lengths_k) == ((7, 1, 3), (7, 1, 3))


def test_a_chunk_keeps_its_positions_and_keys() -> None:
    """Tokens 8 to 13 of 20: the target of token 12 is behind the chunk."""
    examples = [example(20, 19)]
    row = pack(MicroBatch((Segment(0, 8, 13, 20, 5),), (3, 3), Latency(0.0, 0.0)), examples)
    parts = [shard(row, rank, 2) for rank in range(2)]
    assert [part.position_ids.tolist() for part in parts] == [[[8, 9, 10]], [[11, 12, 0]]]
    assert parts[1].targets.tolist() == examples[0].input_ids[12:14].tolist()
    assert {(part.lengths_q, part.lengths_k) for part in parts} == {((5,), (13,))}


def test_fewer_tokens_than_ranks() -> None:
    examples = [example(3, 2)]
    parts = [shard(pack(unit(examples, 0), examples), rank, 4) for rank in range(4)]
    assert [part.input_ids.shape for part in parts] == [(1, 1)] * 4
    assert [part.targets.numel() for part in parts] == [1, 1, 0, 0]
    assert parts[3].input_ids.tolist() == [[0]]


@settings(deadline=None, max_examples=40)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4), degree=st.integers(1, 9))
def test_shards_together_are_the_row(lengths: list[int], degree: int) -> None:
    examples = [example(n, n // 2, seed) for seed, n in enumerate(lengths)]
    row = pack(unit(examples, *range(len(examples))), examples)
    parts = [shard(row, rank, degree) for rank in range(degree)]
    tokens, n = sum(lengths), parts[0].input_ids.shape[1]
    assert {part.input_ids.shape for part in parts} == {(1, n)}
    assert 0 <= degree * n - tokens < degree
    ids, positions = (torch.cat([getattr(p, name)[0] for p in parts]) for name in ("input_ids", "position_ids"))
    assert torch.equal(ids[:tokens], row.input_ids[0])
    assert torch.equal(positions[:tokens], row.position_ids[0])
    assert not ids[tokens:].any()
    wanted = torch.full((degree * n,), IGNORE)
    for rank, part in enumerate(parts):
        wanted[part.target_index + rank * n] = part.targets
    assert torch.equal((wanted != IGNORE).nonzero().flatten(), row.target_index)
    assert torch.equal(wanted[row.target_index], row.targets)


def test_a_rank_beyond_the_degree_is_refused() -> None:
    examples = [example(3, 2)]
    row = pack(unit(examples, 0), examples)
    for rank in (-1, 2):
        with pytest.raises(InputError, match=f"rank {rank} is none of 2 sequence parallel ranks"):
            shard(row, rank, 2)
