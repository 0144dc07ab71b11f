"""Two real processes: the sum over ranks is the gradient of one process, whatever the plan."""

from __future__ import annotations

import json

import pytest

from sparsebalance.planning.baselines import BASELINES
from tests.distributed import forked
from tests.distributed.gradient_worker import CHUNKED

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def found() -> dict[str, object]:
    record: dict[str, object] = json.loads(forked.run("gradient_worker", 2))
    return record


@pytest.mark.parametrize("case", ["targets 1 and 9", "a rank without targets", "an empty rank", *BASELINES, "sab"])
def test_the_gradient_is_that_of_one_process(case: str, found: dict[str, object]) -> None:
    loss, gradient = found[case]  # type: ignore[misc]
    assert loss < 1e-12  # type: ignore[has-type]
    assert gradient < 1e-9  # type: ignore[has-type]


@pytest.mark.parametrize(("name", "unit_size", "keep"), CHUNKED)
def test_the_gradient_of_chunks_and_packs_is_that_of_whole_samples(
    name: str, unit_size: int, keep: int | None, found: dict[str, object]
) -> None:
    case = f"{name} in {unit_size}, {keep} kept"
    loss, gradient = found[case]  # type: ignore[misc]
    assert loss < 1e-12  # type: ignore[has-type]
    assert gradient < 1e-9  # type: ignore[has-type]
    chunks, recomputed, packed = found[f"{case}: plan"]  # type: ignore[misc]
    # Samples of 90, 60, 41, 30 and 17 tokens are cut in chunks of 16, those of 90, 60 and 41 in chunks of 32.
    assert chunks == (6 + 4 + 3 + 2 + 2 if unit_size == 16 else 3 + 2 + 2)  # type: ignore[has-type]
    cut = 5 if unit_size == 16 else 3
    assert recomputed == (0 if keep is None else chunks - keep * cut)  # type: ignore[has-type]
    assert packed > 0  # type: ignore[has-type]


def test_every_rank_makes_the_same_plans(found: dict[str, object]) -> None:
    assert found["same plans"] is True
