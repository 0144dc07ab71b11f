"""Cuts a packed row for sequence parallel ranks: each holds consecutive tokens of it, with positions and targets.

In: the whole row, the same on every rank. Out: one rank's part. Linear layers, norms and the loss run on it alone;
its loss and its parameter gradients are parts of a sum over the ranks. Attention sees the whole row, through
`sparsebalance.attention.ulysses`.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from torch.nn.functional import pad

from sparsebalance.attention.ulysses import shard_tokens
from sparsebalance.planning.errors import InputError
from sparsebalance.training.packing import PackedRow


def shard(row: PackedRow, rank: int, degree: int) -> PackedRow:
    """Rank `rank`'s n = `shard_tokens` tokens of the row, padded behind its end with token 0 at position 0.

    A shard may hold few targets or none, and padding alone where the row has fewer tokens than ranks: it still runs
    forward and backward, because other ranks attend with its tokens and wait for its part of their exchanges.
    Targets were shifted when the data was read, so no border needs a neighbour's token.

    Returns:
        input_ids, position_ids [1, n]; target_index counts from the shard's first token; lengths_q and lengths_k stay
        the whole row's, for the layout that attention needs.

    Raises:
        InputError: no such rank.
    """
    if not 0 <= rank < degree:
        raise InputError(f"rank {rank} is none of {degree} sequence parallel ranks; count them from 0 to degree - 1")
    n = shard_tokens(row.input_ids.shape[1], degree)
    start, end = rank * n, (rank + 1) * n

    def cut(x: Tensor) -> Tensor:
        part = x[:, start:end]
        return pad(part, (0, n - part.shape[1]))

    own = (row.target_index >= start) & (row.target_index < end)
    return replace(
        row,
        input_ids=cut(row.input_ids),
        position_ids=cut(row.position_ids),
        target_index=row.target_index[own] - start,
        targets=row.targets[own],
    )
