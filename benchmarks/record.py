"""One form for all benchmark results: {schema, machine, date, rows: flat records that name their `kind`}."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sparsebalance.profiling.measure import host_kind


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]], **more: Any) -> None:
    """Args:
    rows: each with `kind`: measured, replayed or simulated.
    more: further top-level entries, e.g. fits over the rows.
    """
    record = {
        "schema": 1,
        "machine": {
            "cpu": host_kind(),
            "cores": os.cpu_count(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **more,
        "rows": list(rows),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"results: {path}")
