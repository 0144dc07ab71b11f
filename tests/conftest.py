"""What all tests share: one thread (the machine's cores belong to the distributed tests), and small helpers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

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
    return RooflineModel(
        layers=3, hidden=256, intermediate=512, heads=4, kv_heads=2, head_dim=64, vocabulary=1000, block_size=16,
        linear_tflops=0.05, attention_tflops=0.02, router_tflops=0.02,
    )  # fmt: skip


def samples_of(*lengths: int) -> list[Sample]:
    """Samples 0, 1, ... of these lengths, every token but the last a target."""
    return [Sample(i, length, length - 1) for i, length in enumerate(lengths)]
