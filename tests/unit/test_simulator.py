"""The event simulator against closed forms, hand-worked examples and a naive replay."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebalance.planning.errors import InputError
from sparsebalance.planning.list_schedule import zero_bubble
from sparsebalance.planning.plan import Latency
from sparsebalance.planning.schedule import KINDS, Action, Schedule, gpipe, interleaved, one_forward_one_backward
from sparsebalance.planning.simulator import Network, Pipeline, StageCosts, imbalance, simulate, simulate_units

TIMES = {"F": "forward_ms", "B": "input_ms", "I": "input_ms", "W": "weight_ms"}  # where to lengthen an action


def random_costs(random: np.random.Generator, stages: int, units: int) -> StageCosts:
    times = [random.uniform(0.1, 3, (stages, units)) * (random.random((stages, units)) > 0.1) for _ in range(3)]
    return StageCosts(*times, *random.uniform(0, 2, (3, stages, units)))


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    """Any builder, chains, costs (zeros too) and sizes."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    build = draw(st.sampled_from(["gpipe", "1f1b", "zero_bubble", "interleaved"]))
    chains = tuple(draw(st.lists(st.integers(1, 1 if build == "interleaved" else 4), min_size=1, max_size=5)))
    units, workers = sum(chains), draw(st.integers(1, 4))
    virtual = draw(st.integers(1, 3)) if build == "interleaved" else 1
    costs = random_costs(random, workers * virtual, units)
    schedule = {
        "gpipe": lambda: gpipe(chains, workers),
        "1f1b": lambda: one_forward_one_backward(chains, workers),
        "zero_bubble": lambda: zero_bubble(chains, costs),
        "interleaved": lambda: interleaved(units, workers, virtual),
    }[build]()
    return Pipeline(schedule, chains, costs, random.uniform(0, 5, units))


networks = st.builds(Network, st.floats(0, 2), st.floats(0, 1), st.floats(0, 5), st.integers(1, 4))


def took(costs: StageCosts, action: Action) -> float:
    at = action.stage, action.unit
    whole = {"F": [costs.forward_ms], "B": [costs.input_ms, costs.weight_ms], "I": [costs.input_ms]}
    return float(sum(ms[at] for ms in whole.get(action.kind, [costs.weight_ms])))


def naive(pipeline: Pipeline, network: Network) -> dict[Action, tuple[float, float]]:
    """Ask every worker, again and again, whether its next action can run; slow and obvious."""
    costs, schedule = pipeline.costs, pipeline.schedule
    split = any(action.kind == "W" for own in schedule for action in own)
    times: dict[Action, tuple[float, float]] = {}
    home = {action.stage: worker for worker, own in enumerate(schedule) for action in own}
    position, free = [0] * len(schedule), [0.0] * len(schedule)
    while any(at < len(own) for at, own in zip(position, schedule)):
        for worker, own in enumerate(schedule):
            if position[worker] == len(own):
                continue
            action = own[position[worker]]
            stage, unit, needs = action.stage, action.unit, []
            if action.kind == "F" and stage > 0:
                needs.append(Action("F", unit, stage - 1))
            if action.kind in "BI":
                needs.append(Action("F", unit, stage))
                if stage < costs.stages - 1:
                    needs.append(Action("I" if split else "B", unit, stage + 1))
            if action.kind == "W":
                needs.append(Action("I", unit, stage))
            if all(need in times for need in needs):
                transfer = network.latency_ms + network.ms_per_mb * pipeline.unit_mb[unit]
                arrivals = [times[need][1] + (transfer if home[need.stage] != worker else 0) for need in needs]
                start = max([free[worker], *arrivals])
                free[worker] = start + took(costs, action)
                times[action] = (start, free[worker])
                position[worker] += 1
    return times


@given(pipelines(), networks)
def test_the_simulator_equals_the_naive_replay(pipeline: Pipeline, network: Network) -> None:
    timeline = simulate([pipeline], network)
    expected = naive(pipeline, network)
    spans = timeline.spans(0)
    assert [Action(s.kind, s.unit, s.stage) for s in spans] == [a for own in pipeline.schedule for a in own]
    for span in spans:
        assert Action(span.kind, span.unit, span.stage) in pipeline.schedule[span.worker]
        assert (span.start_ms, span.end_ms) == pytest.approx(expected[Action(span.kind, span.unit, span.stage)])
    assert timeline.rank_ms[0] == pytest.approx(max(end for _, end in expected.values()))


