"""Models spread over real processes: loss, gradient norm and every gradient are those of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.distributed

TOPOLOGIES = ("4x2x1x1", "2x4x1x1", "4x1x2x1", "4x1x1x2", "2x1x2x2", "2x2x2x1")
"""Data x pipeline x tensor x sequence, of 8 processes."""


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, float]]:
    pytest.importorskip("peft", reason="adapters need the extra `lora`")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8"]
    done = subprocess.run(
        [*command, "-m", "tests.distributed.pipeline_worker", *TOPOLOGIES],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record: dict[str, dict[str, float]] = json.loads(done.stdout.strip().splitlines()[-1])
    return record


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_topology_gives_the_loss_and_gradient_of_one_process(
    topology: str, found: dict[str, dict[str, float]]
) -> None:
    cases = found[topology]
    assert len(cases) == (15 if topology == TOPOLOGIES[0] else 8)
    assert {case: off for case, off in cases.items() if not off < 1e-12} == {}
