"""From step records to summary.json: medians, spreads, speed-ups, imbalances, and the run's own checks.

Speed-ups are ratios of time per target token over the whole run; their spread is that of the steps' ratios.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsebalance.planning.policy import is_ours
from sparsebalance.planning.simulator import imbalance

SCHEMA = 1
LOSS_LIMIT = 1e-5
GRAD_NORM_LIMIT = 1e-4

Record = dict[str, Any]


@dataclass(frozen=True)
class Checks:
    """Strict policies at equal budgets must train exactly like the baseline: largest relative differences."""

    strict_loss_rel_diff_max: float
    strict_grad_norm_rel_diff_max: float
    loss_limit: float = LOSS_LIMIT
    grad_norm_limit: float = GRAD_NORM_LIMIT

    @property
    def passed(self) -> bool:
        return (
            self.strict_loss_rel_diff_max <= self.loss_limit
            and self.strict_grad_norm_rel_diff_max <= self.grad_norm_limit
        )

    def record(self) -> Record:
        return {**vars(self), "passed": self.passed}


def check_strict(records: Sequence[Record], baseline: str, tuned: Sequence[str]) -> Checks:
    """Compare losses and gradient norms of all untuned policies with the baseline's, step by step."""
    loss, norm = [0.0], [0.0]
    for record in records:
        base = record["policies"][baseline]
        for name, policy in record["policies"].items():
            if name not in tuned:
                loss.append(_relative(policy["loss"], base["loss"]))
                norm.append(_relative(policy["grad_norm"], base["grad_norm"]))
    return Checks(float(np.max(loss)), float(np.max(norm)))  # unlike max(), numpy's keeps a NaN, which then fails


def _relative(value: float, base: float) -> float:
    return abs(value - base) / max(abs(base), 1e-12)


def summarise(records: Sequence[Record], names: Sequence[str], tuned: Sequence[str]) -> tuple[dict[str, Record], str]:
    """Per policy the figures of the run, and the name of the fastest baseline.

    Args:
        records: of all steps.
        names: policies; the first is the baseline.
        tuned: those whose budgets differ from the default.
    """
    ms = {name: np.array([r["policies"][name]["step_ms"] for r in records]) for name in names}
    # Every policy trains the same target tokens in a step, so time per target token compares as time.
    baselines = [name for name in names if not is_ours(name)]
    best = min(baselines, key=lambda name: float(ms[name].sum()))
    summary = {}
    for name in names:
        steps = [record["policies"][name] for record in records]
        ratios = ms[names[0]] / ms[name]
        unit_ms = [[[u["forward_ms"] + u["backward_ms"] for u in rank] for rank in step["units"]] for step in steps]
        uneven = [imbalance(ranks) for ranks in unit_ms]
        busy = [sum(step["rank_busy_ms"]) / (_workers(step) * step["step_ms"]) for step in steps]
        error = [abs(step["predicted_step_ms"] / step["step_ms"] - 1) for step in steps]
        planning = [step["planning_ms"] for step in steps]
        memory = [step["peak_memory_mb"] for step in steps]
        summary[name] = {
            "step_ms": float(np.median(ms[name])),
            "step_ms_p10": float(np.quantile(ms[name], 0.1)),
            "step_ms_p90": float(np.quantile(ms[name], 0.9)),
            "speedup_vs_random": float(ms[names[0]].sum() / ms[name].sum()),
            "speedup_vs_random_p10": float(np.quantile(ratios, 0.1)),
            "speedup_vs_random_p90": float(np.quantile(ratios, 0.9)),
            "speedup_vs_best_baseline": float(ms[best].sum() / ms[name].sum()),
            "imbalance": {
                "all": float(np.mean([x.all for x in uneven])),
                "slot": float(np.mean([x.slot for x in uneven])),
                "rank": float(np.mean([x.rank for x in uneven])),
            },
            "busy_fraction": float(np.mean(busy)),
            "bubble": _bubble(steps),
            "coverage": float(np.mean([step["coverage"] for step in steps])),
            "oracle_coverage": float(np.mean([step["oracle_coverage"] for step in steps])),
            "mean_budget": float(np.mean([step["mean_budget"] for step in steps])),
            "loss": float(np.mean([step["loss"] for step in steps])),
            "planning_ms": float(np.median(planning)),
            "planning_share": float(np.sum(planning) / ms[name].sum()),
            "peak_memory_mb": None if None in memory else float(max(memory)),
            "micro_batches": float(np.mean([sum(map(len, step["units"])) for step in steps])),
            "predicted_step_ms": float(np.median([step["predicted_step_ms"] for step in steps])),
            "predictor_error": float(np.median(error)),
            "strict": True,
            "tuned": name in tuned,
            "ours": is_ours(name),
        }
    return summary, best


def _workers(policy: Record) -> int:
    """Data-parallel ranks, or all workers of their pipelines."""
    return len(policy["workers"] if "workers" in policy else policy["rank_busy_ms"])


def _bubble(steps: Sequence[Record]) -> Record | None:
    """Mean share of the pipelines' time that was waited, as planned and as measured; None without pipelines."""
    if not all("bubble" in step for step in steps):
        return None
    return {side: float(np.mean([step["bubble"][side] for step in steps])) for side in ("planned", "measured")}


def in_order(policies: dict[str, Record], records: Sequence[Record], apart: float = 0.02) -> tuple[int, int]:
    """Pairs of policies that the prediction puts in the measured order, of those at least `apart` in total time."""
    measured = {name: sum(r["policies"][name]["step_ms"] for r in records) for name in policies}
    predicted = {name: sum(r["policies"][name]["predicted_step_ms"] for r in records) for name in policies}
    pairs = [(a, b) for a in policies for b in policies if measured[a] < measured[b] * (1 - apart)]
    return sum(predicted[a] < predicted[b] for a, b in pairs), len(pairs)


def slowest_unit_error(records: Sequence[Record]) -> float:
    """Median absolute relative error over the slowest micro-batch of every plan that ran."""
    errors = []
    for record in records:
        for policy in record["policies"].values():
            units = [unit for rank in policy["units"] for unit in rank]
            slowest = max(units, key=lambda unit: unit["forward_ms"] + unit["backward_ms"])
            errors.append(abs(slowest["predicted_ms"] / (slowest["forward_ms"] + slowest["backward_ms"]) - 1))
    return float(np.median(errors))


def unit_errors(records: Sequence[Record]) -> tuple[float, float]:
    """Mean absolute relative error of the predicted latency over every micro-batch that ran.

    None of them is a measuring point of the table: their lengths and packs come from the data. The second
    figure takes out the machine's own drift: each step's predictions are first scaled by the median ratio of
    measured to predicted time in that step.
    """
    raw, at_step_speed = [], []
    for record in records:
        units = [u for p in record["policies"].values() for rank in p["units"] for u in rank if u["tokens"]]
        ratios = np.array([u["predicted_ms"] / (u["forward_ms"] + u["backward_ms"]) for u in units])
        raw.append(np.abs(ratios - 1))
        at_step_speed.append(np.abs(ratios / np.median(ratios) - 1))
    return float(np.mean(np.concatenate(raw))), float(np.mean(np.concatenate(at_step_speed)))
