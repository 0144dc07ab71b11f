"""Schedule builders: orders by hand, the memory promises, and the check that names what is wrong."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebalance.planning.errors import InputError
from sparsebalance.planning.list_schedule import list_schedule, zero_bubble
from sparsebalance.planning.schedule import (
    Action,
    Schedule,
    backward_order,
    check_schedule,
    gpipe,
    interleaved,
    one_forward_one_backward,
)
from sparsebalance.planning.simulator import Network, Pipeline, StageCosts, simulate

chain_lists = st.lists(st.integers(1, 5), min_size=1, max_size=6)


def written(actions: tuple[Action, ...]) -> str:
    """F0 F1 B0 ..., with the stage behind a dot where the worker holds several."""
    several = len({action.stage for action in actions}) > 1
    return " ".join(f"{a.kind}{a.unit}" + (f".{a.stage}" if several else "") for a in actions)


def read(*workers: str) -> Schedule:
    """The inverse: one string per worker, each action "F0.1" = forward of unit 0 on stage 1."""
    return tuple(
        tuple(Action(word[0], int(word[1:].split(".")[0]), int(word.split(".")[1])) for word in text.split())  # type: ignore[arg-type]
        for text in workers
    )


def costs_of(seed: int, stages: int, units: int) -> StageCosts:
    """Random costs, some of them exactly 0."""
    random = np.random.default_rng(seed)
    times = [random.uniform(0.1, 3, (stages, units)) * (random.random((stages, units)) > 0.1) for _ in range(3)]
    return StageCosts(*times, *random.uniform(0, 2, (2, stages, units)), random.uniform(0, 3, (stages, units)))


def live(actions: tuple[Action, ...]) -> np.ndarray:
    """Units whose forward has started and whose last backward part has not ended, after each action."""
    split = any(action.kind == "W" for action in actions)
    return np.cumsum([1 if a.kind == "F" else -1 if a.kind in ("W" if split else "B") else 0 for a in actions])


@pytest.mark.parametrize("build", [gpipe, one_forward_one_backward])
@given(chains=chain_lists, stages=st.integers(1, 6))
def test_every_fixed_schedule_passes_the_check(build, chains: list[int], stages: int) -> None:  # type: ignore[no-untyped-def]
    check_schedule(build(chains, stages), chains, stages)


@given(st.integers(1, 20), st.integers(1, 5), st.integers(1, 4))
def test_every_interleaved_schedule_passes_the_check(units: int, workers: int, virtual: int) -> None:
    schedule = interleaved(units, workers, virtual)
    assert len(schedule) == workers
    check_schedule(schedule, (1,) * units, workers * virtual)


@given(chain_lists, st.integers(1, 5), st.integers(0, 2**32), st.booleans(), st.sampled_from(["units", "mb"]))
def test_every_list_schedule_passes_the_check_and_keeps_its_cap(
    chains: list[int], stages: int, seed: int, split: bool, cap: str
) -> None:
    costs = costs_of(seed, stages, sum(chains))
    transfer = np.random.default_rng(seed).uniform(0, 1, sum(chains))
    if cap == "units":
        units = [max(chains) + seed % 3] * stages
        schedule = list_schedule(chains, costs, split, transfer.tolist(), live_units=units)
        ones, times = np.ones((stages, sum(chains))), (costs.forward_ms, costs.input_ms, costs.weight_ms)
        counted = StageCosts(*times, ones)
        most = units[0]
    else:
        ends = np.cumsum(chains)
        held = costs.activation_mb + costs.state_mb
        room = np.maximum(costs.deferred_mb - costs.activation_mb, 0).max(1) * split
        most = max((held[:, end - size : end].sum(1) + room).max() for end, size in zip(ends, chains)) * 1.2
        schedule = list_schedule(chains, costs, split, transfer.tolist(), cap_mb=most)
        counted = costs
    check_schedule(schedule, chains, stages)
    assert {a.kind for own in schedule for a in own} == (set("FIW") if split else set("FB"))
    assert simulate([Pipeline(schedule, tuple(chains), counted)]).peak_memory_mb.max() <= most + 1e-6


@given(chain_lists, st.integers(1, 5), st.integers(0, 2**32))
def test_zero_bubble_holds_no_more_than_the_first_stage_of_1f1b(chains: list[int], stages: int, seed: int) -> None:
    costs = costs_of(seed, stages, sum(chains))
    ones = np.ones_like(costs.forward_ms)
    costs = StageCosts(costs.forward_ms, costs.input_ms, costs.weight_ms, ones)
    schedule = zero_bubble(chains, costs)
    check_schedule(schedule, chains, stages)
    peak = simulate([Pipeline(schedule, tuple(chains), costs)]).peak_memory_mb
    assert peak.max() <= min(sum(chains), stages - 1 + max(chains)) + 1e-6


@given(chain_lists, st.integers(1, 4), st.integers(0, 2**32))
def test_zero_bubble_is_greedy_in_the_simulated_times(chains: list[int], stages: int, seed: int) -> None:
    """Replayed with its transfers: no other work while an input gradient could run, no rest while a W is left."""
    costs = costs_of(seed, stages, sum(chains))
    transfer = np.random.default_rng(seed).uniform(0, 2, sum(chains))
    schedule = zero_bubble(chains, costs, transfer.tolist())
    spans = simulate([Pipeline(schedule, tuple(chains), costs, transfer)], Network(ms_per_mb=1.0)).spans(0)
    ends = {(span.kind, span.stage, span.unit): span.end_ms for span in spans}
    for stage in range(stages):
        own = [span for span in spans if span.stage == stage]
        clock, deferred = 0.0, 0
        for place, span in enumerate(own):
            assert deferred == 0 or span.start_ms <= clock + 1e-9
            clock, deferred = span.end_ms, deferred + (span.kind == "I") - (span.kind == "W")
            following = next((later.unit for later in own[place:] if later.kind == "I"), None)
            if span.kind != "I" and following is not None:
                last = stage == stages - 1
                source = ends["F", stage, following] if last else ends["I", stage + 1, following] + transfer[following]
                assert source >= span.start_ms - 1e-9


def test_the_classical_1f1b_by_hand() -> None:
    first, second, third = one_forward_one_backward((1,) * 4, 3)
    assert written(first) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert written(second) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert written(third) == "F0 B0 F1 B1 F2 B2 F3 B3"


@given(st.integers(1, 9), st.integers(1, 6))
def test_1f1b_keeps_its_memory_promise(units: int, stages: int) -> None:
    for stage, actions in enumerate(one_forward_one_backward((1,) * units, stages)):
        assert live(actions).max() == min(units, stages - stage)


@given(chain_lists, st.integers(1, 6))
def test_1f1b_with_chunks_holds_at_most_the_longest_chain_and_the_warm_up(chains: list[int], stages: int) -> None:
    for stage, actions in enumerate(one_forward_one_backward(chains, stages)):
        assert live(actions).max() <= max(chains) + stages - 1 - stage


def test_1f1b_with_chunks_by_hand() -> None:
    """Units 0 and 1 are chunks of one sample: 1 runs backward before 0, and not before both ran forward. Unit 2 runs
    forward as soon as one of the two is gone; without another stage to keep busy, when both are."""
    first, last = one_forward_one_backward((2, 1), 2)
    assert written(first) == "F0 F1 F2 B1 B0 B2"
    assert written(last) == "F0 F1 B1 F2 B0 B2"
    assert written(one_forward_one_backward((2, 1), 1)[0]) == "F0 F1 B1 B0 F2 B2"
    assert backward_order((2, 1, 3)) == [1, 0, 2, 5, 4, 3]


def test_gpipe_by_hand() -> None:
    assert written(gpipe((1, 2), 1)[0]) == "F0 F1 F2 B0 B2 B1"


def test_interleaved_by_hand() -> None:
    """Two workers with two stages each, four units, as in Megatron-LM's figure but smaller."""
    first, second = interleaved(4, 2, 2)
    assert written(first) == ("F0.0 F1.0 F0.2 F1.2 F2.0 B0.2 F3.0 B1.2 F2.2 B0.0 F3.2 B1.0 B2.2 B3.2 B2.0 B3.0")
    assert written(second) == ("F0.1 F1.1 F0.3 B0.3 F1.3 B1.3 F2.1 B0.1 F3.1 B1.1 F2.3 B2.3 F3.3 B3.3 B2.1 B3.1")
    odd = interleaved(3, 2, 2)  # the same without unit 3
    assert odd == tuple(tuple(a for a in own if a.unit < 3) for own in interleaved(4, 2, 2))
    assert interleaved(5, 3, 1) == one_forward_one_backward((1,) * 5, 3)


