"""What all tests share: one thread (the machine's cores belong to the distributed tests), and small helpers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sparsebalance.planning.decoder import Decoder
from sparsebalance.planning.hardware import Device
from sparsebalance.planning.latency import RooflineModel
from sparsebalance.planning.plan import Sample

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="session")
def roofline() -> RooflineModel:
    """A small decoder on slow hardware: attention, linear part and head all matter."""
    return RooflineModel(Decoder(3, 256, 512, 4, 2, 64, 1000, tied=True), slow_device(), block_size=16)


def slow_device(linear_tflops: float = 0.05, attention_tflops: float = 0.02, unit_ms: float = 0.1) -> Device:
    return Device(
        name="slow", memory_gb=1.0, linear_tflops=linear_tflops, attention_tflops=attention_tflops,
        router_tflops=attention_tflops, memory_gbps=10.0, link_gbps=1.0, network_gbps=0.1, link_latency_us=10.0,
        devices_per_node=4, unit_ms=unit_ms, source="made up",
    )  # fmt: skip


def samples_of(*lengths: int) -> list[Sample]:
    """Samples 0, 1, ... of these lengths, every token but the last a target."""
    return [Sample(i, length, length - 1) for i, length in enumerate(lengths)]
