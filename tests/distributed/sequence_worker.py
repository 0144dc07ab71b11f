"""Run by forked.py in four processes: sequence parallel ranks against one process with everything; JSON on rank 0.

At degree 4 all ranks are one group; at degree 2 they are two
groups, which share the units out as data-parallel ranks do.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from sparsebalance.attention.interface import PackedLayout
from sparsebalance.attention.moba import MoBARouter
from sparsebalance.attention.online import OnlineBudgets
from sparsebalance.attention.state import SampleState
from sparsebalance.attention.ulysses import HeadExchange
from sparsebalance.planning.batching import cut
from sparsebalance.planning.calibration import UNCALIBRATED
from sparsebalance.planning.coverage import BUDGET_GRID
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.plan import Latency, MicroBatch, OnlineTuning
from sparsebalance.planning.work import Granularity
from sparsebalance.training.config import AttentionConfig, ModelConfig
from sparsebalance.training.data import Example
from sparsebalance.training.loss import linear_cross_entropy
from sparsebalance.training.model import build_model
from sparsebalance.training.packing import pack
from sparsebalance.training.sequence_parallel import shard
from sparsebalance.training.sparse_attention import SparseContext
from tests.models import VOCABULARY, example, samples, unit

WORLD = 4
DEGREES = (2, 4)
BLOCK = 4
T = TypeVar("T")
Chains = Sequence[Sequence[MicroBatch]]


@dataclass(frozen=True)
class Case:
    """Samples of `lengths`, of which the last `targets` tokens are targets (all that can be by default).

    Attributes:
        chunk: tokens per chunk of samples that are longer; the first chunk but one is recomputed.
        filler: the token that stands in the padding.
    """

    lengths: tuple[int, ...]
    targets: int = 999
    heads: int = 4
    kv_heads: int = 2
    granularity: Granularity = "token"
    checkpointing: bool = False
    chunk: int = 999
    filler: int = 0

    @property
    def examples(self) -> list[Example]:
        return [example(n, min(n - 1, self.targets), seed) for seed, n in enumerate(self.lengths)]

    def chains(self) -> list[list[MicroBatch]]:
        """The chunks of long samples, and one packed unit of the others."""
        examples = self.examples
        cuts = [cut(sample, self.chunk, BLOCK) for sample in samples(examples)]
        found = [
            [
                MicroBatch((part,), (3, 3), Latency(0.0, 0.0), recompute=place < len(parts) - 2)
                for place, part in enumerate(parts)
            ]
            for parts in cuts
            if len(parts) > 1
        ]
        short = [i for i, parts in enumerate(cuts) if len(parts) == 1]
        return [*found, *([[unit(examples, *short)]] if short else [])]


CASES = {
    "packed": Case((7, 1, 3)),
    "packed, checkpointed": Case((7, 1, 3), checkpointing=True),
    "packed, longer": Case((30, 1, 17, 45, 2), granularity="block"),
    "whatever stands in the padding": Case((7, 1, 3), filler=VOCABULARY - 1),
    "one token": Case((1,)),
    "fewer tokens than ranks": Case((3,)),
    "targets on the last shard alone": Case((64,), targets=5),
    "chunks": Case((70, 9, 41, 6), chunk=16),
    "chunks, checkpointed": Case((70, 9, 41, 6), chunk=16, granularity="block", checkpointing=True),
    "chunks, most without targets": Case((70,), targets=3, chunk=16),
    "one key/value head": Case((30, 7), kv_heads=1),
    "one key/value head, chunks": Case((50,), kv_heads=1, chunk=16, checkpointing=True),
    "a key/value head for each": Case((30, 7), kv_heads=4, granularity="block"),
    "groups across ranks": Case((30, 7, 50), heads=12, kv_heads=4, chunk=32),
}
TUNINGS = {
    "share": OnlineTuning(3, 0.1, 1, 12, 0.03, tuple(float(k) for k in BUDGET_GRID)),
    "clamp": OnlineTuning(3, 0.2, 1, 12),
}
WISHES = (9, 8)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    exchanges = {2: HeadExchange(pairs[rank // 2]), 4: HeadExchange(dist.group.WORLD)}  # type: ignore[arg-type]
    found: dict[str, object] = {}
    for name, case in CASES.items():
        expected = None
        if rank == 0:
            model = build(case)
            whole = [[unit(case.examples, i)] for i in range(len(case.lengths))]
            expected = run(model, whole, case)[0], gradients(model)
        for degree, exchange in exchanges.items():
            model = build(case)
            mine = case.chains()[rank // degree :: WORLD // degree]
            summed = torch.tensor(run(model, mine, case, exchange)[0], dtype=torch.float64)
            grads = gradients(model)
            for tensor in (summed, *grads.values()):
                dist.all_reduce(tensor)
            if expected is not None:
                found[f"{name} at {degree}"] = differences(expected, (float(summed), grads))
    for degree, exchange in exchanges.items():
        for kind, tuning in TUNINGS.items():
            found[f"{kind} at {degree}"] = tuned_online(tuning, exchange)
        found[f"nan at {degree}"] = not_finite(exchange)
        found[f"unsharded at {degree}"] = refused(lambda exchange=exchange: whole_row(exchange))
        found[f"bfloat16 at {degree}"] = low_precision(exchange)
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def build(case: Case, dtype: str = "float64") -> PreTrainedModel:
    model = build_model(
        ModelConfig(
            layers=2, hidden=8 * case.heads, intermediate=48, heads=case.heads, kv_heads=case.kv_heads, dtype=dtype,  # type: ignore[arg-type]
            checkpointing=case.checkpointing,
        ),
        AttentionConfig(block_size=BLOCK, budget=3, granularity=case.granularity),
        VOCABULARY,
        512,
        seed=3,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)  # see tests.models.tiny_model
            else:  # biases are 0 at first, and would hide a gradient that is put to the wrong head
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def run(
    model: PreTrainedModel,
    chains: Chains,
    case: Case,
    exchange: HeadExchange | None = None,
    online: OnlineTuning | None = None,
    probe_rows: int = 0,
) -> tuple[float, list[SparseContext]]:
    """Forward and backward as the engine does it; adds to the gradients. The loss is this rank's part of the mean."""
    denominator = max(1, sum(one.target_count for one in case.examples))
    total, contexts = 0.0, []
    for chain in chains:
        state = SampleState(chain[0].segments[0].sample_length, BLOCK) if len(chain) > 1 else None
        passes: list[tuple[Callable[[], torch.Tensor], torch.Tensor | None]] = []
        for one in chain:
            row = pack(one, case.examples)
            context = SparseContext(
                PackedLayout(row.lengths_q, row.lengths_k, BLOCK),
                one.budgets,
                MoBARouter(case.granularity),
                keep_selections=case.checkpointing or one.recompute,
                probe_rows=probe_rows,
                state=state,
                online=online,
                sequence=exchange,
            )
            if exchange is not None:
                tokens = row.input_ids.shape[1]
                row = shard(row, exchange.rank, exchange.degree)
                n = row.input_ids.shape[1]
                row.input_ids[:, max(0, tokens - exchange.rank * n) :] = case.filler
            contexts.append(context)

            def loss(row=row, context=context) -> torch.Tensor:  # type: ignore[no-untyped-def]
                hidden = model.base_model(
                    input_ids=row.input_ids, position_ids=row.position_ids, use_cache=False, sparse=context
                ).last_hidden_state[0]
                if not row.targets.numel():
                    return hidden[row.target_index].sum() / denominator
                weight = model.get_output_embeddings().weight
                return linear_cross_entropy(hidden[row.target_index], weight, row.targets) / denominator

            if one.recompute:
                with torch.no_grad():
                    loss()
            passes.append((loss, None if one.recompute else loss()))
        for again, graph in reversed(passes):
            graph = again() if graph is None else graph
            graph.backward()
            total += float(graph.detach())
    return total, contexts


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Zeros where there is none, as on a rank without a unit."""
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def differences(
    a: tuple[float, dict[str, torch.Tensor]], b: tuple[float, dict[str, torch.Tensor]]
) -> tuple[float, float, float]:
    """Of the loss, relative; of gradients, the largest one relative to the largest of all, and, of those parameters
    that have any, relative to the largest of the same parameter."""
    loss = abs(a[0] - b[0]) / max(abs(a[0]), 1e-9)
    sizes = {n: float(x.abs().max()) for n, x in a[1].items()}
    wrong = {n: float((x - b[1][n]).abs().max()) for n, x in a[1].items()}
    of_own = max((wrong[n] / sizes[n] for n in wrong if sizes[n] > 1e-9), default=0.0)
    return loss, max(wrong.values()) / max(*sizes.values(), 1e-9), of_own


def tuned_online(tuning: OnlineTuning, exchange: HeadExchange) -> dict[str, object]:
    """Against one process: budgets, estimates, probes and gradients; and whether the group's ranks agree on them."""
    case = Case((64, 9, 40), checkpointing=True)
    chains = [[replace(one, budgets=WISHES) for one in chain] for chain in case.chains()]
    model = build(case)
    with torch.no_grad():  # heads of one rank that like all blocks the same, and of another that like few
        for layer in model.base_model.layers:
            layer.self_attn.q_proj.weight[:16] *= 0.05
            layer.self_attn.q_proj.weight[16:] *= 3
    _, (alone,) = run(model, chains, case, online=tuning, probe_rows=4)
    expected = gradients(model)
    model.zero_grad()
    _, (mine,) = run(model, chains, case, exchange, tuning, probe_rows=4)
    grads = gradients(model)
    for grad in grads.values():
        dist.all_reduce(grad, group=exchange.group)
    used, wanted = ([int(one.used[i]) for i in range(2)] for one in (mine, alone))  # type: ignore[arg-type]
    curves, whole = (
        torch.tensor([[(p.estimated, p.router, p.oracle) for p in one.probes[i]] for i in range(2)])
        for one in (mine, alone)
    )
    estimates = [float((mine.estimated[i].mean(0) - alone.estimated[i].mean(0)).abs().max()) for i in range(2)]
    own = [used, [mine.estimated[i].tolist() for i in range(2)], curves.tolist()]
    return {
        "used": used,
        "alone": wanted,
        "agreed": all(other == own for other in gathered(own, exchange)),
        # What a rank would choose by its own heads' estimates.
        "by own heads": gathered(by_own_heads(tuning, mine, exchange), exchange),
        "estimates": max(estimates),
        "probes": float((curves - whole).abs().max()),
        "gradients": differences((1.0, expected), (1.0, grads))[1],
    }


