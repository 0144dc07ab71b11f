"""Accelerators for planning before anything was measured: memory, achieved rates, links.

In: a name. Out: a `Device`. Every rate is the vendor's peak times a utilisation written here, so all times that
come from it are analytic, not measured; label them with `ANALYTIC`, and use a latency table where there is one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sparsebalance.planning.errors import InputError, did_you_mean

ANALYTIC = "analytic, not measured"

# Shares of the dense bf16 peak. Whole training runs report 38 to 43 % on the H100 (Llama 3, arXiv 2407.21783, section
# 3.3) and 52 % on the A100 (Megatron-LM, arXiv 2104.04473); matrix products alone are a little above the whole.
# The less arithmetic a device has per byte of memory traffic, the nearer it comes to its peak: peak flops per byte are
# 295 (H100), 153 (A100), 37 (H20). The H20's shares follow from that and are the least certain.
H100_LINEAR = 0.45
A100_LINEAR = 0.55
H20_LINEAR = 0.70
# Block-sparse attention gathers scattered blocks and spends much of its time in exponentials, not in products.
SPARSE_ATTENTION = 0.20
ROUTER = 0.30
# The H20 has 59 % of the H100's multiprocessors for these, but 15 % of its peak, so their share of the peak is larger.
H20_SPARSE_ATTENTION = 0.40
H20_ROUTER = 0.50
# What large transfers reach of a link's or a memory's stated rate.
TRANSFER = 0.80


@dataclass(frozen=True)
class Device:
    """One accelerator and its links.

    Attributes:
        name: as in reports.
        memory_gb: gigabytes (10^9 bytes) of device memory.
        linear_tflops, attention_tflops, router_tflops: achieved rates of matrix products, block-sparse attention and
            its router in bf16, teraflop per second.
        memory_gbps: achieved gigabytes per second to and from the device's memory.
        link_gbps: achieved gigabytes per second of one device within a node, per direction.
        network_gbps: achieved gigabytes per second of one device between nodes, per direction.
        link_latency_us: microseconds before the first byte of a transfer arrives.
        devices_per_node: devices joined by the fast link.
        unit_ms: fixed milliseconds per micro-batch.
        source: where the figures come from.

    Raises:
        InputError: a figure is not a finite number above 0, or devices_per_node is not a whole number.
    """

    name: str
    memory_gb: float
    linear_tflops: float
    attention_tflops: float
    router_tflops: float
    memory_gbps: float
    link_gbps: float
    network_gbps: float
    link_latency_us: float
    devices_per_node: int
    unit_ms: float
    source: str

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name in ("name", "source"):
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise InputError(f"device {self.name}: {name} is {value!r}, but it must be a finite number above 0")
        if not isinstance(self.devices_per_node, int):
            raise InputError(
                f"device {self.name}: devices_per_node is {self.devices_per_node!r}, but it must be a whole number"
            )


def _from_data_sheet(
    name: str,
    *,
    memory_gb: float,
    peak_tflops: float,
    peak_memory_gbps: float,
    nvlink_gbps: float,
    network_gbit: float,
    linear: float,
    attention: float = SPARSE_ATTENTION,
    router: float = ROUTER,
) -> Device:
    """Vendor figures times utilisations. nvlink_gbps counts both directions, as vendors do; network_gbit is the adapter
    of each device in the vendor's own server."""
    return Device(
        name=name,
        memory_gb=memory_gb,
        linear_tflops=peak_tflops * linear,
        attention_tflops=peak_tflops * attention,
        router_tflops=peak_tflops * router,
        memory_gbps=peak_memory_gbps * TRANSFER,
        link_gbps=nvlink_gbps / 2 * TRANSFER,
        network_gbps=network_gbit / 8 * TRANSFER,
        link_latency_us=5.0,
        devices_per_node=8,
        unit_ms=0.1,
        source=f"NVIDIA data sheet of the {name.upper()} SXM ({peak_tflops:g} TFLOPS dense bf16): {linear:.0%} of it "
        f"linear, {attention:.0%} block-sparse attention, {router:.0%} router, {TRANSFER:.0%} of transfers; {ANALYTIC}",
    )


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        _from_data_sheet(
            "h100", memory_gb=80, peak_tflops=989, peak_memory_gbps=3350, nvlink_gbps=900, network_gbit=400,
            linear=H100_LINEAR,
        ),
        _from_data_sheet(
            "h200", memory_gb=141, peak_tflops=989, peak_memory_gbps=4800, nvlink_gbps=900, network_gbit=400,
            linear=H100_LINEAR,
        ),
        _from_data_sheet(
            "a100", memory_gb=80, peak_tflops=312, peak_memory_gbps=2039, nvlink_gbps=600, network_gbit=200,
            linear=A100_LINEAR,
        ),
        _from_data_sheet(
            "h20", memory_gb=96, peak_tflops=148, peak_memory_gbps=4000, nvlink_gbps=900, network_gbit=400,
            linear=H20_LINEAR, attention=H20_SPARSE_ATTENTION, router=H20_ROUTER,
        ),
    )
}  # fmt: skip


def named_device(name: str) -> Device:
    """A device by its name, in any case.

    Raises:
        InputError: no device has that name.
    """
    wanted = name.strip().lower()
    if wanted not in DEVICES:
        hint = did_you_mean(wanted, DEVICES)
        raise InputError(f"no device is called {name!r}{hint}; choose from {', '.join(DEVICES)}")
    return DEVICES[wanted]