@settings(max_examples=30)
@given(pipelines(), networks, st.integers(0, 2**32))
def test_many_ranks_at_once_equal_each_rank_alone(pipeline: Pipeline, network: Network, seed: int) -> None:
    random = np.random.default_rng(seed)
    stages, units = pipeline.costs.stages, pipeline.costs.units
    ranks = [replace(pipeline, costs=random_costs(random, stages, units)) for _ in range(9)]
    together = simulate(ranks, network)
    alone = [simulate([rank], network) for rank in ranks]
    assert together.step_ms >= max(timeline.step_ms for timeline in alone) - 1e-9
    assert together.rank_ms.tolist() == [timeline.rank_ms[0] for timeline in alone]
    for rank, timeline in enumerate(alone):
        assert together.spans(rank) == [replace(span, rank=rank) for span in timeline.spans(0)]
        assert together.peak_memory_mb[rank].tolist() == timeline.peak_memory_mb[0].tolist()
        assert (together.step_ms - together.bubble_ms[rank]) == pytest.approx(timeline.step_ms - timeline.bubble_ms[0])


@given(pipelines(), networks, st.data())
def test_more_work_never_shortens_a_step(pipeline: Pipeline, network: Network, data: st.DataObject) -> None:
    action = data.draw(st.sampled_from([a for own in pipeline.schedule for a in own]))
    longer = lengthened(pipeline, action, 1.0)
    assert simulate([longer], network).step_ms >= simulate([pipeline], network).step_ms - 1e-9


def lengthened(pipeline: Pipeline, action: Action, by_ms: float) -> Pipeline:
    name = TIMES[action.kind]
    values = getattr(pipeline.costs, name).copy()
    values[action.stage, action.unit] += by_ms
    return replace(pipeline, costs=replace(pipeline.costs, **{name: values}))


@given(st.data(), networks)
def test_a_step_is_no_shorter_than_its_bounds(data: st.DataObject, network: Network) -> None:
    pipeline = data.draw(pipelines())
    timeline = simulate([pipeline], network)
    for own in pipeline.schedule:
        assert timeline.rank_ms[0] >= sum(took(pipeline.costs, action) for action in own) - 1e-9
    through_all = (pipeline.costs.forward_ms + pipeline.costs.input_ms).sum(0)
    sent = network.latency_ms + network.ms_per_mb * pipeline.unit_mb
    hops = 2 * (pipeline.costs.stages - 1) if len(pipeline.schedule) > 1 else 0
    assert timeline.rank_ms[0] >= (through_all + hops * sent).max() - 1e-9
    assert (timeline.all_reduce_end_ms <= timeline.step_ms).all()
    assert 0 <= timeline.busy_fraction <= 1 + 1e-9
    assert (timeline.bubble_ms >= -1e-9).all()


@given(st.data(), networks)
def test_slack_is_exactly_what_an_action_can_take_longer(data: st.DataObject, network: Network) -> None:
    first = data.draw(pipelines())
    other = replace(first, costs=random_costs(np.random.default_rng(3), first.costs.stages, first.costs.units))
    timeline = simulate([first, other], network)
    rank = data.draw(st.integers(0, 1))
    actions = [a for own in first.schedule for a in own]
    slack = timeline.slack(rank)
    number = data.draw(st.integers(0, len(actions) - 1))
    for more, grows in ((0.0, False), (0.25, True)):
        ranks = [first, other]
        ranks[rank] = lengthened(ranks[rank], actions[number], slack[number] + more)
        after = simulate(ranks, network).step_ms
        assert after > timeline.step_ms + 1e-3 if grows else after == pytest.approx(timeline.step_ms)


