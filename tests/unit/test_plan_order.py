"""The order within ranks: nothing lost, chains whole, never slower, and faster where an order is."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebalance.planning import plan_order
from sparsebalance.planning.batching import SparsityAware
from sparsebalance.planning.expected import ExpectedBudgets
from sparsebalance.planning.latency import LatencyModel, RooflineModel
from sparsebalance.planning.pipeline import PipelineModel, ScheduleName, simulate_plan
from sparsebalance.planning.plan import MicroBatch, Topology, chain_lengths
from sparsebalance.planning.plan_order import order_by_simulation
from tests.conftest import samples_of
from tests.unit.test_latency import make_table

Ranks = tuple[tuple[MicroBatch, ...], ...]


@pytest.fixture(scope="module")
def deep(roofline: RooflineModel) -> RooflineModel:
    return replace(roofline, decoder=replace(roofline.decoder, layers=4, vocabulary=10))


def ranks_of(model: LatencyModel, lengths: list[int], dp: int, equal: bool = False) -> Ranks:
    budgets = (4,) * model.layers
    rule = SparsityAware(256, equal_counts=equal)
    placement = rule(samples_of(*lengths), model, Topology(dp=dp, pp=2), ExpectedBudgets(budgets), 4096)
    return tuple(tuple(MicroBatch(u, budgets, model.latency(u, budgets)) for u in rank) for rank in placement)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 1500), min_size=1, max_size=10),
    st.integers(1, 3),
    st.sampled_from(["1f1b", "zero_bubble"]),
    st.booleans(),
)
def test_the_same_units_on_the_same_ranks_never_slower(
    lengths: list[int], dp: int, schedule: ScheduleName, equal: bool
) -> None:
    table, topology, pipeline = make_table(), Topology(dp=dp, pp=2), PipelineModel(schedule)
    before = ranks_of(table, lengths, dp, equal)
    after = order_by_simulation(before, table, topology, pipeline)
    for old, new in zip(before, after, strict=True):
        assert sorted(map(repr, old)) == sorted(map(repr, new))
        assert sum(chain_lengths([unit.segments for unit in new])) == len(new)  # chunks in order, none torn apart
        empty = [not unit.segments for unit in new]
        assert empty == sorted(empty)
    ms = [simulate_plan(ranks, table, topology, pipeline).step_ms for ranks in (before, after)]
    assert ms[1] <= ms[0] * (1 + 1e-12)
    assert after == order_by_simulation(before, table, topology, pipeline)


def test_a_better_order_of_the_slowest_rank_is_found(deep: RooflineModel) -> None:
    """Split backwards fill the bubbles of three long samples better when the longest is not the first."""
    topology, pipeline = Topology(pp=4), PipelineModel("zero_bubble")
    found = 0
    for longest in (1500, 2100, 2700, 3300):
        before = ranks_of(deep, [longest, 1400, 1000, 700, 300], 1)
        after = order_by_simulation(before, deep, topology, pipeline)
        ms = [simulate_plan(ranks, deep, topology, pipeline).step_ms for ranks in (before, after)]
        found += ms[1] < 0.999 * ms[0]
    assert found >= 1


def test_ranks_that_nothing_waits_for_keep_their_order(deep: RooflineModel) -> None:
    before = ranks_of(deep, [4000, 100, 90, 80], 2)
    after = order_by_simulation(before, deep, Topology(dp=2, pp=4), PipelineModel("zero_bubble"))
    light = min(range(2), key=lambda rank: len(before[rank]))
    assert after[light] == before[light]


def test_one_stage_and_large_plans_keep_their_order(deep: RooflineModel, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = ranks_of(deep, [3300, 1400, 1000, 700], 1)
    given_order = tuple(tuple(reversed(rank)) for rank in ranks_of(deep, [250, 200, 150], 1))
    assert order_by_simulation(given_order, deep, Topology(), PipelineModel()) == given_order
    monkeypatch.setattr(plan_order, "SIMULATED_UNITS", len(ranks[0]) - 1)
    monkeypatch.setattr(plan_order, "simulate_rank", lambda *_: pytest.fail("simulated"))
    assert order_by_simulation(ranks, deep, Topology(pp=4), PipelineModel("zero_bubble")) == ranks
