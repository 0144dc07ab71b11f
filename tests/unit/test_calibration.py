"""What probes teach about estimates: exact where they agree, monotone, bounded, and resumed exactly."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebalance.planning.calibration import UNCALIBRATED, Calibration, Calibrator
from sparsebalance.planning.coverage import BUDGET_GRID
from sparsebalance.planning.errors import InputError

POINTS = len(BUDGET_GRID)
ESTIMATED = np.linspace(0.1, 0.9, POINTS)
ROUTER = np.linspace(0.3, 0.95, POINTS)
ONE = np.ones(1)
coverages = st.lists(st.floats(0, 1), min_size=POINTS, max_size=POINTS).map(sorted)


def logit(x: float) -> float:
    return float(np.log(x / (1 - x)))


def after(*probes: tuple[int, np.ndarray, np.ndarray], decay: float = 0.8) -> Calibrator:
    calibrator = Calibrator(decay)
    for layer, estimated, router in probes:
        calibrator.update(layer, estimated[None], router[None], ONE)
    return calibrator


def test_one_probe_maps_its_estimate_to_what_was_measured() -> None:
    calibration = after((3, ESTIMATED, ROUTER)).calibration()
    assert calibration.apply(3, ESTIMATED) == pytest.approx(ROUTER)
    other = calibration.apply(3, np.full(POINTS, 0.5))
    assert other[0] == pytest.approx(1 / (1 + np.exp(logit(0.1) - logit(0.3))))


def test_nothing_known_changes_nothing() -> None:
    assert UNCALIBRATED.apply(0, ESTIMATED) == pytest.approx(ESTIMATED)


def test_an_unknown_layer_has_the_mean_offset_of_the_known_ones() -> None:
    half, up, down = (np.full(POINTS, x) for x in (0.5, 0.6, 0.3))
    calibration = after((0, half, up), (1, half, down)).calibration()
    expected = (logit(0.6) + logit(0.3)) / 2
    assert calibration.offset(7) == pytest.approx(np.full(POINTS, expected))


def test_later_probes_count_by_the_decay_and_probes_of_a_step_by_their_tokens() -> None:
    half = np.full((2, POINTS), 0.5)
    calibrator = Calibrator(decay=0.75)
    calibrator.update(0, half, np.stack([half[0] + 0.3, half[0] + 0.1]), np.array([100.0, 300.0]))
    first = (logit(0.8) + 3 * logit(0.6)) / 4
    assert calibrator.calibration().offset(0) == pytest.approx(np.full(POINTS, first))
    calibrator.update(0, half[:1], half[:1], ONE)
    assert calibrator.calibration().offset(0) == pytest.approx(np.full(POINTS, 0.75 * first))


def test_budgets_that_read_everything_teach_nothing() -> None:
    """A sample of 3 blocks: from budget 3 on both are 1. What a longer one taught there stays, and else the nearest
    known offset is used."""
    short = np.where(np.array(BUDGET_GRID) >= 3, 1.0, 0.5)
    lower = np.where(np.array(BUDGET_GRID) >= 3, 1.0, 0.4)
    alone = after((0, short, lower)).calibration()
    assert alone.offset(0) == pytest.approx(np.full(POINTS, logit(0.4)))
    both = after((0, ESTIMATED, ROUTER), (0, short, lower)).calibration()
    assert both.apply(0, ESTIMATED)[2:] == pytest.approx(ROUTER[2:])
    assert both.offset(0)[0] == pytest.approx(0.8 * (logit(0.3) - logit(0.1)) + 0.2 * logit(0.4))
    nothing = after((0, np.ones(POINTS), np.ones(POINTS))).calibration()
    assert nothing.apply(0, ESTIMATED) == pytest.approx(ESTIMATED)
    beside = after((0, np.ones(POINTS), np.ones(POINTS)), (1, ESTIMATED, ROUTER)).calibration()
    assert (beside.offset(0) == beside.offset(1)).all()


@settings(deadline=None, max_examples=60)
@given(estimated=coverages, router=coverages, curve=coverages)
def test_a_calibrated_curve_rises_within_bounds(
    estimated: list[float], router: list[float], curve: list[float]
) -> None:
    calibration = after((0, np.array(estimated), np.array(router))).calibration()
    for layer in (0, 1):
        found = calibration.apply(layer, curve)
        assert (np.diff(found) >= 0).all()
        assert found[0] > 0
        assert found[-1] <= 1
        assert (found[np.array(curve) == 1] == 1).all()


def test_state_is_restored_exactly() -> None:
    rng = np.random.default_rng(5)
    straight = after(*((layer, *np.sort(rng.random((2, POINTS)))) for layer in (0, 2, 0)), decay=0.7)
    short = np.where(np.array(BUDGET_GRID) >= 3, 1.0, 0.5)
    straight.update(4, short[None], short[None] * 0.9, ONE)
    resumed = Calibrator()
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    snapshot = Calibration.from_state_dict(json.loads(json.dumps(straight.calibration().state_dict())))
    for layer in (0, 1, 2, 4):
        for known in (resumed.calibration(), snapshot):
            assert (known.offset(layer) == straight.calibration().offset(layer)).all()
    for calibrator in (straight, resumed):
        calibrator.update(0, ESTIMATED[None], ROUTER[None], ONE)
    assert resumed.state_dict() == straight.state_dict()


def test_a_snapshot_does_not_change() -> None:
    calibrator = after((0, ESTIMATED, ROUTER))
    before = calibrator.calibration()
    offset = before.offset(0)
    calibrator.update(0, ROUTER[None], ESTIMATED[None], ONE)
    assert (before.offset(0) == offset).all()
    assert (calibrator.calibration().offset(0) != offset).all()


def test_wrong_probes_are_refused() -> None:
    with pytest.raises(InputError, match=r"layer 2: coverage must lie in \[0, 1\].*check the attention scores for NaN"):
        after((2, np.full(POINTS, np.nan), ROUTER))
    with pytest.raises(InputError, match=r"layer 1: probes of shape \(1, 3\) do not fit 1 weights and 14 budgets"):
        after((1, np.ones(3), ROUTER))
    with pytest.raises(InputError, match="decay is 1"):
        Calibrator(decay=1.0)
