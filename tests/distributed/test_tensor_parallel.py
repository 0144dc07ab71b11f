"""Real tensor-parallel processes: loss and every gradient are those of one process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.distributed import forked
from tests.distributed.tensor_worker import CASES, HAS_PEFT, THREE
from tests.models import VOCABULARY

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def on_two() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(forked.run("tensor_worker", 2))
    return record


@pytest.fixture(scope="module")
def on_three() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(forked.run("tensor_worker", 3))
    return record


def check(name: str, found: dict[str, Any]) -> None:
    tolerance = 1e-12 if name != "fp32" else 1e-5
    assert found["loss"] < tolerance
    assert found["norm"] < tolerance
    assert len(found["gradients"]) > 12
    assert {n: apart for n, apart in found["gradients"].items() if not apart < tolerance} == {}
    assert found["in one buffer"]


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_have_the_gradient_of_one(name: str, on_two: dict[str, Any]) -> None:
    if CASES[name].lora and not HAS_PEFT:
        pytest.skip("peft is not installed")
    check(name, on_two[name])


@pytest.mark.parametrize("name", THREE)
def test_three_ranks_have_the_gradient_of_one(name: str, on_three: dict[str, Any]) -> None:
    check(name, on_three[name])


def test_no_rank_sees_the_whole_vocabulary(on_two: dict[str, Any]) -> None:
    """97 rows on two ranks: no tensor of any operation, forward or backward, has a side of 97."""
    sizes = on_two["packed"]["sizes"]
    assert 48 in sizes
    assert VOCABULARY not in sizes


def test_parameters_are_spread(on_two: dict[str, Any], on_three: dict[str, Any]) -> None:
    """All but the norms, 5 of 32 numbers; rank 0 has the smaller part of what does not divide."""
    assert 0.49 < on_two["packed"]["parameters"] < 0.51
    assert 0.32 < on_three["packed"]["parameters"] < 0.34


def test_states_go_out_and_in_whole(on_two: dict[str, Any], on_three: dict[str, Any]) -> None:
    assert all(on_two["states"].values())
    assert all(on_three["states"].values())


def test_stages_hand_on_their_own_tokens_alone(on_two: dict[str, Any], on_three: dict[str, Any]) -> None:
    assert on_two["shard sizes"] == [4, 2, 1]  # of rows of 7, 3 and 1 tokens
    assert on_three["shard sizes"] == [3, 1, 1]


def test_logits_far_apart_do_not_overflow(on_two: dict[str, Any], on_three: dict[str, Any]) -> None:
    assert on_two["far apart"] == [2e4, [1.0, -1.0]]
    assert on_three["far apart"] == [2e4, [1.0, -1.0, 0.0]]
