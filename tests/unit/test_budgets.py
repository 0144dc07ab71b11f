"""Coverage curves and the anchor rule: never empty, bounded, and moving the right way."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebalance.planning.anchor import Anchor
from sparsebalance.planning.budgets import Fixed, attention_ms
from sparsebalance.planning.coverage import (
    BUDGET_GRID,
    CoverageCurves,
    CoverageEstimator,
    length_bucket,
    plan_coverage,
)
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.plan import Latency, MicroBatch, Segment, StepPlan, Topology
from tests.unit.test_latency import make_table, models
from tests.unit.tuning_steps import step_of, tune

TABLE = make_table()


def place(*ranks: list[tuple[int, ...]]) -> tuple[tuple[tuple[Segment, ...], ...], ...]:
    """Lengths per unit per rank -> placement."""
    sample = iter(range(1000))
    return tuple(tuple(tuple(Segment(next(sample), 0, n, n, 0) for n in unit) for unit in rank) for rank in ranks)


def curves(steepness: float, layers: int = 2) -> CoverageCurves:
    """Coverage 1 - exp(-steepness x budget) for every length."""
    values = 1 - np.exp(-steepness * np.array(BUDGET_GRID))
    return CoverageCurves(16, {(layer, bucket): values for layer in range(layers) for bucket in range(20)})


def milliseconds(unit: tuple[Segment, ...], budgets: tuple[int, ...]) -> float:
    return TABLE.latency(unit, budgets).total_ms


@pytest.mark.parametrize("name", models())
def test_choices_cost_what_a_layer_costs(name: str) -> None:
    """Under every latency model, and with the second forward of a recomputed chunk."""
    model = models()[name]
    step = step_of(place([(900, 30), (4000,), (77,), ()]), model, 8, CoverageCurves(model.block_size, {}))
    recomputed = replace(step, ranks=tuple(tuple(replace(u, recompute=True) for u in rank) for rank in step.ranks))
    budgets = np.array([1, 3, 8, 40])
    once, twice = attention_ms(step, budgets), attention_ms(recomputed, budgets)
    for place_, unit in enumerate(step.units):
        router, forward, backward = model.layer_attention(unit.segments, budgets.tolist())
        factor = model.rank_factor(int(step.rank_of[place_]))
        assert once[:, place_] == pytest.approx(np.array([router + forward, backward]) * factor)
        assert twice[1, place_] == pytest.approx((backward + forward) * factor)


def test_fixed_keeps_the_default() -> None:
    placement = place([(100,), (50, 60)], [()])
    assert tune(Fixed(), placement, TABLE, 5, curves(0.1)) == (((5, 5), (5, 5)), ((5, 5),))


def test_slow_units_read_less_and_fast_ones_more() -> None:
    placement = place([(4000,), (600,)])
    ((slow, fast),) = tune(Anchor(threshold=0.3), placement, TABLE, 8, curves(0.05))
    assert max(slow) < 8 < min(fast)


@pytest.mark.parametrize(("kind", "sign"), [("min", -1), ("max", 1)])
def test_min_only_takes_and_max_only_gives(kind: str, sign: int) -> None:
    placement = place([(4000,), (600,)], [(1500,)])
    budgets = tune(Anchor(kind=kind, threshold=1.0), placement, TABLE, 8, curves(0.05))  # type: ignore[arg-type]
    assert all(sign * (k - 8) >= 0 for rank in budgets for unit in rank for k in unit)


def test_without_a_threshold_to_spend_nothing_changes() -> None:
    """At p = 0 only the default is feasible: the set is never empty."""
    placement = place([(4000,), (600,)])
    assert tune(Anchor(threshold=0.0), placement, TABLE, 8, curves(0.05)) == (((8, 8), (8, 8)),)


def test_the_nearest_end_of_the_feasible_set_where_the_anchor_is_out_of_reach() -> None:
    """coverage(8) - coverage(k) <= 0.1 along 1 - exp(-0.05 k): the smallest such k, by hand."""
    table = curves(0.05)
    at = {k: table.coverage(0, 4000, np.array([k]))[0] for k in range(1, 9)}
    lowest = min(k for k, covered in at.items() if at[8] - covered <= 0.1)
    ((slow, _),) = tune(Anchor(threshold=0.1), place([(4000,), (40,)]), TABLE, 8, table)
    assert slow == (lowest, lowest)
    assert 1 < lowest < 8


def test_layers_are_tuned_one_by_one() -> None:
    """Where a layer's coverage hardly depends on the budget it gives up more."""
    flat, steep = curves(5.0), curves(0.05)
    mixed = CoverageCurves(16, {key: (flat if key[0] == 0 else steep).values[key] for key in steep.values})
    ((slow, _),) = tune(Anchor(threshold=0.1), place([(4000,), (40,)]), TABLE, 8, mixed)
    assert slow[0] < slow[1] < 8


