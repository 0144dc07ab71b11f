"""Latency models: the roofline's arithmetic, the table's interpolation, its error estimate, and table files."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebalance.planning.correction import CorrectedModel, Correction
from sparsebalance.planning.decoder import Decoder
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.latency import TERMS, LatencyModel, RooflineModel
from sparsebalance.planning.network import LinkCost, NetworkCosts, ring_all_reduce
from sparsebalance.planning.plan import Latency, Segment
from sparsebalance.planning.table import AttentionPoint, Identity, LatencyTable, LinePoint
from sparsebalance.planning.table_file import (
    check_same_identity,
    compare_tables,
    load_table,
    merge_tables,
    save_table,
)
from sparsebalance.planning.work import attended_pairs, computed_scores, key_blocks, router_scores
from tests.conftest import slow_device

DECODER = Decoder(2, 64, 128, 2, 1, 32, 100, tied=True)
IDENTITY = Identity(DECODER, block_size=16, granularity="block", device="cpu", dtype="float32", threads=1)
CALL = (0.25, 0.5, 1.25)


def make_table(rate: float = 1e-4, identity: Identity = IDENTITY) -> LatencyTable:
    """A machine that takes exactly `rate` ms per computed score (twice that backward), 0.01 ms per token, and
    `rate` ms for every query block and every key block that it is compared with."""
    points = []
    for length in (16, 64, 256, 1024):
        for budget in (1, 4, 16):
            if budget <= key_blocks(length, 16):
                scores = float(computed_scores(0, length, budget, 16, identity.granularity))
                looks = router_scores(0, length, 16, identity.granularity) + key_blocks(length, 16)
                points.append(AttentionPoint(length, budget, looks * rate, scores * rate, 2 * scores * rate))
    linear = tuple(LinePoint(n, 0.01 * n + 1, 0.02 * n + 2) for n in (1, 100, 1000))
    head = tuple(LinePoint(n, 0.1 * n, 0.2 * n) for n in (1, 100))
    return LatencyTable(identity, {"host": "test"}, tuple(points), linear, head, CALL)


def whole(length: int, targets: int = 0, sample: int = 0) -> Segment:
    return Segment(sample, 0, length, length, targets)


def attention_total(table: LatencyTable, segments: list[Segment], budget: int) -> float:
    """Without the fixed cost of a call."""
    return float(table.attention_ms(segments, np.array([budget]))[0]) - sum(CALL)


def test_roofline_terms_are_work_over_rate() -> None:
    # One flop takes 1 ms at 1e-9 teraflop per second (1 kiloflop per second is 1 flop per ms).
    device = slow_device(linear_tflops=1e-9, attention_tflops=1e-9, unit_ms=3.0)
    decoder = Decoder(2, 8, 16, 2, 1, 4, 10, tied=True)
    terms = RooflineModel(decoder, device, block_size=4, granularity="block").terms([whole(4, 3)], (1, 1))
    linear = 2 * 2 * 4 * decoder.layer_parameters + 1.0
    attend = 2 * 2 * 2 * 4 * 16  # two products, 2 flops, heads x dim, 16 scores
    head = 2 * 3 * 8 * 10
    assert terms.linear == Latency(pytest.approx(linear), pytest.approx(2 * linear))
    assert terms.attend == Latency(pytest.approx(2 * attend), pytest.approx(2.5 * 2 * attend))
    assert terms.head == Latency(pytest.approx(head), pytest.approx(2 * head))
    assert terms.router == Latency(0.0, 0.0)  # one block: nothing to choose from
    assert terms.latency.forward_ms == pytest.approx(linear + 2 * attend + head)
    assert terms.total_ms()["head"] == pytest.approx(3 * head)


def test_roofline_shares_work_over_tensor_and_sequence_ranks_and_adds_their_collectives() -> None:
    decoder = Decoder(2, 8, 16, 4, 2, 2, 10, tied=True)
    device = slow_device()
    alone = RooflineModel(decoder, device, block_size=4).terms([whole(40)], (2, 2))
    shared = RooflineModel(decoder, device, block_size=4, tp=2, sp=2).terms([whole(40)], (2, 2))
    assert shared.attend.forward_ms == pytest.approx(alone.attend.forward_ms / 4)
    hidden_mb, latency = 20 * 8 * 2 / 1e6, 0.01
    tensor = 4 * (latency + hidden_mb / 2)  # 1 GB/s: 1 ms per MB
    sequence = 2 * latency + 20 * (2 * 4 + 2 * 2) * 2 / 2 * 2 / 1e6 / 2
    work = (alone.linear.forward_ms - 0.1 / 3) / 4
    assert shared.linear.forward_ms == pytest.approx(work + 2 * (tensor + sequence) + 0.1 / 3)


def test_checkpointing_adds_one_forward_to_the_backward(roofline: RooflineModel) -> None:
    again = replace(roofline, checkpointing=True)
    plain, recomputed = (model.terms([whole(100)], (4, 4, 4)) for model in (roofline, again))
    assert recomputed.attend.backward_ms == pytest.approx(plain.attend.backward_ms + plain.attend.forward_ms)
    assert recomputed.latency.forward_ms == pytest.approx(plain.latency.forward_ms)


def test_an_empty_micro_batch_takes_no_time(roofline: RooflineModel) -> None:
    assert roofline.latency([], (4, 4, 4)) == Latency(0.0, 0.0)
    assert make_table().latency([], (4, 4)) == Latency(0.0, 0.0)
    assert make_table().predict([], (4, 4)).error_ms == 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"tp": 3}, "4 attention heads"), ({"block_size": 0}, "at least 1 key"), ({"sp": 0}, "at least 1")],
)
def test_a_roofline_that_cannot_be_is_refused(roofline: RooflineModel, changes: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(roofline, **changes)


@pytest.mark.parametrize("length", [5, 16, 17, 63, 100, 256, 700, 1024, 5000])
@pytest.mark.parametrize("budget", [1, 2, 4, 7, 16, 40])
def test_a_machine_with_a_constant_rate_is_predicted_exactly(length: int, budget: int) -> None:
    """On the grid, between its points, and beyond it, in length and in budget."""
    scores = float(computed_scores(0, length, min(budget, key_blocks(length, 16)), 16, "block"))
    found = make_table().attention_ms([whole(length)], np.array([budget]))
    looks = router_scores(0, length, 16, "block") + key_blocks(length, 16)
    assert found[0] == pytest.approx(3e-4 * scores + 1e-4 * looks + sum(CALL))


def test_latency_adds_linear_head_and_every_layer_with_its_own_budget() -> None:
    table = make_table()
    segments = [whole(100, 30), whole(40, 10, sample=1)]
    attention = [table.attention_ms(segments, np.array([k]))[0] for k in (3, 5)]
    linear = 0.03 * 140 + 3
    head = 0.3 * 40
    assert table.latency(segments, (3, 5)).total_ms == pytest.approx(sum(attention) + linear + head)
    assert table.latency(segments, (5, 3)) == table.latency(segments, (3, 5))


def test_packed_samples_cost_their_own_pairs_not_those_of_one_long_sample() -> None:
    """At full budget and a constant rate, by exactly the ratio of their scores, in any order."""
    table = make_table()
    packed = [whole(128, sample=i) for i in range(8)]
    attend = [
        table.terms(segments, (64, 64)).attend.total_ms - 2 * (CALL[1] + CALL[2])
        for segments in (packed, [whole(1024)])
    ]
    scores = [float(computed_scores(0, n, 64, 16, "block")) for n in (128, 1024)]
    assert attend[1] / attend[0] == pytest.approx(scores[1] / (8 * scores[0]))
    mixed = [whole(700, sample=1), whole(30, sample=2), whole(129, sample=3)]
    assert table.latency(mixed, (3, 3)).total_ms == pytest.approx(table.latency(mixed[::-1], (3, 3)).total_ms)


@given(length=st.integers(1, 3000), budget=st.integers(1, 40), size=st.sampled_from([1, 4, 16, 64]))
def test_pairs_are_counted_exactly_per_query(length: int, budget: int, size: int) -> None:
    """Never from a mean length, and never as 1 - k x block / length."""
    expected = sum(min(i // size, budget - 1) * size + i % size + 1 for i in range(length))
    assert float(attended_pairs(0, length, budget, size)) == expected


def test_a_chunk_costs_its_own_queries_at_the_rate_of_its_position() -> None:
    table = make_table()
    chunk = Segment(0, 512, 768, 1024, 0)
    scores = float(computed_scores(512, 768, 4, 16, "block"))
    looks = router_scores(512, 768, 16, "block") * (1 + 48 / router_scores(0, 768, 16, "block"))
    assert attention_total(table, [chunk], 4) == pytest.approx(3e-4 * scores + 1e-4 * looks)


def test_the_chunks_of_a_sample_add_up_to_it() -> None:
    table = make_table()
    chunks = [Segment(0, a, a + 256, 1024, 0) for a in range(0, 1024, 256)]
    parts = sum(attention_total(table, [chunk], 4) for chunk in chunks)
    assert parts == pytest.approx(attention_total(table, [whole(1024)], 4), rel=0.02)


@given(length=st.integers(1, 5000), rates=st.lists(st.floats(0.5, 2.0), min_size=10, max_size=10))
def test_time_never_falls_with_the_budget(length: int, rates: list[float]) -> None:
    table = make_table()
    points = tuple(
        replace(point, forward_ms=point.forward_ms * rate, backward_ms=point.backward_ms * rate)
        for point, rate in zip(table.attention, rates)
    )
    bumpy = replace(table, attention=points)
    times = bumpy.attention_ms([whole(length)], np.arange(1, 40))
    assert (np.diff(times) >= -0.05 * times[:-1]).all()
    measured = bumpy.attention_ms([whole(1024)], np.arange(1, 40))
    assert (np.diff(measured) >= -1e-9).all()


def test_lines_interpolate_extend_and_never_fall() -> None:
    table = make_table()

    def linear(tokens: int, of: LatencyTable = table) -> Latency:
        return of.terms([whole(tokens)], (1, 1)).linear

    falling = replace(table, linear=(LinePoint(1, 5.0, 5.0), LinePoint(10, 4.0, 4.0)))
    assert linear(1000, falling) == linear(10, falling) == Latency(4.0, 4.0)
    assert linear(550) == Latency(pytest.approx(6.5), pytest.approx(13.0))
    assert linear(2000) == Latency(pytest.approx(21.0), pytest.approx(42.0))
    assert linear(1) == Latency(pytest.approx(1.01), pytest.approx(2.02))


def test_a_prediction_says_how_sure_it_is_and_what_it_extrapolated() -> None:
    table = make_table()
    sure = table.predict([whole(256, 50)], (4, 4))
    assert sure.extrapolated == ()
    assert sure.error_ms == pytest.approx(0.0)
    assert sure.terms == table.terms([whole(256, 50)], (4, 4))
    noisy = replace(table, residual=0.1)
    assert noisy.predict([whole(256, 50)], (4, 4)).error_ms == pytest.approx(0.1 * sure.terms.latency.total_ms)
    far = table.predict([whole(1500, 300)], (40, 40))
    assert far.extrapolated == ("length", "budget", "tokens", "targets")


def test_errors_are_larger_between_points_that_disagree() -> None:
    table = make_table()
    points = tuple(replace(p, forward_ms=p.forward_ms * (2 if p.length == 1024 else 1)) for p in table.attention)
    bent = replace(table, attention=points)
    at, between = (bent.predict([whole(n)], (4, 4)) for n in (1024, 512))
    assert at.error_ms == pytest.approx(0.0)
    assert between.error_ms > 0.05 * between.terms.attend.total_ms


def test_saving_and_loading_keeps_every_figure(tmp_path: Path) -> None:
    costs = NetworkCosts(LinkCost(0.1, 0.5), LinkCost(0.2, 1.5), ranks=2)
    for table in (make_table(), replace(make_table(), network=costs, residual=0.02)):
        path = tmp_path / "deep" / "table.json"
        save_table(table, path)
        assert load_table(path) == table
        assert [p.name for p in path.parent.iterdir()] == ["table.json"]


def test_a_used_table_can_be_sent_to_other_processes() -> None:
    table = make_table()
    before = table.latency([whole(100, 5)], (2, 2))
    again = pickle.loads(pickle.dumps(table))
    assert again == table
    assert again.latency([whole(100, 5)], (2, 2)) == before


def test_merging_takes_the_union_of_points_and_means_where_both_measured() -> None:
    one, other = make_table(1e-4), make_table(3e-4)
    fewer = replace(other, attention=other.attention[:4], network=NetworkCosts(LinkCost(1, 1), LinkCost(1, 1), 2))
    merged = merge_tables([one, fewer])
    expected = make_table(2e-4)
    for i, point in enumerate(merged.attention):
        reference = expected.attention[i] if i < 4 else one.attention[i]
        assert point.forward_ms == pytest.approx(reference.forward_ms)
    assert merged.network == fewer.network
    assert merged.provenance["merged"] == [{"host": "test"}, {"host": "test"}]
    assert merge_tables([one]).attention == one.attention
    with pytest.raises(InputError, match="block_size"):
        merge_tables([one, make_table(identity=replace(IDENTITY, block_size=32))])
    with pytest.raises(InputError, match="at least one"):
        merge_tables([])


def test_comparing_shows_every_shared_point_and_refuses_other_models() -> None:
    slower = make_table(3e-4, replace(IDENTITY, device="other", threads=4))
    rows = compare_tables(make_table(1e-4), slower)
    assert {row.term for row in rows} == {"attention", "linear", "head"}
    assert all(row.ratio == pytest.approx(3.0 if row.term == "attention" else 1.0) for row in rows)
    with pytest.raises(InputError, match="layers"):
        compare_tables(make_table(), make_table(identity=replace(IDENTITY, decoder=replace(DECODER, layers=3))))
    apart = replace(make_table(), attention=(), linear=(LinePoint(7, 1.0, 1.0),), head=(LinePoint(7, 1.0, 1.0),))
    with pytest.raises(InputError, match="share no measured point"):
        compare_tables(make_table(), apart)


def test_a_table_of_another_model_is_refused_with_every_differing_field() -> None:
    other = replace(IDENTITY, block_size=64, threads=8, decoder=replace(DECODER, heads=4))
    message = r"heads \(table 2, run 4\), block_size \(table 16, run 64\), threads \(table 1, run 8\)"
    with pytest.raises(InputError, match=message):
        check_same_identity(make_table().identity, other)
    check_same_identity(make_table().identity, IDENTITY)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.update(schema=99), "schema 99"),
        (lambda r: r.pop("schema"), "broken"),
        (lambda r: r.pop("identity"), "broken"),
        (lambda r: r["identity"].update(colour="blue"), "broken"),
        (lambda r: r["identity"]["decoder"].pop("layers"), "broken"),
        (lambda r: r["attention"][0].update(forward_ms=float("nan")), "not above 0"),
        (lambda r: r["linear"][0].update(forward_ms=-1.0), "not above 0"),
        (lambda r: r["linear"][0].update(count=5000), "do not rise"),
        (lambda r: r.update(linear=r["linear"][:1]), "too few points"),
        (lambda r: r.update(attention=[]), "too few points"),
        (lambda r: r.update(call_ms=[1.0, 2.0]), "broken"),
        (lambda r: r.update(residual=-0.5), "below 0"),
        (lambda r: r.update(network={"ranks": 2}), "broken"),
    ],
)
def test_a_broken_table_is_one_clear_error(tmp_path: Path, change: object, message: str) -> None:
    path = tmp_path / "table.json"
    save_table(make_table(), path)
    record = json.loads(path.read_text())
    change(record)  # type: ignore[operator]
    path.write_text(json.dumps(record))
    with pytest.raises(InputError, match=message):
        load_table(path)


def test_missing_and_unreadable_tables_name_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="sparsebalance profile --table"):
        load_table(tmp_path / "none.json")
    for text in (b'{"schema": 2, "ident', b"\xff\xfe", b"[]"):
        (tmp_path / "half.json").write_bytes(text)
        with pytest.raises(InputError, match="broken"):
            load_table(tmp_path / "half.json")


def test_link_costs_are_fitted_and_never_negative() -> None:
    exact = LinkCost.fitted([0.001, 1.0, 16.0], [0.2 + 0.5 * mb for mb in (0.001, 1.0, 16.0)])
    assert (exact.latency_ms, exact.ms_per_mb) == (pytest.approx(0.2), pytest.approx(0.5))
    assert exact.ms(4.0) == pytest.approx(2.2)
    for sizes, times in (([1.0, 2.0], [1.0, 3.0]), ([1.0, 2.0], [3.0, 1.0])):
        found = LinkCost.fitted(sizes, times)
        assert min(found.latency_ms, found.ms_per_mb) >= 0
        assert math.isfinite(found.ms(3.0))


def test_a_ring_moves_the_buffer_twice_less_one_share() -> None:
    assert ring_all_reduce(100.0, 1, 10.0, 5.0) == 0.0
    assert ring_all_reduce(100.0, 4, 10.0, 5.0) == pytest.approx(6 * (0.005 + 2.5))


@cache
def models() -> dict[str, LatencyModel]:
    token = replace(IDENTITY, granularity="token")
    roofline = RooflineModel(Decoder(2, 64, 128, 4, 2, 32, 100, tied=True), slow_device(), 16)
    correction = Correction((1.0,), {"linear": 0.5, "router": 3.0, "attend": 1.5, "head": 2.0})
    return {
        "table": make_table(),
        "table by token": make_table(identity=token),
        "roofline": roofline,
        "roofline, many devices": replace(roofline, granularity="block", tp=2, sp=2, checkpointing=True),
        "corrected": CorrectedModel(make_table(), correction),
    }


some_units = st.lists(
    st.lists(st.tuples(st.integers(1, 3000), st.floats(0, 1), st.floats(0, 1)), max_size=4).map(
        lambda rows: [
            Segment(i, start := int(n * a) // 16 * 16, n, n, int((n - start) * b)) for i, (n, a, b) in enumerate(rows)
        ]
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("name", models())
@settings(max_examples=20, deadline=None)
@given(some_units, st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=6, max_size=6))
def test_many_units_at_once_cost_what_each_costs_alone(
    name: str, units: list[list[Segment]], layers: list[tuple[int, int]]
) -> None:
    """At one budget a layer for all, and at budgets of their own; empty units cost nothing."""
    model = models()[name]
    for budgets in (np.array(layers[0]), np.array(layers[: len(units)])):
        found = model.many_terms(units, budgets)
        assert found.shape == (4, 2, len(units))
        for unit, blocks, ms in zip(units, np.broadcast_to(budgets, (len(units), 2)).tolist(), found.T):
            terms = model.terms(unit, blocks)
            each = [[getattr(getattr(terms, t), side) for t in TERMS] for side in ("forward_ms", "backward_ms")]
            assert ms.tolist() == [pytest.approx(row, rel=1e-9, abs=1e-12) for row in each]
            assert ms.sum() == pytest.approx(model.latency(unit, blocks).total_ms, rel=1e-9)
    assert model.many_terms([], np.array(layers[0])).shape == (4, 2, 0)
