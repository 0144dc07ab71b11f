"""Which topologies a model can be spread over, and how its layers are cut for them."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import Qwen2Config

from sparsebalance.planning.errors import InputError
from sparsebalance.planning.latency import RooflineModel
from sparsebalance.planning.pipeline import PipelineModel, layers_by_time, rank_pipelines, simulate_plan
from sparsebalance.planning.plan import Latency, MicroBatch, Sample, Segment, Topology
from sparsebalance.planning.policy import named_policy, plan_step
from sparsebalance.planning.simulator import simulate
from sparsebalance.training.config import ParallelConfig
from sparsebalance.training.parallel import Ranks
from sparsebalance.training.topology import check_topology
from tests.unit.test_latency import make_table

DECODER = Qwen2Config(
    hidden_size=28 * 4, intermediate_size=64, num_hidden_layers=6, num_attention_heads=28, num_key_value_heads=4
)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (
            ParallelConfig(sp=8),
            "28 attention heads .* 8 sequence parallel ranks; choose a degree out of 1, 2, 4, 7, 14",
        ),
        (ParallelConfig(tp=3), "28 query heads and 4 key/value heads cannot be split over tp 3; .* 1 or 2 or 4"),
        (ParallelConfig(tp=2, sp=4), "14 attention heads .* 4 sequence parallel ranks"),
        (ParallelConfig(pp=7), "7 pipeline stages for 6 layers"),
        (ParallelConfig(pp=4, schedule="interleaved"), "8 pipeline stages for 6 layers"),
    ],
)
def test_a_topology_that_does_not_fit_names_what_does(parallel: ParallelConfig, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_topology(parallel, DECODER)


@pytest.mark.parametrize("parallel", [ParallelConfig(sp=7), ParallelConfig(tp=4, sp=7), ParallelConfig(pp=6, tp=2)])
def test_a_topology_that_fits_passes(parallel: ParallelConfig) -> None:
    check_topology(parallel, DECODER)


def test_processes_are_numbered_inside_out() -> None:
    topology = Topology(dp=2, pp=3, tp=2, sp=2)
    places = [Ranks(rank, 24, topology) for rank in range(24)]
    assert [p.replica for p in places] == [rank // 12 for rank in range(24)]
    assert [p.stage_worker for p in places] == [rank // 4 % 3 for rank in range(24)]
    gathered = places[0].by_replica(list(range(24)))
    assert gathered[1][2] == [20, 21, 22, 23]
    assert places[0].slowest([float(rank) for rank in range(24)]) == [11.0, 23.0]


def whole(length: int, targets: int, layers: int) -> MicroBatch:
    return MicroBatch((Segment(0, 0, length, length, targets),), (3,) * layers, Latency(0, 0))


def test_the_head_counts_when_layers_are_cut(roofline: RooflineModel) -> None:
    layers = roofline.layers
    assert layers_by_time([whole(4096, 0, layers)], roofline, 1) == (layers,)
    few, many = (layers_by_time([whole(4096, targets, layers)], roofline, 3) for targets in (1, 4095))
    assert sum(few) == sum(many) == layers
    assert few == tuple(sorted(few, reverse=True))
    assert many[-1] <= few[-1]


def test_no_other_cut_makes_the_slowest_stage_faster() -> None:
    from dataclasses import replace

    from sparsebalance.planning.decoder import named_decoder
    from sparsebalance.planning.hardware import named_device

    decoder = replace(named_decoder("qwen2.5-0.5b"), layers=8)
    model = RooflineModel(decoder, named_device("h200"), 64)
    unit = whole(8192, 8191, 8)
    terms = model.terms(unit.segments, unit.budgets).total_ms()
    head_ms = terms["head"]
    layer_ms = (sum(terms.values()) - head_ms) / 8
    assert head_ms > layer_ms  # a large vocabulary beside small layers

    def slowest(cut: tuple[int, ...]) -> float:
        return max(layer_ms * n + head_ms * (place == len(cut) - 1) for place, n in enumerate(cut))

    found = layers_by_time([unit], model, 3)
    every = [(a, b, 8 - a - b) for a in range(1, 7) for b in range(1, 8 - a)]
    assert slowest(found) == pytest.approx(min(map(slowest, every)))


def test_stages_of_another_model_are_refused(roofline: RooflineModel) -> None:
    with pytest.raises(InputError, match="do not fit a model of"):
        PipelineModel(layers=(1, 1)).split(5, Topology(pp=2))
    with pytest.raises(InputError, match="do not fit a model of"):
        PipelineModel(layers=(2, 3)).split(5, Topology(pp=4))
    assert [s.layers for s in PipelineModel(layers=(2, 3)).split(5, Topology(pp=2))] == [2, 3]


def test_auto_takes_the_faster_schedule_for_every_rank() -> None:
    table, topology = make_table(), Topology(dp=2, pp=2)
    samples = [Sample(i, n, n // 2) for i, n in enumerate((400, 30, 200, 90, 60, 350, 20, 110))]
    plan = plan_step(samples, table, topology, named_policy("sab", budget=3, token_cap=500, unit_size=64))
    auto = rank_pipelines(plan.ranks, table, topology, PipelineModel("auto"))
    for rank, chosen in enumerate(auto):
        ms = [
            float(simulate([rank_pipelines(plan.ranks, table, topology, PipelineModel(name))[rank]]).rank_ms[0])
            for name in ("1f1b", "zero_bubble")
        ]
        assert float(simulate([chosen]).rank_ms[0]) == min(ms)
    step_ms = simulate_plan(plan.ranks, table, topology, PipelineModel("auto")).step_ms
    assert step_ms <= min(
        simulate_plan(plan.ranks, table, topology, PipelineModel(name)).step_ms for name in ("1f1b", "zero_bubble")
    )
    assert np.isfinite(step_ms)
