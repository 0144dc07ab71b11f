"""The coverage probe against coverage computed from full softmax weights."""

from __future__ import annotations

import pytest
import torch

from sparsebalance.attention.estimate import segment_estimates
from sparsebalance.attention.interface import Granularity, PackedLayout
from sparsebalance.attention.moba import MoBARouter
from sparsebalance.attention.probe import probe_coverage
from sparsebalance.attention.reference import selected_blocks
from sparsebalance.planning.coverage import BUDGET_GRID
from tests.unit.test_attention import inputs


@pytest.mark.parametrize("granularity", ["token", "block"])
def test_router_coverage_is_the_softmax_mass_of_its_blocks(granularity: Granularity) -> None:
    """All rows probed, two segments, one of them a chunk: the mean over queries and heads, by definition."""
    layout = PackedLayout((14, 9), (30, 9), 4)
    q, k, _ = inputs(layout, 4, 2, torch.float64)
    probes = probe_coverage(q, k, layout, MoBARouter(granularity), rows=100)
    for probe, q_s, k_s in zip(probes, q.detach().split((14, 9)), k.detach().split((30, 9)), strict=True):
        length, queries = len(k_s), len(q_s)
        logits = torch.einsum("thd,shd->ths", q_s, k_s.repeat_interleave(2, 1)) / 8**0.5
        future = torch.arange(length) > (length - queries + torch.arange(queries))[:, None]
        weights = logits.masked_fill(future[:, None], -torch.inf).softmax(-1)
        for budget, covered in zip(BUDGET_GRID, probe.router, strict=True):
            chosen = selected_blocks(q_s, k_s, 4, budget, granularity)
            inside = (weights * chosen.repeat_interleave(4, 2)[:, :, :length]).sum(-1).mean()
            assert covered == pytest.approx(float(inside), abs=1e-6)


def test_the_oracle_is_never_worse_and_both_rise_to_one() -> None:
    layout = PackedLayout.from_lengths([100], 4)
    q, k, _ = inputs(layout, 2, 1, torch.float32)
    (probe,) = probe_coverage(q, k, layout, MoBARouter("token"), rows=16)
    assert all(o >= r - 1e-6 for r, o in zip(probe.router, probe.oracle))
    for curve in (probe.router, probe.oracle):
        assert list(curve) == sorted(curve)
        assert curve[-1] == pytest.approx(1.0)


def test_short_segments_are_probed_too() -> None:
    layout = PackedLayout.from_lengths([1, 3], 4)
    q, k, _ = inputs(layout, 2, 1, torch.float32)
    for probe in probe_coverage(q, k, layout, MoBARouter("block"), rows=16):
        for curve in (probe.estimated, probe.router, probe.oracle):
            assert curve == pytest.approx([1.0] * len(BUDGET_GRID))


@pytest.mark.parametrize("granularity", ["token", "block"])
def test_the_estimate_is_of_the_same_queries(granularity: Granularity) -> None:
    """Its mean over heads, segment by segment, a chunk among them; and it is no copy of what was measured."""
    layout = PackedLayout((14, 9, 1), (30, 9, 1), 4)
    q, k, _ = inputs(layout, 4, 2, torch.float64)
    router = MoBARouter(granularity)
    probes = probe_coverage(q, k, layout, router, rows=5, scale=0.7)
    expected = segment_estimates(router.score(q, k, layout), 0.7, rows=5).mean(1)
    assert torch.equal(torch.tensor([probe.estimated for probe in probes], dtype=torch.float64), expected)
    assert max(abs(e - r) for e, r in zip(probes[0].estimated, probes[0].router)) > 1e-3
    assert list(probes[0].estimated) == sorted(probes[0].estimated)
