"""Run by forked.py: gradients over two ranks against one process, plans against each other; JSON on rank 0."""

from __future__ import annotations

import json
import sys

from sparsebalance.planning.baselines import BASELINES
from sparsebalance.planning.plan import Latency, MicroBatch, Topology
from sparsebalance.planning.policy import OURS, named_policy, plan_step
from sparsebalance.training.config import ParallelConfig
from sparsebalance.training.engine import Engine
from sparsebalance.training.gradients import FlatGradients
from sparsebalance.training.parallel import start, stop
from tests.models import example, samples, tiny_model, unit
from tests.unit.test_latency import make_table

CHUNKED = [("sab", 16, None), ("sab", 16, 1), ("sab", 32, 2), ("dense_chunks", 16, 1)]
EMPTY = MicroBatch((), (3, 3), Latency(0.0, 0.0))


def main() -> None:
    ranks = start(ParallelConfig(dp=2, timeout_s=60))
    model = tiny_model()
    flat = FlatGradients(dict(model.named_parameters()), ranks)
    engine = Engine.whole(model, 4, "token")
    found: dict[str, object] = {}

    def difference(examples: list, placement: list[list[MicroBatch]]) -> list[float]:  # type: ignore[type-arg]
        """Relative differences of loss and gradient from one process with everything."""
        targets = sum(e.target_count for e in examples)
        flat.begin()
        mine = engine.run(placement[ranks.rank], examples, targets)
        ranks.all_reduce(flat.buffer)
        loss, summed = sum(ranks.gather(mine.loss)), flat.buffer.clone()
        flat.begin()
        alone = engine.run([unit(examples, i) for i in range(len(examples))], examples, targets)
        worst = float((summed - flat.buffer).abs().max() / flat.buffer.abs().max())
        return [abs(loss - alone.loss) / alone.loss, worst]

    one_and_nine = [example(25, 1), example(40, 9)]
    found["targets 1 and 9"] = difference(one_and_nine, [[unit(one_and_nine, 0)], [unit(one_and_nine, 1)]])
    some_without = [example(25, 7), example(12, 0), example(5, 0)]
    found["a rank without targets"] = difference(some_without, [[unit(some_without, 0)], [unit(some_without, 1, 2)]])
    found["an empty rank"] = difference(one_and_nine, [[unit(one_and_nine, 0, 1)], [EMPTY]])

    many = [example(n, n // 3, seed) for seed, n in enumerate((90, 3, 41, 8, 8, 60, 17, 1, 30))]
    for name in (*BASELINES, "sab"):
        policy = named_policy(name, budget=3, token_cap=200)
        plan = plan_step(samples(many), make_table(), Topology(dp=2), policy)
        found[name] = difference(many, [list(rank) for rank in plan.ranks])
    for name, unit_size, keep in CHUNKED:
        policy = named_policy(name, budget=3, token_cap=200, unit_size=unit_size, keep_chunks=keep)
        plan = plan_step(samples(many), make_table(), Topology(dp=2), policy)
        units = plan.micro_batches
        found[f"{name} in {unit_size}, {keep} kept"] = difference(many, [list(rank) for rank in plan.ranks])
        found[f"{name} in {unit_size}, {keep} kept: plan"] = [
            sum(not segment.is_whole for unit in units for segment in unit.segments),
            sum(unit.recompute for unit in units),
            sum(len(unit.segments) > 1 for unit in units),
        ]
    digests = [
        plan_step(samples(many), make_table(), Topology(dp=2), named_policy(name, budget=3, token_cap=200)).digest()
        for name in (*BASELINES, *OURS)
    ]
    found["same plans"] = len({tuple(d) for d in ranks.gather(digests)}) == 1
    if ranks.is_first:
        print(json.dumps(found), file=sys.stdout, flush=True)
    stop()
