"""Keeps the books of a run: what became of its samples, and what the composition did to its batches.

In: every step's plan. Out: data.json in the run's directory, the same figures for the terminal, and plans on file for
later runs where that is wished.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from sparsebalance.planning.accounting import Account, Accountant
from sparsebalance.planning.batch_statistics import BatchStatistics, batch_statistics
from sparsebalance.planning.composition import in_order
from sparsebalance.planning.files import write_whole
from sparsebalance.planning.plan import StepPlan
from sparsebalance.planning.policy import Policy
from sparsebalance.training.global_batches import Seen
from sparsebalance.training.saved_plans import SavedPlans
from sparsebalance.training.session import Session

FILE = "data.json"


@dataclass(frozen=True)
class DataBooks:
    """Attributes:
    account: of the steps that this call ran.
    batches: of the same steps, and of those before them in a window that they began inside of, beside strict ones.
    seen: of the whole run.
    """

    account: Account
    batches: BatchStatistics
    seen: Seen

    def sentences(self) -> list[str]:
        return [*self.account.sentences(), *self.remarks()]

    def remarks(self) -> list[str]:
        """What there is to say besides the account."""
        seen = self.seen
        return [
            *(f"{sentence[0].upper()}{sentence[1:]}." for sentence in self.batches.sentences()),
            f"The whole run so far: {seen.epochs:.2f} epochs, {seen.samples:,} samples ({seen.unique_samples:,} "
            f"different ones), {seen.tokens:,} tokens ({seen.unique_tokens:,} different ones).",
        ]

    def record(self) -> dict[str, Any]:
        return {"schema": 1, **asdict(self), "sentences": self.sentences()}


class Books:
    """Of one call of the trainer; every rank feeds it the same plans."""

    def __init__(self, session: Session, policy: Policy, saved: SavedPlans) -> None:
        self._session, self._policy, self._saved = session, policy, saved
        self._accountant = Accountant()
        self._steps: list[int] = []
        self._plans: dict[int, StepPlan] = {}

    def add(self, step: int, plan: StepPlan) -> None:
        """Raises:
        CheckFailed: the plan does not hold each of its samples exactly once.
        """
        self._accountant.add(plan)
        self._steps.append(step)
        if self._saved.path is not None:
            self._plans[step] = plan

    def close(self) -> DataBooks | None:
        """Add up, and write on rank 0; None where no step was run.

        Raises:
            CheckFailed: samples do not add up.
        """
        if not self._steps:
            return None
        session, batches = self._session, self._session.batches
        composed = [batches.at(step) for step in self._steps]
        report = session.data.report
        account = self._accountant.account(
            capacity=self._policy.unit_size or self._policy.token_cap,
            rows_read=report.rows,
            truncated=report.truncated,
            truncated_tokens=report.truncated_tokens,
            dropped=report.dropped,
            dropped_tokens=report.dropped_tokens,
            without_targets=report.without_targets,
            not_used=len(session.data) - len({sample.id for batch in composed for sample in batch}),
        )
        books = DataBooks(account, self._statistics(), batches.seen(self._steps[-1]))
        if session.ranks.is_first:
            write_whole(session.config.out / FILE, json.dumps(books.record(), indent=1) + "\n")
            self._saved.save(self._plans)
        return books

    def _statistics(self) -> BatchStatistics:
        """Of the steps run, against the strict batches of the same steps."""
        batches = self._session.batches
        strict = replace(batches, composition=in_order)
        name = "target-token" if self._session.config.data.target_tokens else self._session.config.balance.mode
        if not batches.composition.fixed_size:
            composed = [batches.at(step) for step in self._steps]
            return batch_statistics(name, composed, composed)
        steps = [*self._same_block(self._steps[0]), *self._steps]
        return batch_statistics(name, [batches.at(step) for step in steps], [strict.at(step) for step in steps])

    def _same_block(self, step: int) -> range:
        """Earlier steps that this one's samples may come from: of its window, or of its epoch where there is none."""
        batches = self._session.batches
        block, (_, place) = batches.composition.block(batches.batch_size), batches.locate(step)
        return range(step - (place if block is None else place % (block // batches.batch_size)), step)
