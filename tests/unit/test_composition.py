"""Compositions: every sample once, bounded moves, the tail rules, streams, and what the statistics say."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebalance.planning.batch_statistics import (
    Spread,
    batch_statistics,
    length_correlation,
    neighbour_correlation,
)
from sparsebalance.planning.composition import (
    ByTargetTokens,
    Composition,
    GroupByLength,
    InOrder,
    Tail,
    Window,
    by_target_tokens,
    compose,
    in_order,
    stream_batches,
)
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.lengths import draw
from sparsebalance.planning.plan import Sample
from sparsebalance.planning.window_swaps import step_ms
from tests.conftest import samples_of

Batches = list[list[Sample]]

lengths = st.lists(st.one_of(st.integers(1, 40), st.sampled_from([1, 900, 900, 5000])), min_size=1, max_size=60)
compositions = st.sampled_from(
    [InOrder(), GroupByLength(3), Window(1, 2), Window(3, 2), Window(4, 8), ByTargetTokens(300), ByTargetTokens(1)]
)


def shuffled(count: int, seed: int = 1, name: str = "longalign-10k") -> list[Sample]:
    order = np.random.default_rng(seed).permutation(count).tolist()
    return [Sample(i, n, n // 10) for i, n in zip(order, draw(name, count, 0).tolist())]


def ids(batches: Batches) -> list[list[int]]:
    return [[sample.id for sample in batch] for batch in batches]


@settings(max_examples=150, deadline=None)
@given(lengths, st.integers(1, 7), compositions)
def test_every_composition_is_a_permutation_of_the_order(
    values: list[int], batch_size: int, composition: Composition
) -> None:
    order = samples_of(*values)
    batches = composition(order, batch_size, None)
    assert sorted(itertools.chain(*ids(batches))) == list(range(len(order)))
    assert batches == composition(order, batch_size, None)
    assert all(batches)
    if composition.fixed_size:
        assert [len(batch) for batch in batches] == [len(batch) for batch in in_order(order, batch_size, None)]


@settings(max_examples=100, deadline=None)
@given(lengths, st.integers(1, 7), st.integers(1, 5), st.integers(1, 9))
def test_a_window_moves_samples_by_less_than_its_steps_and_never_costs_time(
    values: list[int], batch_size: int, steps: int, dp: int
) -> None:
    order = samples_of(*values)
    strict, batches = in_order(order, batch_size, None), Window(steps, dp)(order, batch_size, None)
    for step, batch in enumerate(batches):
        assert all(sample.id // batch_size // steps == step // steps for sample in batch)
    assert batch_statistics("window", batches, strict).max_displacement < steps
    assert total_ms(batches, dp) <= total_ms(strict, dp) * (1 + 1e-9)


def total_ms(batches: Batches, dp: int) -> float:
    return sum(step_ms(np.array([float(s.length) for s in batch]), dp) for batch in batches)


def test_giants_that_leave_ranks_waiting_come_together() -> None:
    """Four steps with one giant each, two ranks: two steps of two giants take half the time of four."""
    order = samples_of(*[1000, 10, 10, 10] * 4)
    batches = Window(4, dp=2)(order, 4, None)
    assert sorted(sum(s.length == 1000 for s in batch) for batch in batches) == [0, 0, 2, 2]
    assert total_ms(in_order(order, 4, None), 2) == 4 * 1000
    assert total_ms(batches, 2) == 2 * (2020 / 2) + 2 * (40 / 2)
    stats = batch_statistics("window", batches, in_order(order, 4, None))
    assert stats.moved == 4 / 16  # two swaps, no sample more


def test_several_equal_giants_are_moved_at_once() -> None:
    """Eight ranks, two steps with four giants each: no single swap helps, four do."""
    order = samples_of(*[100] * 4, *[1] * 4, *[100] * 4, *[1] * 4)
    batches = Window(2, dp=8)(order, 8, None)
    assert sorted(sum(s.length == 100 for s in batch) for batch in batches) == [0, 8]


def test_costs_decide_in_a_window_and_not_lengths() -> None:
    order = samples_of(*[50] * 8)
    costs = np.array([9.0, 1, 1, 1, 9, 1, 1, 1])
    assert Window(2, 2)(order, 4, None) == in_order(order, 4, None)
    together = {frozenset(batch) for batch in ids(Window(2, 2)(order, 4, costs)) if {0, 4} <= set(batch)}
    assert len(together) == 1


def test_balanced_steps_are_left_alone() -> None:
    order = samples_of(*[100, 90, 110, 95] * 8)
    assert Window(4, 2)(order, 4, None) == in_order(order, 4, None)
    assert Window(4, 2)(order, 4, np.zeros(32)) == in_order(order, 4, None)


def test_equal_giants_are_not_always_collected_by_the_first_step_of_a_window() -> None:
    order = samples_of(*[1000, 10, 10, 10] * 400)
    batches = Window(4, dp=4)(order, 4, None)
    collecting = [step % 4 for step, batch in enumerate(batches) if sum(s.length == 1000 for s in batch) == 4]
    assert len(collecting) == 100
    assert all(10 < collecting.count(place) < 40 for place in range(4))


def test_grouping_by_length_by_hand() -> None:
    """16 samples, batches of 2: megabatches of 2 batches, each sorted; then the longest changes with the first."""
    order = samples_of(5, 1, 8, 3, 7, 2, 6, 4, 15, 11, 16, 13, 9, 12, 10, 14)
    found = [[s.length for s in batch] for batch in GroupByLength()(order, 2, None)]
    assert found == [[16, 5], [3, 1], [7, 6], [4, 2], [8, 15], [13, 11], [14, 12], [10, 9]]
    assert [len(b) for b in GroupByLength()(samples_of(1, 2, 3), 2, None)] == [2, 1]
    assert GroupByLength()([], 2, None) == []


def test_target_tokens_by_hand() -> None:
    """Wish 10: 4 + 4 is nearer than 4 + 4 + 5; 5 + 7 is nearer than 5 alone; 30 stands alone; zeros come along."""
    order = [Sample(i, 50, targets) for i, targets in enumerate([4, 4, 5, 7, 30, 0, 9, 1, 3])]
    assert ids(by_target_tokens(order, 10)) == [[0, 1], [2, 3], [4], [5, 6, 7], [8]]
    assert ids(compose(order, 1, ByTargetTokens(10), tail="drop")) == [[0, 1], [2, 3], [4], [5, 6, 7]]
    assert ids(compose(order, 1, ByTargetTokens(10), tail="fill"))[-1] == [8, 0, 1]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(1, 80))
def test_no_border_could_be_nearer_to_the_wish(targets: list[int], wish: int) -> None:
    order = [Sample(i, 60, n) for i, n in enumerate(targets)]
    batches = by_target_tokens(order, wish)
    for batch, following in itertools.pairwise(batches):
        total = sum(s.targets for s in batch)
        assert abs(total - wish) <= abs(total + following[0].targets - wish)
        before = total - batch[-1].targets
        assert len(batch) == 1 or abs(total - wish) <= abs(before - wish)


@settings(max_examples=100, deadline=None)
@given(lengths, st.integers(1, 7), compositions, st.sampled_from(["drop", "keep", "fill"]))
def test_the_tail_rules(values: list[int], batch_size: int, composition: Composition, tail: Tail) -> None:
    order = samples_of(*values)
    batches = compose(order, batch_size, composition, None, tail)
    found = list(itertools.chain(*ids(batches)))
    assert all(len(set(batch)) == len(batch) for batch in ids(batches))
    if tail == "drop":
        assert len(set(found)) == len(found)
        assert all(composition.is_full(batch, batch_size) for batch in batches[-1:])
        if composition.fixed_size:  # the last of the order, whatever their length
            assert set(found) == set(range(len(order) // batch_size * batch_size))
    else:
        assert set(found) == set(range(len(order)))
    if tail == "keep":
        assert len(found) == len(order)
    if tail == "fill" and composition.fixed_size:
        assert all(len(batch) == min(batch_size, len(order)) for batch in batches)


def test_filling_takes_from_the_start_what_is_not_in_the_batch() -> None:
    assert ids(compose(samples_of(*[5] * 5), 3, in_order, tail="fill")) == [[0, 1, 2], [3, 4, 0]]
    assert ids(compose(samples_of(*[5] * 2), 3, in_order, tail="fill")) == [[0, 1]]


class Counting:
    """Counts how many samples were read."""

    def __init__(self, samples: list[Sample]) -> None:
        self.samples, self.read = samples, 0

    def __iter__(self) -> Iterator[Sample]:
        for sample in self.samples:
            self.read += 1
            yield sample


@settings(max_examples=100, deadline=None)
@given(
    lengths,
    st.integers(1, 7),
    st.sampled_from([InOrder(), Window(1, 2), Window(3, 2), ByTargetTokens(300)]),
    st.sampled_from(["drop", "keep"]),
)
def test_a_stream_gives_the_batches_of_a_list_and_reads_one_window_ahead(
    values: list[int], batch_size: int, composition: Composition, tail: Tail
) -> None:
    order = samples_of(*values)
    costs = np.array([s.length**1.5 for s in order])
    source = Counting(order)
    held, found, yielded = 0, [], 0
    for batch in stream_batches(source, batch_size, composition, lambda s: s.length**1.5, tail):  # type: ignore[arg-type]
        held = max(held, source.read - yielded - (0 if composition.fixed_size else len(batch)))
        yielded += len(batch)
        found.append(batch)
    assert found == compose(order, batch_size, composition, costs, tail)
    if composition.fixed_size:
        assert held <= (composition.block(batch_size) or 0)


def test_a_stream_without_end_can_be_read() -> None:
    endless = (Sample(i, 10 + i % 7, 5) for i in itertools.count())
    assert ids(list(itertools.islice(stream_batches(endless, 2, Window(2, 2)), 1)))[0] == [0, 1]
    assert next(endless).id == 4


def test_a_window_on_public_lengths_balances_with_few_moves() -> None:
    """Far more ranks than suit the batch, the hard case: nearly no waiting left, and batches stay mixed."""
    for name, moved in (("longalign-10k", 0.35), ("chatqa2", 0.5)):
        order = shuffled(3200, name=name)
        strict, batches = in_order(order, 16, None), Window(8, 8)(order, 16, None)
        bound = sum(s.length for s in order) / 8
        assert total_ms(strict, 8) > 1.3 * bound
        assert total_ms(batches, 8) < 1.02 * bound
        stats = batch_statistics("window", batches, strict)
        assert 0 < stats.moved < moved
        assert stats.max_displacement <= 7
        assert stats.correlation < 0.5
        assert abs(stats.neighbours) < 0.2
        alike = batch_statistics("group_by_length", GroupByLength()(order, 16, None), strict)
        assert alike.correlation > 0.95
        assert alike.neighbours > 0.7


def test_statistics_by_hand() -> None:
    short, long = samples_of(10, 10, 1000, 1000)[:2], samples_of(10, 10, 1000, 1000)[2:]
    assert length_correlation([short, long]) == pytest.approx(1)
    # Means equal, so nothing lies between the batches: (0 - MSW) / (0 + MSW).
    assert length_correlation([[short[0], long[0]], [short[1], long[1]]]) == pytest.approx(-1)
    assert length_correlation([short]) == length_correlation([[short[0]], [long[0]]]) == 0
    assert length_correlation([[short[0]] * 2, [short[1]] * 2]) == 0
    assert neighbour_correlation([short, long, short, long]) == pytest.approx(-1)
    assert neighbour_correlation([short, long]) == neighbour_correlation([short, short, short]) == 0
    strict = [samples_of(4, 6, 8, 10)[i : i + 1] for i in range(4)]
    stats = batch_statistics("window", [strict[2], strict[1], strict[0], strict[3]], strict)
    assert (stats.moved, stats.max_displacement, stats.mean_displacement) == (0.5, 2, 1.0)
    assert stats.tokens == Spread.of([4, 6, 8, 10])
    assert (stats.tokens.p50, stats.targets.p50) == (7, 6)
    assert stats.sentences()[0] == "in window mode 50.0 % of samples moved, at most 2 steps"
    assert batch_statistics("strict", strict, strict).sentences()[0] == "in strict mode no sample moved"
    with pytest.raises(InputError, match="at least one batch"):
        batch_statistics("window", [], strict)


def test_random_batches_have_no_length_correlation_and_unequal_sizes_count() -> None:
    order = shuffled(3000)
    assert abs(length_correlation(in_order(order, 10, None))) < 0.02
    ends = [0, 1, 4, 9, 100, 1000, 1003, 3000]
    assert abs(length_correlation([order[a:b] for a, b in itertools.pairwise(ends)])) < 0.05


def test_wrong_compositions_and_costs_are_refused() -> None:
    for make, message in (
        (lambda: Window(0, 2), "steps is 0"),
        (lambda: Window(2, 0), "dp is 0"),
        (lambda: Window(2.5, 1), r"steps is 2\.5, but it must be a whole number"),  # type: ignore[arg-type]
        (lambda: GroupByLength(0), "megabatch_steps is 0"),
        (lambda: ByTargetTokens(0), "target_tokens is 0"),
        (lambda: compose(samples_of(5), 0, in_order), "batch_size is 0"),
        (lambda: compose(samples_of(5), 1, in_order, tail="pad"), "tail is 'pad'; choose one of drop"),  # type: ignore[arg-type]
        (lambda: Window(2, 2)(samples_of(5, 6), 1, np.array([1.0])), r"shape \[1\] for 2 samples"),
        (lambda: Window(2, 2)(samples_of(5, 6), 1, np.array([1.0, np.nan])), "sample 1: its predicted cost is nan"),
        (lambda: Window(2, 2)(samples_of(5, 6), 1, np.array([-1.0, 1.0])), r"sample 0: its predicted cost is -1\.0"),
        (lambda: stream_batches([], 1, GroupByLength()), "needs the whole data set"),
        (lambda: stream_batches([], 1, in_order, tail="fill"), "the start of a stream is gone"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InputError, match=message):
            make()
