"""Plans that one run writes and another one reads: the same plans, made once; others are refused by what differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparsebalance.planning.errors import InputError
from sparsebalance.planning.plan import StepPlan
from sparsebalance.planning.plan_file import OtherPlans
from sparsebalance.planning.policy import Policy, plan_step
from sparsebalance.training import trainer
from sparsebalance.training.parallel import Ranks
from sparsebalance.training.saved_plans import SavedPlans, saved_plans
from sparsebalance.training.session import Session, open_session
from sparsebalance.training.trainer import train
from tests.models import tiny_config

ALONE = Ranks(0, 1)
KEPT: dict[str, Any] = {
    "parallel": {"dp": 1},
    "attention": {"probe_every": 0},
    "model": {"layers": 1},
}


def changed(folder: Path, **changes: Any) -> Session:
    balance = {"plans": str(folder / "plans.jsonl.gz"), "unit_size": 64, **changes.pop("balance", {})}
    sections = {
        key: {**value, **changes.pop(key, {})} if isinstance(value, dict) else value for key, value in KEPT.items()
    }
    return open_session(tiny_config(folder, balance=balance, **{**sections, **changes}), ALONE)


def opened(session: Session) -> tuple[SavedPlans, list[StepPlan]]:
    """What is on file for a session, and its first two plans, made now."""
    table, _ = session.latency_table()
    policy = policy_of(session)
    plans = [plan_step(session.batches.at(step), table, session.topology, policy) for step in range(2)]
    return saved_plans(session, policy, table, session.pipeline(table)), plans


def policy_of(session: Session) -> Policy:
    return session.policy(session.config.balance.policy, session.latency_table()[0])


def test_plans_come_back_as_they_were_made(tmp_path: Path) -> None:
    saved, plans = opened(changed(tmp_path))
    assert saved.plans == {}
    saved.save(dict(enumerate(plans)))
    again, _ = opened(changed(tmp_path))
    assert again.plans == dict(enumerate(plans))
    assert [plan.digest() for plan in again.plans.values()] == [plan.digest() for plan in plans]
    assert any(unit.segments and not unit.segments[0].is_whole for plan in plans for unit in plan.micro_batches)


def test_new_plans_are_added_and_nothing_is_written_without_any(tmp_path: Path) -> None:
    file = tmp_path / "plans.jsonl.gz"
    saved, plans = opened(changed(tmp_path))
    saved.save({0: plans[0]})
    written = file.read_bytes(), file.stat().st_mtime_ns
    again, _ = opened(changed(tmp_path))
    again.save({0: plans[0]})
    assert (file.read_bytes(), file.stat().st_mtime_ns) == written
    again.save({1: plans[1]})
    assert opened(changed(tmp_path))[0].plans == dict(enumerate(plans))


def test_without_a_file_nothing_is_read_or_written(tmp_path: Path) -> None:
    saved, plans = opened(changed(tmp_path, balance={"plans": None}))
    assert (saved.path, saved.plans) == (None, {})
    saved.save(dict(enumerate(plans)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chat.jsonl", "table.json"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 5}, r"seed \(was 0, is 5\)"),
        ({"data": {"batch_size": 5}}, r"batch size \(was 6, is 5\)"),
        ({"data": {"tail": "keep"}}, r"tail \(was drop, is keep\)"),
        ({"data": {"limit": 20}}, "data "),
        ({"data": {"target_tokens": 50}}, "composition "),
        ({"balance": {"mode": "window"}}, "composition "),
        ({"balance": {"token_cap": 512}}, r"token cap \(was 1024, is 512\)"),
        ({"balance": {"unit_size": 32}}, r"unit size \(was 64, is 32\)"),
        ({"balance": {"keep_chunks": 1}}, "policy "),
        ({"balance": {"threshold": 0.2}}, "policy "),
        ({"balance": {"policy": "sab"}}, "policy "),
        ({"attention": {"budget": 4}}, r"budget \(was 3, is 4\)"),
    ],
    ids=str,
)
def test_plans_made_for_something_else_are_refused(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    saved, plans = opened(changed(tmp_path))
    saved.save({0: plans[0]})
    with pytest.raises(OtherPlans, match=f"plans that were made for something else: .*{named}.*delete it or name"):
        opened(changed(tmp_path, **changes))


def test_what_plans_do_not_depend_on_may_change(tmp_path: Path) -> None:
    saved, plans = opened(changed(tmp_path))
    saved.save({0: plans[0]})
    again, _ = opened(
        changed(tmp_path, steps=9, out=str(tmp_path / "other"), optimizer={"lr": 1e-4}, checkpoint_every=0)
    )
    assert again.plans == {0: plans[0]}


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "plans.jsonl.gz").write_bytes(b"no plans at all")
    with pytest.raises(InputError, match=r"plans\.jsonl\.gz"):
        opened(changed(tmp_path))


def test_a_longer_run_plans_only_what_is_not_on_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same result as a run that plans everything: tuned budgets depend on those of earlier plans."""
    planned: list[int] = []
    honest = trainer.plan_step

    def counted(*arguments: Any) -> StepPlan:
        plan = honest(*arguments)
        planned.append(plan.targets)
        return plan

    monkeypatch.setattr(trainer, "plan_step", counted)

    def run(out: str, steps: int, plans: str | None) -> list[dict[str, Any]]:
        planned.clear()
        path = None if plans is None else str(tmp_path / plans)
        session = changed(tmp_path, out=str(tmp_path / out), steps=steps, balance={"plans": path})
        return [
            {"loss": record.loss, "mean_budget": record.mean_budget, "predicted": record.predicted_step_ms}
            for record in train(session.config, ALONE).records
        ]

    first = run("first", 3, "plans.jsonl.gz")
    assert len(planned) == 3
    longer = run("longer", 5, "plans.jsonl.gz")
    assert len(planned) == 2
    straight = run("straight", 5, None)
    assert len(planned) == 5
    assert longer == straight
    # The learning rate falls over other numbers of steps, so only the first losses are alike.
    assert [step["predicted"] for step in first] == [step["predicted"] for step in straight[:3]]
    assert run("again", 5, "plans.jsonl.gz") == straight
    assert planned == []