@given(st.lists(st.integers(0, 2**32), min_size=1, max_size=3), pipelines(), networks)
def test_the_critical_path_is_an_unbroken_chain(seeds: list[int], pipeline: Pipeline, network: Network) -> None:
    shape = pipeline.costs.stages, pipeline.costs.units
    ranks = [replace(pipeline, costs=random_costs(np.random.default_rng(seed), *shape)) for seed in seeds]
    timeline = simulate(ranks, network)
    path = timeline.critical_path()
    assert path[0].start_ms == 0
    assert path[-1].end_ms == timeline.rank_ms.max()
    for a, b in itertools.pairwise(path):
        sent = network.latency_ms + network.ms_per_mb * pipeline.unit_mb[b.unit]
        assert b.start_ms == pytest.approx(a.end_ms + (sent if a.worker != b.worker else 0))


def equal(schedule: Schedule, units: int, stages: int, *times: float) -> float:
    costs = StageCosts(*(np.full((stages, units), ms) for ms in times))
    return simulate([Pipeline(schedule, (1,) * units, costs)]).step_ms


@pytest.mark.parametrize("stages", [1, 2, 4, 7])
@pytest.mark.parametrize("units", [1, 3, 8])
def test_equal_units_take_the_closed_form(units: int, stages: int) -> None:
    """1F1B and GPipe with m equal units on p stages: (m + p - 1) (f + b)."""
    ones = (1,) * units
    for schedule in (one_forward_one_backward(ones, stages), gpipe(ones, stages)):
        assert equal(schedule, units, stages, 1.0, 0.75, 1.25) == pytest.approx((units + stages - 1) * 3.0)
    timeline = simulate_units([[Latency(stages * 1.0, stages * 2.0)] * units], stages)
    assert timeline.step_ms == pytest.approx((units + stages - 1) * 3.0)
    assert timeline.busy_fraction == pytest.approx(units / (units + stages - 1))
    assert timeline.bubble_ms == pytest.approx(np.full((1, stages), (stages - 1) * 3.0))


@pytest.mark.parametrize(("workers", "virtual", "rounds"), [(2, 2, 1), (2, 3, 4), (4, 2, 2), (4, 4, 3), (1, 3, 5)])
def test_interleaving_divides_the_bubble_by_the_stages_per_worker(workers: int, virtual: int, rounds: int) -> None:
    """Megatron-LM, section 2.2.2: the bubble is (p - 1) (f + b) / v for a multiple of p units."""
    units, stages = rounds * workers, workers * virtual
    step = equal(interleaved(units, workers, virtual), units, stages, 1.0 / virtual, 0.75 / virtual, 1.25 / virtual)
    assert step - units * 3.0 == pytest.approx((workers - 1) * 3.0 / virtual)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("more", [0, 1, 4, 9, 24])
def test_zero_bubble_reaches_the_published_bubble(stages: int, more: int) -> None:
    """ZB-H1 with F = I = W = 1: p - 1 if units - stages is even, otherwise a forward more; 1F1B: 3 (p - 1)."""
    units, ones = stages + more, np.ones((stages, stages + more))
    schedule = zero_bubble((1,) * units, StageCosts(ones, ones, ones))
    bubble = equal(schedule, units, stages, 1.0, 1.0, 1.0) - 3 * units
    assert bubble == (stages - 1 + more % 2 if stages > 1 else 0)


def test_zero_bubble_beats_1f1b_with_chunks_too() -> None:
    chains, ones = (6, 1, 3, 1, 1, 4), np.ones((4, 16))
    costs = StageCosts(ones, ones, ones)
    filled, classical = zero_bubble(chains, costs), one_forward_one_backward(chains, 4)
    assert simulate([Pipeline(filled, chains, costs)]).step_ms < simulate([Pipeline(classical, chains, costs)]).step_ms


def test_transfers_by_hand() -> None:
    """F 1, B 2 on two stages, transfer 0.5 + 10 MB x 0.05 = 1: F ends at 1, F 2-3, B 3-5, B 6-8."""
    ones = np.ones((2, 1))
    costs, network = StageCosts(ones, ones, ones), Network(latency_ms=0.5, ms_per_mb=0.05)
    timeline = simulate([Pipeline(one_forward_one_backward((1,), 2), (1,), costs, np.array([10.0]))], network)
    assert [(s.start_ms, s.end_ms) for s in timeline.critical_path()] == [(0, 1), (2, 3), (3, 5), (6, 8)]
    assert timeline.bubble_ms.tolist() == [[5, 5]]
    one_worker = simulate([Pipeline(interleaved(1, 1, 2), (1,), costs, np.array([10.0]))], network)
    assert one_worker.step_ms == 6


