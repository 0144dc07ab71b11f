"""How much memory a rank needs before anything runs: weights, gradients, optimiser, activations, K/V state, head.

In: a decoder, precisions, parallel degrees, and the layers of a pipeline stage. Out: megabytes (10^6 bytes) by
part. Analytic: it counts the tensors that a Qwen2- or Llama-family layer of transformers keeps for its backward
under this package's attention; `train --dry-run` measures what a machine really needs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sparsebalance.planning.decoder import Decoder
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.work import Granularity

MB = 1e6
HEAD_SLICE = 256  # target tokens whose logits exist at once; the loss is computed in slices of so many
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class StageLayers:
    """What a pipeline stage holds: so many decoder layers, perhaps the embedding, perhaps the head."""

    layers: int
    embedding: bool = True
    head: bool = True


@dataclass(frozen=True)
class MemoryParts:
    """Megabytes of one device by part; `activations` and `state` are of the units that are alive at once."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    state: float
    head: float

    @property
    def total(self) -> float:
        return float(sum(vars(self).values()))


@dataclass(frozen=True)
class MemoryModel:
    """Attributes:
    decoder: the model's sizes.
    block_size, granularity, budget: of the block-sparse attention.
    dtype: of weights and activations.
    optimizer_bytes: per parameter; AdamW keeps two fp32 moments, and below fp32 an fp32 copy of the weights.
    gradient_bytes: per parameter.
    checkpointing: a layer keeps its input alone, and one layer at a time is computed again.
    tp, sp: a micro-batch's tokens, or a layer's width, are spread over tp * sp devices.
    shards: devices over which the optimiser's state is spread (ZeRO stage 1: the data-parallel ranks).
    """

    decoder: Decoder
    block_size: int
    granularity: Granularity
    budget: int
    dtype: str = "bfloat16"
    checkpointing: bool = False
    tp: int = 1
    sp: int = 1
    shards: int = 1

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise InputError(f"dtype is {self.dtype!r}; choose one of {', '.join(DTYPE_BYTES)}")

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def gradient_bytes(self) -> int:
        return self.dtype_bytes

    @property
    def optimizer_bytes(self) -> int:
        """AdamW's two moments in the weights' precision, at least fp32; below fp32 a copy of the weights too."""
        moment = max(self.dtype_bytes, 4)
        return 2 * moment + (4 if self.dtype_bytes < 4 else 0)

    def parameters(self, stage: StageLayers) -> int:
        """Of one device of the stage; a tied embedding is held by the first and the last stage."""
        d = self.decoder
        matrices = 1 if d.tied and stage.embedding and stage.head else stage.embedding + stage.head
        return (stage.layers * d.layer_parameters + matrices * d.vocabulary * d.hidden) // self.tp

    def static(self, stage: StageLayers) -> tuple[float, float, float]:
        """Megabytes of weights, gradients, optimiser."""
        count = self.parameters(stage) / MB
        return count * self.dtype_bytes, count * self.gradient_bytes, count * self.optimizer_bytes / self.shards

    def activations_mb(self, tokens: float, layers: int, head: bool = False) -> float:
        """Kept from a unit's forward to its backward, on each of tp * sp devices.

        Per token and layer without checkpointing: six hidden-wide tensors (two norms' inputs and results, the
        inputs of the two projections), query and output, key and value, four of the feed-forward's width. The last
        norm, before the head, keeps two hidden-wide ones more.
        """
        d = self.decoder
        if self.checkpointing:
            per_token = layers * (d.hidden * self.dtype_bytes + self._selection_bytes())
        else:
            per_token = layers * self._layer_bytes()
        per_token += 2 * d.hidden * self.dtype_bytes if head else 0
        return tokens * per_token / (self.tp * self.sp) / MB

    def deferred_mb(self, tokens: float, layers: int) -> float:
        """Kept from a unit's input gradients to its weight gradients where these come apart, on each of tp * sp
        devices: of the linear layers the inputs, which some share, and the gradients of their outputs."""
        d = self.decoder
        width = 4 * d.hidden + (2 * d.heads + 2 * d.kv_heads) * d.head_dim + 3 * d.intermediate
        return tokens * layers * width * self.dtype_bytes / (self.tp * self.sp) / MB

    def working_mb(self, tokens: float) -> float:
        """Held for a moment in a unit's backward: gradients inside one layer, and its recomputed activations."""
        d = self.decoder
        width = 3 * d.intermediate + 2 * d.hidden + (2 * d.heads + 4 * d.kv_heads) * d.head_dim
        again = self._layer_bytes() if self.checkpointing else 0
        return tokens * (width * self.dtype_bytes + again) / (self.tp * self.sp) / MB

    def _layer_bytes(self) -> int:
        d = self.decoder
        width = 6 * d.hidden + (2 * d.heads + 2 * d.kv_heads) * d.head_dim + 4 * d.intermediate
        return width * self.dtype_bytes + self._selection_bytes()

    def _selection_bytes(self) -> int:
        """Of one token in one layer: the chosen blocks (8-byte indices) and the log-sum-exp."""
        heads = self.decoder.heads
        # Under token routing, tiles of queries have empty places: about a third more than is chosen.
        chosen = self.budget / self.block_size if self.granularity == "block" else self.budget * 4 / 3
        return round(heads * (8 * chosen + 4))

    def state_mb(self, tokens: float, layers: int) -> float:
        """K and V of a sample that runs in chunks, and their gradients, until its first chunk's backward: all in the
        precision that attention computes in, at least fp32."""
        width = 2 * self.decoder.kv_heads * self.decoder.head_dim
        return tokens * layers * width * 2 * max(self.dtype_bytes, 4) / (self.tp * self.sp) / MB

    def head_mb(self, targets: float) -> float:
        """Logits of a slice twice in fp32, the fp32 gradient of the output projection, hidden states of targets."""
        d = self.decoder
        logits = 2 * min(targets, HEAD_SLICE) * d.vocabulary * 4 / self.tp
        gradient = d.vocabulary * d.hidden * 4 / self.tp
        hidden = 2 * targets * d.hidden * self.dtype_bytes
        return (logits + gradient + hidden) / MB if targets else 0.0

    def single_unit(self, tokens: float, targets: float, stage: StageLayers) -> MemoryParts:
        """Peak of a rank that has one unit alive at a time (no pipeline)."""
        weights, gradients, optimizer = self.static(stage)
        activations = self.activations_mb(tokens, stage.layers, stage.head)
        # The head's buffers are gone when the layers' backward needs its own.
        working, head = self.working_mb(tokens), self.head_mb(targets) if stage.head else 0.0
        return MemoryParts(weights, gradients, optimizer, activations + working, 0.0, max(head - working, 0.0))

    def chunked_sample(
        self, tokens: int, targets: int, stage: StageLayers, unit_size: int, keep_chunks: int | None = None
    ) -> MemoryParts:
        """Peak of a rank without a pipeline that runs a sample in chunks of at most `unit_size` tokens, keeping the
        activations of `keep_chunks` of them (all where None), and the keys, values and chosen blocks of all."""
        if tokens <= unit_size:
            return self.single_unit(tokens, targets, stage)
        unit = self.single_unit(unit_size, min(targets, unit_size), stage)
        alive = tokens if keep_chunks is None else min(tokens, keep_chunks * unit_size)
        others = self.activations_mb(alive - unit_size, stage.layers, stage.head)
        # Chunks that run forward again read the blocks that they chose the first time.
        chosen = (tokens - alive) * stage.layers * self._selection_bytes() / (self.tp * self.sp) / MB
        return replace(unit, activations=unit.activations + others + chosen, state=self.state_mb(tokens, stage.layers))
