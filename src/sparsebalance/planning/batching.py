"""Sparsity-aware batching (SAB): which samples share a micro-batch, and on which rank it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sparsebalance.planning.latency import LatencyModel
from sparsebalance.planning.plan import Sample, Segment, Topology

Unit = tuple[Segment, ...]
Placement = tuple[tuple[Unit, ...], ...]  # [data-parallel rank][execution order]


class Batching(Protocol):
    """Samples of one step -> placement. Pure and deterministic: every rank calls it and gets the same answer."""

    def __call__(
        self,
        samples: Sequence[Sample],
        model: LatencyModel,
        topology: Topology,
        budgets: Sequence[int],
        token_cap: int,
    ) -> Placement: ...
