"""What is remembered of single samples from epoch to epoch: one array per sample, a row per layer, bounded.

In: a sample's newest array. Out: frozen snapshots for planning, and a compact JSON form. Sample ids must name the
same samples throughout a run, as positions in its data set do.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from sparsebalance.planning.errors import InputError

MAX_SAMPLE_LAYERS = 2**19
"""Rows kept by default: 14,563 samples of 36 layers. Fewer than an epoch has would forget most samples before they
come again. A row of coverage takes 28 bytes and a row of budgets 4: 16 MiB where all are used."""

SAMPLE_DECAY = 0.5
"""Weight of a sample's past when it is seen again: once an epoch, so that a slower average would never arrive."""

Array = TypeVar("Array", bound=NDArray[Any])


class SampleMemory(Generic[Array]):
    """Sample id -> array [layers, ...]. Arrays are replaced, never changed, so a snapshot shares them: taking one
    copies one pointer per sample and no values."""

    def __init__(self, most: int = MAX_SAMPLE_LAYERS) -> None:
        """Args:
            most: rows (sample-layers) kept at most; the samples seen least recently are dropped.

        Raises:
            InputError: a negative limit.
        """
        if most < 0:
            raise InputError(f"most is {most} sample-layers, but it must be at least 0; 0 remembers no samples")
        self.most = most
        self._arrays: dict[int, Array] = {}  # the sample seen least recently first
        self._rows = 0

    def get(self, sample: int) -> Array | None:
        return self._arrays.get(sample)

    def put(self, sample: int, array: Array) -> None:
        """`array` takes the place of the sample's older one; the caller must not change it afterwards."""
        old = self._arrays.pop(sample, None)
        self._rows += len(array) - (0 if old is None else len(old))
        self._arrays[sample] = array
        while self._rows > self.most:
            self._rows -= len(self._arrays.pop(next(iter(self._arrays))))

    def snapshot(self) -> dict[int, Array]:
        """The arrays as they are now, the sample seen least recently first."""
        return dict(self._arrays)

    def restore(self, arrays: Mapping[int, Array]) -> None:
        """Forget everything, then take in `arrays` in their order."""
        self._arrays, self._rows = {}, 0
        for sample, array in arrays.items():
            self.put(sample, array)


def encode_arrays(arrays: Mapping[int, NDArray[Any]], dtype: DTypeLike) -> dict[str, Any]:
    """JSON-compatible and exact: bytes of all arrays in base64, because a list of numbers is 5 times as long.

    Args:
        arrays: sample id -> [layers, ...] of `dtype`, which says the byte order; all but the first axis alike.
    """
    data = b"".join(np.asarray(array, dtype).tobytes() for array in arrays.values())
    return {
        "samples": list(arrays),
        "layers": [len(array) for array in arrays.values()],
        "data": base64.b64encode(data).decode("ascii"),
    }


def decode_arrays(state: Mapping[str, Any], dtype: DTypeLike, row: tuple[int, ...] = ()) -> dict[int, NDArray[Any]]:
    """What `encode_arrays` was given; `row` is the shape of one layer's row."""
    data = np.frombuffer(base64.b64decode(state["data"]), dtype).reshape(-1, *row)
    parts = np.split(data, np.cumsum(state["layers"])[:-1]) if state["layers"] else []
    return dict(zip(state["samples"], parts, strict=True))
