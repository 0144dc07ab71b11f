"""`sparsebalance plan`: scenarios, forecasts, recommendations, sweeps, and the command as users type it."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsebalance.cli import main
from sparsebalance.planner.command import scenario_of
from sparsebalance.planner.config import PlanConfig
from sparsebalance.planner.forecast import (
    Forecast,
    Row,
    check_static,
    forecast,
    global_batches,
    recommend,
    variants_of,
)
from sparsebalance.planner.scenario import USABLE, Scenario
from sparsebalance.planner.sweep import Choice, sweep, topologies
from sparsebalance.planning.baselines import BASELINES
from sparsebalance.planning.decoder import Decoder
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.hardware import named_device
from sparsebalance.planning.lengths import Lengths
from sparsebalance.planning.network import LinkCost, NetworkCosts
from sparsebalance.planning.plan import Topology
from sparsebalance.planning.policy import OURS
from sparsebalance.planning.table_file import save_table
from sparsebalance.reporting.accounting import account_of
from tests.conftest import samples_of, slow_device
from tests.unit.test_latency import DECODER, make_table

SMALL = Decoder(4, 64, 128, 4, 2, 16, 100, tied=True)
LAYER = 64 * 16 * (2 * 4 + 2 * 2) + 3 * 64 * 128 + 2 * 64
MATRIX = 100 * 64
ALL = (*BASELINES, *OURS)


def scenario(dp: int = 1, pp: int = 1, tp: int = 1, sp: int = 1, **changes: Any) -> Scenario:
    plain = Scenario(SMALL, slow_device(), Topology(dp, pp, tp, sp), block_size=16, budget=4)
    return replace(plain, **changes)


def lengths_of(*values: int, targets: Sequence[int] | None = None) -> Lengths:
    wanted = None if targets is None else np.array(targets, dtype=np.int64)
    return Lengths(np.array(values, dtype=np.int64), wanted, "made up", "by hand")


def heavy_tail(count: int = 48, longest: float = 8.0, seed: int = 0) -> Lengths:
    values = np.exp(np.random.default_rng(seed).uniform(3.0, longest, count)).astype(int)
    return lengths_of(*values.tolist())


# Global batches.


@given(
    count=st.integers(1, 60), size=st.integers(1, 20), dp=st.integers(1, 4), steps=st.none() | st.integers(1, 5),
    seed=st.integers(0, 9),
)  # fmt: skip
def test_every_sample_is_in_at_most_one_batch(count: int, size: int, dp: int, steps: int | None, seed: int) -> None:
    lengths = lengths_of(*range(1, count + 1))
    if size < dp or count < size:
        with pytest.raises(InputError):
            global_batches(lengths, size, dp, steps, seed)
        return
    batches = global_batches(lengths, size, dp, steps, seed)
    assert len(batches) == min(count // size, steps or count)
    assert {len(batch) for batch in batches} == {size}
    ids = [sample.id for batch in batches for sample in batch]
    assert len(set(ids)) == len(ids)
    assert all(sample.length == sample.id + 1 for batch in batches for sample in batch)
    assert global_batches(lengths, size, dp, steps, seed) == batches


def test_the_seed_shuffles_and_fewer_steps_are_the_first_ones() -> None:
    lengths = lengths_of(*range(1, 41))
    batches = global_batches(lengths, 8, 2, None, 0)
    assert global_batches(lengths, 8, 2, 2, 0) == batches[:2]
    assert global_batches(lengths, 8, 2, None, 1) != batches
    assert [sample.id for sample in batches[0]] != list(range(8))


def test_targets_are_the_datas_own_or_else_a_tenth() -> None:
    own = global_batches(lengths_of(10, 20, 30, targets=[0, 7, 30]), 3, 1, None, 0)[0]
    assert {sample.length: sample.targets for sample in own} == {10: 0, 20: 7, 30: 30}
    guessed = global_batches(lengths_of(1, 5, 200, 50_000), 4, 1, None, 0)[0]
    assert {sample.length: sample.targets for sample in guessed} == {1: 1, 5: 1, 200: 20, 50_000: 1024}


def test_batches_that_cannot_be_are_refused_with_the_way_out() -> None:
    with pytest.raises(InputError, match="a global batch of 3 samples cannot feed dp 4; raise the batch size or low"):
        global_batches(lengths_of(*range(1, 9)), 3, 4, None, 0)
    with pytest.raises(InputError, match="made up has 8 samples, fewer than one global batch of 9; lower"):
        global_batches(lengths_of(*range(1, 9)), 9, 4, None, 0)


# Scenarios.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topology": Topology(pp=5)}, "5 pipeline stages for 4 layers"),
        ({"topology": Topology(pp=3), "schedule": "interleaved"}, "6 pipeline stages for 4 layers"),
        ({"topology": Topology(tp=4, sp=2)}, "4 attention heads cannot be split over tp 4 x sp 2 = 8 ranks"),
        ({"topology": Topology(sp=3)}, "4 attention heads cannot be split over tp 1 x sp 3"),
        ({"budget": 0}, "budget is 0, but the own block is always read: at least 1"),
        ({"table": make_table()}, "give either a device or a latency table"),
        ({"device": None}, "give either a device or a latency table"),
        ({"schedule": "2f2b"}, "schedule is '2f2b'; choose one of gpipe, 1f1b"),
    ],
)
def test_a_scenario_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        scenario(**changes)


@pytest.mark.parametrize("degrees", [{"tp": 2}, {"sp": 2}])
def test_a_table_holds_whole_layers(degrees: dict[str, int]) -> None:
    with pytest.raises(InputError, match="a latency table holds whole layers"):
        Scenario(DECODER, None, Topology(**degrees), 16, 4, table=make_table())


def test_network_costs_by_hand() -> None:
    """Two stages of two layers, bf16 gradients; 1 GB/s within a node of 4, 0.1 GB/s beyond, 0.01 ms a message."""
    stages = [(2 * LAYER + MATRIX) * 2 / 1e6] * 2  # embedding on the first, the tied head on the last
    near = scenario(dp=2, pp=2).pipeline.network
    assert (near.latency_ms, near.ms_per_mb) == (pytest.approx(0.01), pytest.approx(1.0))
    assert np.allclose(near.all_reduce_ms, [2 * (0.01 + mb / 2 / 1.0) for mb in stages])
    far = scenario(dp=4, pp=2).pipeline.network
    assert far.ms_per_mb == pytest.approx(1.0)  # neighbouring stages share a node, the ranks do not
    assert np.allclose(far.all_reduce_ms, [6 * (0.01 + mb / 4 / 0.1) for mb in stages])
    # Every sequence rank holds the weights and takes part; a tensor rank holds its part of them.
    assert np.allclose(
        scenario(dp=2, pp=2, sp=2).pipeline.network.all_reduce_ms, [6 * (0.01 + mb / 4 / 0.1) for mb in stages]
    )
    assert np.allclose(
        scenario(dp=2, pp=2, tp=2).pipeline.network.all_reduce_ms, [2 * (0.01 + mb / 2 / 2 / 0.1) for mb in stages]
    )
    assert scenario(pp=4, tp=2).pipeline.network.ms_per_mb == pytest.approx(10.0)
    assert not scenario(pp=4).pipeline.network.all_reduce_ms.any()


def test_a_tables_network_is_what_was_measured() -> None:
    costs = NetworkCosts(LinkCost(0.5, 2.0), LinkCost(0.25, 3.0), ranks=2)
    table = replace(make_table(), network=costs)
    network = Scenario(DECODER, None, Topology(dp=2), 16, 4, dtype="float32", table=table).pipeline.network
    gradients_mb = (DECODER.parameters - DECODER.hidden) * 4 / 1e6
    assert (network.latency_ms, network.ms_per_mb) == (0.5, 2.0)
    assert np.allclose(network.all_reduce_ms, [0.25 + 3 * gradients_mb])
    alone = Scenario(DECODER, None, Topology(), 16, 4, table=table).pipeline.network
    assert not np.any(alone.all_reduce_ms)
    silent = Scenario(DECODER, None, Topology(dp=2), 16, 4, table=make_table()).pipeline.network
    assert not np.any(silent.all_reduce_ms)


def test_static_memory_is_that_of_the_stages_of_each_device() -> None:
    per = 2 + 2 + 12  # bytes of weight, gradient and optimiser in bf16
    one = scenario(zero=False).static_mb()
    assert one == pytest.approx([(4 * LAYER + MATRIX) * per / 1e6])
    four = scenario(pp=4, zero=False).static_mb()
    ends, middle = (LAYER + MATRIX) * per / 1e6, LAYER * per / 1e6
    assert four == pytest.approx([ends, middle, middle, ends])
    # Interleaved: stages 0 and 2 on the first device, 1 and 3 on the second.
    assert scenario(pp=2, schedule="interleaved", zero=False).static_mb() == pytest.approx([ends + middle] * 2)
    spread = scenario(dp=3, zero=True).static_mb()
    assert spread == pytest.approx([(4 * LAYER + MATRIX) * (2 + 2 + 12 / 3) / 1e6])
    assert scenario(dp=3, zero=False).static_mb() == pytest.approx(one)


def test_usable_memory_and_the_source_of_times() -> None:
    assert scenario().capacity_mb == pytest.approx(1e3 * USABLE)
    assert scenario().source == "slow, analytic, not measured"
    measured = Scenario(DECODER, None, Topology(), 16, 4, table=make_table())
    assert measured.capacity_mb is None
    assert measured.source == "measured on test"


# Forecasts.


def forecast_of(placed: Scenario, sizes: Sequence[int | None] = (None, 256), policies: Sequence[str] = ALL) -> Forecast:
    lengths = heavy_tail()
    batches = global_batches(lengths, 12, placed.topology.dp, 3, 0)
    return forecast(batches, variants_of(placed, policies, sizes), int(lengths.values.max()))


@pytest.fixture(scope="module")
def piped() -> Forecast:
    return forecast_of(scenario(dp=2, pp=2))


def test_random_comes_first_and_all_speedups_are_over_it(piped: Forecast) -> None:
    first = piped.rows[0]
    assert (first.policy, first.speedup) == ("random", 1.0)
    for row in piped.rows:
        assert row.speedup == pytest.approx(first.step_ms / row.step_ms)
        assert row.step_ms_p10 <= row.step_ms <= row.step_ms_p90 or row.step_ms_p10 == row.step_ms_p90


def test_the_best_baseline_is_the_fastest_that_is_not_ours(piped: Forecast) -> None:
    baselines = [row for row in piped.rows if not row.ours]
    best = min(baselines, key=lambda row: row.step_ms)
    assert piped.best_baseline == best.name
    assert best.speedup_vs_best == 1.0
    assert min(piped.rows, key=lambda row: row.step_ms).ours  # else this would prove nothing
    assert {row.policy for row in piped.rows if row.ours} == set(OURS)
    assert list(dict.fromkeys(row.policy for row in baselines)) == list(BASELINES)
    chunked = [(row.unit_size, row.schedule) for row in piped.rows if row.policy == "dense_chunks"]
    assert chunked == [(row.unit_size, row.schedule) for row in piped.rows if row.policy == "sab"]
    assert len(chunked) == 3
    for row in piped.rows:
        assert row.speedup_vs_best == pytest.approx(best.step_ms / row.step_ms)


def test_no_strict_plan_is_faster_than_devices_that_never_wait(piped: Forecast) -> None:
    for row in piped.rows:
        if row.policy in ("dst", "sab_dst"):
            continue
        assert 0 < row.share_of_bound <= 1
        assert row.step_ms >= piped.bound_ms
        assert row.share_of_bound == pytest.approx(piped.bound_ms / row.step_ms)
        assert row.busy_fraction <= 1
        assert min(row.imbalance_all, row.imbalance_slot, row.imbalance_rank) >= 1


def test_policies_that_do_not_pack_reach_the_bound_on_one_device() -> None:
    result = forecast_of(scenario(), policies=("kk_quadratic", "kk_tokens"))
    assert [row.share_of_bound for row in result.rows] == pytest.approx([1.0] * 3)
    assert [row.busy_fraction for row in result.rows] == pytest.approx([1.0] * 3)


def test_packing_does_not_pass_the_bound() -> None:
    """Packs save fixed costs of micro-batches, which the bound may then not count."""
    result = forecast_of(scenario(), sizes=(None,))
    assert max(row.share_of_bound for row in result.rows if row.policy not in ("dst", "sab_dst")) <= 1 + 1e-9


def test_every_row_is_deterministic(piped: Forecast) -> None:
    again = forecast_of(scenario(dp=2, pp=2))
    assert again.rows == piped.rows
    assert again.bound_ms == piped.bound_ms
    assert [plan.digest() for plan, _ in again.examples] == [plan.digest() for plan, _ in piped.examples]


def test_figures_of_a_row_are_those_of_its_plans() -> None:
    placed = scenario(dp=2)
    batches = [samples_of(100, 40, 70, 10), samples_of(300, 5, 5, 5)]
    result = forecast(batches, variants_of(placed, ["sab"], [32]), 300)
    for row in result.rows:
        assert row.mean_budget == 4.0
        assert row.extrapolated == 0.0
    first, chunked = result.rows
    assert (first.largest_unit, first.unit_size, first.units) == (300, None, 4.0)
    assert chunked.largest_unit <= 32
    assert chunked.unit_size == 32
    assert result.example_step == 1
    assert result.examples[0][1].step_ms == pytest.approx(max(first.step_ms_p10, first.step_ms_p90), rel=0.5)
    for plan, _ in result.examples:
        plan.validate(batches[1], 300)


def test_peak_memory_holds_at_least_what_is_static_and_falls_with_the_units() -> None:
    rows = {row.unit_size: row for row in forecast_of(scenario(dp=2, pp=2), policies=("sab",)).rows if row.ours}
    static = max(scenario(dp=2, pp=2).static_mb())
    assert rows[None].peak_memory_mb > static
    assert rows[256].largest_unit <= 256 < rows[None].largest_unit
    tight = replace(slow_device(), memory_gb=static * 1.0001 / 1e3 / USABLE)
    assert all(row.fits is False for row in forecast_of(scenario(dp=2, pp=2, device=tight), policies=()).rows)
    assert all(row.fits for row in rows.values())


def test_chunks_beat_whole_samples_under_a_pipeline_with_one_giant() -> None:
    batch = samples_of(4096, *[64] * 15)
    result = forecast([batch], variants_of(scenario(dp=2, pp=4), ["sab"], [None, 512]), 4096)
    rows = {(row.unit_size, row.schedule): row for row in result.rows if row.ours}
    assert rows[512, "1f1b"].step_ms < 0.8 * rows[None, "1f1b"].step_ms
    assert rows[512, "zero_bubble"].step_ms < rows[512, "1f1b"].step_ms


def test_a_table_says_how_much_is_extrapolated() -> None:
    placed = Scenario(DECODER, None, Topology(dp=2), 16, 4, granularity="block", table=make_table())
    inside = forecast([samples_of(*[64] * 8)], variants_of(placed, [], [None]), 2048).rows[0]
    beyond = forecast([samples_of(2048, *[64] * 7)], variants_of(placed, [], [None]), 2048).rows[0]
    assert (inside.extrapolated, beyond.extrapolated) == (0.0, 1 / 8)
    assert inside.fits is None


def test_progress_reaches_the_end_and_long_samples_are_refused() -> None:
    seen: list[tuple[int, int]] = []
    batches = [samples_of(10, 20), samples_of(5, 6)]
    forecast(batches, variants_of(scenario(), ["sab"], [None]), 20, lambda done, total: seen.append((done, total)))
    assert seen == [(n, 4) for n in (1, 2, 3, 4)]
    with pytest.raises(InputError, match="sample 1 has 20 tokens, over the cap of 19"):
        forecast(batches, variants_of(scenario(), [], [None]), 19)


# Variants and recommendation.


def planned(variants: Sequence[Any]) -> list[tuple[str, int | None, str]]:
    return [(v.policy, v.scenario.unit_size, v.scenario.schedule) for v in variants]


def test_variants_are_random_first_then_every_unit_size_and_split_backwards_under_pipelines() -> None:
    flat = variants_of(scenario(unit_size=64), ["kk_tokens", "random", "sab", "dst"], [None, 32])
    assert planned(flat) == [
        ("random", None, "1f1b"), ("kk_tokens", None, "1f1b"), ("sab", None, "1f1b"), ("sab", 32, "1f1b"),
        ("dst", None, "1f1b"),
    ]  # fmt: skip
    peer = variants_of(scenario(pp=2), ["dense_chunks", "dense_chunks"], [32])
    assert planned(peer)[1:] == [("dense_chunks", 32, "1f1b"), ("dense_chunks", 32, "zero_bubble")]
    piped = variants_of(scenario(pp=2), ["sab"], [None, 32])
    assert planned(piped)[1:] == [("sab", None, "1f1b"), ("sab", 32, "1f1b"), ("sab", 32, "zero_bubble")]
    assert planned(variants_of(scenario(pp=2, schedule="gpipe"), ["sab"], [32]))[1:] == [("sab", 32, "gpipe")]


def row(policy: str, step_ms: float, peak: float = 100.0, fits: bool | None = True, **changes: Any) -> Row:
    plain = Row(
        policy=policy, unit_size=None, schedule="1f1b", step_ms=step_ms, step_ms_p10=step_ms, step_ms_p90=step_ms,
        speedup=100 / step_ms, speedup_vs_best=90 / step_ms, imbalance_all=1.0, imbalance_slot=1.0, imbalance_rank=1.0,
        busy_fraction=1.0, share_of_bound=0.5, peak_memory_mb=peak, fits=fits, largest_unit=12_345, units=1.0,
        mean_budget=4.0, coverage=0.5, extrapolated=0.0,
    )  # fmt: skip
    return replace(plain, **changes)


def test_the_fastest_that_fits_is_recommended_and_a_faster_one_named() -> None:
    rows = [row("random", 100), row("sab", 50, 9000, fits=False), row("sab", 70, unit_size=512), row("kk_tokens", 80)]
    found = recommend(rows, 500.0)
    assert found.row is rows[2]
    assert "1.43x over random and 1.29x over the best baseline, 50% of what is possible" in found.reason
    assert "sab would be faster but does not fit" in found.reason
    assert "\n" not in found.reason
    assert "does not fit" not in recommend([rows[0], rows[2]], 500.0).reason


def test_within_one_percent_the_least_memory_wins() -> None:
    rows = [row("random", 100), row("sab", 50.0, 400), row("sab", 50.4, 300), row("sab", 50.6, 200)]
    assert recommend(rows, 500.0).row is rows[2]
    even = [row("sab", 50.4, 300), row("sab", 50.0, 300)]
    assert recommend(even, 500.0).row is even[1]


def test_tuned_policies_are_not_recommended_on_time_alone() -> None:
    rows = [row("random", 100), row("dst", 10), row("sab_dst", 5), row("sab", 60)]
    assert recommend(rows, None).row is rows[3]
    assert recommend([row("random", 100, fits=False), *rows[1:3]], None).row is rows[2]  # nothing else fits


def test_a_baseline_is_recommended_only_where_it_is_faster_than_ours() -> None:
    peer, sab = row("dense_chunks", 60, 50, unit_size=512), row("sab", 60.5, 400, unit_size=512)
    assert recommend([row("random", 100), peer, sab], None).row is sab  # less than 1 % slower, whatever it needs
    slow = row("sab", 72, unit_size=512)
    found = recommend([row("random", 100), peer, slow], None)
    assert found.row is peer
    assert found.reason.endswith("; a baseline, because it is 1.20x as fast as ours (sab 512)")
    assert recommend([row("random", 100), peer, replace(slow, fits=False)], None).row is peer
    alone = recommend([row("random", 100), peer], None)
    assert alone.row is peer
    assert "ours" not in alone.reason
    tuned = recommend([row("random", 100), peer, row("sab_dst", 30), sab], None)
    assert tuned.row is sab


def test_unknown_memory_refuses_nothing() -> None:
    found = recommend([row("random", 100, fits=None), row("sab", 60, fits=None)], None)
    assert found.row.policy == "sab"
    assert "GB" not in found.reason


def test_where_nothing_fits_the_least_need_is_named() -> None:
    rows = [row("random", 100, 7000, fits=False), row("sab", 60, 5000, fits=False, unit_size=512)]
    with pytest.raises(InputError) as error:
        recommend(rows, 2500.0)
    message = str(error.value)
    assert message.startswith("nothing fits: sab 512 needs the least, 5.0 GB a device, of which 2.5 GB are usable;")
    assert "its largest unit has 12,345 tokens. Use smaller units" in message


def test_a_row_is_named_by_policy_unit_size_and_schedule() -> None:
    assert row("kk_tokens", 1).name == "kk_tokens"
    assert row("sab", 1, unit_size=4096, schedule="zero_bubble").name == "sab 4,096 zero_bubble"


# Sweeps.


@given(devices=st.integers(1, 64))
def test_every_topology_appears_once(devices: int) -> None:
    found = list(topologies(devices))
    assert len(set(found)) == len(found)
    assert all(topology.world_size == devices for topology in found)
    divisors = [d for d in range(1, devices + 1) if devices % d == 0]
    assert len(found) == sum((devices // a // b) % c == 0 for a in divisors for b in divisors
                             if devices % (a * b) == 0 for c in divisors)  # fmt: skip


def swept(placed: Scenario, batch_size: int = 8, **changes: Any) -> list[Choice]:
    arguments = {"devices": 8, "steps": 2, "unit_sizes": (None, 256), "seed": 0, **changes}
    token_cap = int(heavy_tail(24).values.max())
    return sweep(heavy_tail(24), placed, batch_size=batch_size, token_cap=token_cap, **arguments)


def skipped(choices: Sequence[Choice]) -> dict[Topology, str]:
    return {choice.topology: choice.skipped for choice in choices if choice.row is None}


def test_a_sweep_judges_every_topology_and_says_why_one_is_skipped() -> None:
    seen: list[tuple[int, int]] = []
    placed = scenario(decoder=replace(SMALL, heads=2, kv_heads=1), dp=3)
    choices = swept(placed, batch_size=4, progress=lambda done, total: seen.append((done, total)))
    assert [choice.topology for choice in choices] == list(topologies(8))
    assert len(choices) == 20
    assert seen == [(n, 20) for n in range(1, 21)]
    reasons = skipped(choices)
    assert reasons[Topology(dp=8)] == "dp 8 is more than the 4 samples of a global batch"
    assert "8 pipeline stages for 4 layers" in reasons[Topology(pp=8)]
    assert "tp 8 x sp 1 does not fit in a node of 4 devices" in reasons[Topology(tp=8)]
    assert "2 attention heads cannot be split over tp 4 x sp 1" in reasons[Topology(dp=2, tp=4)]
    assert Topology(dp=2, pp=4) not in reasons
    for choice in choices:
        assert (choice.row is None) == bool(choice.skipped)
        if choice.row is None:
            assert (choice.tokens_per_s, choice.pareto) == (0.0, False)


def test_tokens_per_second_are_those_of_the_same_batches() -> None:
    placed = scenario()
    batches = global_batches(heavy_tail(24), 8, 1, 2, 0)
    tokens = sum(sample.length for batch in batches for sample in batch) / 2
    for choice in swept(placed):
        if choice.row is not None:
            assert choice.tokens_per_s == pytest.approx(tokens / 8 / (choice.row.step_ms / 1e3))


def test_the_front_is_what_no_other_topology_dominates() -> None:
    choices = swept(scenario())
    rows = [choice.row for choice in choices if choice.row is not None]
    assert len(rows) >= 5
    for choice in choices:
        if choice.row is None:
            continue
        own = (choice.row.step_ms, choice.row.peak_memory_mb)
        others = [(other.step_ms, other.peak_memory_mb) for other in rows]
        dominated = any(o[0] <= own[0] and o[1] <= own[1] and o != own for o in others)
        assert choice.pareto == (not dominated)
    assert any(choice.pareto for choice in choices)
    assert any(choice.row is not None and not choice.pareto for choice in choices)


def test_topologies_without_enough_memory_are_skipped_before_they_are_simulated() -> None:
    whole = scenario(dp=8).static_mb()[0]
    assert scenario(dp=2, pp=4).static_mb()[0] < 0.9 * whole
    tight = replace(slow_device(), memory_gb=0.99 * whole / 1e3 / USABLE)
    with pytest.raises(InputError, match="weights, gradients and optimiser alone need"):
        check_static(scenario(dp=8, device=tight))
    check_static(scenario(dp=8))
    with pytest.raises(InputError, match="none of 20 topologies of 8 devices can be used; 15 of them because weights"):
        swept(scenario(device=replace(slow_device(), memory_gb=1e-6)))


def test_topologies_whose_units_do_not_fit_are_skipped() -> None:
    free = [choice.row.peak_memory_mb for choice in swept(scenario()) if choice.row is not None]
    middle = sorted(free)[len(free) // 2]
    choices = swept(scenario(device=replace(slow_device(), memory_gb=middle / 1e3 / USABLE)))
    assert any("nothing fits: " in reason for reason in skipped(choices).values())
    found = [choice.row for choice in choices if choice.row is not None]
    assert found
    assert all(row.fits and row.peak_memory_mb <= middle * 1.0001 for row in found)


# The command.


@pytest.fixture
def lengths_file(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(str(100 + 83 * i % 2900) for i in range(40)) + "\n")
    return path


def strict_json(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def failure(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that ends standard error of a call that must end with status 2."""
    capsys.readouterr()
    assert main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    last = captured.err.strip().splitlines()[-1]
    assert last.startswith("error: ")
    return last


