"""A plan as pipelines: stage costs add up to the unit, schedules follow the policy, bounds hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebalance.planning.errors import InputError
from sparsebalance.planning.latency import RooflineModel
from sparsebalance.planning.memory import MemoryModel
from sparsebalance.planning.pipeline import PipelineModel, ScheduleName, simulate_plan, split_layers, stage_costs
from sparsebalance.planning.plan import Topology, chain_lengths
from sparsebalance.planning.policy import named_policy, plan_and_timeline, plan_step
from sparsebalance.planning.simulator import Network
from tests.conftest import samples_of

LENGTHS = (4000, 300, 900, 40, 2100, 700, 130, 60)


def test_layers_are_shared_out_with_embedding_first_and_head_last() -> None:
    stages = split_layers(7, 3)
    assert [stage.layers for stage in stages] == [3, 2, 2]
    assert [stage.embedding for stage in stages] == [True, False, False]
    assert [stage.head for stage in stages] == [False, False, True]
    with pytest.raises(InputError, match="8 pipeline stages for 7 layers"):
        split_layers(7, 8)


@pytest.mark.parametrize("policy", ["random", "sab", "dst"])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_unit_costs_on_all_stages_what_it_costs_in_all(policy: str, stages: int, roofline: RooflineModel) -> None:
    plan = plan_step(samples_of(*LENGTHS), roofline, Topology(dp=2), named_policy(policy, budget=4, token_cap=4096))
    units = plan.ranks[0]
    chains = chain_lengths([unit.segments for unit in units])
    costs = stage_costs(units, chains, roofline, 1.0, split_layers(3, stages))
    assert costs.forward_ms.sum(0) == pytest.approx([unit.latency.forward_ms for unit in units])
    both = costs.input_ms + costs.weight_ms
    assert both.sum(0) == pytest.approx([unit.latency.backward_ms for unit in units])


def test_the_head_makes_the_last_stage_slower_and_budgets_count_where_their_layers_are(roofline: RooflineModel) -> None:
    plan = plan_step(samples_of(2000), roofline, Topology(), named_policy("random", budget=4, token_cap=4096))
    unit = plan.ranks[0][0]
    even = stage_costs([unit], (1,), roofline, 1.0, split_layers(3, 3)).forward_ms[:, 0]
    assert even[0] == pytest.approx(even[1])
    assert even[2] > even[1]
    uneven = replace(unit, budgets=(16, 1, 1))
    first, second, _ = stage_costs([uneven], (1,), roofline, 1.0, split_layers(3, 3)).forward_ms[:, 0]
    assert first > 1.2 * second


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=12), dp=st.integers(1, 3), pp=st.integers(1, 3))
def test_every_schedule_ends_between_its_bounds(
    schedule: ScheduleName, roofline: RooflineModel, lengths: list[int], dp: int, pp: int
) -> None:
    model = replace(roofline, decoder=replace(roofline.decoder, layers=6))
    topology = Topology(dp=dp, pp=pp)
    policy = named_policy("sab", budget=4, token_cap=4096, unit_size=None if schedule == "interleaved" else 512)
    plan, timeline = plan_and_timeline(samples_of(*lengths), model, topology, policy, None, PipelineModel(schedule))
    plan.validate(samples_of(*lengths), 4096)
    for units, rank_ms in zip(plan.ranks, timeline.rank_ms.tolist()):
        work = sum(unit.latency.total_ms for unit in units)
        assert work / pp <= rank_ms * (1 + 1e-9)
        assert rank_ms <= work * (1 + 1e-9)
        # A unit goes through all stages and back; split weight gradients need not wait for one another.
        if schedule != "zero_bubble":
            assert max(unit.latency.total_ms for unit in units) <= rank_ms * (1 + 1e-9)
        assert max(unit.latency.forward_ms for unit in units) <= rank_ms * (1 + 1e-9)
    assert plan.predicted_step_ms == timeline.step_ms == timeline.rank_ms.max()


def test_chunks_shorten_the_pipeline_of_a_long_sample(roofline: RooflineModel) -> None:
    model = replace(roofline, decoder=replace(roofline.decoder, layers=4, vocabulary=10))
    step, topology = samples_of(4000, 100, 200), Topology(pp=4)
    whole, cut = (
        plan_step(step, model, topology, named_policy("sab", budget=2, token_cap=4096, unit_size=size))
        for size in (None, 256)
    )
    assert cut.predicted_step_ms < 0.6 * whole.predicted_step_ms
    with pytest.raises(InputError, match="choose 1f1b or zero_bubble"):
        plan_and_timeline(
            step, model, Topology(pp=2), named_policy("sab", budget=2, token_cap=4096, unit_size=256), None,
            PipelineModel("interleaved"),
        )  # fmt: skip
    with pytest.raises(InputError, match="schedule is 'best'"):
        PipelineModel("best")  # type: ignore[arg-type]


def test_memory_and_transfers_reach_the_timeline(roofline: RooflineModel) -> None:
    memory = MemoryModel(roofline.decoder, 16, "token", 4, "float32")
    plan = plan_step(
        samples_of(*LENGTHS), roofline, Topology(dp=2), named_policy("sab", budget=4, token_cap=4096, unit_size=512)
    )
    topology = Topology(dp=2, pp=3)
    free = simulate_plan(plan.ranks, roofline, topology, PipelineModel(memory=memory))
    dear = simulate_plan(
        plan.ranks, roofline, topology, PipelineModel(memory=memory, network=Network(ms_per_mb=5.0, all_reduce_ms=7.0))
    )
    assert dear.step_ms > free.step_ms + 7
    longest = max(unit.tokens for unit in plan.micro_batches)
    assert (free.peak_memory_mb >= memory.activations_mb(longest, 1) * (1 - 1e-9)).any()
    assert np.all(free.peak_memory_mb > 0)
    # A sample in chunks keeps keys and values of all of them.
    state = memory.state_mb(4000, 1)
    assert free.peak_memory_mb.max() > state
