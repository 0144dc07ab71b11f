"""Global batches over epochs, what was seen of the data, and the planned sampler with its saved position."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from sparsebalance.planning.composition import (
    ByTargetTokens,
    Composition,
    GroupByLength,
    InOrder,
    Tail,
    Window,
    compose,
)
from sparsebalance.planning.coverage import CoverageCurves
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.plan import Sample, Segment, StepPlan, Topology
from sparsebalance.planning.policy import named_policy, plan_step
from sparsebalance.training.sampler import GlobalBatches, PlanAhead, PlannedSampler, Seen
from sparsebalance.training.segment_view import SegmentView
from tests.conftest import samples_of
from tests.unit.test_latency import make_table

Plan = Callable[[int, list[Sample]], StepPlan]

lengths = st.lists(st.one_of(st.integers(1, 40), st.sampled_from([900, 5000])), min_size=1, max_size=25)
compositions = st.sampled_from([InOrder(), GroupByLength(2), Window(2, 2), Window(3, 4), ByTargetTokens(60)])
tails = st.sampled_from(["drop", "keep", "fill"])


def made(values: list[int], batch_size: int, tail: Tail, composition: Composition, seed: int = 5) -> GlobalBatches:
    """As asked, or with the tail kept where there is not one batch."""
    samples = tuple(samples_of(*values))
    if tail == "drop" and not composition.is_full(samples, batch_size):
        tail = "keep"
    return GlobalBatches(samples, batch_size, seed, tail, composition, tuple(float(s.length) for s in samples))


def planned_for(dp: int, unit_size: int | None = 64) -> Plan:
    table, policy = make_table(), named_policy("sab", budget=4, token_cap=8192, unit_size=unit_size)

    def plan(step: int, samples: list[Sample]) -> StepPlan:
        return plan_step(samples, table, Topology(dp=dp), policy)

    return plan


def test_an_epoch_uses_every_sample_once_and_the_next_one_in_another_order() -> None:
    batches = GlobalBatches(tuple(samples_of(*range(1, 13))), 4, seed=1)
    epochs = [[s.id for step in range(3 * e, 3 * e + 3) for s in batches.at(step)] for e in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(12))
    assert epochs[0] != epochs[1]
    assert batches.at(4) == GlobalBatches(tuple(samples_of(*range(1, 13))), 4, seed=1).at(4)
    assert batches.at(0) != GlobalBatches(tuple(samples_of(*range(1, 13))), 4, seed=2).at(0)


def test_the_tail_is_kept_dropped_or_filled_as_asked() -> None:
    samples = tuple(samples_of(*range(1, 11)))
    assert GlobalBatches(samples, 4, 0).batches_in(0) == 2
    kept = GlobalBatches(samples, 4, 0, tail="keep")
    assert [len(kept.at(step)) for step in range(4)] == [4, 4, 2, 4]
    filled = GlobalBatches(samples, 4, 0, tail="fill")
    assert [filled.at(step) for step in range(2)] == [kept.at(step) for step in range(2)]
    assert filled.at(2) == [*kept.at(2), *kept.at(0)[:2]]
    assert GlobalBatches(samples[:2], 4, 0, tail="fill").batches_in(3) == 1


@settings(max_examples=120, deadline=None)
@given(lengths, st.integers(1, 6), tails, compositions)
def test_batches_are_those_of_the_whole_order_and_of_a_new_object(
    values: list[int], batch_size: int, tail: Tail, composition: Composition
) -> None:
    """Windows are composed one by one, when their step comes; the whole epoch at once gives the same."""
    batches = made(values, batch_size, tail, composition)
    step = 0
    for epoch in range(3):
        order = np.random.default_rng([batches.seed, epoch]).permutation(len(values))
        samples = [batches.samples[i] for i in order]
        costs = np.array([float(s.length) for s in samples])
        whole = compose(samples, batch_size, composition, costs, batches.tail)
        assert batches.first_step(epoch) == step
        assert batches.batches_in(epoch) == len(whole)
        assert [batches.at(step + i) for i in range(len(whole))] == whole
        assert [batches.locate(step + i) for i in range(len(whole))] == [(epoch, i) for i in range(len(whole))]
        again = made(values, batch_size, tail, composition)
        assert again.at(step + len(whole) - 1) == whole[-1]
        step += len(whole)


@settings(max_examples=120, deadline=None)
@given(lengths, st.integers(1, 6), tails, compositions)
def test_seen_counts_as_brute_force_does(
    values: list[int], batch_size: int, tail: Tail, composition: Composition
) -> None:
    batches = made(values, batch_size, tail, composition)
    last = batches.first_step(3)
    used: list[Sample] = []
    expected = []
    for step in range(last):
        used += batches.at(step)
        unique = {s.id: s.length for s in used}
        epoch, batch = batches.locate(step)
        share = epoch + (batch + 1) / batches.batches_in(epoch)
        tokens, targets = sum(s.length for s in used), sum(s.targets for s in used)
        expected.append(Seen(len(used), len(unique), tokens, sum(unique.values()), targets, share))
    assert [batches.seen(step) for step in range(last)] == expected
    assert made(values, batch_size, tail, composition).seen(last - 1) == expected[-1]  # asked for nothing before
    assert expected[-1].epochs == 3


def test_seen_is_cheap_far_into_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the windows that are asked for are composed."""
    composed: list[int] = []

    class Spy(Window):
        def __call__(self, order: Any, batch_size: int, costs: Any) -> list[list[Sample]]:
            composed.append(len(order))
            return super().__call__(order, batch_size, costs)

    batches = GlobalBatches(tuple(samples_of(*range(1, 1001))), 10, 0, composition=Spy(5, 2))
    assert batches.seen(4 * 100 + 52).samples == 4530
    assert batches.seen(4 * 100 + 53).unique_samples == 1000
    assert batches.at(4 * 100 + 50)
    assert len(composed) <= 4 + 1  # the last window of each epoch before, and this one


