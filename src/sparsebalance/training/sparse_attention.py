"""Our attention inside a transformers decoder, through its AttentionInterface: no forked model code.

`activate()` registers the implementation and, under the same name, its mask function (without one,
transformers drops padding silently). A training step passes a `SparseContext` as the keyword `sparse`; a
plain call without one reads block size and budget from `config.sparse_attention` and finds document
boundaries by itself, from cu_seq_lens, a padding mask or restarting position ids, in this order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from sparsebalance.attention.clock import TermClock
from sparsebalance.attention.cpu import attend
from sparsebalance.attention.estimate import estimated_coverage
from sparsebalance.attention.interface import BlockSelection, PackedLayout, RoutingScores, budget_per_segment
from sparsebalance.attention.moba import MoBARouter
from sparsebalance.attention.online import OnlineBudgets
from sparsebalance.attention.probe import CoverageProbe, probe_coverage
from sparsebalance.attention.state import LayerState, SampleState
from sparsebalance.attention.ulysses import HeadExchange, gather_heads
from sparsebalance.planning.calibration import UNCALIBRATED, Calibration
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.plan import OnlineTuning
from sparsebalance.planning.work import Granularity

IMPLEMENTATION = "sparsebalance"
BudgetLike = int | Sequence[int] | Tensor


@dataclass
class SparseContext:
    """What one micro-batch's attention layers need beyond q, k, v.

    Attributes:
        layout: boundaries of the packed row; they win over any mask or position ids.
        budgets: per layer, one budget for the row or one for each segment ([segments]).
        router: chooses blocks.
        keep_selections: remember each layer's selection, so that a recompute under activation
            checkpointing attends the same blocks. Budgets tuned online are always kept: a second choice would
            spend a layer's time twice.
        probe_rows: queries per segment on which coverage is measured; 0 measures nothing.
        probes: layer -> one probe per segment, filled while running.
        clock: collects how long routing, attention, probing and tuning take.
        state: keys and values of the sample's earlier chunks, where the row is a chunk.
        name: of the micro-batch, for error messages.
        online: how budgets follow the scores; `budgets` are then wishes, one number per layer.
        calibration: of estimated coverage, for tuning online.
        used: layer -> the budget really used, filled while running; 0-d tensors where tuned online.
        estimated: layer -> estimated coverage [Hk, len(BUDGET_GRID)], not calibrated; filled where tuned online.
            With `sequence`, a row for every copy of a key/value head.
        sequence: of the ranks that share the row's tokens, where the row is sequence parallel; the layout stays that
            of the whole row. State and selections then hold this rank's heads.
        heads: ranks that share out the heads, by sequence or tensor parallelism: budgets, estimates and probes are of
            all heads, the same on each of them. Those of `sequence` where not given.
    """

    layout: PackedLayout
    budgets: Mapping[int, BudgetLike] | Sequence[BudgetLike]
    router: MoBARouter
    keep_selections: bool = False
    probe_rows: int = 0
    probes: dict[int, list[CoverageProbe]] = field(default_factory=dict)
    clock: TermClock = field(default_factory=TermClock)
    state: SampleState | None = None
    name: str = "a row"
    online: OnlineTuning | None = None
    calibration: Calibration = UNCALIBRATED
    used: dict[int, BudgetLike] = field(default_factory=dict)
    estimated: dict[int, Tensor] = field(default_factory=dict)
    sequence: HeadExchange | None = None
    heads: dist.ProcessGroup | None = None
    _selections: dict[int, BlockSelection] = field(default_factory=dict)
    _tuner: OnlineBudgets | None = None

    @property
    def sharing(self) -> dist.ProcessGroup | None:
        """Ranks that share out the heads."""
        return self.sequence.group if self.heads is None and self.sequence is not None else self.heads

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        """q [tokens_q, H, D], k, v [tokens_k, Hk, D] -> [tokens_q, H, D]; of a chunk, k and v are its own tokens',
        and with `sequence` all of them hold this rank's shard of the tokens.

        Raises:
            InputError: a query or key is NaN or infinite, or not a shard of the row.
        """
        if self.sequence is None:
            return self._attend(layer, q, k, v, scale)
        q, k, v = self.sequence.to_heads(q, k, v, self.layout.tokens_q)
        return self.sequence.to_tokens(self._attend(layer, q, k, v, scale))

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        state = None if self.state is None else self.state.layer(layer, k, v)
        selection = self._selections.get(layer)
        if selection is None:
            self._check_finite(layer, q, k)
            selection = self._select(layer, q, k, v, state, scale)
            if self.keep_selections or self.online is not None:
                self._selections[layer] = selection
            if self.probe_rows:
                with self.clock.measure("probe"):
                    keys = k if state is None else state.prefix(self.layout.tokens_k).to(k.dtype)
                    probes = probe_coverage(q, keys, self.layout, self.router, self.probe_rows, scale)
                    self.probes[layer] = probes if self.sharing is None else _of_all_heads(probes, self.sharing, q)
        return attend(q, k, v, selection, self.layout, scale, self.clock, state)[0]

    def _select(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, state: LayerState | None, scale: float | None
    ) -> BlockSelection:
        with self.clock.measure("router"):
            if state is None:
                scores = self.router.score(q, k, self.layout)
            else:
                state.write(self.layout.tokens_k - self.layout.tokens_q, k, v)
                scores = self.router.score_means(q, state.means[: self.layout.key_blocks[0]], self.layout)
        budget = self.budgets[layer]
        if self.online is not None:
            with self.clock.measure("tune"):
                budget = self._tuned(layer, int(budget), scores, self.online, scale)  # type: ignore[arg-type]
        self.used[layer] = budget
        with self.clock.measure("router"):
            return self.router.select(scores, budget_per_segment(budget, self.layout))

    def _tuned(self, layer: int, wish: int, scores: RoutingScores, online: OnlineTuning, scale: float | None) -> Tensor:
        if self._tuner is None:
            blocks = max(self.layout.key_blocks)
            self._tuner = OnlineBudgets(online, blocks, self.calibration, scores.keys.device)
        scale = scores.keys.shape[-1] ** -0.5 if scale is None else scale
        estimated = estimated_coverage(scores, scale)
        self.estimated[layer] = estimated if self.sharing is None else gather_heads(estimated, self.sharing)
        return self._tuner.choose(layer, wish, self.estimated[layer])

    @torch.no_grad()
    def _check_finite(self, layer: int, q: Tensor, k: Tensor) -> None:
        # NaN and infinity survive a sum; so may an overflow of finite values: only then all values are looked at.
        if math.isfinite(float(q.sum(dtype=torch.float32) + k.sum(dtype=torch.float32))):
            return
        for what, values in (("queries", q), ("keys", k)):
            wrong = values.numel() - int(values.isfinite().sum())
            if wrong:
                raise InputError(
                    f"layer {layer} of {self.name}: {wrong:,} of {values.numel():,} values of the {what} are NaN or "
                    "infinite, but routing needs finite ones; lower optimizer.lr, or resume from an earlier checkpoint"
                )


def _of_all_heads(probes: Sequence[CoverageProbe], group: dist.ProcessGroup, like: Tensor) -> list[CoverageProbe]:
    """Means over the ranks, each with as many heads; the message lies on the device of `like`."""
    curves = torch.tensor(
        [[probe.estimated, probe.router, probe.oracle] for probe in probes], dtype=torch.float64, device=like.device
    )
    return [CoverageProbe(*map(tuple, found)) for found in gather_heads(curves[None], group).mean(0).tolist()]


def activate(model: PreTrainedModel, block_size: int, budget: int, granularity: Granularity) -> None:
    """Let `model` attend with block-sparse attention; the settings go into its config and are saved with it.

    Raises:
        InputError: a setting out of range, or a model with sliding-window layers.
    """
    MoBARouter(granularity)  # checks the name
    if block_size < 1 or budget < 1:
        raise InputError(f"block_size {block_size} and budget {budget} must both be at least 1")
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise InputError(
            f"the model has layers of kinds {sorted(kinds)}, but block-sparse attention replaces full "
            "attention only; set use_sliding_window to false in its config"
        )
    AttentionInterface.register(IMPLEMENTATION, sparse_attention_forward)
    AttentionMaskInterface.register(IMPLEMENTATION, _padding_mask)
    model.config.sparse_attention = {
        "block_size": block_size,
        "budget": budget,
        "granularity": granularity,
    }
    model.set_attn_implementation(IMPLEMENTATION)


def sparse_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sparse: SparseContext | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls: query [B, H, T, D], key, value [B, Hk, S, D] -> [B, T, H, D]."""
    if dropout:
        raise InputError(f"attention dropout is {dropout}, but block-sparse attention has none; set it to 0")
    if attention_mask is not None and attention_mask.ndim != 2 and sparse is None:
        raise InputError(
            f"a {attention_mask.ndim}-dimensional attention mask cannot be used with block-sparse attention; "
            "pass a [batch, tokens] padding mask, or packed rows"
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    batch, _, queries, _ = query.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    if sparse is not None:
        if batch != 1:
            raise InputError(f"a planned micro-batch is one packed row, but the batch has {batch}")
        return sparse.attend(layer, q, k, v, scaling)[None], None
    settings: dict[str, Any] = module.config.sparse_attention  # type: ignore[union-attr, assignment]
    lengths_q, lengths_k, keep_q, keep_k = _boundaries(query, key, attention_mask, kwargs)
    context = SparseContext(
        PackedLayout(lengths_q, lengths_k, settings["block_size"]),
        {layer: settings["budget"]},
        MoBARouter(settings["granularity"]),
    )
    if keep_q is None:
        out = context.attend(layer, q, k, v, scaling)
    else:
        out = torch.zeros_like(q)
        out[keep_q] = context.attend(layer, q[keep_q], k[keep_k], v[keep_k], scaling)
    return out.view(batch, queries, *out.shape[1:]), None


def _padding_mask(
    batch_size: int, q_length: int, kv_length: int, attention_mask: Tensor | None = None, **kwargs: Any
) -> Tensor | None:
    """Hand the 2-D padding mask through to the attention function; None where nothing is padded."""
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return attention_mask[:, -kv_length:].bool()


def _boundaries(
    query: Tensor, key: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
) -> tuple[tuple[int, ...], tuple[int, ...], Tensor | None, Tensor | None]:
    """Lengths of queries and keys per document, and which flat queries and keys are real (None: all)."""
    batch, _, queries, _ = query.shape
    keys = key.shape[2]
    starts = kwargs.get("cu_seq_lens_q")
    if starts is not None:
        starts_k = kwargs.get("cu_seq_lens_k", starts)
        keep_q, keep_k = (
            None if int(edges[-1]) == tokens else torch.arange(tokens) < edges[-1]
            for edges, tokens in ((starts, batch * queries), (starts_k, batch * keys))
        )
        return tuple(starts.diff().tolist()), tuple(starts_k.diff().tolist()), keep_q, keep_k
    position_ids = kwargs.get("position_ids")
    if queries != keys or position_ids is None:  # decoding with a cache: one document a row
        if mask is None:
            return (queries,) * batch, (keys,) * batch, None, None
        real_q = mask[:, -queries:]
        return tuple(real_q.sum(1).tolist()), tuple(mask.sum(1).tolist()), real_q.flatten(), mask.flatten()
    positions = position_ids.expand(batch, -1)
    real = _without_padding_tail(positions) if mask is None else mask
    lengths = tuple(n for row, kept in zip(positions, real) for n in _document_lengths(row, kept))
    keep = None if bool(real.all()) else real.flatten()
    return lengths, lengths, keep, keep


def _without_padding_tail(positions: Tensor) -> Tensor:
    """[B, T] bool, False in a tail of two or more equal positions: padding, not documents of one token."""
    repeated = torch.nn.functional.pad(positions.diff(dim=1) == 0, (1, 0))
    tail = repeated.flip(1).long().cumprod(1).flip(1).bool()
    first = torch.nn.functional.pad(tail[:, 1:] & ~tail[:, :-1], (0, 1))
    return ~(tail | first)


def _document_lengths(positions: Tensor, real: Tensor) -> list[int]:
    """A document begins where the positions of real tokens do not go on, not at a gap that the mask leaves."""
    index = real.nonzero().flatten()
    step = positions[index].diff()
    jumps = ((step != 1) & (step != index.diff())).nonzero().flatten() + 1
    edges = [0, *jumps.tolist(), len(index)]
    return [b - a for a, b in itertools.pairwise(edges) if b > a]