FAST = ("--model", "smollm2-135m", "--steps", "2", "--unit-size", "1024")


def test_plan_forecasts_recommends_and_writes_pages(
    lengths_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, trace = tmp_path / "plan.html", tmp_path / "plan.json"
    arguments = [*FAST, "--dp", "2", "--pp", "2", "--html", str(page), "--trace", str(trace), "--json"]
    assert main(["plan", str(lengths_file), *arguments]) == 0
    captured = capsys.readouterr()
    result = strict_json(captured.out)
    assert result["schema"] == 1
    settings = result["settings"]
    assert settings["topology"] == {"dp": 2, "pp": 2, "tp": 1, "sp": 1}
    assert (settings["samples"], settings["batches"], settings["batch_size"], settings["steps"]) == (40, 2, 16, 2)
    assert (settings["model"], settings["source"]) == ("smollm2-135m", "h200, analytic, not measured")
    names = [row["name"] for row in result["rows"]]
    assert names == [
        "random", "batch_rebalance", "kk_quadratic", "kk_tokens", "kk_tokens_packed", "nextfit_packing",
        "dense_chunks 1,024", "dense_chunks 1,024 zero_bubble", "sab 1,024", "sab 1,024 zero_bubble",
        "dst", "sab_dst 1,024", "sab_dst 1,024 zero_bubble",
    ]  # fmt: skip
    assert {row["kind"] for row in result["rows"]} == {"simulated"}
    assert all(row["fits"] for row in result["rows"])
    baselines = {row["name"]: row["step_ms"] for row in result["rows"] if row["policy"] in BASELINES}
    assert result["best_baseline"] == min(baselines, key=baselines.__getitem__)
    assert result["recommendation"]["name"] in names
    assert result["bound_ms"] > 0
    assert f"recommended: {result['recommendation']['name']}: " in captured.err
    chosen = next(row for row in result["rows"] if row["name"] == result["recommendation"]["name"])
    found = account_of(result["account"])
    assert (found.rows_read, found.samples, found.not_used, found.steps, found.capacity) == (40, 32, 8, 2, 1024)
    assert (found.alone.samples + found.packed.samples + found.cut.samples, found.dropped) == (32, 0)
    assert found.micro_batches == 2 * chosen["units"]
    assert found.sentences()[0] in " ".join(captured.err.split())
    assert "<html" in page.read_text()[:1000].lower()
    assert json.loads(trace.read_text())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lengths.txt", "plan.html", "plan.json"]
    assert main(["plan", str(lengths_file), *arguments]) == 0
    assert capsys.readouterr().out == captured.out


def test_plan_on_a_measured_table(lengths_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "table.json"
    save_table(make_table(), table)
    arguments = ["--table", str(table), "--dp", "2", "--steps", "2", "--unit-size", "64", "--budget", "4", "--json"]
    assert main(["plan", str(lengths_file), *arguments]) == 0
    result = strict_json(capsys.readouterr().out)
    settings = result["settings"]
    assert settings["source"] == "measured on test"
    assert (settings["block_size"], settings["granularity"], settings["dtype"]) == (16, "block", "float32")
    assert settings["capacity_mb"] is None
    assert {row["fits"] for row in result["rows"]} == {None}
    assert result["rows"][0]["extrapolated"] > 0  # samples over 1,024 tokens
    assert "whole layers" in failure([str(lengths_file), *arguments[:-1], "--tp", "2"], capsys)


def test_sweep_tries_every_topology(lengths_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "sweep.html"
    arguments = [*FAST, "--sweep", "--devices", "4", "--html", str(page), "--json"]
    assert main(["plan", str(lengths_file), *arguments]) == 0
    result = strict_json(capsys.readouterr().out)
    assert result["settings"]["devices"] == 4
    assert len(result["choices"]) == 10
    used = [choice for choice in result["choices"] if choice["row"] is not None]
    assert {(c["topology"]["dp"], c["topology"]["pp"]) for c in used} == {(4, 1), (2, 2), (1, 4)}  # 9 heads
    assert all("9 attention heads" in c["skipped"] for c in result["choices"] if c["row"] is None)
    assert all(choice["tokens_per_s"] > 0 for choice in used)
    assert any(choice["pareto"] for choice in used)
    assert page.is_file()


def test_lengths_are_read_from_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(str(100 * i) for i in range(1, 33))))
    assert main(["plan", "-", *FAST, "--dp", "2", "--json"]) == 0
    result = strict_json(capsys.readouterr().out)
    assert (result["settings"]["lengths"], result["settings"]["samples"]) == ("standard input", 32)


def test_people_get_a_table(lengths_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(lengths_file), *FAST, "--dp", "2", "--policies", "kk_tokens", "sab"]) == 0
    printed = capsys.readouterr().out
    assert "recommended: " in printed
    assert "analytic, not measured" in printed


