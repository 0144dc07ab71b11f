"""All topologies of a number of devices, judged by their best strict plan; what cannot be is skipped with its reason.

In: sample lengths, a scenario whose topology is replaced, the number of devices. Out: one `Choice` per topology.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from sparsebalance.planner.forecast import (
    Batches,
    Row,
    best_unit_size,
    check_static,
    forecast,
    global_batches,
    recommend,
    variants_of,
)
from sparsebalance.planner.scenario import Scenario
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.lengths import Lengths
from sparsebalance.planning.plan import Topology

POLICIES = ("random", "kk_tokens", "dense_chunks", "sab")


@dataclass(frozen=True)
class Choice:
    """One topology.

    Attributes:
        topology: parallel degrees.
        row: its best row; None where it was skipped.
        tokens_per_s: trained tokens per second and device.
        skipped: why there is no row, else empty.
        pareto: no other topology is both faster and needs less memory.
    """

    topology: Topology
    row: Row | None
    tokens_per_s: float
    skipped: str
    pareto: bool = False


def topologies(devices: int) -> Iterator[Topology]:
    """Every (dp, pp, tp, sp) whose product is `devices`, most data parallel first."""
    for dp in _divisors(devices):
        for pp in _divisors(devices // dp):
            for tp in _divisors(devices // dp // pp):
                yield Topology(dp, pp, tp, devices // dp // pp // tp)


def _divisors(n: int) -> list[int]:
    return [d for d in range(n, 0, -1) if n % d == 0]


def sweep(
    lengths: Lengths,
    scenario: Scenario,
    devices: int,
    batch_size: int,
    steps: int,
    token_cap: int,
    unit_sizes: Sequence[int | None],
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Choice]:
    """Forecast every topology on the same global batches.

    Args:
        progress: called with (topologies so far, in all).

    Raises:
        InputError: no topology can be used; names the most frequent reason.
    """
    wanted = list(topologies(devices))
    batches = global_batches(lengths, batch_size, 1, steps, seed)
    tokens = sum(sample.length for batch in batches for sample in batch) / len(batches)
    choices = []
    for number, topology in enumerate(wanted):
        choices.append(_judge(scenario, topology, batches, batch_size, token_cap, unit_sizes, tokens / devices))
        progress(number + 1, len(wanted))
    found = [choice for choice in choices if choice.row is not None]
    if not found:
        reason, count = Counter(choice.skipped for choice in choices).most_common(1)[0]
        raise InputError(
            f"none of {len(choices)} topologies of {devices} devices can be used; {count} of them because {reason}"
        )
    return [replace(choice, pareto=_on_front(choice, found)) for choice in choices]


def _judge(
    scenario: Scenario,
    topology: Topology,
    batches: Batches,
    batch_size: int,
    token_cap: int,
    unit_sizes: Sequence[int | None],
    tokens: float,
) -> Choice:
    device = scenario.device
    try:
        if topology.dp > batch_size:
            raise InputError(f"dp {topology.dp} is more than the {batch_size} samples of a global batch")
        if device is not None and topology.tp * topology.sp > device.devices_per_node:
            raise InputError(
                f"tp {topology.tp} x sp {topology.sp} does not fit in a node of {device.devices_per_node} devices"
            )
        placed = replace(scenario, topology=topology)
        check_static(placed)
        size = best_unit_size(batches, placed, unit_sizes, token_cap)
        rows = forecast(batches, variants_of(placed, POLICIES, [size]), token_cap).rows
        row = recommend(rows, scenario.capacity_mb).row
    except InputError as error:
        return Choice(topology, None, 0.0, str(error))
    return Choice(topology, row, tokens / row.step_ms * 1e3, "")


def _on_front(choice: Choice, found: Sequence[Choice]) -> bool:
    row = choice.row
    if row is None:
        return False
    return not any(
        other.row is not None
        and (other.row.step_ms, other.row.peak_memory_mb) != (row.step_ms, row.peak_memory_mb)
        and other.row.step_ms <= row.step_ms
        and other.row.peak_memory_mb <= row.peak_memory_mb
        for other in found
    )
