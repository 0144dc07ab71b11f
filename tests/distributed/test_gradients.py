"""Two real processes: the sum over ranks is the gradient of one process, whatever the plan."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from sparsebalance.planning.baselines import BASELINES
from tests.conftest import ROOT

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def found() -> dict[str, object]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "tests.distributed.gradient_worker"],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record: dict[str, object] = json.loads(done.stdout.strip().splitlines()[-1])
    return record


@pytest.mark.parametrize("case", ["targets 1 and 9", "a rank without targets", "an empty rank", *BASELINES, "sab"])
def test_the_gradient_is_that_of_one_process(case: str, found: dict[str, object]) -> None:
    loss, gradient = found[case]  # type: ignore[misc]
    assert loss < 1e-12  # type: ignore[has-type]
    assert gradient < 1e-9  # type: ignore[has-type]


def test_every_rank_makes_the_same_plans(found: dict[str, object]) -> None:
    assert found["same plans"] is True
