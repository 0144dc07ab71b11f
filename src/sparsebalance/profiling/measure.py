"""Measures one model on this machine, term by term, and returns a latency table.

After a warm-up that never enters the table, every point is timed once per round, with rounds interleaved over
all points (so that a slow spell of the machine hits all alike), and medians are kept.
"""

from __future__ import annotations

import datetime
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparsebalance.attention.cpu import attend
from sparsebalance.attention.interface import PackedLayout, budget_per_segment
from sparsebalance.attention.moba import MoBARouter
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.plan import Latency, MicroBatch, Segment
from sparsebalance.planning.table import AttentionPoint, Identity, LatencyTable, LinePoint
from sparsebalance.planning.work import key_blocks
from sparsebalance.training.data import IGNORE, Example
from sparsebalance.training.engine import Engine
from sparsebalance.training.loss import linear_cross_entropy
from sparsebalance.training.sparse_attention import SparseContext

PACKED_TOKENS = 2048  # short samples are measured packed up to this length, as they will run
Progress = Callable[[int, int], None]  # (points done, points in all)
Work = tuple[MicroBatch, list[Example]]  # a micro-batch and the examples that its sample ids index


@dataclass(frozen=True)
class Measurement:
    """Attributes:
    table: for prediction.
    held_out_ms: median forward + backward milliseconds of each held-out micro-batch.
    """

    table: LatencyTable
    held_out_ms: tuple[float, ...]


@dataclass
class _Point:
    """One measurement: `run` returns milliseconds for each of its parts."""

    run: Callable[[], tuple[float, ...]]
    rounds: list[tuple[float, ...]] = field(default_factory=list)

    def median(self) -> tuple[float, ...]:
        return tuple(statistics.median(values) for values in zip(*self.rounds))


