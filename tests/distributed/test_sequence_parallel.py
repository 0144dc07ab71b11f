"""Four real processes: token shards and whole heads give loss, gradients and budgets of one process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.distributed import forked
from tests.distributed.sequence_worker import CASES, DEGREES, TUNINGS, WORLD

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(forked.run("sequence_worker", WORLD))
    return record


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_one_process(case: str, degree: int, found: dict[str, Any]) -> None:
    loss, gradient, of_own = found[f"{case} at {degree}"]
    assert loss < 1e-12
    assert gradient < 1e-12
    assert of_own < 1e-12


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("kind", TUNINGS)
def test_budgets_tuned_online_are_those_of_one_process(kind: str, degree: int, found: dict[str, Any]) -> None:
    online = found[f"{kind} at {degree}"]
    assert online["used"] == online["alone"]
    assert online["agreed"]
    assert any(own != online["used"] for own in online["by own heads"])  # else this test could not fail
    assert online["estimates"] < 1e-12
    assert online["gradients"] < 1e-12


@pytest.mark.parametrize("degree", DEGREES)
def test_probes_tell_of_all_heads(degree: int, found: dict[str, Any]) -> None:
    assert found[f"share at {degree}"]["probes"] < 1e-6  # masses are in fp32


@pytest.mark.parametrize("degree", DEGREES)
def test_every_rank_refuses_what_is_not_finite(degree: int, found: dict[str, Any]) -> None:
    said = found[f"nan at {degree}"]
    assert len(said) == degree
    assert all("layer 0 of a row: " in one and "NaN or infinite" in one for one in said)


@pytest.mark.parametrize("degree", DEGREES)
def test_a_row_that_was_not_cut_is_refused(degree: int, found: dict[str, Any]) -> None:
    said = f"a shard holds 11 tokens, but one of {degree} shards of a row of 11 tokens holds {-(-11 // degree)}; cut"
    assert found[f"unsharded at {degree}"].startswith(said)


@pytest.mark.parametrize("degree", DEGREES)
def test_low_precision_is_exchanged_too(degree: int, found: dict[str, Any]) -> None:
    assert found[f"bfloat16 at {degree}"] < 2e-2