def test_wrong_batches_are_refused() -> None:
    three = tuple(samples_of(1, 2, 3))
    for make, message in (
        (lambda: GlobalBatches((), 1, 0), "the data has no samples"),
        (lambda: GlobalBatches(three, 8, 0), "3 samples, fewer than one batch of 8; lower data.batch_size or set"),
        (lambda: GlobalBatches(three, 0, 0), "batch_size is 0"),
        (lambda: GlobalBatches(three, 1, 0, "wrap"), "tail is 'wrap'; choose one of drop, keep, fill"),  # type: ignore[arg-type]
        (lambda: GlobalBatches((three[0], three[0]), 1, 0), "share an id"),
        (lambda: GlobalBatches(three, 1, 0, costs=(1.0,)), "1 costs for 3 samples"),
        (
            lambda: GlobalBatches(three, 1, 0, composition=ByTargetTokens(9)),
            r"3 target tokens, too few for one batch of ByTargetTokens\(target_tokens=9\)",
        ),
    ):
        with pytest.raises(InputError, match=message):
            make()


def test_plans_are_made_in_the_background_and_errors_arrive() -> None:
    names = []

    def plan(step: int, curves: CoverageCurves) -> StepPlan:
        names.append(threading.current_thread().name)
        if step == 2:
            raise InputError("no plan for step 2")
        return StepPlan(f"step {step}", Topology(), 4, (), 0.0)

    planner = PlanAhead(plan)
    curves = CoverageCurves(4, {})
    planner.prepare(1, curves)
    assert planner.prepared == 1
    made, milliseconds = planner.take(1)
    assert made.policy == "step 1"
    assert milliseconds >= 0
    assert names[0].startswith("plan")
    planner.prepare(2, curves)
    with pytest.raises(InputError, match="no plan for step 2"):
        planner.take(2)
    with pytest.raises(RuntimeError, match="no plan was prepared for step 9"):
        planner.take(9)
    planner.close()


MIXED = [300, 20, 64, 65, 7, 1, 130, 500, 64, 9, 33]  # 11 samples, 4 a batch: the last batch of an epoch has 3


def samplers(
    dp: int, batches: GlobalBatches | None = None, unit_size: int | None = 64, forever: bool = False
) -> list[PlannedSampler]:
    batches = batches or made(MIXED, 4, "keep", Window(2, 4))
    return [PlannedSampler(batches, planned_for(dp, unit_size), rank, forever) for rank in range(dp)]


def tokens_of(units: list[list[Segment]]) -> list[tuple[int, int]]:
    """(sample, token) of all."""
    return sorted((s.sample, token) for unit in units for s in unit for token in range(s.start, s.end))


def close(ranks: list[PlannedSampler]) -> None:
    for sampler in ranks:
        sampler.close()


@pytest.mark.parametrize(
    "values",
    [MIXED, [5], [64] * 9, [9] * 3, [1000, *[3] * 7]],
    ids=["mixed", "one sample", "all equal", "fewer samples than ranks", "one giant"],
)
@pytest.mark.parametrize("unit_size", [None, 64])
def test_the_ranks_of_an_epoch_run_every_token_once_and_none_is_without_units(
    values: list[int], unit_size: int | None
) -> None:
    batches = made(values, 4, "keep", InOrder())
    ranks = samplers(4, batches, unit_size)
    for _ in range(2):  # the second iteration is the second epoch
        assert tokens_of([unit for sampler in ranks for unit in sampler]) == [
            (s.id, token) for s in batches.samples for token in range(s.length)
        ]
    assert {sampler.epoch for sampler in ranks} == {2}
    for sampler in ranks:
        sampler.set_epoch(0)
        for step, units in sampler.steps():
            assert len(units) >= 1
            assert units == sampler.plan_of(step).ranks[sampler.rank]
    close(ranks)


