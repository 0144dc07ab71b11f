"""The books of a run: every sample is accounted for, over epochs, tails, truncation and resumed windows."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparsebalance.planning.errors import CheckFailed
from sparsebalance.planning.plan import StepPlan
from sparsebalance.planning.plan_file import PlanKey
from sparsebalance.planning.policy import Policy, plan_step
from sparsebalance.training.books import Books
from sparsebalance.training.parallel import Ranks
from sparsebalance.training.saved_plans import SavedPlans
from sparsebalance.training.session import Session, configured_policy, open_session
from tests.models import document_rows, tiny_config, write_rows

NOT_SAVED = SavedPlans(None, PlanKey(()), {})


def opened(folder: Path, **changes: Any) -> Session:
    (folder / "run").mkdir(parents=True)
    session = open_session(tiny_config(folder, parallel={"dp": 1}, **changes), Ranks(0, 1))
    return session


def policy_of(session: Session, unit_size: int | None = 64) -> Policy:
    return configured_policy(session.config, "sab", unit_size)


def plan_of(session: Session, step: int, policy: Policy) -> StepPlan:
    table, _ = session.latency_table()
    return plan_step(session.batches.at(step), table, session.topology, policy)


def kept(session: Session, steps: Iterable[int], saved: SavedPlans = NOT_SAVED) -> Books:
    policy = policy_of(session)
    books = Books(session, policy, saved)
    for step in steps:
        books.add(step, plan_of(session, step, policy))
    return books


def test_two_and_a_half_epochs_add_up(tmp_path: Path) -> None:
    """24 samples in batches of 6, 10 steps: 60 samples, of which 24 are different ones."""
    session = opened(tmp_path)
    books = kept(session, range(10)).close()
    assert books is not None
    account, seen, samples = books.account, books.seen, session.data.samples()
    tokens = [sum(s.length for s in session.batches.at(step)) for step in range(10)]
    assert (account.steps, account.rows_read, account.samples, account.not_used) == (10, 24, 24, 0)
    assert account.repeats == 36
    assert account.tokens == sum(s.length for s in samples) == seen.unique_tokens
    assert account.tokens + account.repeated_tokens == sum(tokens) == seen.tokens
    assert account.targets == sum(s.targets for s in samples)
    assert (seen.samples, seen.unique_samples, seen.epochs) == (60, 24, 2.5)
    assert account.capacity == 64  # the unit size, not the cap
    longer = sum(s.length > 64 for step in range(10) for s in session.batches.at(step))
    assert account.cut.samples == longer > 0
    assert account.alone.samples + account.packed.samples + longer == 60
    assert account.truncated == account.dropped == 0
    written = json.loads((session.config.out / "data.json").read_text())
    assert written == json.loads(json.dumps(books.record()))
    assert written["schema"] == 1
    assert written["sentences"][-1].startswith("The whole run so far: 2.50 epochs, 60 samples (24 different ones), ")
    assert any("none was lost (0 dropped, 0 truncated)" in sentence for sentence in written["sentences"])


def test_a_resumed_run_accounts_for_its_own_steps_and_has_seen_all(tmp_path: Path) -> None:
    session = opened(tmp_path)
    books = kept(session, range(6, 8)).close()
    assert books is not None
    assert (books.account.steps, books.account.samples, books.account.not_used) == (2, 12, 12)
    assert (books.seen.samples, books.seen.unique_samples, books.seen.epochs) == (48, 24, 2.0)


@pytest.mark.parametrize(
    ("on_long", "truncated", "dropped", "samples"), [("truncate", 2, 0, 7), ("drop", 0, 2, 5)], ids=["cut", "drop"]
)
def test_truncated_and_dropped_samples_are_counted_with_their_tokens(
    on_long: str, truncated: int, dropped: int, samples: int, tmp_path: Path
) -> None:
    """Two documents of 302 and 402 tokens over a limit of 200."""
    write_rows(tmp_path / "chat.jsonl", document_rows(20, 300, 50, 400, 30, 10, 60))
    session = opened(tmp_path, data={"max_length": 200, "on_long": on_long, "batch_size": 2, "tail": "keep"})
    books = kept(session, range(session.batches.batches_in(0))).close()
    assert books is not None
    account = books.account
    assert (account.rows_read, account.samples, account.not_used) == (7, samples, 0)
    assert (account.truncated, account.truncated_tokens) == (truncated, truncated and 302 - 200 + 402 - 200)
    assert (account.dropped, account.dropped_tokens) == (dropped, dropped and 302 + 402)
    assert account.repeats == 0
    lost = "2 truncated (304 tokens cut off)" if truncated else "2 dropped (704 tokens)"
    assert any(lost in sentence for sentence in account.sentences())


@pytest.mark.parametrize(("tail", "not_used", "repeats"), [("drop", 1, 0), ("keep", 0, 0), ("fill", 0, 2)])
def test_the_tail_is_accounted_for(tail: str, not_used: int, repeats: int, tmp_path: Path) -> None:
    write_rows(tmp_path / "chat.jsonl", document_rows(20, 30, 50, 40, 30, 10, 60))
    session = opened(tmp_path, data={"batch_size": 3, "tail": tail})
    books = kept(session, range(session.batches.batches_in(0))).close()
    assert books is not None
    assert (books.account.not_used, books.account.repeats) == (not_used, repeats)
    assert books.account.samples == 7 - not_used
    assert books.seen.unique_samples == 7 - not_used
    assert books.seen.epochs == 1.0


@pytest.mark.parametrize("steps", [range(8), range(3, 11), range(1, 2), range(5, 16)], ids=str)
def test_samples_move_less_than_a_window_wherever_a_run_starts(steps: range, tmp_path: Path) -> None:
    """Windows of 2 steps, epochs of 4; a run that goes on inside of one still knows where its samples came from."""
    lengths = [400 if i % 5 == 0 else 20 + i for i in range(24)]
    write_rows(tmp_path / "chat.jsonl", document_rows(*lengths))
    session = opened(tmp_path, balance={"mode": "window", "window": 2, "window_ranks": 2})
    books = kept(session, steps).close()
    assert books is not None
    assert books.batches.name == "window"
    assert books.batches.max_displacement < 2
    assert books.account.steps == len(steps)
    if len(steps) > 2:
        assert books.batches.moved > 0


def test_other_compositions_have_their_names(tmp_path: Path) -> None:
    grouped = kept(opened(tmp_path / "a", balance={"mode": "group_by_length"}), range(4)).close()
    targets = kept(opened(tmp_path / "b", data={"target_tokens": 60}), range(3)).close()
    strict = kept(opened(tmp_path / "c"), range(4)).close()
    assert grouped is not None
    assert targets is not None
    assert strict is not None
    assert [books.batches.name for books in (grouped, targets, strict)] == [
        "group_by_length", "target-token", "strict",
    ]  # fmt: skip
    assert grouped.batches.moved > 0
    assert strict.batches.moved == targets.batches.moved == 0


def test_a_lost_sample_is_found(tmp_path: Path) -> None:
    session = opened(tmp_path)
    policy = configured_policy(session.config, "random")
    plan = plan_of(session, 0, policy)
    books = Books(session, policy, NOT_SAVED)
    books.add(0, replace(plan, ranks=(plan.ranks[0][:-1],)))
    with pytest.raises(CheckFailed, match="the samples do not add up"):
        books.close()
    assert not (session.config.out / "data.json").exists()


def test_an_incomplete_sample_is_found(tmp_path: Path) -> None:
    session = opened(tmp_path)
    plan = plan_of(session, 0, policy_of(session, 16))
    assert len(plan.ranks[0]) > 6
    with pytest.raises(CheckFailed, match="each must be planned exactly once"):
        kept(session, ()).add(0, replace(plan, ranks=(plan.ranks[0][1:],)))


def test_rank_0_alone_writes_and_without_a_step_nobody_does(tmp_path: Path) -> None:
    session = opened(tmp_path)
    file = session.config.out / "data.json"
    assert kept(session, ()).close() is None
    assert not file.exists()
    other = kept(replace(session, ranks=Ranks(1, 2)), ())
    for step in range(2):
        other.add(step, plan_of(session, step, policy_of(session)))
    assert other.close() == kept(session, range(2)).close()
    assert file.exists()


def test_plans_are_kept_only_where_they_are_to_be_saved(tmp_path: Path) -> None:
    session = opened(tmp_path)
    saved = SavedPlans(tmp_path / "plans.jsonl.gz", PlanKey((("seed", "0"),)), {})
    kept(session, range(2)).close()
    assert not (tmp_path / "plans.jsonl.gz").exists()
    kept(session, range(2), saved).close()
    assert (tmp_path / "plans.jsonl.gz").exists()