def by_own_heads(tuning: OnlineTuning, context: SparseContext, exchange: HeadExchange) -> list[int]:
    tuner = OnlineBudgets(tuning, max(context.layout.key_blocks), UNCALIBRATED, torch.device("cpu"))
    own = [context.estimated[i].chunk(exchange.degree)[exchange.rank] for i in range(2)]
    return [int(tuner.choose(i, WISHES[i], own[i])) for i in range(2)]


def not_finite(exchange: HeadExchange) -> list[str]:
    """What each rank of the group says about a NaN in a token that one of them holds."""
    case = Case((7, 1, 3))
    model = build(case)
    with torch.no_grad():
        model.get_input_embeddings().weight[int(case.examples[0].input_ids[0])] = math.nan
    return gathered(refused(lambda: run(model, case.chains(), case, exchange)), exchange)


def whole_row(exchange: HeadExchange) -> None:
    q = torch.ones(11, 4, 8)
    context = SparseContext(PackedLayout.from_lengths((11,), BLOCK), [3], MoBARouter(), sequence=exchange)
    context.attend(0, q, q, q, None)


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except InputError as error:
        return str(error)
    return "nothing was refused"


def gathered(value: T, exchange: HeadExchange) -> list[T]:
    found = [value] * exchange.degree
    dist.all_gather_object(found, value, group=exchange.group)
    return found


def low_precision(exchange: HeadExchange) -> float:
    """Relative difference of a bfloat16 loss from the same in fp64."""
    case = Case((30, 7))
    losses = []
    for dtype in ("float64", "bfloat16"):
        loss = torch.tensor(run(build(case, dtype), case.chains(), case, exchange)[0], dtype=torch.float64)
        dist.all_reduce(loss, group=exchange.group)
        losses.append(float(loss))
    return abs(losses[1] / losses[0] - 1)
