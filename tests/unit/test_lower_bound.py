"""The exact optimum: against hand-worked and enumerated ones, and how near our placement comes to it."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebalance.planning.batching import largest_first, refine
from sparsebalance.planning.errors import CheckFailed, InputError
from sparsebalance.planning.latency import RooflineModel
from sparsebalance.planning.lengths import draw
from sparsebalance.planning.lower_bound import least_makespan
from sparsebalance.planning.plan import Segment
from tests.conftest import samples_of

pytest.importorskip("ortools")


def enumerated(costs: Sequence[float], factors: Sequence[float]) -> float:
    """The least slowest rank over every way to place the items."""
    ranks = range(len(factors))
    return min(
        max(factors[rank] * sum(cost for cost, on in zip(costs, where) if on == rank) for rank in ranks)
        for where in itertools.product(ranks, repeat=len(costs))
    )


def test_the_case_where_largest_first_is_worst() -> None:
    """Graham's example: 7 + 5, 7 + 5, 6 + 6, 4 + 4 + 4 is 12 on every one of 4 ranks; largest first ends at 15."""
    costs = [7.0, 7, 6, 6, 5, 5, 4, 4, 4]
    assert max(sum(costs[i] for i in rank) for rank in largest_first(np.array(costs), np.ones(4))) == 15
    assert least_makespan(costs, 4) == pytest.approx(12, rel=1e-6)


def test_small_sums_split_by_hand() -> None:
    """3 + 3 and 2 + 2 + 2; 3 + 2 twice; 4 + 3 and 3 + 2 + 2; five times 3 has no even split, so three of them."""
    assert least_makespan([3, 3, 2, 2, 2], 2) == pytest.approx(6)
    assert least_makespan([3, 3, 2, 2], 2) == pytest.approx(5)
    assert least_makespan([3, 3, 2, 2, 4], 2) == pytest.approx(7)
    assert least_makespan([3, 3, 3, 3, 3], 2) == pytest.approx(9)


def test_a_slow_rank_is_given_less() -> None:
    """4, 3, 2 on ranks of factor 2 and 1: the slow one with nothing 9, with the 2 it is 4 and 7, with the 3 it is 6
    and 6, with the 4 it is 8."""
    assert least_makespan([4, 3, 2], 2, [2.0, 1.0]) == pytest.approx(6)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.01, 100), min_size=6, max_size=6))
def test_it_equals_the_best_of_all_placements(costs: list[float]) -> None:
    assert least_makespan(costs, 3) == pytest.approx(enumerated(costs, [1.0] * 3), rel=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.one_of(st.just(0.0), st.floats(0.01, 100)), max_size=6),
    st.lists(st.sampled_from((1.0, 1.0, 1.3, 2.5, 1e9)), min_size=1, max_size=3),
)
def test_it_equals_the_best_of_all_placements_on_unequal_ranks(costs: list[float], factors: list[float]) -> None:
    found, best = least_makespan(costs, len(factors), factors), enumerated(costs, factors)
    assert best * (1 - 1e-12) <= found <= best * (1 + 1e-6)


def test_our_placement_is_within_a_percent_of_the_optimum_on_average(roofline: RooflineModel) -> None:
    gaps = []
    for seed in range(60):
        lengths = draw("longalign-10k", 6 + seed % 7, seed).tolist()
        ms = [roofline.latency([Segment.whole(sample)], (32,) * 3).total_ms for sample in samples_of(*lengths)]
        costs, factors = np.array(ms), np.ones(2 + seed % 3)
        ours = max(costs[rank].sum() for rank in refine(largest_first(costs, factors), costs, factors))
        gaps.append(ours / least_makespan(ms, len(factors)) - 1)
    assert min(gaps) >= -1e-12
    assert np.mean(gaps) <= 0.01, f"mean gap {np.mean(gaps):.3%}, largest gap {max(gaps):.3%}"


@pytest.mark.parametrize("size", [0, 1, 3])
def test_few_items(size: int) -> None:
    assert least_makespan([5.0] * size, 3) == (5 if size else 0)
    assert least_makespan([0.0] * size, 2) == 0


def test_wrong_input_is_refused() -> None:
    for costs, ranks, factors, limit_s, message in (
        ([1.0, -2.0], 2, None, 10.0, "cost of item 1 is -2.0"),
        ([float("nan")], 2, None, 10.0, "cost of item 0 is nan"),
        ([1.0], 0, None, 10.0, "ranks is 0"),
        ([1.0], 2, [1.0], 10.0, "1 factors for 2 ranks"),
        ([1.0], 2, [1.0, 0.0], 10.0, r"factor of rank 1 is 0\.0"),
        ([1.0], 2, None, 0.0, "limit_s is 0"),
    ):
        with pytest.raises(InputError, match=message):
            least_makespan(costs, ranks, factors, limit_s)


def test_without_ortools_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(InputError, match=r"ortools is not installed.*pip install ortools"):
        least_makespan([1.0], 2)


def test_an_unproven_optimum_is_no_optimum() -> None:
    costs = np.random.default_rng(0).random(40).tolist()
    with pytest.raises(CheckFailed, match=r"no optimum of 40 items on 4 ranks is proven after 0\.001 s; raise limit_s"):
        least_makespan(costs, 4, limit_s=0.001)


def test_planning_needs_no_ortools() -> None:
    code = "import sys, sparsebalance.planning.lower_bound; assert 'ortools' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