def test_scope_rank_compares_sums() -> None:
    """Equal sums of unequal units: nothing to do under rank, much under micro_batch."""
    placement = place([(2000,), (500,)], [(2000,), (500,)])
    by_rank = tune(Anchor(threshold=0.5, scope="rank"), placement, TABLE, 8, curves(0.05))
    assert by_rank == (((8, 8), (8, 8)),) * 2
    assert tune(Anchor(threshold=0.5), placement, TABLE, 8, curves(0.05)) != by_rank


def test_level_global_gives_all_layers_one_budget_and_bounds_their_mean() -> None:
    flat, steep = curves(5.0), curves(0.05)
    mixed = CoverageCurves(16, {key: (flat if key[0] == 0 else steep).values[key] for key in steep.values})
    ((slow, _),) = tune(Anchor(threshold=0.05, level="global"), place([(4000,), (40,)]), TABLE, 8, mixed)
    assert slow[0] == slow[1] < 8
    covered = mixed.of_units(2, [place([(4000,)])[0][0]], np.array([slow[0], 8]))[0]
    assert 0 < (covered[:, 1] - covered[:, 0]).mean() <= 0.05 < (covered[:, 1] - covered[:, 0]).max()


def test_limits_hold_and_the_default_stays_possible_outside_them() -> None:
    placement = place([(4000,), (600,)])
    ((slow, fast),) = tune(Anchor(threshold=1.0, min_budget=6, max_budget=9), placement, TABLE, 8, curves(0.05))
    assert min(slow) >= 6
    assert max(fast) <= 9
    ((only,),) = tune(Anchor(threshold=0.0, min_budget=1, max_budget=4), place([(4000,)]), TABLE, 8, curves(0.05))
    assert only == (8, 8)


def test_empty_units_keep_the_default() -> None:
    assert tune(Anchor(), place([(100,)], [()]), TABLE, 8, curves(0.1))[1] == ((8, 8),)


@settings(max_examples=40)
@given(
    st.lists(st.lists(st.integers(1, 4000), min_size=0, max_size=3), min_size=1, max_size=5),
    st.sampled_from(["mean", "min", "max"]),
    st.sampled_from(["micro_batch", "rank"]),
    st.floats(0, 1),
    st.floats(0.001, 1),
    st.integers(1, 12),
)
def test_coverage_never_changes_by_more_than_the_threshold(
    units: list[list[int]], kind: str, scope: str, threshold: float, steepness: float, default: int
) -> None:
    if not any(units):
        return
    placement = place([tuple(unit) for unit in units])
    table = curves(steepness)
    anchor = Anchor(kind=kind, threshold=threshold, scope=scope)  # type: ignore[arg-type]
    (budgets,) = tune(anchor, placement, TABLE, default, table)
    assert (budgets,) == tune(anchor, placement, TABLE, default, table)
    for unit, layers in zip(placement[0], budgets, strict=True):
        for layer, k in enumerate(layers):
            if unit:
                before, after = table.of_units(2, [unit], np.array([default, k]))[0, layer]
                assert abs(after - before) <= threshold + 1e-9
                assert 1 <= k <= max(4 * default, default)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 4000), min_size=2, max_size=6), st.floats(0, 1))
def test_tuning_never_moves_a_unit_further_from_the_anchor(lengths: list[int], threshold: float) -> None:
    placement = place([(n,) for n in lengths])
    before = [milliseconds(unit, (8, 8)) for unit in placement[0]]
    (budgets,) = tune(Anchor(threshold=threshold), placement, TABLE, 8, curves(0.05))
    after = [milliseconds(unit, layers) for unit, layers in zip(placement[0], budgets, strict=True)]
    anchor = np.mean(before)
    for was, now in zip(before, after):
        assert abs(now - anchor) <= abs(was - anchor) + 1e-6 * was


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "median"}, "anchor is 'median'"),
        ({"scope": "all"}, "scope is 'all'"),
        ({"level": "head"}, "level is 'head'"),
        ({"threshold": -0.1}, "threshold"),
        ({"threshold": 1.5}, "threshold"),
        ({"threshold": float("nan")}, "threshold"),
        ({"min_budget": 0}, "min_budget"),
        ({"min_budget": 5, "max_budget": 4}, "max_budget 4 is below"),
    ],
)
def test_wrong_settings_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Anchor(**arguments)  # type: ignore[arg-type]


def test_coverage_is_one_from_the_full_budget_on_and_rises_before() -> None:
    for table in (CoverageCurves(16, {}), curves(0.03)):
        covered = table.coverage(0, 1000, np.arange(1, 80))
        assert (covered[62:] == 1).all()
        assert (np.diff(covered) >= 0).all()
        assert covered[0] > 0