def measure(
    model: PreTrainedModel,
    identity: Identity,
    max_length: int,
    max_budget: int = 16,
    rounds: int = 3,
    limit_s: float = 45.0,
    progress: Progress | None = None,
    held_out: Sequence[Work] = (),
) -> Measurement:
    """Args:
        model: the decoder, with block-sparse attention activated.
        identity: recorded in the table.
        max_length: tokens of the longest sample to predict.
        max_budget: largest budget to measure; larger ones are extrapolated by their work.
        rounds: timed rounds; at least 1.
        limit_s: no new round starts after so many seconds; the first is always finished.
        progress: called after every point.
        held_out: micro-batches that are timed in the same rounds and never enter the table.

    Raises:
        InputError: max_length below two blocks (nothing to interpolate between).
    """
    if max_length < 2 * identity.block_size:
        raise InputError(
            f"max_length {max_length} is below two blocks of {identity.block_size}; nothing to interpolate"
        )
    lengths = measured_lengths(identity.block_size, max_length)
    attention = {
        (length, budget): _Point(_attention_run(identity, length, budget))
        for length in lengths
        for budget in _powers_of_four(1, min(key_blocks(length, identity.block_size), max_budget))
    }
    linear = {count: _Point(_linear_run(model, identity, count)) for count in [1, *lengths]}
    head = {count: _Point(_head_run(model, count)) for count in _targets(max_length)}
    call = _Point(_attention_run(identity, 1, 1, packed=False))
    works = [_work(identity, packed, max_budget // 2) for packed in _whole(max_length)]
    whole = [_Point(_whole_run(model, identity, work)) for work in (*works, *held_out)]
    points = [call, *attention.values(), *linear.values(), *head.values(), *whole]
    begin = time.perf_counter()
    for kind in (attention, linear, head):  # the largest ones touch the memory that all others reuse
        for point in (*list(kind.values())[:2], list(kind.values())[-1]):
            point.run()
    for index in range(rounds):
        if index and time.perf_counter() - begin > limit_s:
            break
        for place, point in enumerate(points):
            point.rounds.append(point.run())
            if progress is not None:
                progress(index * len(points) + place + 1, rounds * len(points))
    call_times = call.median()
    call_router, call_forward, call_backward = call_times
    parts = LatencyTable(
        identity=identity,
        provenance=_provenance(len(call.rounds), time.perf_counter() - begin),
        attention=tuple(
            _marginal(length, budget, point.median(), call_times) for (length, budget), point in attention.items()
        ),
        linear=tuple(LinePoint(count, *point.median()) for count, point in linear.items()),
        head=tuple(LinePoint(count, *point.median()) for count, point in head.items()),
        call_ms=(call_router + call_forward, call_backward),
    )
    whole_ms = [point.median()[0] for point in whole]
    ratios = [
        ms / parts.latency(unit.segments, unit.budgets).total_ms for ms, (unit, _) in zip(whole_ms, works, strict=False)
    ]
    return Measurement(replace(parts, interaction=statistics.median(ratios)), tuple(whole_ms[len(works) :]))


def measured_lengths(block_size: int, max_length: int) -> list[int]:
    """Lengths of the samples that enter the table."""
    return _powers_of_four(block_size, max_length)


def _powers_of_four(first: int, last: int) -> list[int]:
    """first, first * 4, first * 16, ... below `last`, and `last`."""
    values = []
    while first < last:
        values.append(first)
        first *= 4
    return [*values, last]


def _targets(max_length: int) -> list[int]:
    return sorted({1, 32, min(256, max_length), min(1024, max_length)})


def _marginal(length: int, budget: int, times: Sequence[float], call: Sequence[float]) -> AttentionPoint:
    """Milliseconds that one sample adds to a call; never below a tenth of its share of the whole."""
    copies = _copies(length)
    router, forward, backward = (max(t - c, 0.1 * t) / copies for t, c in zip(times, call))
    return AttentionPoint(length, budget, router, forward, backward)


def _copies(length: int) -> int:
    return max(1, PACKED_TOKENS // length)


def _attention_run(
    identity: Identity, length: int, budget: int, packed: bool = True
) -> Callable[[], tuple[float, float, float]]:
    """Router, forward and backward milliseconds of one attention layer."""

    def run() -> tuple[float, float, float]:
        copies = _copies(length) if packed else 1
        layout = PackedLayout.from_lengths([length] * copies, identity.block_size)
        dtype = getattr(torch, identity.dtype)
        generator = torch.Generator().manual_seed(length)

        def random(heads: int) -> Tensor:
            x = torch.randn(layout.tokens_q, heads, identity.head_dim, generator=generator)
            return x.to(dtype).requires_grad_()

        q, k, v = random(identity.heads), random(identity.kv_heads), random(identity.kv_heads)
        grad = torch.ones_like(q)
        router = MoBARouter(identity.granularity)
        t0 = time.perf_counter()
        selection = router.select(router.score(q, k, layout), budget_per_segment(budget, layout))
        t1 = time.perf_counter()
        out, _ = attend(q, k, v, selection, layout)
        t2 = time.perf_counter()
        torch.autograd.grad(out, (q, k, v), grad)
        t3 = time.perf_counter()
        return (t1 - t0) * 1e3, (t2 - t1) * 1e3, (t3 - t2) * 1e3

    return run


class _WithoutAttention(SparseContext):
    """Stands in for the attention: mixes q, k and v cheaply, so that all projections get gradients."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        grouped = q.unflatten(1, (k.shape[1], -1)) + (k + v)[:, :, None]
        return grouped.flatten(1, 2)


def _linear_run(model: PreTrainedModel, identity: Identity, tokens: int) -> Callable[[], tuple[float, float]]:
    """Forward and backward milliseconds of the whole model without attention and without loss."""

    def run() -> tuple[float, float]:
        layout = PackedLayout.from_lengths([tokens], identity.block_size)
        context = _WithoutAttention(layout, {}, MoBARouter(identity.granularity))
        ids = torch.arange(tokens)[None] % identity.vocabulary
        t0 = time.perf_counter()
        hidden = model.base_model(
            input_ids=ids, position_ids=torch.arange(tokens)[None], use_cache=False, sparse=context
        ).last_hidden_state
        loss = hidden.sum()
        t1 = time.perf_counter()
        loss.backward()
        t2 = time.perf_counter()
        return (t1 - t0) * 1e3, (t2 - t1) * 1e3

    return run


def _head_run(model: PreTrainedModel, targets: int) -> Callable[[], tuple[float, float]]:
    def run() -> tuple[float, float]:
        weight = model.get_output_embeddings().weight
        hidden = torch.zeros(targets, weight.shape[1], dtype=weight.dtype, requires_grad=True)
        wanted = torch.arange(targets) % weight.shape[0]
        t0 = time.perf_counter()
        loss = linear_cross_entropy(hidden, weight, wanted)
        t1 = time.perf_counter()
        loss.backward()
        t2 = time.perf_counter()
        return (t1 - t0) * 1e3, (t2 - t1) * 1e3

    return run


def _whole(max_length: int) -> list[tuple[int, ...]]:
    """Lengths of the micro-batches that are measured whole: two single samples and a pack."""
    return [(max(1, max_length // 32),), (max(1, max_length // 8),), (max(1, max_length // 64),) * 4]


def _whole_run(model: PreTrainedModel, identity: Identity, work: Work) -> Callable[[], tuple[float]]:
    engine = Engine(model, identity.block_size, identity.granularity, identity.checkpointing)
    unit, examples = work

    def run() -> tuple[float]:
        return (engine.run([unit], examples, max(unit.targets, 1)).busy_ms,)

    return run


def _work(identity: Identity, lengths: tuple[int, ...], budget: int) -> Work:
    rng = np.random.default_rng(lengths)
    examples = [random_example(length, identity.vocabulary, rng) for length in lengths]
    return micro_batch(examples, (max(budget, 1),) * identity.layers), examples


def random_example(length: int, vocabulary: int, rng: np.random.Generator) -> Example:
    """Random tokens; the last tenth are targets, at most 1024, as in long-document instructions."""
    ids = rng.integers(0, vocabulary, length).astype(np.int32)
    targets = np.full(length, IGNORE, dtype=np.int32)
    wanted = min(length // 10, 1024)
    if wanted:
        targets[-wanted - 1 : -1] = ids[-wanted:]
    return Example(ids, targets)


def micro_batch(examples: Sequence[Example], budgets: tuple[int, ...]) -> MicroBatch:
    """All examples packed, whole; its latency is not predicted yet."""
    segments = tuple(
        Segment(i, 0, len(example.input_ids), len(example.input_ids), example.target_count)
        for i, example in enumerate(examples)
    )
    return MicroBatch(segments, budgets, Latency(0.0, 0.0))


def host_kind() -> str:
    """The processor's model name, as far as the system tells."""
    for line in _cpu_info():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _cpu_info() -> Iterator[str]:
    try:
        with open("/proc/cpuinfo") as file:
            yield from file
    except OSError:
        return


def _provenance(rounds: int, seconds: float) -> dict[str, object]:
    return {
        "host": host_kind(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "rounds": rounds,
        "seconds": round(seconds, 1),
        "processes": 1,
    }
