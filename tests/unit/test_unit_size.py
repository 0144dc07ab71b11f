"""Which unit sizes are worth trying, and which one is predicted fastest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebalance.planning.errors import InputError
from sparsebalance.planning.latency import RooflineModel
from sparsebalance.planning.plan import Sample, StepPlan, Topology
from sparsebalance.planning.policy import named_policy, plan_step
from sparsebalance.planning.unit_size import fastest_unit_size, unit_sizes
from tests.conftest import samples_of

Plan = Callable[[Sequence[Sample], int | None], StepPlan]


def planner(ms: Mapping[int | None, float], asked: list[int | None] | None = None) -> Plan:
    """Plans that take `ms` of their unit size for each sample of a step."""

    def plan(samples: Sequence[Sample], size: int | None) -> StepPlan:
        if asked is not None:
            asked.append(size)
        return StepPlan("made up", Topology(), 16, (), ms[size] * len(samples))

    return plan


STEPS = [samples_of(5, 6), samples_of(7)]


def test_the_fastest_size_over_all_steps_wins() -> None:
    assert fastest_unit_size(STEPS, [1024, 2048, None], planner({1024: 5.0, 2048: 4.0, None: 6.0})) == 2048
    assert fastest_unit_size(STEPS, [1024, 2048, None], planner({1024: 5.0, 2048: 4.0, None: 3.0})) is None


def test_among_equals_the_smallest_wins() -> None:
    assert fastest_unit_size(STEPS, [1024, 2048, None], planner({1024: 4.0, 2048: 4.0, None: 4.0})) == 1024
    # Within 1 % is as good as equal, more is not.
    assert fastest_unit_size(STEPS, [1024, 2048], planner({1024: 100.9, 2048: 100.0})) == 1024
    assert fastest_unit_size(STEPS, [1024, 2048], planner({1024: 101.1, 2048: 100.0})) == 2048


def test_times_of_steps_add_up() -> None:
    """Size 1024 is faster in the long step, 2048 in two short ones: together 2048."""
    steps = [samples_of(*[9] * 10), samples_of(9), samples_of(9)]

    def plan(samples: Sequence[Sample], size: int | None) -> StepPlan:
        long, short = {1024: (10.0, 9.0), 2048: (12.0, 5.0)}[size or 0]
        return StepPlan("made up", Topology(), 16, (), long if len(samples) > 1 else short)

    assert fastest_unit_size(steps, [1024, 2048], plan) == 2048
    assert fastest_unit_size(steps[:2], [1024, 2048], plan) == 2048
    assert fastest_unit_size(steps[:1], [1024, 2048], plan) == 1024


def test_a_single_size_is_taken_without_planning() -> None:
    asked: list[int | None] = []
    assert fastest_unit_size([], [64], planner({}, asked)) == 64
    assert fastest_unit_size(STEPS, [None], planner({}, asked)) is None
    assert asked == []


def test_sizes_are_whole_blocks_below_the_longest_sample_and_within_the_cap() -> None:
    samples = samples_of(10, 9000)
    assert unit_sizes(samples, 64, 32768) == [1024, 2048, 4096, 8192, None]
    assert unit_sizes(samples, 64, 9000) == [1024, 2048, 4096, 8192, None]
    assert unit_sizes(samples, 3000, 9000) == [3000, 6000, None]  # 1,024 and 2,048 round up to one block, 9,000 is all
    assert unit_sizes(samples_of(1024), 64, 32768) == [None]
    assert unit_sizes(samples_of(1025), 64, 32768) == [1024, None]


def test_samples_over_the_cap_cannot_stay_whole() -> None:
    assert unit_sizes(samples_of(9000), 64, 4096) == [1024, 2048, 4096]
    assert unit_sizes(samples_of(9000), 64, 1000) == [960]  # below all sizes: as many blocks as the cap holds
    assert unit_sizes(samples_of(9000), 64, 64) == [64]


def test_a_cap_below_a_block_is_refused() -> None:
    with pytest.raises(InputError, match=r"sample 1 has 9000 tokens, over the cap of 63 tokens.*raise token_cap"):
        unit_sizes(samples_of(5, 9000), 64, 63)
    assert unit_sizes(samples_of(5, 63), 64, 63) == [None]  # nothing to cut


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 300_000), min_size=1, max_size=4),
    block=st.sampled_from([1, 16, 100, 256, 3000]),
    cap=st.integers(3000, 200_000),
)
def test_every_size_can_be_planned_with(lengths: list[int], block: int, cap: int) -> None:
    sizes = unit_sizes(samples_of(*lengths), block, cap)
    cutting = [size for size in sizes if size is not None]
    assert sizes
    assert cutting == sorted(set(cutting))
    assert all(size % block == 0 and size <= cap for size in cutting)
    assert (None in sizes) == (max(lengths) <= cap)
    assert sizes.index(None) == len(sizes) - 1 if None in sizes else True


def test_real_plans_of_a_giant_are_faster_in_chunks_and_short_samples_stay_whole(roofline: RooflineModel) -> None:
    def plan(samples: Sequence[Sample], size: int | None) -> StepPlan:
        policy = named_policy("sab", budget=4, token_cap=2**17, unit_size=size)
        return plan_step(samples, roofline, Topology(dp=1, pp=3), policy)

    giants = [samples_of(8000, 100, 200)]
    assert fastest_unit_size(giants, unit_sizes(giants[0], 16, 2**17), plan) in (1024, 2048)
    short = [samples_of(*[1000] * 8)]
    assert fastest_unit_size(short, unit_sizes(short[0], 16, 2**17), plan) is None
