"""What needs a CUDA device: that CPU ranks still work where there is one."""

from __future__ import annotations

import pytest
import torch

from sparsebalance.training.config import ParallelConfig
from sparsebalance.training.parallel import start, stop

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def test_collectives_reach_both_kinds_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo for what lies on the CPU, nccl for what lies on the device, in one process group."""
    for name, value in {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29512"}.items():
        monkeypatch.setenv(name, value)
    ranks = start(ParallelConfig(dp=1))
    assert ranks.world == 1
    for device in ("cpu", "cuda"):
        tensor = torch.ones(3, device=device)
        ranks.all_reduce(tensor)
        assert tensor.tolist() == [1.0] * 3
    stop()
