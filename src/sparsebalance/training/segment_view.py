"""A map-style data set of segments: any tokenised data set, indexed with what a `PlannedSampler` yields.

In: rows with columns of one value per token. Out: the same columns of a segment, and its positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any, Protocol

import torch
from torch.utils.data import Dataset

from sparsebalance.planning.errors import InputError
from sparsebalance.planning.plan import Segment


class Rows(Sized, Protocol):
    """A data set of dictionaries: a list, one of `datasets`, a torch Dataset."""

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


class SegmentView(Dataset[dict[str, Any]]):
    """`view[segment]` -> {column: its tokens start..end} and `position_ids`, for a DataLoader's `batch_sampler`.

    Columns with one value per token are cut (input_ids, labels, attention_mask, ...); all others are left out.
    `position_ids` count from the segment's start, unless the rows have their own; they are a tensor where the rows
    hold tensors, else a list. The loader's `collate_fn` gets an empty list for an explicit empty unit.

    A column is cut as it is: where a model shifts `labels` itself, the first label of a chunk after the first one
    has no prediction. Shift labels before (position t holds the token t + 1), or plan without a unit size.

    Args:
        dataset: rows by sample id.
    """

    def __init__(self, dataset: Rows) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, segment: Segment) -> dict[str, Any]:
        """Raises:
        InputError: the row has not as many tokens as it was planned with.
        """
        row = self._dataset[segment.sample]
        sizes = {name: len(column) for name, column in row.items() if _is_column(column)}
        cut = {name: row[name][segment.start : segment.end] for name, n in sizes.items() if n == segment.sample_length}
        if not cut or sizes.get("input_ids", segment.sample_length) != segment.sample_length:
            raise InputError(
                f"row {segment.sample} was planned with {segment.sample_length} tokens, but its columns hold {sizes}; "
                "plan with the lengths of this data"
            )
        if "position_ids" not in cut:
            tensors = isinstance(next(iter(cut.values())), torch.Tensor)
            bounds = segment.start, segment.end
            cut["position_ids"] = torch.arange(*bounds) if tensors else list(range(*bounds))
        return cut


def _is_column(value: object) -> bool:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sized):
        return False
    return hasattr(value, "__getitem__") and getattr(value, "ndim", 1) > 0  # an array without axes has no length
