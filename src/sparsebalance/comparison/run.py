"""Runs every policy's plan of every global batch on the same weights, in rotating order, and times it.

In: a `CompareConfig` and this process's place among the ranks. Out: one record per step (the same on every
rank) with each policy's measured times, loss and gradient norm; and one policy's steps as planned and as they
went. Measured times of a step correct the predictions of the next. After all policies ran a batch, one optimiser
step is taken with the gradients of the first one, so all policies see the same training trajectory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from sparsebalance.planning.correction import Correction
from sparsebalance.planning.imbalance import imbalance
from sparsebalance.planning.latency import LatencyModel
from sparsebalance.planning.pipeline import PipelineModel
from sparsebalance.planning.plan import MicroBatch, Sample, StepPlan
from sparsebalance.planning.policy import Policy, plan_and_timeline
from sparsebalance.planning.table import LatencyTable
from sparsebalance.planning.timeline import Timeline
from sparsebalance.profiling.memory import PeakMemory
from sparsebalance.training.config import CompareConfig
from sparsebalance.training.feedback import Feedback, Learner
from sparsebalance.training.records import bubble, budget_record, chunk_record, probe_record, worker_records
from sparsebalance.training.results import Probes, RankResult, UnitTime, as_run, merged, of_replica, of_workers
from sparsebalance.training.session import Session
from sparsebalance.training.trainer import learning_rate, make_optimizer, update

OnPolicy = Callable[[int, str], None]


@dataclass(frozen=True)
class PolicyStep:
    """What one policy measured in one step, the same on every rank.

    Attributes:
        timeline: simulated, of the plan's pipelines; None without a pipeline.
        workers: results, [data-parallel rank][worker of its pipeline].
    """

    plan: StepPlan
    timeline: Timeline | None
    planning_ms: float
    step_ms: float
    workers: list[list[RankResult]]
    loss: float
    grad_norm: float
    peak_memory_mb: float | None

    @cached_property
    def results(self) -> list[RankResult]:
        """Of the data-parallel ranks."""
        return [of_replica(workers) for workers in self.workers]

    @cached_property
    def used(self) -> StepPlan:
        """The plan with the budgets that its units really used."""
        return as_run(self.plan, self.results)


def run_comparison(
    session: Session,
    config: CompareConfig,
    table: LatencyTable,
    rank_factors: tuple[float, ...],
    begin: float,
    on_policy: OnPolicy = lambda step, policy: None,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns one JSON-compatible record per step, and the last policy's records for the planned-versus-actual page.

    Args:
        rank_factors: how much slower each rank is than the table says.
        begin: `time.perf_counter()` from which the configured time limit counts.
        on_policy: called before a policy runs in a step, e.g. for a progress bar.
    """
    optimizer = make_optimizer(session.engine.named_parameters, config.optimizer)
    learner = Learner(table, Correction(rank_factors), config.balance.correction)
    policies = [session.policy(name, learner.corrected(learner.feedback())) for name in config.policies]
    pipeline = session.pipeline(table)
    records: list[dict[str, Any]] = []
    followed: list[dict[str, Any]] = []
    longest_s = 0.0
    for step in range(config.steps):
        step_begin = time.perf_counter()
        if config.time_limit_s is not None and step:
            late = step_begin - begin + longest_s > config.time_limit_s
            if session.ranks.from_first(late):
                break
        samples = session.batches.at(step)
        known = learner.feedback()
        model = learner.corrected(known)
        plans = [_plan(session, policy, model, samples, known, pipeline) for policy in policies]
        calibrated = session.calibrated(known.calibration)
        # Untimed: measures coverage for everyone, and brings the step's data and code into the caches.
        probes = _probe(calibrated, plans[0][0])
        measured: dict[str, PolicyStep] = {}
        baseline_gradients: dict[str, torch.Tensor] = {}
        for turn in range(len(policies)):
            index = (turn + step) % len(policies)
            plan, timeline, planning_ms = plans[index]
            on_policy(step, plan.policy)
            measured[plan.policy] = _run(calibrated, plan, timeline, planning_ms, step)
            if index == 0:
                baseline_gradients = session.gradients.copies()
        session.gradients.restore(baseline_gradients)
        session.gradients.clip(config.optimizer.clip_norm)
        rate = learning_rate(config.optimizer, step, config.steps)
        update(optimizer, rate)
        learner.learn_coverage(plans[0][0], probes)
        learner.learn_times(_by_rank(measured.values()))
        for policy in policies:
            if policy.tuned:
                learner.learn_budgets(measured[policy.name].used)
        records.append(_record(step, rate, samples, measured, [p.name for p in policies], probes, model))
        followed.append(_planned_record(records[-1], measured[policies[-1].name], known, model))
        longest_s = max(longest_s, time.perf_counter() - step_begin)
    return records, followed


def _plan(
    session: Session,
    policy: Policy,
    model: LatencyModel,
    samples: list[Sample],
    known: Feedback,
    pipeline: PipelineModel,
) -> tuple[StepPlan, Timeline | None, float]:
    begin = time.perf_counter()
    expected = known.expected(policy.name, samples)
    plan, timeline = plan_and_timeline(samples, model, session.topology, policy, known.curves, pipeline, expected)
    planning_ms = (time.perf_counter() - begin) * 1e3
    plan.validate(samples, policy.token_cap)
    session.check_same_plan(plan)
    return plan, timeline if session.topology.pp > 1 else None, planning_ms


