"""Tuned and fixed budgets on real steps, for `benchmarks/tuning.py`.

Trains nothing: two processes with one thread each run every contender's plan of the same global batches of real
samples on the same weights, in an order that rotates from step to step. First some steps are probed only, so that
coverage is known before anything is timed. Probes go on, outside of the timed runs: they say what the budgets that
were really used cover, and planning knows those of earlier steps alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from chunked_records import Run, timed_units
from chunked_step import check_same_gradient, in_turn, run_plan
from sparsebalance.planning.correction import Correction
from sparsebalance.planning.coverage import CoverageCurves, mean_coverage
from sparsebalance.planning.imbalance import imbalance
from sparsebalance.planning.plan import StepPlan
from sparsebalance.planning.policy import Policy, plan_step
from sparsebalance.planning.table import LatencyTable
from sparsebalance.training.config import CompareConfig
from sparsebalance.training.feedback import Feedback, Learner
from sparsebalance.training.records import probe_record
from sparsebalance.training.results import Probes, as_run, merged
from sparsebalance.training.session import Session, configured_policy

NAMES = ("random", "dst", "kk_tokens", "sab", "sab+anchor", "sab+slack", "sab_dst")
WARM_UP = 4  # global batches that are probed before the first timed one
LEAST_STEPS = 2


@dataclass(frozen=True)
class Tuned:
    """One contender in one step, the same on every rank.

    Attributes:
        planning_ms: of the rank that took longest. tune_ms: of the rank that spent most on tuning while it ran.
        used: the plan with the budgets that its units really used.
        coverage: by the router's choice at those budgets, as probed. expected_coverage: of those budgets, by the
            curves that the step was planned with.
    """

    run: Run
    planning_ms: float
    tune_ms: float
    used: StepPlan
    coverage: float
    expected_coverage: float


Step = dict[str, Tuned]  # by contender


def contenders(config: CompareConfig) -> dict[str, Policy]:
    """By the name that the tables use, which plans carry too: each learns from its own budgets alone."""
    size = config.balance.unit_size
    assert isinstance(size, int)
    found = {name: configured_policy(config, name, size) for name in NAMES}
    found["sab_dst online"] = replace(found["sab_dst"], name="sab_dst online", timing="online")
    return found


def run_steps(
    session: Session, table: LatencyTable, factors: tuple[float, ...], end: float, on_turn: Callable[[], None]
) -> tuple[list[Step], Learner]:
    """All contenders on one global batch after the other, at least two, until no more would be done at `end`.

    Raises:
        CheckFailed: the loss or gradient norm of a contender with fixed budgets is not that of `random`.
    """
    assert isinstance(session.config, CompareConfig)
    policies = contenders(session.config)
    fixed = [name for name, policy in policies.items() if not policy.tuned]
    learner, pipeline = Learner(table, Correction(factors), True), session.pipeline(table)

    def planned(policy: Policy, step: int, known: Feedback) -> tuple[StepPlan, float]:
        samples, model = session.batches.at(step), learner.corrected(known)
        begin = time.perf_counter()
        expected = known.expected(policy.name, samples)
        plan = plan_step(samples, model, session.topology, policy, known.curves, pipeline, expected)
        took = (time.perf_counter() - begin) * 1e3
        plan.validate(samples, policy.token_cap)
        session.check_same_plan(plan)
        return plan, max(session.ranks.gather(took))

    for step in range(WARM_UP):
        plan = planned(policies["random"], step, learner.feedback())[0]
        run = run_plan(session, plan, f"warm-up {step}")
        learner.learn_coverage(plan, probed(session, plan))
        learner.learn_times([timed_units([run], rank) for rank in range(session.ranks.world)])
        on_turn()
    names, longest_s = list(policies), 0.0
    steps: list[Step] = []
    while len(steps) < LEAST_STEPS or not session.ranks.from_first(time.perf_counter() + longest_s > end):
        begin, place = time.perf_counter(), len(steps)
        known = learner.feedback()
        plans = {name: planned(policy, WARM_UP + place, known) for name, policy in policies.items()}
        calibrated = session.calibrated(known.calibration)
        probes = probed(calibrated, plans["random"][0])  # untimed; the step's data is then in the caches
        if not steps:  # the largest micro-batch once untimed: its memory is then there for all
            largest = max(plans, key=lambda name: max(unit.tokens for unit in plans[name][0].micro_batches))
            run_plan(calibrated, plans[largest][0], "first")
        runs = {}
        for name in in_turn(names, place):
            runs[name] = run_plan(calibrated, plans[name][0], f"step {place}, {name}")
            on_turn()
        check_same_gradient({name: runs[name] for name in fixed})
        steps.append({name: tuned(runs[name], plans[name][1], probes, known.curves) for name in names})
        learner.learn_coverage(plans["random"][0], probes)
        learner.learn_times([timed_units(runs.values(), rank) for rank in range(session.ranks.world)])
        for name, policy in policies.items():
            if policy.tuned:
                learner.learn_budgets(steps[-1][name].used)
        longest_s = max(longest_s, time.perf_counter() - begin)
    return steps, learner


def probed(session: Session, plan: StepPlan) -> Probes:
    """Coverage of all samples of a plan, on every rank."""
    rows = session.config.attention.probe_rows
    return merged(
        session.ranks.gather(session.engine.probe(plan.ranks[session.ranks.replica], session.data.examples, rows))
    )


def tuned(run: Run, planning_ms: float, probes: Probes, curves: CoverageCurves) -> Tuned:
    used = as_run(run.plan, run.results)
    record = probe_record(used, probes)
    assert record is not None  # every step is probed
    tune_ms = max(result.tune_ms for result in run.results)
    return Tuned(run, planning_ms, tune_ms, used, record["router"], mean_coverage(used, curves))


def step_rows(steps: Sequence[Step], policies: Mapping[str, Policy]) -> list[dict[str, Any]]:
    """One row per contender; speed-ups are ratios of total time over the same steps."""
    measured = {name: np.array([step[name].run.step_ms for step in steps]) for name in policies}
    cpu = {name: np.array([step[name].run.cpu_ms for step in steps]) for name in policies}
    base = float(np.mean([step["random"].coverage for step in steps]))
    rows = []
    for name, policy in policies.items():
        own = [step[name] for step in steps]
        each = [[[unit.total_ms for unit in result.units] for result in one.run.results] for one in own]
        uneven = [imbalance(ranks) for ranks in each]
        low, middle, high = np.quantile(measured[name], (0.1, 0.5, 0.9)).tolist()
        ratios = measured["random"] / measured[name]
        planning, tuning = (float(np.median([getattr(one, key) for one in own])) for key in ("planning_ms", "tune_ms"))
        coverage = float(np.mean([one.coverage for one in own]))
        rows.append(
            {
                "kind": "measured",
                "what": "steps",
                "distribution": "real",
                "variant": name,
                "policy": policy.name,
                "timing": policy.timing if policy.tuned else None,
                "unit_size": policy.unit_size,
                "steps": len(steps),
                "imbalance": float(np.mean([one.all for one in uneven])),
                "imbalance_slot": float(np.mean([one.slot for one in uneven])),
                "imbalance_rank": float(np.mean([one.rank for one in uneven])),
                "ms": middle,
                "ms_p10": low,
                "ms_p90": high,
                "predicted_ms": float(np.median([one.run.plan.predicted_step_ms for one in own])),
                "speedup_vs_random": float(measured["random"].sum() / measured[name].sum()),
                "speedup_vs_random_p10": float(np.quantile(ratios, 0.1)),
                "speedup_vs_random_p90": float(np.quantile(ratios, 0.9)),
                "cpu_ms": float(np.median(cpu[name])),
                "cpu_speedup_vs_random": float(cpu["random"].sum() / cpu[name].sum()),
                "planning_ms": planning,
                "planning_share": planning / middle,
                "tune_ms": tuning,
                "tune_share": tuning / middle,
                "overhead_ms": planning + tuning,
                "mean_budget": float(np.mean([one.used.mean_budget for one in own])),
                "coverage": coverage,
                "expected_coverage": float(np.mean([one.expected_coverage for one in own])),
                "coverage_change": coverage / base - 1,
            }
        )
    return rows


def record(session: Session, table: LatencyTable, steps: Sequence[Step], learner: Learner) -> dict[str, Any]:
    """Settings and rows, as the first process writes them."""
    config, correction = session.config, learner.feedback().correction
    assert isinstance(config, CompareConfig)
    settings = {
        "processes": session.ranks.world,
        "threads": config.parallel.threads,
        "layers": table.layers,
        "hidden": table.identity.decoder.hidden,
        "block_size": table.block_size,
        "budget": config.attention.budget,
        "batch_size": config.data.batch_size,
        "unit_size": config.balance.unit_size,
        "warm_up": WARM_UP,
        "steps": len(steps),
        "lengths": [sample.length for step in range(len(steps)) for sample in session.batches.at(WARM_UP + step)],
        "term_factors": dict(correction.terms),
        "rank_factors": list(correction.ranks),
    }
    return {"settings": settings, "rows": step_rows(steps, contenders(config))}