def test_zero_bubble_by_hand() -> None:
    """F = I = W = 1 on two stages with room for two units each: one idle millisecond on each stage."""
    ones = np.ones((2, 2))
    first, last = zero_bubble((1, 1), StageCosts(ones, ones, ones))
    assert written(first) == "F0 F1 I0 W0 I1 W1"
    assert written(last) == "F0 I0 F1 I1 W0 W1"


@pytest.mark.parametrize(
    ("schedule", "chains", "stages", "message"),
    [
        (read("B0.0"), (1,), 1, "stage 0: F0 must appear exactly once, but it is missing"),
        (read("F0.0"), (1,), 1, "stage 0: B0 must appear exactly once, but it is missing"),
        (read("F0.0 I0.0"), (1,), 1, "stage 0: W0 must appear exactly once, but it is missing"),
        (read("F0.0 W0.0"), (1,), 1, "stage 0: I0 must appear exactly once, but it is missing"),
        (read("F0.0 B0.0 W0.0"), (1,), 1, "stage 0: B0 is there beside I0 or W0"),
        (read("F0.0 F0.0 B0.0"), (1,), 1, "stage 0: F0 must appear exactly once"),
        (read("F0.0 B0.0 F1.0"), (1,), 1, "F1 of stage 0 is not an action of 1 units on 1 stages"),
        (read("F0.0 B0.0 F0.1"), (1,), 1, "F0 of stage 1 is not an action of 1 units on 1 stages"),
        (read("F0.0", "B0.0"), (1,), 1, "stage 0 is on workers 0 and 1"),
        (read("F0.0 B0.0", ""), (1,), 1, "worker 1 has no action"),
        (read("F1.0 F0.0 B1.0 B0.0"), (2,), 1, "stage 0: F1 is before F0"),
        (read("F0.0 F1.0 B0.0 B1.0"), (2,), 1, "stage 0: the backward of 0 is before that of 1"),
        (read("F0.0 B1.0 F1.0 B0.0"), (2,), 1, "deadlocks: worker 0 waits at B1 of stage 0"),
        (read("F0.0 W0.0 I0.0"), (1,), 1, "deadlocks: worker 0 waits at W0 of stage 0"),
        (
            read("B0.0 F0.0", "F0.1 B0.1"),
            (1,),
            2,
            "deadlocks: worker 0 waits at B0 of stage 0; worker 1 waits at F0 of stage 1",
        ),
        (
            read("F0.0 B0.0 F1.0 B1.0", "F0.1 F1.1 B0.1 B1.1", "F0.2 B0.2 F1.2 B1.2"),
            (1, 1),
            3,
            "worker 0 waits at B0 of stage 0; worker 1 waits at F1 of stage 1; worker 2 waits at F1 of stage 2",
        ),
        (read("F0.1 F0.0 B0.1 B0.0"), (1,), 2, "worker 0 waits at F0 of stage 1"),
    ],
)
def test_wrong_schedules_and_deadlocks_are_named(
    schedule: Schedule, chains: tuple[int, ...], stages: int, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        check_schedule(schedule, chains, stages)


@settings(max_examples=60)
@given(chain_lists, st.integers(1, 4), st.data())
def test_two_swapped_actions_are_refused_exactly_when_a_slow_replay_stops(
    chains: list[int], stages: int, data: st.DataObject
) -> None:
    schedule = [list(own) for own in one_forward_one_backward(chains, stages)]
    own = schedule[data.draw(st.integers(0, stages - 1))]
    i, j = (data.draw(st.integers(0, len(own) - 1)) for _ in range(2))
    own[i], own[j] = own[j], own[i]
    changed = tuple(map(tuple, schedule))
    pipeline = Pipeline(changed, tuple(chains), costs_of(0, stages, sum(chains)))
    if runs_to_its_end(changed, chains):
        check_schedule(changed, chains, stages)
        assert np.isfinite(simulate([pipeline]).step_ms)
    else:
        with pytest.raises(InputError, match=r"deadlocks|before"):
            check_schedule(changed, chains, stages)


def runs_to_its_end(schedule: Schedule, chains: list[int]) -> bool:
    """Whether a slow replay of F and B, which also refuses a chunk out of turn, finishes."""
    position = [0] * len(schedule)
    done: set[tuple[str, int, int]] = set()
    heads = {0, *np.cumsum(chains).tolist()}
    for _ in range(sum(map(len, schedule))):
        for stage, own in enumerate(schedule):
            if position[stage] == len(own):
                continue
            kind, unit = own[position[stage]].kind, own[position[stage]].unit
            if kind == "F":
                needs = [("F", unit, stage - 1)] * (stage > 0) + [("F", unit - 1, stage)] * (unit not in heads)
            else:
                needs = [("F", unit, stage)] + [("B", unit, stage + 1)] * (stage < len(schedule) - 1)
                needs += [("B", unit + 1, stage)] * (unit + 1 not in heads)
            if done.issuperset(needs):
                done.add((kind, unit, stage))
                position[stage] += 1
    return position == list(map(len, schedule))


def test_builders_refuse_nonsense() -> None:
    ones = np.ones((2, 3))
    costs = StageCosts(ones, ones, ones, ones, ones)
    for chains, stages in (((), 2), ((1, 0), 2), ((1,), 0), ((-1,), 1)):
        for build in (gpipe, one_forward_one_backward):
            with pytest.raises(InputError, match="at least one"):
                build(chains, stages)
    for sizes in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(InputError, match="at least one"):
            interleaved(*sizes)
    with pytest.raises(InputError, match="must agree"):
        zero_bubble((1, 1), costs)
    with pytest.raises(InputError, match="must agree"):
        zero_bubble((1, 2), costs, [0.0])
    with pytest.raises(InputError, match="finite"):
        zero_bubble((1, 2), costs, [0.0, 1.0, float("nan")])
    with pytest.raises(InputError, match="at least 2, the longest chain"):
        list_schedule((1, 2), costs, True, live_units=[2, 1])
    with pytest.raises(InputError, match="one chain alone holds 4 MB"):
        zero_bubble((1, 2), costs, cap_mb=3.9)
    with pytest.raises(InputError, match="one chain alone"):
        zero_bubble((1, 2), costs, cap_mb=float("nan"))
    with pytest.raises(InputError, match="both given"):
        list_schedule((1, 2), costs, True, live_units=[3, 3], cap_mb=9.0)
