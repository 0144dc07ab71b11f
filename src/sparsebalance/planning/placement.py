"""Items with costs -> ranks, so that the slowest rank is done as early as possible.

In: [items] costs in milliseconds on a rank of factor 1, and [ranks] factors, how much slower each rank is. Out: per
rank, the places of its items. Pure; n log n in the number of items while ranks are alike.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from sparsebalance.planning.latency import Floats

TOLERANCE = 1e-3  # relative; a slowest rank this near to what cannot be beaten is left as it is
EXACT_ITEMS = 16  # two ranks that hold no more are shared out anew in the best of all ways
PARTNERS = 16  # ranks that the slowest one tries to exchange items with, the fastest first
LEAST_GAIN = 1e-9  # relative; less is rounding


def largest_first(costs: Floats, factors: Floats) -> list[list[int]]:
    """Deal items by falling cost, each to the rank that is then done first (the lowest rank among equals).

    Source: Graham 1969, Bounds on multiprocessing timing anomalies; on ranks of unequal speed Gonzalez et al. 1977.

    Args:
        costs: [items] milliseconds on a rank of factor 1. factors: [ranks], how much slower each rank is.
    """
    placed: list[list[int]] = [[] for _ in factors]
    order = np.argsort(-costs, kind="stable").tolist()
    if len(set(factors.tolist())) == 1:  # then the rank that is done first is the least loaded one
        heap = [(0.0, rank) for rank in range(len(placed))]
        for item, cost in zip(order, costs[order].tolist()):
            load, rank = heap[0]
            placed[rank].append(item)
            heapq.heapreplace(heap, (load + cost, rank))
        return placed
    loads = np.zeros(len(factors))
    for item in order:
        done = loads + costs[item] * factors
        rank = int(np.argmin(done))
        placed[rank].append(item)
        loads[rank] = done[rank]
    return placed


def refine(ranks: Sequence[Sequence[int]], costs: Floats, factors: Floats) -> list[list[int]]:
    """Lower the slowest rank by exchanging items with another one, the fastest that helps, until none does.

    Few items of two ranks are shared out anew in the best of all ways; of many, one is moved or two are swapped so that
    both ranks are done as nearly together as that can be. Stops where the slowest rank is within `TOLERANCE` of the
    mean or of the largest item, which no placement beats.
    """
    placed = [list(rank) for rank in ranks]
    slowness: list[float] = factors.tolist()
    loads = np.array([costs[rank].sum() for rank in placed]) * factors
    bound = max(costs.sum() / (1 / factors).sum(), costs.max(initial=0.0) * factors.min())
    for _ in range(100 + 4 * len(placed)):
        slow = int(np.argmax(loads))
        if loads[slow] <= bound * (1 + TOLERANCE):
            break
        for fast in np.argsort(loads, kind="stable")[:PARTNERS].tolist():
            if fast == slow:
                continue
            few = len(placed[slow]) + len(placed[fast]) <= EXACT_ITEMS
            exchange = _best_split if few else _best_swap
            found = exchange(placed[slow], placed[fast], costs, slowness[slow], slowness[fast])
            after = costs[found[0]].sum() * slowness[slow], costs[found[1]].sum() * slowness[fast]
            if max(after) < loads[slow] * (1 - LEAST_GAIN):
                (placed[slow], placed[fast]), (loads[slow], loads[fast]) = found, after
                break
        else:
            break
    return placed


def _best_split(
    slow: list[int], fast: list[int], costs: Floats, slow_factor: float, fast_factor: float
) -> tuple[list[int], list[int]]:
    """The items of both ranks, over all ways to share them out the one whose later rank is done first.

    The subsets of one half of the items, by rising sum, meet those of the other half, by falling sum, around an even
    split (meet in the middle; Horowitz and Sahni 1974). In plain lists: the arrays would be too short to pay.
    """
    items = slow + fast
    middle = len(items) // 2
    own = costs[items].tolist()
    left, right = _subset_sums(own[:middle]), _subset_sums(own[middle:])
    rising = sorted(range(len(left)), key=left.__getitem__)
    falling = sorted(range(len(right)), key=right.__getitem__, reverse=True)
    total = left[-1] + right[-1]
    best, kept = float("inf"), (0, 0)
    i = j = 0
    while i < len(rising) and j < len(falling):
        ms = left[rising[i]] + right[falling[j]]
        slow_ms, fast_ms = ms * slow_factor, (total - ms) * fast_factor
        later = max(slow_ms, fast_ms)
        if later < best:
            best, kept = later, (rising[i], falling[j])
        if slow_ms > fast_ms:
            j += 1
        else:
            i += 1
    keep = kept[0] | kept[1] << middle
    return [x for n, x in enumerate(items) if keep >> n & 1], [x for n, x in enumerate(items) if not keep >> n & 1]


def _subset_sums(values: Sequence[float]) -> list[float]:
    """Sums of all subsets; bit n of a place tells whether value n is in it."""
    sums = [0.0]
    for value in values:
        sums += [value + other for other in sums]
    return sums


def _best_swap(
    slow: list[int], fast: list[int], costs: Floats, slow_factor: float, fast_factor: float
) -> tuple[list[int], list[int]]:
    """One item given for one or for none, so that what changes hands is nearest to what would make both ranks equal."""
    give, take = costs[slow], np.append(costs[fast], 0.0)  # taking nothing makes the swap a move
    ideal = (give.sum() * slow_factor - take.sum() * fast_factor) / (slow_factor + fast_factor)
    order = np.argsort(take, kind="stable")
    above = np.searchsorted(take[order], give - ideal)
    near = order[np.stack([np.maximum(above - 1, 0), np.minimum(above, len(take) - 1)])]
    side, given = divmod(int(np.argmin(np.abs(give - take[near] - ideal))), len(slow))
    taken = int(near[side, given])
    returned = fast[taken : taken + 1]
    return [*slow[:given], *slow[given + 1 :], *returned], [*fast[:taken], *fast[taken + 1 :], slow[given]]
