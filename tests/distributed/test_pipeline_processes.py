"""Models spread over real processes: loss, gradient norm and every gradient are those of one process."""

from __future__ import annotations

import json

import pytest

from tests.distributed import forked

pytestmark = pytest.mark.distributed

TOPOLOGIES = {
    2: ("1x2x1x1", "1x1x2x1", "1x1x1x2"),
    4: ("2x2x1x1", "1x4x1x1", "2x1x1x2", "1x1x2x2", "2x2x1x1/2", "4x1x1x1/2", "2x1x2x1/2", "2x1x1x2/4"),
    8: ("2x2x2x1",),
}
"""Data x pipeline x tensor x sequence / processes that share parameters out, by the number of processes."""
THOROUGH = ("1x2x1x1", "2x2x1x1", "2x2x1x1/2")
"""Looked at with every schedule."""


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, float]]:
    pytest.importorskip("peft", reason="adapters need the extra `lora`")
    lines = [forked.run("pipeline_worker", processes, *some) for processes, some in TOPOLOGIES.items()]
    return {topology: cases for line in lines for topology, cases in json.loads(line).items()}


@pytest.mark.parametrize("topology", [topology for some in TOPOLOGIES.values() for topology in some])
def test_a_topology_gives_the_loss_and_gradient_of_one_process(
    topology: str, found: dict[str, dict[str, float]]
) -> None:
    cases = found[topology]
    assert len(cases) == (15 if topology in THOROUGH else 8)
    assert {case: off for case, off in cases.items() if not off < 1e-12} == {}
