"""The training loop, top to bottom: lengths -> plan -> micro-batches -> gradients -> measured times -> estimator.

A newcomer learns the system from this file; mechanics live in the modules that it calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from sparsebalance.planning.correction import Correction
from sparsebalance.planning.coverage import mean_coverage
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.pipeline import simulate_plan
from sparsebalance.planning.plan import StepPlan
from sparsebalance.planning.policy import Policy, plan_step
from sparsebalance.planning.schedule import Schedule
from sparsebalance.planning.simulator import imbalance
from sparsebalance.planning.table import LatencyTable
from sparsebalance.planning.table_file import check_same_identity, load_table, save_table
from sparsebalance.planning.timeline import Timeline
from sparsebalance.profiling.measure import Progress
from sparsebalance.training import checkpoint
from sparsebalance.training.books import Books, DataBooks
from sparsebalance.training.checkpoint_writer import CheckpointWriter
from sparsebalance.training.config import OptimizerConfig, RunConfig
from sparsebalance.training.faults import at_step
from sparsebalance.training.feedback import Feedback, Learner
from sparsebalance.training.metrics import MetricsFile, StepRecord
from sparsebalance.training.parallel import Ranks
from sparsebalance.training.records import bubble, probe_record, worker_records
from sparsebalance.training.results import RankResult, as_run, merged, of_replica, of_workers
from sparsebalance.training.sampler import PlanAhead
from sparsebalance.training.saved_plans import saved_plans
from sparsebalance.training.session import Session, configured_policy, open_session


@dataclass(frozen=True)
class Trained:
    """Attributes:
    records: of the steps run, the same on every rank.
    books: what became of the samples; None where no step was left to run.
    stopped: whether it was asked to end before its last step.
    """

    records: list[StepRecord]
    books: DataBooks | None
    stopped: bool = False


def train(
    config: RunConfig,
    ranks: Ranks,
    resume: bool = False,
    on_step: Callable[[StepRecord], None] = lambda record: None,
    announce: Callable[[str], None] = lambda note: None,
    on_measure: Progress | None = None,
    stop: Callable[[], bool] = lambda: False,
    launch: str | None = None,
) -> Trained:
    """Run `config.steps` optimiser steps, from the newest checkpoint under `config.out` if `resume`.

    Args:
        on_step: called on every rank after every step, e.g. for a progress bar.
        on_measure: called with (points done, points in all) where the run measures its latency table.
        announce: called on every rank, before the first step, with what a user should know about data and plan.
        stop: asked on every rank after every step; where one says yes, all end with a checkpoint of that step.
        launch: what its checkpoints say started the run.

    Returns:
        What this call did.

    Raises:
        InputError: the input is wrong, or there is nothing to resume, or a run is there and `resume` is off.
        LostRank: another rank is stuck or gone; names the step and what was waited for.
    """
    session = open_session(config, ranks)
    for note in session.data.report.notes():
        announce(note)
    table, rank_factors = _table_of_run(session, resume, on_measure)
    session = session.staged(table)
    optimizer = make_optimizer(session.engine.named_parameters, config.optimizer)
    learner = Learner(table, Correction(rank_factors), config.balance.correction)
    first, feedback = 0, learner.feedback()
    found = checkpoint.start_from(config.out, resume)
    state = None if found is None else checkpoint.load(found, ranks, session.engine, optimizer)
    if state is not None:
        session.check_same_data(state["data"])
        first = state["step"]
        learner.load_state_dict(state["learner"])
        feedback = Feedback.from_state_dict(state["next_feedback"]).on_ranks(ranks.topology.dp)
    policy, pipeline = _policy_of_run(session, learner, feedback, state, announce), session.pipeline(table)
    saved = saved_plans(session, policy, table, pipeline)

    def make_plan(step: int, known: Feedback) -> tuple[StepPlan, Timeline | None]:
        samples, model = session.batches.at(step), learner.corrected(known)
        plan = saved.plans.get(step)
        if plan is None:
            expected = known.expected(policy.name, samples)
            now = replace(policy, budget=session.budgets.at(step))
            plan = plan_step(samples, model, session.topology, now, known.curves, pipeline, expected)
        plan.validate(samples, config.balance.token_cap)
        timeline = simulate_plan(plan.ranks, model, session.topology, pipeline) if session.topology.pp > 1 else None
        return plan, timeline

    planner = PlanAhead(make_plan)
    books = Books(session, policy, saved)
    metrics = MetricsFile(config.out / "metrics.jsonl", ranks.is_first, first)
    saving = CheckpointWriter(config.out, ranks, session.engine, optimizer, config.keep_last)
    records = []
    try:
        planner.prepare(first, feedback)
        for step in range(first, config.steps):
            with at_step(step):
                (plan, timeline), planning_ms = planner.take(step)
                planned_with, feedback = feedback, learner.feedback()
                if step + 1 < config.steps:  # it is planned before this step's times and coverage are known
                    planner.prepare(step + 1, feedback)
                session.check_same_plan(plan)
                books.add(step, plan)
                schedule = None if timeline is None else timeline.runs[ranks.replica].program.schedule
                measured = run_plan(session.calibrated(planned_with.calibration), plan, step, schedule)
                record = finish_step(
                    session, optimizer, learner, step, plan, timeline, planned_with, measured, planning_ms, policy.tuned
                )
                metrics.write(asdict(record))
                records.append(record)
                on_step(record)
                done = step + 1
                # A signal reaches ranks at different moments: they end after the same step because they agree on it.
                last = any(ranks.gather(stop())) or done == config.steps
                saving.check()
                if last or (config.checkpoint_every and done % config.checkpoint_every == 0):
                    state = {
                        "learner": learner.state_dict(),
                        "next_feedback": feedback.state_dict(),
                        "unit_size": policy.unit_size,
                        "data": session.batches.fingerprint(),
                        "launch": launch,
                    }
                    saving.save(done, state)
            if last:
                break
        saving.finish()
    finally:
        planner.close()
        metrics.close()
        saving.close()
    return Trained(records, books.close(), stopped=first + len(records) < config.steps)


def run_plan(
    session: Session, plan: StepPlan, step: int, schedule: Schedule | None = None
) -> tuple[RankResult, float, float]:
    """Forward, backward and gradient all-reduce of this rank's units; see `Session.run`."""
    attention = session.config.attention
    probing = attention.probe_every and step % attention.probe_every == 0
    return session.run(plan, f"step {step}", attention.probe_rows if probing else 0, schedule)