def test_samples_without_targets_are_accounted_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("length,targets\n" + "".join(f"{100 * i},{i % 4}\n" for i in range(1, 33)))
    assert main(["plan", str(path), *FAST, "--dp", "2", "--policies", "sab", "--json"]) == 0
    found = account_of(strict_json(capsys.readouterr().out)["account"])
    assert (found.without_targets, found.targets, found.not_used) == (8, 48, 0)


def test_where_nothing_fits_the_table_is_printed_before_the_error(
    lengths_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that holds the weights and next to nothing else."""
    device = named_device("h200")
    static = max(scenario_of(PlanConfig("-", model="smollm2-135m", dp=2)).static_mb())
    tight = replace(device, memory_gb=1.001 * static / 1e3 / USABLE)
    monkeypatch.setattr("sparsebalance.planner.command.named_device", lambda name: tight)
    page = tmp_path / "plan.html"
    arguments = [str(lengths_file), *FAST, "--dp", "2", "--html", str(page)]
    assert main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.strip().splitlines()[-1].startswith("error: nothing fits: ")
    for name in ("random", "dense_chunks 1,024", "sab 1,024", "too large: a device has"):
        assert name in captured.out
    assert "->" not in captured.out
    assert "recommended" not in captured.out
    assert not page.exists()


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (None, ["--html", "."], "is a directory; give the name of a file to write"),
        (None, ["--trace", "."], "is a directory; give the name of a file to write"),
        (None, ["--sweep", "--trace", "t.json"], "--trace shows one plan, and --sweep makes many"),
        (None, ["--model", "smollm2-135"], "did you mean 'smollm2-135m'?"),
        (None, ["--device", "h210"], "no device is called 'h210'"),
        (None, ["--table", "none.json"], "no latency table at none.json"),
        (None, ["--steps", "0"], "steps is 0, but it must be at least 1"),
        (None, ["--dp", "0"], "dp is 0, but it must be at least 1"),
        (None, ["--dp", "8", "--batch-size", "7"], "a global batch of 7 samples cannot feed dp 8"),
        (None, ["--dp", "16"], "has 40 samples, fewer than one global batch of 64"),
        (None, ["--limit", "9"], "has 9 samples, fewer than one global batch of 16"),
        (None, ["--limit", "0"], "limit is 0"),
        (None, ["--pp", "31"], "31 pipeline stages for 30 layers"),
        (None, ["--tp", "2"], "9 attention heads cannot be split over tp 2"),
        (None, ["--budget", "0"], "budget is 0"),
        (None, ["--token-cap", "1024"], "over the cap of 1024 tokens per micro-batch"),
        (None, ["--unit-size", "1000"], "unit size 1000 is no multiple of the block size 256"),
        (None, ["--policies", "magic"], "no policy is called 'magic'"),
        ("", [], "holds no lengths"),
        ("100\nnan\n", [], "nan"),
        ("100\n-5\n", [], "length is -5"),
        ("100\n2.5\n", [], "2.5"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_one_sentence_and_nothing_is_written(
    content: str | None, arguments: list[str], message: str, lengths_file: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(lengths_file.parent)
    if content is not None:
        lengths_file.write_text(content)
    outputs = [] if {"--html", "--trace"} & set(arguments) else ["--html", "page.html"]
    assert message in failure([str(lengths_file), *FAST, *outputs, *arguments], capsys)
    assert [p.name for p in lengths_file.parent.iterdir()] == ["lengths.txt"]


@pytest.mark.parametrize(
    "arguments",
    [["--dp", "2"], ["--dp", "2", "--pp", "2", "--schedule", "interleaved"], ["--sweep", "--devices", "4"]],
    ids=" ".join,
)
def test_automatic_unit_sizes_suit_the_samples_and_the_schedule(
    arguments: list[str], lengths_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sizes over the longest sample, or chunks that a schedule cannot run, are left out, not an error."""
    assert main(["plan", str(lengths_file), "--model", "smollm2-135m", "--steps", "2", *arguments, "--json"]) == 0
    assert strict_json(capsys.readouterr().out)["schema"] == 1


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--unit-size", "auto", "--block-size", "0"], "block_size"),
        (["--seed", "-1"], "seed"),
        (["--batch-size", "0"], "batch"),
        (["--sweep", "--devices", "0"], "devices"),
    ],
)
def test_numbers_without_meaning_are_refused(
    arguments: list[str], name: str, lengths_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert name in failure([str(lengths_file), *FAST, *arguments], capsys)