def test_the_all_reduce_overlaps_with_the_last_backward_by_hand() -> None:
    """Rank 1 ends last: F 0-2, B 2-6. In 4 buckets the first is ready at 3, the last at 6."""
    two = np.array([[2.0]])
    ranks = [Pipeline(gpipe((1,), 1), (1,), StageCosts(two / 2, two, two))]
    ranks.append(Pipeline(gpipe((1,), 1), (1,), StageCosts(two, two, two)))
    assert simulate(ranks, Network(all_reduce_ms=2.0, buckets=4)).step_ms == 6.5  # the last bucket, 6 + 2/4
    assert simulate(ranks, Network(all_reduce_ms=8.0, buckets=4)).step_ms == 11  # all of them, 3 + 8
    slow = simulate(ranks, Network(all_reduce_ms=12.0, buckets=4))  # ends at 3 + 12
    # Rank 0's B (1-5) has its first bucket ready at 2, too; F can move that by 1, and B's own length counts a quarter.
    assert slow.slack(0).tolist() == [1, 4]
    plain = simulate(ranks, Network(all_reduce_ms=8.0))
    assert (plain.step_ms, plain.rank_ms.tolist(), plain.all_reduce_end_ms.tolist()) == (14, [5, 6], [14])


@given(pipelines(), st.floats(0, 20), st.integers(1, 6), st.integers(0, 2**32))
def test_the_all_reduce_is_the_latest_of_its_buckets(pipeline: Pipeline, ms: float, buckets: int, seed: int) -> None:
    other = random_costs(np.random.default_rng(seed), pipeline.costs.stages, pipeline.costs.units)
    timeline = simulate([pipeline, replace(pipeline, costs=other)], Network(all_reduce_ms=ms, buckets=buckets))
    for stage in range(pipeline.costs.stages):
        own = [[s for s in timeline.spans(r) if s.stage == stage and s.kind in "BW"][-1] for r in range(2)]
        clock = 0.0
        for bucket in range(1, buckets + 1):
            ready = max(s.start_ms + (s.end_ms - s.start_ms) * bucket / buckets for s in own)
            clock = max(clock, ready) + ms / buckets
        assert timeline.all_reduce_end_ms[stage] == pytest.approx(clock)


def test_memory_by_hand() -> None:
    """Two chunks with 3 and 4 MB of activations and 5 + 6 MB of state."""
    one, mb, state = np.ones((1, 2)), np.array([[3.0, 4.0]]), np.array([[5.0, 6.0]])
    costs = StageCosts(one, one, one, mb, state, np.array([[2.0, 6.0]]))
    timeline = simulate([Pipeline(gpipe((2,), 1), (2,), costs)])  # F0 F1 B1 B0
    [(times, held)] = timeline.memory_mb(0)
    assert times.tolist() == [0, 1, 4, 6]
    assert held.tolist() == [14, 18, 14, 0]
    assert timeline.peak_memory_mb.tolist() == [[18]]
    order = [Action("F", 0, 0), Action("F", 1, 0), *(Action(kind, unit, 0) for kind in KINDS[2:] for unit in (1, 0))]
    split = (tuple(order),)  # F0 F1 I1 I0 W1 W0
    [(times, held)] = simulate([Pipeline(split, (2,), costs)]).memory_mb(0)
    assert times.tolist() == [0, 1, 3, 4, 5, 6]
    assert held.tolist() == [14, 18, 20, 8, 2, 0]  # the second chunk leaves more than it releases


@given(pipelines())
def test_memory_returns_to_nothing_and_1f1b_keeps_its_promise(pipeline: Pipeline) -> None:
    timeline = simulate([pipeline])
    for times, held in timeline.memory_mb(0):
        assert (np.diff(times) >= 0).all()
        assert held.min() >= -1e-9
        assert held[-1] == pytest.approx(0)
    units, stages = pipeline.costs.units, pipeline.costs.stages
    ones = np.ones((stages, units))
    classical = Pipeline(one_forward_one_backward((1,) * units, stages), (1,) * units, StageCosts(*[ones] * 4))
    assert simulate([classical]).peak_memory_mb[0].tolist() == [min(units, stages - s) for s in range(stages)]