def _probe(session: Session, plan: StepPlan) -> Probes:
    rows = session.config.attention.probe_rows
    session.gradients.begin()
    mine = session.engine.probe(plan.ranks[session.ranks.replica], session.data.examples, rows)
    return merged(session.ranks.gather(mine))


def _run(session: Session, plan: StepPlan, timeline: Timeline | None, planning_ms: float, step: int) -> PolicyStep:
    ranks = session.ranks
    schedule = None if timeline is None else timeline.runs[ranks.replica].program.schedule
    ranks.barrier()
    with PeakMemory() as peak:
        measured = session.run(plan, f"step {step}, policy {plan.policy}", schedule=schedule)
    gathered = ranks.gather((*measured, planning_ms, peak.megabytes))
    found, step_ms, waited, planning, memory = zip(*gathered, strict=True)
    workers = of_workers(ranks.by_replica(list(zip(found, waited))), ranks.topology.tp)
    return PolicyStep(
        plan=plan,
        timeline=timeline,
        planning_ms=max(planning),
        step_ms=max(step_ms),
        workers=workers,
        loss=sum(result.loss for own in workers for result in own),
        grad_norm=session.gradients.norm(),
        peak_memory_mb=None if None in memory else max(memory),
    )


def _by_rank(runs: Iterable[PolicyStep]) -> list[list[tuple[MicroBatch, UnitTime]]]:
    """Per rank, the micro-batches of all policies with what they took."""
    ranks = zip(*(list(zip(run.plan.ranks, run.results, strict=True)) for run in runs), strict=True)
    return [[pair for units, result in rank for pair in zip(units, result.units, strict=True)] for rank in ranks]


def _planned_record(record: dict[str, Any], run: PolicyStep, known: Feedback, model: LatencyModel) -> dict[str, Any]:
    """One policy's step in the form of a training run's metrics."""
    own = {key: value for key, value in record["policies"][run.plan.policy].items() if key != "units"}
    return {
        **own,
        "step": record["step"],
        "policy": run.plan.policy,
        "learning_rate": record["learning_rate"],
        "tokens": record["tokens"],
        "targets": record["targets"],
        "imbalance_rank": imbalance([[ms] for ms in own["rank_busy_ms"]]).rank,
        "rank_factors": list(known.correction.ranks),
        "term_factors": dict(known.correction.terms),
        "workers": worker_records(run.plan, model, run.workers, run.timeline),
    }


def _record(
    step: int,
    rate: float,
    samples: list[Sample],
    measured: dict[str, PolicyStep],
    names: list[str],
    probes: Probes,
    model: LatencyModel,
) -> dict[str, Any]:
    return {
        "step": step,
        "learning_rate": rate,
        "tokens": sum(sample.length for sample in samples),
        "targets": sum(sample.targets for sample in samples),
        "samples": [{"id": s.id, "length": s.length, "targets": s.targets} for s in samples],
        "baseline_loss": measured[names[0]].loss,
        "policies": {name: _policy_record(measured[name], probes, model) for name in names},
    }


def _policy_record(run: PolicyStep, probes: Probes, model: LatencyModel) -> dict[str, Any]:
    probe = probe_record(run.used, probes)
    assert probe is not None  # every step of a comparison is probed
    return {
        **_pipeline_record(run, model),
        "step_ms": run.step_ms,
        "rank_busy_ms": [result.busy_ms for result in run.results],
        "all_reduce_ms": [result.all_reduce_ms for result in run.results],
        "loss": run.loss,
        "grad_norm": run.grad_norm,
        "coverage": probe["router"],
        "oracle_coverage": probe["oracle"],
        "probe": probe,
        "mean_budget": run.used.mean_budget,
        "planning_ms": run.planning_ms,
        "tune_ms": max(result.tune_ms for result in run.results),
        "predicted_step_ms": run.plan.predicted_step_ms,
        "peak_memory_mb": run.peak_memory_mb,
        "units": [
            [
                {
                    "lengths": [segment.tokens for segment in unit.segments],
                    "tokens": unit.tokens,
                    "targets": unit.targets,
                    **budget_record(unit, time_),
                    **chunk_record(unit),
                    "predicted_ms": unit.latency.total_ms,
                    "start_ms": time_.start_ms,
                    "backward_start_ms": time_.backward_start_ms,
                    "forward_ms": time_.forward_ms,
                    "backward_ms": time_.backward_ms,
                }
                for unit, time_ in zip(rank, result.units, strict=True)
            ]
            for rank, result in zip(run.plan.ranks, run.results, strict=True)
        ],
    }


def _pipeline_record(run: PolicyStep, model: LatencyModel) -> dict[str, Any]:
    """What a pipeline's workers did, action by action; nothing without one: its units say it all."""
    if run.timeline is None:
        return {}
    workers = worker_records(run.plan, model, run.workers, run.timeline)
    return {
        "bubble": bubble(workers, run.plan.predicted_step_ms, run.step_ms),
        "workers": [{key: value for key, value in worker.items() if key != "units"} for worker in workers],
    }