def test_units_say_where_they_stand() -> None:
    ranks = samplers(2, forever=True)
    for sampler in ranks:
        plan = planned_for(2)
        units = list(itertools.islice(sampler.units(), 40))
        assert sampler.step == 0  # looking moves nothing
        expected = [
            (step, index, index == len(rank) - 1)
            for step in range(8)
            for rank in [plan(step, sampler.batches.at(step)).ranks[sampler.rank]]
            for index in range(len(rank))
        ]
        assert [(u.step, u.index, u.is_last) for u in units][: len(expected)] == expected[:40]
        assert all(u.step_targets == sum(s.targets for s in sampler.batches.at(u.step)) for u in units)
        assert units[-1].step >= 3  # forever goes on after the epoch's 3 steps
    close(ranks)


def test_a_run_stopped_anywhere_goes_on_as_if_it_had_not() -> None:
    """Also in the middle of a step of the second epoch, through JSON as a checkpoint stores it."""
    whole = samplers(2)[1]
    everything = [unit for _ in range(3) for unit in whole]
    count = len(everything)
    seen_middle = False
    for stop in range(0, count, 3):
        first = samplers(2)[1]
        first.forever = True
        before = list(itertools.islice(first, stop))
        state = json.loads(json.dumps(first.state_dict()))
        second = samplers(2)[1]
        second.load_state_dict(state)
        seen_middle |= second.epoch == 1 and second.micro_batch > 0
        second.set_epoch(second.epoch)  # what trainers call before an epoch must not lose the place in it
        second.forever = True
        assert before + list(itertools.islice(second, count - stop)) == everything
        close([first, second])
    assert seen_middle
    close([whole])


def test_half_the_ranks_go_on_with_the_same_global_batches() -> None:
    batches = made(MIXED, 4, "keep", Window(2, 4))
    ranks = samplers(4, batches)
    for sampler in ranks:
        sampler.forever = True
        for step, _ in sampler.steps():
            if step == 4:  # steps 0 to 3 are done: in the middle of the second epoch
                break
    state = ranks[3].state_dict()
    assert (state["step"], state["micro_batch"]) == (4, 0)
    fewer = samplers(2, made(MIXED, 4, "keep", Window(2, 4)))
    for sampler in fewer:
        sampler.load_state_dict(state)
    left = [sample for step in range(4, batches.first_step(2)) for sample in batches.at(step)]
    assert tokens_of([unit for sampler in fewer for unit in sampler]) == sorted(
        (s.id, token) for s in left for token in range(s.length)
    )
    close(ranks + fewer)


def test_a_position_inside_a_step_belongs_to_its_rank_and_plan() -> None:
    ranks, fewer = samplers(2), samplers(1)
    stopped = next(s for s in ranks for _ in [next(iter(s))] if s.micro_batch)
    state = stopped.state_dict()
    assert (state["step"], state["micro_batch"]) == (0, 1)
    other = ranks[1 - stopped.rank]
    with pytest.raises(InputError, match=rf"inside step 0, before micro-batch 1 of rank {stopped.rank}, but this is"):
        other.load_state_dict(state)
    with pytest.raises(InputError, match=r"planned differently now, for 1 ranks.*or save at a step border"):
        fewer[0].load_state_dict({**state, "rank": 0})
    close(ranks + fewer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(seed=6), "other seed; seed: 5 then, 6 now; restore"),
        (dict(batch_size=3), "other batch_size; batch_size: 4 then, 3 now"),
        (dict(tail="fill"), "other tail"),
        (dict(composition=Window(2, 2)), r"Window\(steps=2, dp=4\) then, .*Window keeps the dp of the first run"),
        (dict(values=[*MIXED[:-1], 34]), "other lengths and targets, costs; restore them"),
        (dict(values=[*MIXED, 1]), "other samples, lengths and targets, costs; samples: 11 then, 12 now"),
    ],
)
def test_the_position_of_other_data_or_settings_is_refused(change: dict[str, Any], message: str) -> None:
    wanted: dict[str, Any] = dict(values=MIXED, batch_size=4, tail="keep", composition=Window(2, 4), seed=5)
    state = samplers(1, made(**wanted))[0].state_dict()
    samplers(1, made(**wanted))[0].load_state_dict(state)
    with pytest.raises(InputError, match=message):
        samplers(1, made(**(wanted | change)))[0].load_state_dict(state)