def test_the_slowest_rank_sets_the_step_and_the_all_reduce_comes_on_top() -> None:
    timeline = simulate_units([[Latency(1, 2)], [Latency(2, 3), Latency(1, 1)]], all_reduce_ms=0.5)
    assert timeline.step_ms == 7.5
    assert timeline.rank_ms.tolist() == [3.0, 7.0]
    assert timeline.busy_fraction == pytest.approx(10 / 15)
    assert timeline.slack(0) == pytest.approx([4.0, 4.0])
    assert timeline.peak_memory_mb.tolist() == [[0], [0]]  # no sizes were given


def test_the_three_imbalances_by_hand() -> None:
    """Units 1, 3 and 4, 2: all 4 / 2.5; slots (1, 4) -> 1.6 and (3, 2) -> 1.2; ranks 4 and 6 -> 1.2."""
    found = imbalance([[1, 3], [4, 2]])
    assert (found.all, found.slot, found.rank) == (pytest.approx(1.6), pytest.approx(1.4), pytest.approx(1.2))


def test_a_missing_slot_counts_zero_and_empty_units_are_no_micro_batches() -> None:
    found = imbalance([[2, 2], [0]])
    assert (found.all, found.slot, found.rank) == (1.0, 2.0, 2.0)
    nothing = imbalance([[0], [0]])
    assert (nothing.all, nothing.slot, nothing.rank) == (1.0, 1.0, 1.0)
    for wrong in ([], [[1.0], []]):
        with pytest.raises(InputError, match="at least one unit"):
            imbalance(wrong)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_wrong_values_are_refused(bad: float) -> None:
    one, wrong = np.ones((1, 2)), np.array([[1.0, bad]])
    with pytest.raises(InputError, match="rank 0"):
        simulate_units([[Latency(bad, 1.0)]])
    with pytest.raises(InputError, match="weight_ms lies between"):
        StageCosts(one, one, wrong)
    with pytest.raises(InputError, match="state_mb lies between"):
        StageCosts(one, one, one, one, wrong)
    with pytest.raises(InputError, match="deferred_mb lies between"):
        StageCosts(one, one, one, one, one, wrong)
    with pytest.raises(InputError, match="all_reduce_ms lies between"):
        Network(all_reduce_ms=wrong[0])
    with pytest.raises(InputError, match="unit_mb lies between"):
        Pipeline(gpipe((1, 1), 1), (1, 1), StageCosts(one, one, one), wrong[0])


def test_sizes_that_disagree_are_refused() -> None:
    one = np.ones((1, 2))
    costs = StageCosts(one, one, one)
    good = Pipeline(gpipe((1, 1), 1), (1, 1), costs)
    with pytest.raises(InputError, match="at least one unit"):
        simulate_units([[]])
    with pytest.raises(InputError, match="at least one rank"):
        simulate([])
    with pytest.raises(InputError, match=r"must be \[stages, units\]"):
        StageCosts(one[0], one[0], one[0])
    with pytest.raises(InputError, match="input_ms has shape"):
        StageCosts(one, np.ones((2, 2)), one)
    with pytest.raises(InputError, match="chains hold 3 units"):
        Pipeline(gpipe((1, 2), 1), (1, 2), costs)
    with pytest.raises(InputError, match="unit_mb has shape"):
        Pipeline(gpipe((1, 1), 1), (1, 1), costs, np.ones(3))
    two = np.ones((2, 2))
    other = Pipeline(gpipe((1, 1), 2), (1, 1), StageCosts(two, two, two))
    with pytest.raises(InputError, match="they must agree"):
        simulate([good, other])
    with pytest.raises(InputError, match="there are 1 stages"):
        simulate([good], Network(all_reduce_ms=np.ones(2)))
    with pytest.raises(InputError, match="buckets is 0"):
        Network(buckets=0)
    with pytest.raises(InputError, match="B1 must appear"):
        simulate([Pipeline((gpipe((1, 1), 1)[0][:-1],), (1, 1), costs)])
