"""How far a placement is from the best there is: the exact optimum of the slowest rank, for small cases.

In: costs and ranks. Out: the least time in which ranks that share no item can have done them all. Solved by
constraint programming, which needs ortools; nothing else in planning does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from sparsebalance.planning.batching import largest_first, refine
from sparsebalance.planning.errors import CheckFailed, InputError
from sparsebalance.planning.latency import Floats

ACCURACY = 1e-6  # relative, of an optimum over costs rounded to whole numbers


def least_makespan(
    costs: Sequence[float], ranks: int, factors: Sequence[float] | None = None, limit_s: float = 10.0
) -> float:
    """The least possible time of the slowest rank, over all ways to place every item on one rank.

    Args:
        costs: [items] milliseconds on a rank of factor 1, each finite and at least 0.
        ranks: how many there are.
        factors: [ranks], how much slower each rank is; all 1 by default.
        limit_s: seconds that the proof may take: enough for a dozen or two items, hardly for many more.

    Returns:
        Milliseconds, at most 1e-6 (relative) above the optimum, as costs are rounded; never above what
        `largest_first` and `refine` reach.

    Raises:
        InputError: costs, ranks, factors or limit out of range, or ortools is not installed.
        CheckFailed: the limit passed without a proof.
    """
    values = np.asarray(costs, dtype=np.float64)
    slow = np.ones(max(ranks, 0)) if factors is None else np.asarray(factors, dtype=np.float64)
    _check(values, ranks, slow, limit_s)
    solver = _cp_model()
    values = np.sort(values)[::-1]
    slow = np.sort(slow)
    reached = refine(largest_first(values, slow), values, slow)
    upper = _slowest(reached, values, slow)
    # No placement beats work shared out freely, nor the largest item on the fastest rank.
    lower = max(values.sum() / (1 / slow).sum(), values.max(initial=0.0) * slow[0])
    if upper <= lower * (1 + 1e-12):
        return upper
    return min(upper, _slowest(_solve(solver, values, slow, reached, lower, limit_s), values, slow))


def _cp_model() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise InputError(
            "ortools is not installed, but the exact optimum is found with it; install it with `pip install ortools`"
        ) from None
    return cp_model


def _check(costs: Floats, ranks: int, factors: Floats, limit_s: float) -> None:
    for item, cost in enumerate(costs.tolist()):
        if not (math.isfinite(cost) and cost >= 0):
            raise InputError(f"cost of item {item} is {cost}, but it must be finite and at least 0; check the costs")
    if ranks < 1:
        raise InputError(f"ranks is {ranks}, but items need at least 1 rank; raise it")
    if len(factors) != ranks:
        raise InputError(f"{len(factors)} factors for {ranks} ranks; give one factor for each rank")
    for rank, factor in enumerate(factors.tolist()):
        if not (math.isfinite(factor) and factor > 0):
            raise InputError(f"factor of rank {rank} is {factor}, but it must be finite and above 0; 1 is a usual rank")
    if not limit_s > 0:
        raise InputError(f"limit_s is {limit_s}, but a proof takes some time; give more than 0 seconds")


def _slowest(placed: Sequence[Sequence[int]], costs: Floats, factors: Floats) -> float:
    return max(float(costs[list(items)].sum() * factor) for items, factor in zip(placed, factors.tolist()))


def _solve(
    cp_model: Any, costs: Floats, factors: Floats, hint: list[list[int]], lower: float, limit_s: float
) -> list[list[int]]:
    """The best placement of items by falling cost on ranks by rising factor.

    Ranks of one factor are alike, so they are told apart by their first item: one may take an item only after the
    rank before it has taken an earlier one. That leaves one of all the placements that differ by names of ranks.
    """
    items, ranks = range(len(costs)), range(len(factors))
    # Two placements' sums are off by at most half a unit an item each: `items` units, within ACCURACY of the optimum.
    # What takes longer than the hint on a rank is never placed there, so how much longer does not matter.
    times = np.minimum(np.outer(costs, factors), 2 * _slowest(hint, costs, factors))
    scaled = np.rint(times * (len(costs) / (ACCURACY * lower))).astype(np.int64)
    alike = [rank for rank in ranks[1:] if factors[rank] == factors[rank - 1]]
    model = cp_model.CpModel()
    on = [[model.new_bool_var(f"item {i} on rank {r}") for r in ranks] for i in items]
    hint = _named_by_first_item(hint, factors)
    most = max(sum(int(scaled[i, rank]) for i in placed) for rank, placed in enumerate(hint))
    slowest = model.new_int_var(0, most, "slowest")
    for i in items:
        model.add_exactly_one(on[i])
        for rank in alike:
            model.add_bool_or([on[i][rank].negated(), *(on[j][rank - 1] for j in range(i))])
    for rank in ranks:
        model.add(sum(int(scaled[i, rank]) * on[i][rank] for i in items) <= slowest)
        for i in items:
            model.add_hint(on[i][rank], i in hint[rank])
    model.minimize(slowest)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = 1
    if solver.solve(model) != cp_model.OPTIMAL:
        raise CheckFailed(
            f"no optimum of {len(costs)} items on {len(factors)} ranks is proven after {limit_s} s; "
            "raise limit_s or give fewer items"
        )
    return [[i for i in items if solver.boolean_value(on[i][rank])] for rank in ranks]


def _named_by_first_item(placed: list[list[int]], factors: Floats) -> list[list[int]]:
    """The same placement, ranks of one factor in the order of their first items, those without any last."""
    named: list[list[int]] = []
    for _, group in itertools.groupby(range(len(placed)), key=lambda rank: factors[rank]):
        named += sorted((placed[rank] for rank in group), key=lambda items: min(items, default=math.inf))
    return named
