"""What the contenders of `benchmarks/chunked_step.py` did in each step -> flat records.

In: per step, each contender's plan with its measured times, memory, loss and gradient norm. Out: a row per contender,
and rows that tell by term where the latency table is off, for chunks, packs and whole samples apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsebalance.planning.imbalance import imbalance
from sparsebalance.planning.latency import TERMS, unit_terms
from sparsebalance.planning.plan import MicroBatch, StepPlan
from sparsebalance.planning.policy import Policy
from sparsebalance.planning.table import LatencyTable
from sparsebalance.training.results import RankResult, UnitTime

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One contender in one step, the same on every rank.

    Attributes:
        cpu_ms: processor time of the rank that used most; without what other programs took from it.
        memory_mb: peak of the fullest rank, everything included.
    """

    plan: StepPlan
    results: list[RankResult]
    step_ms: float
    cpu_ms: float
    memory_mb: float | None
    loss: float
    grad_norm: float


Step = dict[str, Run]  # by contender


def relative_differences(step: Step) -> tuple[dict[str, float], dict[str, float]]:
    """By contender, of loss and of gradient norm, to random's."""
    base = step["random"]
    return (
        {name: abs(run.loss / base.loss - 1) for name, run in step.items()},
        {name: abs(run.grad_norm / base.grad_norm - 1) for name, run in step.items()},
    )


def timed_units(runs: Iterable[Run], rank: int) -> list[tuple[MicroBatch, UnitTime]]:
    """Of one rank, all its micro-batches in these runs with what they took."""
    return [pair for run in runs for pair in zip(run.plan.ranks[rank], run.results[rank].units, strict=True)]


def step_rows(steps: Sequence[Step], policies: Mapping[str, Policy]) -> list[Row]:
    """One row per contender; speed-ups are ratios of total time over the same steps."""
    measured = {name: np.array([step[name].step_ms for step in steps]) for name in policies}
    predicted = {name: np.array([step[name].plan.predicted_step_ms for step in steps]) for name in policies}
    total = {name: float(ms.sum()) for name, ms in measured.items()}
    best = min((name for name, policy in policies.items() if policy.name != "sab"), key=lambda name: total[name])
    differences = [relative_differences(step) for step in steps]
    base_cpu = sum(step["random"].cpu_ms for step in steps)
    rows = []
    for name, policy in policies.items():
        runs = [step[name] for step in steps]
        busy = [[[result.busy_ms] for result in run.results] for run in runs]
        memory = [run.memory_mb for run in runs if run.memory_mb is not None]
        speedup = total["random"] / total[name]
        promised = float(predicted["random"].sum() / predicted[name].sum())
        low, middle, high = np.quantile(measured[name], (0.1, 0.5, 0.9)).tolist()
        rows.append(
            {
                "kind": "measured",
                "what": "steps",
                "contender": name,
                "policy": policy.name,
                "unit_size": policy.unit_size,
                "keep_chunks": policy.keep_chunks,
                "steps": len(steps),
                "step_ms": middle,
                "step_ms_p10": low,
                "step_ms_p90": high,
                "predicted_step_ms": float(np.median(predicted[name])),
                "speedup_vs_random": speedup,
                "speedup_vs_best_baseline": total[best] / total[name],
                "best_baseline": best,
                "cpu_ms": float(np.median([run.cpu_ms for run in runs])),
                "cpu_speedup_vs_random": base_cpu / sum(run.cpu_ms for run in runs),
                "predicted_speedup_vs_random": promised,
                "speedup_error": promised / speedup - 1,
                "step_error_median": float(np.median(np.abs(predicted[name] / measured[name] - 1))),
                "imbalance_rank": float(np.mean([imbalance(ranks).rank for ranks in busy])),
                "micro_batches": float(np.mean([len(run.plan.micro_batches) for run in runs])),
                "peak_memory_mb": max(memory, default=None),
                "loss_rel_diff_max": max(loss[name] for loss, _ in differences),
                "grad_norm_rel_diff_max": max(norm[name] for _, norm in differences),
            }
        )
    return rows


def unit_kind(unit: MicroBatch) -> str:
    """What sort of micro-batch it is, as far as its time may depend on that."""
    first = unit.segments[0]
    if len(unit.segments) > 1:
        return "pack"
    if first.is_whole:
        return "sample"
    return ("first" if first.start == 0 else "later") + (" chunk, recomputed" if unit.recompute else " chunk")


def term_rows(steps: Sequence[Step], policies: Mapping[str, Policy], table: LatencyTable) -> list[Row]:
    """Where predictions are off: per unit size and kind of micro-batch, each term's total time as the uncorrected
    table says and as measured, forward and backward apart."""
    found: dict[tuple[int | None, str], list[tuple[MicroBatch, UnitTime]]] = {}
    for step in steps:
        for name, run in step.items():
            for rank in range(len(run.results)):
                for unit, took in timed_units([run], rank):
                    if unit.segments:
                        found.setdefault((policies[name].unit_size, unit_kind(unit)), []).append((unit, took))
    rows = []
    for (size, kind), pairs in sorted(found.items(), key=lambda item: (item[0][0] or 10**9, item[0][1])):
        predicted = [unit_terms(table, unit) for unit, _ in pairs]
        for term in TERMS:
            rows.append(
                {
                    "kind": "measured",
                    "what": "terms",
                    "unit_size": size,
                    "unit": kind,
                    "term": term,
                    "units": len(pairs),
                    "mean_tokens": float(np.mean([unit.tokens for unit, _ in pairs])),
                    "table_forward_ms": sum(getattr(terms, term).forward_ms for terms in predicted),
                    "table_backward_ms": sum(getattr(terms, term).backward_ms for terms in predicted),
                    "forward_ms": sum(took.forward[term] for _, took in pairs),
                    "backward_ms": sum(took.backward[term] for _, took in pairs),
                }
            )
    return rows
