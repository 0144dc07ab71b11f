"""Chains + costs -> schedule, by greedy list scheduling in simulated time; split backwards fill the bubbles.

In: the units of one rank and what they cost on each stage (one stage per worker). Out: a `Schedule` that is the
record of a run that took place, so it cannot block. Milliseconds and megabytes.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from sparsebalance.planning.errors import InputError
from sparsebalance.planning.schedule import Action, Kind, Schedule, backward_order, check_sizes
from sparsebalance.planning.simulator import StageCosts

Rows = list[list[float]]  # [stages][units]

ROUNDING = 1e-9  # sums that end exactly at a cap are rounded


def zero_bubble(
    chains: Sequence[int],
    costs: StageCosts,
    transfer_ms: Sequence[float] | None = None,
    cap_mb: float | None = None,
) -> Schedule:
    """Greedy schedule with split backwards, in the peak memory of 1F1B or within `cap_mb`; see `list_schedule`.

    Input gradients, which other stages wait for, run as soon as they can; weight gradients, which nobody waits for,
    fill the bubbles (Qi et al. 2023, Zero Bubble Pipeline Parallelism, section 2). For equal units with F = I = W, not
    fewer than stages, the bubble is that of the paper's ZB-H1, (stages - 1) (F + I - W), a third of that of 1F1B, or
    one forward more where the number of units is odd and that of stages even, or the other way round. Being greedy, it
    can lose to 1F1B where I and W differ much; simulate both where that matters.
    """
    return list_schedule(chains, costs, split=True, transfer_ms=transfer_ms, cap_mb=cap_mb)


def list_schedule(
    chains: Sequence[int],
    costs: StageCosts,
    split: bool,
    transfer_ms: Sequence[float] | None = None,
    live_units: Sequence[float] | None = None,
    cap_mb: float | None = None,
) -> Schedule:
    """Each worker that is free runs what it has, in this order: the next backward, the next forward, a weight gradient.

    Forwards go in unit order, backwards chain after chain in reverse chunk order. The caps cannot block it: a stage
    at its cap has room for a whole chain, so the chain whose backward is next gets all its forwards.

    Args:
        chains: lengths of consecutive runs of units.
        costs: of all stages and units.
        split: I and W instead of B.
        transfer_ms: [units], time from a stage to its neighbour; 0 if not given.
        live_units: [stages], most units that a stage holds at a time. F takes 1 and B releases it; I and W release
            half of it each. By default every stage may hold what the first one holds in chunk-aware 1F1B, stages - 1 +
            the longest chain; without this cap if `cap_mb` is given.
        cap_mb: most megabytes of activations and state on a stage, counted as in `StageCosts`.

    Raises:
        InputError: nonsense chains, sizes that disagree, bad times, both caps, or a cap below what one chain needs.
    """
    chains = check_sizes(chains, costs.stages)
    units = sum(chains)
    transfer = [0.0] * units if transfer_ms is None else [float(ms) for ms in transfer_ms]
    if units != costs.units or units != len(transfer):
        raise InputError(
            f"{units} units in chains, costs of {costs.units}, {len(transfer)} transfers: these must agree"
        )
    if not all(0 <= ms < float("inf") for ms in transfer):
        raise InputError(f"transfer_ms lies between {min(transfer)} and {max(transfer)}; it must be finite and >= 0")
    if cap_mb is None:
        memory = _unit_caps(chains, costs, split, live_units)
    elif live_units is None:
        memory = _mb_cap(chains, costs, split, cap_mb)
    else:
        raise InputError("live_units and cap_mb are both given; a schedule has one kind of cap")
    return _run(chains, costs, split, transfer, memory)


@dataclass(frozen=True)
class _Memory:
    """Amounts that the actions take and release on each stage, [stages][units], and per stage the most to hold and
    what forwards leave free of it."""

    taken: Rows
    by_backward: Rows
    by_weight: Rows
    caps: list[float]
    room: list[float]


def _unit_caps(chains: tuple[int, ...], costs: StageCosts, split: bool, live_units: Sequence[float] | None) -> _Memory:
    stages, units, longest = costs.stages, costs.units, max(chains)
    caps = [float(stages - 1 + longest)] * stages if live_units is None else [float(cap) for cap in live_units]
    if len(caps) != stages or not min(caps) >= longest:
        raise InputError(f"live_units is {caps}; it needs {stages} values of at least {longest}, the longest chain")
    later = 0.5 if split else 0.0
    return _Memory(
        taken=[[1.0] * units] * stages,
        by_backward=[[1.0 - later] * units] * stages,
        by_weight=[[later] * units] * stages,
        caps=[cap + ROUNDING for cap in caps],
        room=[0.0] * stages,
    )


def _mb_cap(chains: tuple[int, ...], costs: StageCosts, split: bool, cap_mb: float) -> _Memory:
    heads = [0, *accumulate(chains)][:-1]
    state = np.add.reduceat(costs.state_mb, heads, axis=1)
    # Room for an input gradient that leaves more than it releases, once weight gradients are done.
    room = np.maximum(costs.deferred_mb - costs.activation_mb, 0.0).max(1) if split else np.zeros(costs.stages)
    needed = float(((np.add.reduceat(costs.activation_mb, heads, axis=1) + state).max(1) + room).max())
    if not cap_mb >= needed:
        raise InputError(f"cap_mb is {cap_mb}, but one chain alone holds {needed:.6g} MB on a stage; raise the cap")
    taken = costs.activation_mb.copy()
    taken[:, heads] += state
    by_weight = costs.deferred_mb if split else np.zeros_like(taken)
    caps = [cap_mb * (1.0 + ROUNDING)] * costs.stages
    return _Memory(taken.tolist(), (taken - by_weight).tolist(), by_weight.tolist(), caps, room.tolist())


def _run(chains: tuple[int, ...], costs: StageCosts, split: bool, transfer: list[float], memory: _Memory) -> Schedule:
    stages, units = costs.stages, costs.units
    never = float("inf")
    backward_ms = costs.input_ms if split else costs.input_ms + costs.weight_ms
    backward_kind: Kind = "I" if split else "B"
    took = {"F": costs.forward_ms.tolist(), backward_kind: backward_ms.tolist(), "W": costs.weight_ms.tolist()}
    # When the input of a forward or a backward is there; one place more per stage, where there is no next unit.
    input_at: Rows = [[never] * (units + 1) for _ in range(stages)]
    input_at[0][:units] = [0.0] * units
    gradient_at: Rows = [[never] * (units + 1) for _ in range(stages)]
    backwards = [*backward_order(chains), units]
    forward_count, backward_count, weight_count = [0] * stages, [0] * stages, [0] * stages
    held, free = [0.0] * stages, [0.0] * stages
    free_mb = [cap - room for cap, room in zip(memory.caps, memory.room)]  # for forwards
    actions: list[list[Action]] = [[] for _ in range(stages)]
    events = [(0.0, stage) for stage in range(stages)]  # times at which a stage may have something new to run
    while events:
        now, stage = heapq.heappop(events)
        if free[stage] > now:
            continue
        unit = backwards[backward_count[stage]]
        forward = forward_count[stage]
        pending = split and weight_count[stage] < backward_count[stage]
        # Weight gradients make room for an input gradient that leaves more than it releases.
        fits = held[stage] - memory.by_backward[stage][min(unit, units - 1)] <= memory.caps[stage] or not pending
        if gradient_at[stage][unit] <= now and fits:
            kind: Kind = backward_kind
            end = now + took[kind][stage][unit]
            backward_count[stage] += 1
            held[stage] -= memory.by_backward[stage][unit]
            if stage > 0:
                arrival = end + transfer[unit]
                gradient_at[stage - 1][unit] = arrival
                heapq.heappush(events, (arrival, stage - 1))
        elif input_at[stage][forward] <= now and held[stage] + memory.taken[stage][forward] <= free_mb[stage]:
            kind, unit = "F", forward
            end = now + took[kind][stage][unit]
            forward_count[stage] += 1
            held[stage] += memory.taken[stage][unit]
            if stage < stages - 1:
                arrival = end + transfer[unit]
                input_at[stage + 1][unit] = arrival
                heapq.heappush(events, (arrival, stage + 1))
            else:
                gradient_at[stage][unit] = end
        elif pending:
            kind, unit = "W", backwards[weight_count[stage]]
            end = now + took[kind][stage][unit]
            weight_count[stage] += 1
            held[stage] -= memory.by_weight[stage][unit]
        else:
            continue
        actions[stage].append(Action(kind, unit, stage))
        free[stage] = end
        heapq.heappush(events, (end, stage))
    return tuple(tuple(own) for own in actions)
