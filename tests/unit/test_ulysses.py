"""Head exchange without processes: what ranks send each other, by hand, and against one process."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsebalance.attention.ulysses import (
    check_sequence_degree,
    kv_copies,
    pack_heads,
    pack_tokens,
    shard_tokens,
    unpack_heads,
    unpack_tokens,
)
from sparsebalance.planning.errors import InputError

HEADS = 12
DIVISORS = [1, 2, 3, 4, 6, 12]


def shards(x: Tensor, degree: int) -> list[Tensor]:
    n = shard_tokens(x.shape[0], degree)
    padding = x.new_full((n * degree - x.shape[0], *x.shape[1:]), 1e6)  # would show
    return list(torch.cat([x, padding]).split(n))


def exchanged(sent: list[Tensor]) -> list[Tensor]:
    """What an all-to-all gives every rank."""
    return [torch.stack([parts[rank] for parts in sent]) for rank in range(len(sent))]


def product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Stands in for attention: every query head with its key/value head, every token with all earlier ones."""
    group = q.shape[1] // k.shape[1]
    return (q * k.repeat_interleave(group, 1)).sum(-1, keepdim=True) * v.repeat_interleave(group, 1).cumsum(0)


@settings(deadline=None, max_examples=60)
@given(tokens=st.integers(1, 13), degree=st.sampled_from(DIVISORS), kv_heads=st.sampled_from(DIVISORS))
def test_every_head_meets_its_key_value_head(tokens: int, degree: int, kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    q, k, v = (
        torch.randn(tokens, h, dim, dtype=torch.float64, generator=generator).requires_grad_()
        for h, dim in ((HEADS, 4), (kv_heads, 4), (kv_heads, 5))
    )
    weight = torch.randn(tokens, HEADS, 5, dtype=torch.float64, generator=generator)
    expected = product(q, k, v)
    expected_grads = torch.autograd.grad((expected * weight).sum(), (q, k, v))

    mine = list(zip(*(shards(x, degree) for x in (q, k, v))))
    received = exchanged([pack_heads(*shard, degree) for shard in mine])
    attended = [product(*unpack_heads(part, *mine[0], tokens)) for part in received]
    assert {part.shape[:2] for part in attended} == {(tokens, HEADS // degree)}
    back = exchanged([pack_tokens(part, degree) for part in attended])
    out = torch.cat([unpack_tokens(part, HEADS // degree) for part in back])
    assert torch.allclose(out[:tokens], expected, rtol=1e-13, atol=1e-13)
    assert not out[tokens:].any()
    grads = torch.autograd.grad((out[:tokens] * weight).sum(), (q, k, v))
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(grads, expected_grads))


def test_key_value_heads_are_sent_as_often_as_they_are_read_apart() -> None:
    """28 query heads over 4 key/value heads: 2 and 4 ranks get whole groups; 14 ranks get 2 query heads each, of which
    those of rank 3 read two different key/value heads, so every query head brings its own."""
    assert [kv_copies(28, 4, degree) for degree in (1, 2, 4, 14, 28)] == [1, 1, 1, 7, 7]
    assert [kv_copies(4, 2, degree) for degree in (1, 2, 4)] == [1, 1, 2]
    assert [kv_copies(32, 2, degree) for degree in (2, 4, 8, 16)] == [1, 2, 4, 8]
    assert kv_copies(6, 3, 2) == 2


def test_a_message_by_hand() -> None:
    """Two tokens, two query heads, one key/value head, two ranks; v has the sign turned."""
    q = torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]])
    k = torch.tensor([[[5.0]], [[6.0]]])
    assert pack_heads(q, k, -k, 2).tolist() == [[[1, 5, -5], [3, 6, -6]], [[2, 5, -5], [4, 6, -6]]]
    assert pack_tokens(q, 2).tolist() == [[[1, 2]], [[3, 4]]]
    assert pack_tokens(q, 4).tolist() == [[[1, 2]], [[3, 4]], [[0, 0]], [[0, 0]]]


def test_degrees_that_do_not_divide_the_heads_are_refused() -> None:
    with pytest.raises(
        InputError,
        match="28 attention heads cannot be shared out over 8 sequence parallel ranks; "
        "choose a degree out of 1, 2, 4, 7, 14, 28",
    ):
        check_sequence_degree(28, 4, 8)
    with pytest.raises(InputError, match=r"out of 1, 2, 4$"):
        check_sequence_degree(4, 2, 0)
    with pytest.raises(InputError, match="4 attention heads cannot share 3 key/value heads"):
        check_sequence_degree(4, 3, 2)
    with pytest.raises(InputError, match="28 attention heads"):
        pack_heads(torch.ones(2, 28, 1), torch.ones(2, 4, 1), torch.ones(2, 4, 1), 8)
    for degree in (1, 2, 4, 7, 14, 28):
        check_sequence_degree(28, 4, degree)
