"""Latency models: the roofline's arithmetic, the table's interpolation, and what a table refuses."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sparsebalance.planning.errors import InputError
from sparsebalance.planning.latency import RooflineModel
from sparsebalance.planning.plan import Latency, Segment
from sparsebalance.planning.table import AttentionPoint, Identity, LatencyTable, LinePoint
from sparsebalance.planning.work import computed_scores, key_blocks

IDENTITY = Identity(
    layers=2, hidden=64, intermediate=128, heads=2, kv_heads=1, head_dim=32, vocabulary=100, block_size=16,
    granularity="block", device="cpu", dtype="float32", threads=1,
)  # fmt: skip


def make_table(rate: float = 1e-4, identity: Identity = IDENTITY) -> LatencyTable:
    """A machine that takes exactly `rate` ms per computed score (twice that backward), 0.01 ms per token."""
    points = []
    for length in (16, 64, 256, 1024):
        for budget in (1, 4, 16):
            if budget <= key_blocks(length, 16):
                scores = float(computed_scores(0, length, budget, 16, identity.granularity))
                points.append(
                    AttentionPoint(length, budget, 0.25 * scores * rate, 0.75 * scores * rate, 2 * scores * rate)
                )
    linear = tuple(LinePoint(n, 0.01 * n + 1, 0.02 * n + 2) for n in (1, 100, 1000))
    head = tuple(LinePoint(n, 0.1 * n, 0.2 * n) for n in (1, 100))
    return LatencyTable(identity, {"host": "test"}, tuple(points), linear, head, (0.5, 1.5))


def whole(length: int, targets: int = 0, sample: int = 0) -> Segment:
    return Segment(sample, 0, length, length, targets)


def test_roofline_terms_are_work_over_rate() -> None:
    model = RooflineModel(
        layers=2, hidden=8, intermediate=16, heads=2, kv_heads=1, head_dim=4, vocabulary=10, block_size=4,
        linear_tflops=1e-9, attention_tflops=1e-9, router_tflops=1e-9, unit_ms=3.0, granularity="block",
    )  # fmt: skip
    # One flop takes 1 ms at 1e-9 teraflop per second (1 kiloflop per second is 1 flop per ms).
    parameters = 2 * (8 * 4 * (2 * 2 + 2 * 1) + 3 * 8 * 16)
    linear = 2 * (4 * parameters + 3 * 8 * 10) + 1.0
    attend = 2 * 2 * 2 * 4 * 16  # two products, 2 flops, heads x dim, 16 scores
    latency = model.latency([whole(4, 3)], (1, 1))
    assert latency.forward_ms == pytest.approx(linear + 2 * attend)
    assert latency.backward_ms == pytest.approx(2 * linear + 2.5 * 2 * attend)


def test_an_empty_micro_batch_takes_no_time(roofline: RooflineModel) -> None:
    assert roofline.latency([], (4, 4, 4)) == Latency(0.0, 0.0)
    assert make_table().latency([], (4, 4)) == Latency(0.0, 0.0)


def test_roofline_refuses_rates_that_are_not_above_zero() -> None:
    with pytest.raises(InputError, match="linear_tflops is 0"):
        RooflineModel(1, 8, 8, 1, 1, 8, 10, 4, linear_tflops=0)


@pytest.mark.parametrize("length", [5, 16, 17, 63, 100, 256, 700, 1024, 5000])
@pytest.mark.parametrize("budget", [1, 2, 4, 7, 16, 40])
def test_a_machine_with_a_constant_rate_is_predicted_exactly(length: int, budget: int) -> None:
    """On the grid, between its points, and beyond it, in length and in budget."""
    scores = float(computed_scores(0, length, min(budget, key_blocks(length, 16)), 16, "block"))
    found = make_table().attention_ms([whole(length)], np.array([budget]))
    assert found[0] == pytest.approx(3e-4 * scores + 2.0)


def test_the_interaction_scales_every_prediction() -> None:
    table = make_table()
    slower = replace(table, interaction=1.25)
    segments = [whole(100, 30), whole(700)]
    budgets = np.array([1, 5])
    assert slower.latency(segments, (3, 5)).total_ms == pytest.approx(1.25 * table.latency(segments, (3, 5)).total_ms)
    assert slower.attention_ms(segments, budgets) == pytest.approx(1.25 * table.attention_ms(segments, budgets))
    assert LatencyTable.mean([table, slower]).interaction == pytest.approx(1.125)


def test_latency_adds_linear_head_and_every_layer_with_its_own_budget() -> None:
    table = make_table()
    segments = [whole(100, 30), whole(40, 10, sample=1)]
    attention = [table.attention_ms(segments, np.array([k]))[0] for k in (3, 5)]
    linear = 0.03 * 140 + 3
    head = 0.3 * 40
    assert table.latency(segments, (3, 5)).total_ms == pytest.approx(sum(attention) + linear + head)
    assert table.latency(segments, (5, 3)) == table.latency(segments, (3, 5))


def test_packed_samples_cost_their_own_pairs_not_those_of_one_long_sample() -> None:
    table = make_table()
    budget = np.array([64])
    packed = table.attention_ms([whole(128, sample=i) for i in range(8)], budget)[0] - 2.0
    long = table.attention_ms([whole(1024)], budget)[0] - 2.0
    scores = [float(computed_scores(0, n, 64, 16, "block")) for n in (128, 1024)]
    assert long / packed == pytest.approx(scores[1] / (8 * scores[0]))


def test_a_chunk_costs_its_own_queries_at_the_rate_of_its_position() -> None:
    table = make_table()
    chunk = Segment(0, 512, 768, 1024, 0)
    scores = float(computed_scores(512, 768, 4, 16, "block"))
    assert table.attention_ms([chunk], np.array([4]))[0] - 2.0 == pytest.approx(3e-4 * scores)


def test_lines_interpolate_extend_and_never_fall() -> None:
    table = make_table()
    assert table.latency([whole(50)], (1, 1)).forward_ms - table.attention_ms([whole(50)], np.array([1]))[0] < 50
    falling = replace(table, linear=(LinePoint(1, 5.0, 5.0), LinePoint(10, 4.0, 4.0)))
    at_ten, at_thousand = (falling._line(falling.linear, n) for n in (10, 1000))
    assert at_thousand == at_ten == (4.0, 4.0)
    assert table._line(table.linear, 550) == (pytest.approx(6.5), pytest.approx(13.0))
    assert table._line(table.linear, 2000) == (pytest.approx(21.0), pytest.approx(42.0))
    assert table._line(table.linear, 1) == (pytest.approx(1.01), pytest.approx(2.02))


def test_saving_and_loading_keeps_every_figure(tmp_path: Path) -> None:
    table, path = make_table(), tmp_path / "deep" / "table.json"
    table.save(path)
    assert LatencyTable.load(path) == table
    assert [p.name for p in path.parent.iterdir()] == ["table.json"]


def test_a_used_table_can_be_sent_to_other_processes() -> None:
    table = make_table()
    before = table.latency([whole(100, 5)], (2, 2))
    again = pickle.loads(pickle.dumps(table))
    assert again == table
    assert again.latency([whole(100, 5)], (2, 2)) == before


def test_mean_of_two_ranks_is_point_by_point() -> None:
    mean = LatencyTable.mean([make_table(1e-4), make_table(3e-4)])
    for point, expected in zip(mean.attention, make_table(2e-4).attention, strict=True):
        assert point.forward_ms == pytest.approx(expected.forward_ms)
    assert mean.provenance["processes"] == 2
    assert mean.call_ms == (0.5, 1.5)


def test_a_table_of_another_model_is_refused_with_every_differing_field() -> None:
    other = replace(IDENTITY, block_size=64, threads=8)
    with pytest.raises(InputError, match=r"block_size \(table 16, run 64\), threads \(table 1, run 8\)"):
        make_table().check_matches(other)
    make_table().check_matches(IDENTITY)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.update(schema=99), "schema 99"),
        (lambda r: r.pop("schema"), "broken"),
        (lambda r: r.pop("identity"), "broken"),
        (lambda r: r["identity"].update(colour="blue"), "broken"),
        (lambda r: r["attention"][0].update(forward_ms=float("nan")), "not above 0"),
        (lambda r: r["linear"][0].update(forward_ms=-1.0), "not above 0"),
        (lambda r: r.update(linear=r["linear"][:1]), "too few points"),
        (lambda r: r.update(attention=[]), "too few points"),
        (lambda r: r.update(call_ms=[]), "broken"),
        (lambda r: r.update(interaction=0.0), "not above 0"),
    ],
)
def test_a_broken_table_is_one_clear_error(tmp_path: Path, change: object, message: str) -> None:
    path = tmp_path / "table.json"
    make_table().save(path)
    record = json.loads(path.read_text())
    change(record)  # type: ignore[operator]
    path.write_text(json.dumps(record))
    with pytest.raises(InputError, match=message):
        LatencyTable.load(path)


def test_missing_and_unreadable_tables_name_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="sparsebalance profile --table"):
        LatencyTable.load(tmp_path / "none.json")
    (tmp_path / "half.json").write_text('{"schema": 1, "ident')
    with pytest.raises(InputError, match="broken"):
        LatencyTable.load(tmp_path / "half.json")
