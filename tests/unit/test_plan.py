"""Plans are what they say, or they are refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from sparsebalance.planning.errors import InputError
from sparsebalance.planning.plan import Latency, MicroBatch, Sample, Segment, StepPlan, Topology
from tests.conftest import samples_of

ONE = Latency(1.0, 2.0)


def unit(*segments: Segment, budgets: tuple[int, ...] = (2,)) -> MicroBatch:
    return MicroBatch(segments, budgets, ONE)


def plan(*ranks: tuple[MicroBatch, ...], block_size: int = 4) -> StepPlan:
    return StepPlan("test", Topology(dp=len(ranks)), block_size, ranks, 3.0)


@pytest.mark.parametrize("length", [0, -3, 2.5, float("nan"), float("inf"), True, "7", None])
def test_a_sample_of_a_wrong_length_is_refused_by_name(length: object) -> None:
    with pytest.raises(InputError, match="sample 5: length is"):
        Sample(5, length, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("targets", [-1, 11, 1.5, float("nan")])
def test_targets_must_fit_in_the_sample(targets: object) -> None:
    with pytest.raises(InputError, match="sample 5"):
        Sample(5, 10, targets)  # type: ignore[arg-type]


def test_numpy_lengths_become_plain_integers() -> None:
    sample = Sample(0, np.int64(7), np.int32(3))  # type: ignore[arg-type]
    assert (type(sample.length), type(sample.targets)) == (int, int)


def test_plan_dataclasses_are_frozen() -> None:
    for value in (Sample(0, 1, 0), Segment(0, 0, 1, 1, 0), ONE, unit(), Topology(), plan((unit(),))):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, dataclasses.fields(value)[0].name, None)


@pytest.mark.parametrize("field", ["dp", "pp", "tp", "sp"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True])
def test_a_topology_of_wrong_degrees_is_refused(field: str, value: object) -> None:
    with pytest.raises(InputError, match=field):
        Topology(**{field: value})  # type: ignore[arg-type]


def test_a_correct_plan_with_packs_chunks_and_an_empty_unit_is_accepted() -> None:
    packed = unit(Segment(0, 0, 3, 3, 2), Segment(1, 0, 1, 1, 0))
    first, second = unit(Segment(2, 0, 8, 10, 5)), unit(Segment(2, 8, 10, 10, 4))
    plan((packed,), (first, second), (unit(),)).validate(samples_of(3, 1, 10), token_cap=8)


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([Segment(0, 0, 10, 10, 9)], "drops samples"),
        ([Segment(0, 0, 10, 10, 9), Segment(1, 0, 4, 4, 3), Segment(7, 0, 1, 1, 0)], "not in the step"),
        ([Segment(0, 0, 10, 10, 9), Segment(1, 0, 4, 4, 3), Segment(1, 0, 4, 4, 3)], "planned twice"),
        ([Segment(0, 0, 8, 10, 7), Segment(1, 0, 4, 4, 3)], "8 of 10 tokens"),
        ([Segment(0, 0, 4, 10, 4), Segment(0, 8, 10, 10, 5), Segment(1, 0, 4, 4, 3)], "missing"),
        ([Segment(0, 0, 6, 10, 5), Segment(0, 6, 10, 10, 4), Segment(1, 0, 4, 4, 3)], "not a multiple"),
        ([Segment(0, 0, 10, 10, 8), Segment(1, 0, 4, 4, 3)], "target tokens"),
    ],
)
def test_lost_doubled_or_misplaced_tokens_are_found(segments: list[Segment], message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan(tuple(unit(segment) for segment in segments)).validate(samples_of(10, 4))


def test_caps_budgets_and_ranks_are_checked() -> None:
    whole = unit(Segment(0, 0, 10, 10, 9))
    with pytest.raises(InputError, match=r"10 tokens, over the cap of 9"):
        plan((whole,)).validate(samples_of(10), token_cap=9)
    with pytest.raises(InputError, match="below 1 block"):
        plan((unit(Segment(0, 0, 10, 10, 9), budgets=(2, 0)),)).validate(samples_of(10))
    with pytest.raises(InputError, match="rank 1 has no unit"):
        plan((whole,), ()).validate(samples_of(10))
    with pytest.raises(InputError, match="dp=2"):
        StepPlan("test", Topology(dp=2), 4, ((whole,),), 1.0).validate(samples_of(10))


def test_the_digest_tells_any_difference() -> None:
    base = plan((unit(Segment(0, 0, 10, 10, 9)),))
    assert base.digest() == plan((unit(Segment(0, 0, 10, 10, 9)),)).digest()
    others = [
        plan((unit(Segment(0, 0, 10, 10, 9), budgets=(3,)),)),
        plan((unit(), unit(Segment(0, 0, 10, 10, 9)))),
        dataclasses.replace(base, predicted_step_ms=3.0000001),
    ]
    assert len({base.digest(), *(other.digest() for other in others)}) == 4
