"""Run by forked.py: models spread over real processes against one process; JSON on rank 0.

The arguments are topologies as DPxPPxTPxSP or DPxPPxTPxSP/SHARD, each of as many processes as there are; of fewer
than 8, pipelines of two stages are looked at most.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sparsebalance.planning.plan import Latency, MicroBatch, Segment, Topology, chain_lengths
from sparsebalance.planning.schedule import Schedule, gpipe, interleaved, one_forward_one_backward
from sparsebalance.training import gradients
from sparsebalance.training.config import ParallelConfig
from sparsebalance.training.data import Example
from sparsebalance.training.engine import Engine
from sparsebalance.training.gradients import FlatGradients
from sparsebalance.training.parallel import Ranks, joined_ranks, start, stop
from sparsebalance.training.topology import own_part
from tests.models import example, samples
from tests.unit.test_stage import EXAMPLES as USUAL
from tests.unit.test_stage import LAYERS, model_of, split_schedule, units_of, with_adapters

EMPTY = MicroBatch((), (3,) * LAYERS, Latency(0, 0))
FIXED = {"gpipe": gpipe, "1f1b": one_forward_one_backward, "zero_bubble": split_schedule}
LARGE = [example(160, 40, seed) for seed in range(2)]
TINY = [example(n, n % 2, n) for n in (7, 1, 3, 4, 5, 6, 8, 9)]
ONE = [example(90, 30)]


def whole_units(examples: Sequence[Example]) -> list[MicroBatch]:
    return [MicroBatch((Segment.whole(s),), (3,) * LAYERS, Latency(0, 0)) for s in samples(examples)]


def packed_unit(examples: Sequence[Example]) -> list[MicroBatch]:
    return [MicroBatch(tuple(Segment.whole(s) for s in samples(examples)), (3,) * LAYERS, Latency(0, 0))]


@cache
def reference(base: Ranks, which: str, adapters: bool) -> tuple[float, float, dict[str, Tensor]]:
    """Loss, gradient norm and gradients of one process, the first, that runs one sample after the other."""
    return base.from_first(alone(which, adapters) if base.is_first else None)  # type: ignore[return-value]


def alone(which: str, adapters: bool) -> tuple[float, float, dict[str, Tensor]]:
    examples = {"usual": USUAL, "large": LARGE, "tiny": TINY, "one": ONE}[which]
    model = with_adapters(model_of()) if adapters else model_of()
    engine = Engine.whole(model, 4, "token")
    flat = FlatGradients(engine.named_parameters, Ranks(0, 1))
    loss = engine.run(whole_units(examples), examples, sum(one.target_count for one in examples)).loss
    named = engine.named_parameters.items()
    return loss, flat.norm(), {name: p.grad.clone() for name, p in named if p.grad is not None}


class Spread:
    """This process's part of a model."""

    def __init__(self, ranks: Ranks, virtual: int = 1, checkpointing: bool = False, adapters: bool = False) -> None:
        self.ranks, self.adapters = ranks, adapters
        stages = ranks.topology.pp * virtual
        even = [LAYERS // stages + (place < LAYERS % stages) for place in range(stages)]
        model = model_of(checkpointing=checkpointing)
        whole = Engine.whole(with_adapters(model) if adapters else model, 4, "token", checkpointing)
        self.engine, self.gradients = own_part(whole, ranks, even)

    def difference(self, which: str, placement: Sequence[Sequence[MicroBatch]], name: str = "1f1b") -> float:
        """Largest relative difference of loss, gradient norm and gradients from one process with everything."""
        examples = {"usual": USUAL, "large": LARGE, "tiny": TINY, "one": ONE}[which]
        ranks, engine = self.ranks, self.engine
        wanted, norm, gradients = reference(Ranks(ranks.rank, ranks.world), which, self.adapters)
        self.gradients.begin()
        own = placement[ranks.replica]
        result = engine.run(
            own,
            examples,
            sum(one.target_count for one in examples),
            0,
            schedule_of(name, own, ranks.topology.pp),
            self.gradients,
        )
        self.gradients.reduce()
        replicas = ranks.by_replica(ranks.gather(result.loss))
        loss = sum(sum(stage[:: ranks.topology.tp]) for replica in replicas for stage in replica)
        scale = max(float(gradient.abs().max()) for gradient in gradients.values())
        worst = 0.0
        for key, parameter in engine.named_parameters.items():
            found = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            if engine.tensor is not None and engine.tensor.splits[key].trainable:
                found = engine.tensor.whole(key, torch.zeros_like(parameter) if found is None else found)
            if found is not None:
                other = gradients["model.embed_tokens.weight" if key == "lm_head.weight" else key]
                worst = max(worst, float((found - other).abs().max()) / scale)
        off = max(abs(loss - wanted) / wanted, worst, abs(self.gradients.norm() - norm) / norm)
        return max(ranks.gather(off))


def schedule_of(name: str, units: Sequence[MicroBatch], workers: int) -> Schedule:
    chains = chain_lengths([unit.segments for unit in units])
    if name == "interleaved":
        return interleaved(len(units), workers, LAYERS // workers)
    return FIXED[name](chains, workers)


def placed(units: Sequence[MicroBatch], replicas: int) -> list[list[MicroBatch]]:
    """Chains dealt out to pipelines; one without any gets an empty unit."""
    ranks: list[list[MicroBatch]] = [[] for _ in range(replicas)]
    first = 0
    for place, length in enumerate(chain_lengths([unit.segments for unit in units])):
        ranks[place % replicas] += units[first : first + length]
        first += length
    return [rank or [EMPTY] for rank in ranks]


def differences(ranks: Ranks, thorough: bool) -> dict[str, float]:
    """Of every schedule where `thorough`, else of what differs most from one process."""
    topology, found = ranks.topology, {}
    chunks, recomputed, packs = units_of(16), units_of(16, keep_chunks=1), units_of(512)
    schedules = tuple(FIXED) if topology.pp > 1 else ("1f1b",)

    def placing(units: Sequence[MicroBatch]) -> list[list[MicroBatch]]:
        return placed(units, topology.dp)

    plain, last = Spread(ranks), schedules[-1]
    for name in schedules if thorough else schedules[-1:]:
        found[f"{name}: packs"] = plain.difference("usual", placing(packs), name)
        found[f"{name}: chunks"] = plain.difference("usual", placing(recomputed), name)
        found[f"{name}: one unit"] = plain.difference("one", placing(whole_units(ONE)), name)
    if thorough and topology.pp == 2:
        found["interleaved"] = Spread(ranks, virtual=2).difference("usual", placing(packs), "interleaved")
    found["checkpointing"] = Spread(ranks, checkpointing=True).difference("usual", placing(chunks), last)
    found["adapters"] = Spread(ranks, adapters=True).difference("usual", placing(chunks), last)
    # Large units, then tiny ones, with coverage measured in between: buffers follow the plan.
    found["large"] = plain.difference("large", placing(whole_units(LARGE)))
    plain.gradients.begin()
    probes = ranks.gather(plain.engine.probe(placing(chunks)[ranks.replica], USUAL, 4))
    assert len({key for part in probes for key in part}) == LAYERS * len(USUAL)
    found["tiny"] = plain.difference("tiny", placing(whole_units(TINY)), last)
    found["tiny, packed"] = plain.difference("tiny", placing(packed_unit(TINY)), last)
    return found


def main() -> None:
    world = int(os.environ["WORLD_SIZE"])
    gradients.BUCKET_BYTES = 8 * 5000  # several buckets a stage, some of several parameters
    base = start(ParallelConfig(dp=world, timeout_s=60))
    found: dict[str, dict[str, float]] = {}
    for spoken in sys.argv[1:]:
        degrees, _, shard = spoken.partition("/")
        ranks = joined_ranks(base.rank, Topology(*map(int, degrees.split("x"))), 60, int(shard or 1))
        found[spoken] = differences(ranks, thorough=ranks.topology.pp == 2 and base.world < 8)
    if base.is_first:
        print(json.dumps(found), file=sys.stdout, flush=True)
    stop()