def finish_step(
    session: Session,
    optimizer: torch.optim.Optimizer,
    learner: Learner,
    step: int,
    plan: StepPlan,
    timeline: Timeline | None,
    planned_with: Feedback,
    measured: tuple[RankResult, float, float],
    planning_ms: float,
    tuned: bool,
) -> StepRecord:
    """Optimiser update, then everything measured on all ranks: learner and metrics see the same on each."""
    norm = session.gradients.clip(session.config.optimizer.clip_norm)
    gathered, times, waited = zip(*session.ranks.gather(measured), strict=True)
    ranks = session.ranks
    workers = of_workers(ranks.by_replica(list(zip(gathered, waited))), ranks.topology.tp)
    results = [of_replica(own) for own in workers]
    loss, busy = sum(result.loss for result in results), [result.busy_ms for result in results]
    if not math.isfinite(loss) or not math.isfinite(norm):
        raise InputError(
            f"step {step}: loss {loss}, gradient norm {norm}; no update was made. "
            "Lower optimizer.lr, or resume from the last checkpoint"
        )
    rate = learning_rate(session.config.optimizer, step, session.config.steps)
    update(optimizer, rate)
    used, probes = as_run(plan, results), merged(result.probes for result in results)
    learner.learn_coverage(plan, probes)
    learner.learn_times([list(zip(units, result.units)) for units, result in zip(plan.ranks, results)])
    if tuned:
        learner.learn_budgets(used)
    curves, correction, step_ms = learner.feedback().curves, planned_with.correction, max(times)
    records = worker_records(plan, learner.corrected(planned_with), workers, timeline)
    return StepRecord(
        step=step,
        policy=plan.policy,
        loss=loss,
        grad_norm=norm,
        learning_rate=rate,
        tokens=sum(unit.tokens for unit in plan.micro_batches),
        targets=plan.targets,
        step_ms=step_ms,
        rank_busy_ms=busy,
        imbalance_rank=imbalance([[ms] for ms in busy]).rank,
        predicted_step_ms=plan.predicted_step_ms,
        bubble=bubble(records, plan.predicted_step_ms, step_ms),
        planning_ms=planning_ms,
        tune_ms=max(result.tune_ms for result in results),
        probe_ms=max(result.probe_ms for result in results),
        mean_budget=used.mean_budget,
        # By the estimator's curves; nothing to say before anything was measured.
        coverage=mean_coverage(used, curves) if curves.values else None,
        probe=probe_record(used, probes),
        rank_factors=list(correction.ranks),
        term_factors=dict(correction.terms),
        workers=records,
    )


def make_optimizer(named: Mapping[str, torch.nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW; vectors (norms, biases) are not decayed."""
    parameters = [p for p in named.values() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2))


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Linear warm-up, then cosine decay to lr * min_lr_ratio at the last of `steps`; a function of the step alone."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps))
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)


def update(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """One optimiser step at learning rate `rate`."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()


def _policy_of_run(
    session: Session,
    learner: Learner,
    feedback: Feedback,
    state: Mapping[str, Any] | None,
    announce: Callable[[str], None],
) -> Policy:
    """The configured policy; a run that goes on keeps the unit size that was chosen when it began."""
    name = session.config.balance.policy
    if state is not None and session.config.balance.unit_size == "auto":
        return configured_policy(session.config, name, state["unit_size"])
    policy = session.policy(name, learner.corrected(feedback))
    if session.config.balance.unit_size == "auto" and policy.unit_size is not None:
        announce(f"micro-batches of up to {policy.unit_size:,} tokens: predicted fastest for the first steps")
    return policy


def _table_of_run(
    session: Session, resume: bool, on_measure: Progress | None
) -> tuple[LatencyTable, tuple[float, ...]]:
    """The run's latency table, kept beside its checkpoints (a resumed run must plan with the same one), and how
    much slower each rank is; a checkpoint knows better."""
    path = session.config.out / "latency_table.json"
    if resume and path.is_file():
        table = load_table(path)
        check_same_identity(table.identity, session.identity)
        return table, (1.0,) * session.topology.dp
    table, factors = session.latency_table(on_measure)
    if session.ranks.is_first:
        save_table(table, path)
    return table, factors
