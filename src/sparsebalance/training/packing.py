"""Micro-batch -> the tensors of one packed row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparsebalance.planning.plan import MicroBatch
from sparsebalance.training.data import IGNORE, Example


@dataclass(frozen=True)
class PackedRow:
    """One packed row of T tokens, N of them followed by a target token.

    Attributes:
        input_ids: [1, T] int64.
        position_ids: [1, T] int64, positions in the sample: they restart with every sample, and a chunk goes
            on where the one before it ended.
        target_index: [N] int64, places of the row that predict a target.
        targets: [N] int64, token ids.
        lengths_q, lengths_k: per segment, its tokens, and its keys (earlier chunks included).
    """

    input_ids: Tensor
    position_ids: Tensor
    target_index: Tensor
    targets: Tensor
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]


def pack(unit: MicroBatch, examples: Sequence[Example]) -> PackedRow:
    """Gather the unit's segments; `examples` is indexed by sample id. An empty unit gives an empty row."""
    none = np.empty(0, dtype=np.int32)
    parts = [(examples[s.sample], s.start, s.end) for s in unit.segments]
    ids = np.concatenate([none, *(example.input_ids[start:end] for example, start, end in parts)])
    targets = np.concatenate([none, *(example.targets[start:end] for example, start, end in parts)])
    positions = np.concatenate([none, *(np.arange(start, end) for _, start, end in parts)])
    places = np.flatnonzero(targets != IGNORE)
    return PackedRow(
        input_ids=torch.from_numpy(ids.astype(np.int64))[None],
        position_ids=torch.from_numpy(positions.astype(np.int64))[None],
        target_index=torch.from_numpy(places.astype(np.int64)),
        targets=torch.from_numpy(targets[places].astype(np.int64)),
        lengths_q=tuple(segment.tokens for segment in unit.segments),
        lengths_k=tuple(segment.end for segment in unit.segments),
    )