def test_coverage_of_units_weighs_by_tokens() -> None:
    table = CoverageCurves(16, {})
    unit = (Segment(0, 0, 16, 16, 0), Segment(1, 0, 480, 480, 0))
    alone = table.coverage(0, 480, np.array([2]))[0]
    assert table.of_units(1, [unit], np.array([2]))[0, 0, 0] == pytest.approx((16 * 1 + 480 * alone) / 496)


@pytest.mark.parametrize("table", [CoverageCurves(16, {}), curves(0.03)])
@pytest.mark.parametrize("edges", [[0, 320, 640, 1000], [0, 992, 1000], [0, 16, 1000], [0, 1000]])
def test_chunks_cover_together_what_their_sample_covers(table: CoverageCurves, edges: list[int]) -> None:
    """While none of them reads all that it has; later ones cover less, and a short last one is no exception."""
    budgets = np.array([1])
    chunks = [(Segment(0, a, b, 1000, 0),) for a, b in itertools.pairwise(edges)]
    found = table.of_units(2, chunks, budgets)
    whole = table.of_units(2, [(Segment(0, 0, 1000, 1000, 0),)], budgets)[0]
    tokens = np.diff(edges)[:, None, None]
    if edges[1] > 16:
        assert np.allclose((found * tokens).sum(0) / 1000, whole)
    else:
        assert (found[0] == 1).all()
    assert (np.diff(found[:, 0, 0]) < 0).all()
    assert (found > 0).all()
    for layer in range(2):
        assert np.allclose(whole[layer], table.coverage(layer, 1000, budgets))


def test_a_chunk_whose_budget_reads_all_covers_all() -> None:
    unit = (Segment(0, 320, 640, 4000, 0),)
    assert curves(0.03).of_units(1, [unit], np.array([39, 40, 60]))[0, 0].tolist() == [
        pytest.approx(0.69, abs=0.4),
        1,
        1,
    ]


def test_plan_coverage_weighs_by_tokens_and_layers() -> None:
    """Chunks of 10 and 30 tokens, two layers: (10 (.1 + .3) + 30 (.2 + .4)) / 80 at budget / 10 + sample / 10."""
    units = [
        MicroBatch((Segment(0, 0, 10, 10, 0),), (1, 3), Latency(0, 0)),
        MicroBatch((), (9, 9), Latency(0, 0)),
        MicroBatch((Segment(1, 0, 30, 30, 0),), (1, 3), Latency(0, 0)),
    ]
    plan = StepPlan("test", Topology(), 16, (tuple(units),), 0.0)
    found = plan_coverage(plan, lambda segment, layer, budget: [(budget + segment.sample) / 10, 1.0])
    assert found.tolist() == [pytest.approx(22 / 80), 1.0]
    assert plan.mean_budget == 2.0


def test_length_ranges_are_powers_of_two() -> None:
    assert [length_bucket(blocks) for blocks in (1, 2, 3, 4, 5, 8, 9)] == [0, 1, 2, 2, 3, 3, 4]


def test_the_estimator_is_a_moving_average_that_survives_json() -> None:
    estimator = CoverageEstimator(16, decay=0.75)
    estimator.update(1, 100, np.linspace(0.2, 0.6, len(BUDGET_GRID)).tolist())
    estimator.update(1, 100, np.linspace(0.6, 1.0, len(BUDGET_GRID)).tolist())
    other = CoverageEstimator(16)
    other.load_state_dict(json.loads(json.dumps(estimator.state_dict())))
    for each in (estimator, other):
        found = each.curves().values[1, length_bucket(7)]
        assert found == pytest.approx(np.linspace(0.3, 0.7, len(BUDGET_GRID)))
    estimator.update(1, 100, [0.5] * len(BUDGET_GRID))
    other.update(1, 100, [0.5] * len(BUDGET_GRID))
    assert estimator.state_dict() == other.state_dict()


def test_a_snapshot_does_not_change_when_the_estimator_learns() -> None:
    estimator = CoverageEstimator(16)
    estimator.update(0, 100, [0.5] * len(BUDGET_GRID))
    before = estimator.curves()
    kept = before.coverage(0, 100, np.array([2]))[0]
    estimator.update(0, 100, [0.9] * len(BUDGET_GRID))
    assert before.coverage(0, 100, np.array([2]))[0] == kept


@pytest.mark.parametrize(
    "curve", [[0.5], [float("nan")] * len(BUDGET_GRID), [1.5] * len(BUDGET_GRID), [-0.1] * len(BUDGET_GRID)]
)
def test_the_estimator_refuses_what_is_no_coverage(curve: list[float]) -> None:
    with pytest.raises(InputError, match="coverage"):
        CoverageEstimator(16).update(0, 100, curve)


def test_estimator_state_of_another_block_size_is_refused() -> None:
    with pytest.raises(InputError, match="block size 16, but the run has 64"):
        CoverageEstimator(64).load_state_dict(CoverageEstimator(16).state_dict())
    with pytest.raises(InputError, match="decay is 1"):
        CoverageEstimator(16, decay=1.0)