def test_wrong_ranks_and_plans_are_refused() -> None:
    batches = made(MIXED, 4, "keep", InOrder())
    with pytest.raises(InputError, match="rank is -1"):
        PlannedSampler(batches, planned_for(1), -1)
    with pytest.raises(InputError, match="planned for 2 ranks, so there is no rank 2"):
        next(iter(PlannedSampler(batches, planned_for(2), 2)))
    with pytest.raises(InputError, match="plan drops samples"):
        next(iter(PlannedSampler(batches, lambda step, samples: planned_for(1)(step, samples[1:]), 0)))
    with pytest.raises(InputError, match="epoch is -1"):
        PlannedSampler(batches, planned_for(1), 0).set_epoch(-1)
    with pytest.raises(TypeError):
        len(PlannedSampler(batches, planned_for(1), 0))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="did not hand out"):
        next(PlannedSampler(batches, planned_for(1), 0).follow([1]))


ROWS = [
    {
        "input_ids": [1000 * i + t for t in range(n)],
        "labels": torch.arange(n) + 1,
        "text": "x" * n,
        "length": n,
        "tags": ["a", "b"],
    }
    for i, n in enumerate(MIXED)
]


def joined(rows: list[dict[str, Any]]) -> dict[str, list[int]]:
    """A collate function: one packed row; of no segments, an empty one."""
    return {name: [int(x) for row in rows for x in row[name]] for name in ("input_ids", "labels", "position_ids")}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_runs_the_plan_and_the_position_is_that_of_its_consumer(workers: int) -> None:
    sampler, reference = samplers(2)[0], samplers(2)[0]
    loader = DataLoader(SegmentView(ROWS), batch_sampler=sampler, collate_fn=joined, num_workers=workers)
    expected = list(reference)
    found = []
    for unit, row in sampler.follow(loader):
        found.append(list(unit.unit.segments))
        assert row["input_ids"] == [1000 * s.sample + t for s in found[-1] for t in range(s.start, s.end)]
        assert row["position_ids"] == [t for s in found[-1] for t in range(s.start, s.end)]
        assert row["labels"] == [t + 1 for t in row["position_ids"]]
        if len(found) == 3:
            break
    resumed = samplers(2)[0]
    resumed.load_state_dict(sampler.state_dict())
    assert found + list(resumed) == expected
    assert [list(u.unit.segments) for u, _ in sampler.follow(loader)] == expected[3:]
    assert sampler.epoch == 1
    # Without `follow`, the trainer that knows its position says so.
    reference.load_state_dict(sampler.state_dict(step=1))
    assert (reference.step, reference.micro_batch) == (1, 0)
    close([sampler, reference, resumed])


def test_a_plain_loader_over_several_epochs_sees_empty_units_too() -> None:
    batches = made([9, 12, 5], 1, "drop", InOrder())
    ranks = samplers(2, batches)
    rows = [
        list(DataLoader(SegmentView(ROWS_OF_3), batch_sampler=sampler, collate_fn=lambda rows: len(rows)))
        for sampler in ranks
    ]
    assert [sum(rank) for rank in zip(*rows)] == [1, 1, 1]
    assert all(len(rank) == 3 for rank in rows)
    close(ranks)


ROWS_OF_3 = [{"input_ids": list(range(n))} for n in (9, 12, 5)]


def test_a_view_cuts_what_has_one_value_per_token() -> None:
    view = SegmentView(ROWS)
    assert len(view) == len(MIXED)
    row = view[Segment(0, 64, 128, 300, 0)]
    assert set(row) == {"input_ids", "labels", "position_ids"}
    assert row["position_ids"] == list(range(64, 128))
    tensors = SegmentView([{"input_ids": torch.arange(9), "score": torch.tensor(1.0), "bias": np.array(2.0)}])
    assert torch.equal(tensors[Segment(0, 4, 9, 9, 0)]["position_ids"], torch.arange(4, 9))
    own = SegmentView([{"input_ids": [1, 2, 3], "position_ids": [7, 8, 9]}])
    assert own[Segment(0, 1, 3, 3, 0)]["position_ids"] == [8, 9]


def test_rows_of_other_lengths_are_refused() -> None:
    with pytest.raises(InputError, match=r"row 0 was planned with 5 tokens, but its columns hold {'input_ids': 3}"):
        SegmentView([{"input_ids": [1, 2, 3]}])[Segment(0, 0, 5, 5, 0)]
    with pytest.raises(InputError, match="plan with the lengths of this data"):
        SegmentView([{"input_ids": [1, 2, 3], "labels": [1] * 5}])[Segment(0, 0, 5, 5, 0)]
