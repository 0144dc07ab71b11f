"""Plans that a run writes for later ones with the same data and settings.

In: a run's session, policy and latency table. Out: the plans on file, or none yet, and a way to write them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sparsebalance.planning.pipeline import PipelineModel
from sparsebalance.planning.plan import StepPlan
from sparsebalance.planning.plan_file import PlanKey, fingerprint, load_plans, plan_key, save_plans
from sparsebalance.planning.policy import Policy
from sparsebalance.planning.table import LatencyTable
from sparsebalance.training.session import Session


@dataclass(frozen=True)
class SavedPlans:
    """Attributes:
    path: None where plans are neither read nor written.
    key: what they depend on.
    plans: step -> plan, as read.
    """

    path: Path | None
    key: PlanKey
    plans: Mapping[int, StepPlan]

    def save(self, made: Mapping[int, StepPlan]) -> None:
        """Write what was read and what was made since, if there is anything new."""
        if self.path is not None and set(made) - set(self.plans):
            save_plans(self.path, self.key, {**self.plans, **made})


def saved_plans(session: Session, policy: Policy, table: LatencyTable, pipeline: PipelineModel) -> SavedPlans:
    """Raises:
    InputError: the file is broken, or its plans were made for other data or settings; names what differs.
    """
    config, batches = session.config, session.batches
    key = plan_key(
        data=session.data.fingerprint,
        tokenizer=str(config.data.tokenizer),
        token_cap=policy.token_cap,
        block_size=table.block_size,
        unit_size=policy.unit_size,
        topology=session.topology,
        model=session.identity,
        budget=policy.budget,
        policy=policy,
        batch_size=batches.batch_size,
        seed=batches.seed,
        composition=fingerprint(batches.composition),
        latency=table,
        tail=batches.tail,
        pipeline=pipeline,
        budgets=session.budgets,
    )
    path = config.balance.plans
    return SavedPlans(path, key, load_plans(path, key) if path is not None and path.exists() else {})
