"""Devices: vendor figures times utilisation, and names."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from sparsebalance.planning.errors import InputError
from sparsebalance.planning.hardware import ANALYTIC, DEVICES, named_device

NUMBERS = [name for name, value in vars(DEVICES["h100"]).items() if not isinstance(value, str)]


def test_the_h200_reaches_the_rates_that_plans_were_first_compared_at() -> None:
    device = DEVICES["h200"]
    rates = (device.linear_tflops, device.attention_tflops, device.router_tflops)
    assert rates == pytest.approx((450, 200, 300), rel=0.02)


def test_figures_are_those_of_the_data_sheets() -> None:
    assert {name: device.memory_gb for name, device in DEVICES.items()} == {
        "h100": 80, "h200": 141, "a100": 80, "h20": 96,
    }  # fmt: skip
    assert DEVICES["h100"].linear_tflops == pytest.approx(0.45 * 989)
    assert DEVICES["h20"].linear_tflops == pytest.approx(0.7 * 148)
    assert DEVICES["a100"].link_gbps == pytest.approx(0.8 * 300)  # half of 600 GB/s: one direction
    assert DEVICES["h100"].network_gbps == pytest.approx(0.8 * 50)  # 400 Gbit/s


def test_devices_differ_as_they_are_known_to() -> None:
    h100, h200, a100, h20 = (DEVICES[name] for name in ("h100", "h200", "a100", "h20"))
    assert h100.linear_tflops == h200.linear_tflops > a100.linear_tflops > h20.linear_tflops
    assert h20.memory_gbps > h100.memory_gbps > a100.memory_gbps
    assert all(device.link_gbps > device.network_gbps for device in DEVICES.values())


@pytest.mark.parametrize("name", DEVICES)
def test_a_source_says_that_nothing_was_measured(name: str) -> None:
    assert DEVICES[name].name == name
    assert DEVICES[name].source.endswith(ANALYTIC)


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, True, "80", None])
def test_a_figure_must_be_a_finite_number_above_zero(field: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"device h100: {field} is .*, but it must be a finite number above 0"):
        replace(DEVICES["h100"], **{field: value})


def test_a_node_has_a_whole_number_of_devices() -> None:
    with pytest.raises(InputError, match=r"devices_per_node is 7\.5, but it must be a whole number"):
        replace(DEVICES["h100"], devices_per_node=7.5)  # type: ignore[arg-type]


def test_a_name_is_found_in_any_case() -> None:
    assert named_device(" H200 ") is DEVICES["h200"]


def test_an_unknown_name_is_met_with_the_nearest_one_and_all_others() -> None:
    with pytest.raises(InputError, match=r"'h2000' \(did you mean 'h200'\?\); choose from h100, h200, a100, h20"):
        named_device("h2000")
    with pytest.raises(InputError, match=r"no device is called 'tpu'; choose from h100"):
        named_device("tpu")
