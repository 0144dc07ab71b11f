"""The account of samples adds up, finds what is lost, and says what happened in words."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from sparsebalance.planning.accounting import Account, Share, account
from sparsebalance.planning.baselines import BASELINES
from sparsebalance.planning.errors import CheckFailed
from sparsebalance.planning.plan import Latency, MicroBatch, Sample, Segment, StepPlan, Topology
from sparsebalance.planning.policy import OURS, named_policy, plan_step
from sparsebalance.reporting.accounting import account_figure, account_section, account_table, print_account
from sparsebalance.reporting.page import write_page
from tests.unit.test_latency import make_table

CAP = 1024


def unit(*segments: Segment) -> MicroBatch:
    return MicroBatch(segments, (4,), Latency(1.0, 2.0))


def step_plan(*ranks: Sequence[MicroBatch]) -> StepPlan:
    return StepPlan("made up", Topology(dp=len(ranks)), 16, tuple(map(tuple, ranks)), 3.0)


def whole(sample: int, length: int, targets: int = 1) -> Segment:
    return Segment(sample, 0, length, length, targets)


# 1 and 2 share a unit, 3 is alone, 4 is cut in three chunks, and a rank of the second step has nothing.
FIRST = step_plan(
    [unit(whole(1, 30), whole(2, 50, 20)), unit(whole(3, 90, 0))],
    [unit(Segment(4, 0, 96, 250, 0)), unit(Segment(4, 96, 192, 250, 5)), unit(Segment(4, 192, 250, 250, 58))],
)
SECOND = step_plan([unit(whole(5, 10))], [unit()])
THIRD = step_plan([unit(whole(5, 10), whole(3, 90, 0))], [unit(whole(1, 30))])  # the next epoch

TWO_STEPS = account([FIRST, SECOND], capacity=100, rows_read=8, dropped=1, dropped_tokens=400, not_used=2)


def test_a_hand_made_run_is_counted_by_fate() -> None:
    found = TWO_STEPS
    assert (found.steps, found.samples, found.tokens, found.targets) == (2, 5, 430, 85)
    assert found.packed == Share(2, 1, 80)
    assert found.alone == Share(2, 2, 100)
    assert found.cut == Share(1, 3, 250)
    assert (found.chunks, found.empty, found.micro_batches, found.repeats) == (3, 1, 6, 0)
    # 80, 90, 96, 96, 58 and 10 tokens of 100
    assert found.fill_mean == pytest.approx(430 / 600)
    assert found.fill_p10 == pytest.approx(0.34)  # half way from 10 to 58
    assert found.fill_bins == (0, 1, 0, 0, 0, 1, 0, 0, 1, 3)


def test_repeats_are_counted_apart() -> None:
    found = account(iter([FIRST, SECOND, THIRD]), capacity=100, rows_read=5)
    assert (found.samples, found.tokens, found.targets) == (5, 430, 85)
    assert (found.repeats, found.repeated_tokens, found.repeated_targets) == (3, 130, 2)
    assert found.packed == Share(4, 2, 180)
    assert found.alone == Share(3, 3, 130)


def test_a_chunk_that_shares_a_unit_with_whole_samples_is_counted_as_cut() -> None:
    plan = step_plan([unit(Segment(1, 0, 64, 80, 0)), unit(Segment(1, 64, 80, 80, 9), whole(2, 8), whole(3, 9))])
    found = account([plan], capacity=64, rows_read=3)
    assert (found.packed, found.cut, found.alone) == (Share(2, 1, 17), Share(1, 1, 80), Share())
    assert (found.chunks, found.micro_batches) == (2, 2)


def test_a_unit_over_the_capacity_counts_as_full() -> None:
    assert account([step_plan([unit(whole(1, 300))])], capacity=100, rows_read=1).fill_bins[-1] == 1


def test_rows_that_are_unaccounted_for_are_found() -> None:
    with pytest.raises(CheckFailed, match=r"7 rows were read and 1 of them dropped, which leaves 6, but 5 .* 0 not"):
        account([FIRST, SECOND], capacity=100, rows_read=7, dropped=1)
    with pytest.raises(CheckFailed, match="5 samples are planned and 1 not used"):
        account([FIRST, SECOND], capacity=100, rows_read=5, not_used=1)
    with pytest.raises(CheckFailed, match=r"6 cannot be truncated"):
        account([FIRST, SECOND], capacity=100, rows_read=5, truncated=6)
    with pytest.raises(CheckFailed, match="-1 dropped"):
        account([FIRST, SECOND], capacity=100, rows_read=5, dropped=-1, not_used=1)
    with pytest.raises(CheckFailed, match="no sample of 9 read is planned"):
        account([], capacity=100, rows_read=9)


@pytest.mark.parametrize(
    "units",
    [
        [unit(Segment(4, 0, 96, 250, 0)), unit(Segment(4, 112, 250, 250, 0))],  # a hole
        [unit(Segment(4, 0, 96, 250, 0)), unit(Segment(4, 80, 250, 250, 0))],  # twice
        [unit(Segment(4, 0, 96, 250, 0))],  # no end
        [unit(Segment(4, 96, 250, 250, 0))],  # no beginning
        [unit(whole(4, 250)), unit(whole(4, 250))],
    ],
)
def test_an_incomplete_sample_is_found(units: list[MicroBatch]) -> None:
    with pytest.raises(CheckFailed, match=r"step 1 plans tokens \[.* of sample 4, which has 250: each must be"):
        account([SECOND, step_plan(units)], capacity=100, rows_read=2)


@pytest.mark.parametrize("other", [whole(5, 11), whole(5, 10, 2)])
def test_ids_that_mean_two_samples_are_found(other: Segment) -> None:
    with pytest.raises(CheckFailed, match=r"sample 5 has 1\d tokens and . targets in step 1, but 10 and 1 in an earli"):
        account([SECOND, step_plan([unit(other)])], capacity=100, rows_read=1)


def test_the_sentences_say_what_happened_and_nothing_else() -> None:
    assert account([FIRST, SECOND], capacity=100, rows_read=5).sentences() == [
        "5 samples became 6 micro-batches: 2 packed in 1, 1 cut in 3 chunks, 2 alone; none was lost "
        "(0 dropped, 0 truncated).",
        "430 tokens, 85 of them targets, in 2 steps; micro-batches are 72% full on average, the emptiest tenth at most "
        "34% (of 100 tokens).",
        "1 empty micro-batch: ranks without a sample in a step.",
    ]
    alone = account([step_plan([unit(whole(1, 30))])], capacity=100, rows_read=1).sentences()
    assert alone[0] == "1 sample became 1 micro-batch: 1 alone; none was lost (0 dropped, 0 truncated)."
    assert len(alone) == 2
    lost = account(
        [FIRST, SECOND, THIRD],
        capacity=100,
        rows_read=9,
        truncated=1,
        truncated_tokens=1,
        dropped=2,
        dropped_tokens=4000,
        without_targets=1,
        not_used=2,
    ).sentences()
    assert lost[0] == (
        "5 samples, planned 8 times in all, became 8 micro-batches: 4 packed in 2, 1 cut in 3 chunks, 3 alone; "
        "of 9 rows read, 2 dropped (4,000 tokens) and 1 truncated (1 token cut off)."
    )
    assert lost[1].startswith("560 tokens, 87 of them targets, in 3 steps;")
    assert lost[2:] == [
        "2 samples not used: in no batch of the steps planned.",
        "3 repeats of samples, by later epochs or to fill a batch: 130 tokens beside the 430 planned once.",
        "1 sample without a target token, training nothing.",
        "1 empty micro-batch: ranks without a sample in a step.",
    ]


lengths = st.lists(st.one_of(st.integers(1, 40), st.integers(1, CAP)), min_size=2, max_size=16)


@pytest.mark.parametrize("unit_size", [None, 64, 256])
@pytest.mark.parametrize("name", [*BASELINES, *OURS])
@settings(max_examples=8, deadline=None)
@given(sizes=lengths, dp=st.integers(1, 3), left=st.integers(0, 3), again=st.booleans())
def test_counts_add_up_for_every_policy(
    name: str, unit_size: int | None, sizes: list[int], dp: int, left: int, again: bool
) -> None:
    data = [Sample(7 * i, length, length // 2) for i, length in enumerate(sizes)]
    steps = [data[::2], data[1::2]] + ([data] if again else [])
    policy = named_policy(name, budget=3, token_cap=CAP, unit_size=unit_size)
    plans = [plan_step(samples, make_table(), Topology(dp=dp), policy) for samples in steps]
    found = account(plans, capacity=unit_size or CAP, rows_read=len(data) + left, not_used=left)
    shares = (found.alone, found.packed, found.cut)
    assert found.samples == len(data)
    assert found.repeats == (len(data) if again else 0)
    assert sum(share.samples for share in shares) == found.samples + found.repeats
    assert sum(share.tokens for share in shares) == found.tokens + found.repeated_tokens
    assert found.tokens == sum(sizes)
    assert found.targets == sum(sample.targets for sample in data)
    assert found.targets + found.repeated_targets == sum(plan.targets for plan in plans)
    assert found.micro_batches + found.empty == sum(len(plan.micro_batches) for plan in plans)
    assert sum(found.fill_bins) == found.micro_batches
    assert found.chunks >= 2 * found.cut.samples
    assert found.alone.samples == found.alone.micro_batches
    assert found.packed.samples >= 2 * found.packed.micro_batches
    if name in ("random", "kk_tokens", "dst") or (name in OURS and unit_size is None):
        assert found.cut == Share()
    elif name in ("sab", "sab_dst") and unit_size is not None:
        assert found.cut.samples == (1 + again) * sum(length > unit_size for length in sizes)


def shown(found: Account) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    print_account(console, found)
    return console.export_text()


def test_the_table_fits_a_terminal_and_shows_the_counts() -> None:
    found = account([FIRST, SECOND, THIRD], capacity=100, rows_read=7, dropped=2, dropped_tokens=4000)
    text = shown(found)
    assert max(map(len, text.splitlines())) <= 80
    rows = {re.split(r"  +", line.strip())[0]: re.findall(r"[\d,]+", line) for line in text.splitlines()}
    assert rows["packed"] == ["4", "2", "180"]
    assert rows["alone"] == ["3", "3", "130"]
    assert rows["cut in chunks"] == ["1", "3", "250"]
    assert rows["planned"] == ["8", "8", "560"]
    assert rows["of these repeats"] == ["3", "130"]
    assert rows["dropped"] == ["2", "4,000"]
    assert "became 8 micro-batches" in text
    assert list(account_table(TWO_STEPS).columns[0].cells) == [
        "packed", "alone", "cut in chunks", "planned", "truncated", "dropped", "not used",
    ]  # fmt: skip


def test_the_page_section_shows_every_fate(tmp_path: Path) -> None:
    found = replace(TWO_STEPS, truncated=3, truncated_tokens=77)
    fates, fill = account_figure(found).data
    assert dict(zip(fates.y, fates.x)) == {
        "packed": 2, "alone": 2, "cut in chunks": 1, "not used": 2, "truncated": 3, "dropped": 1,
    }  # fmt: skip
    assert "77 tokens cut off" in fates.hovertext[4]
    assert list(fill.y) == list(found.fill_bins)
    assert list(fill.x) == [5, 15, 25, 35, 45, 55, 65, 75, 85, 95]
    assert fill.hovertext[-1] == "3 micro-batches, 90% and more full"
    heading, text, _ = account_section(found)
    write_page(tmp_path / "page.html", "test", "", [account_section(found)])
    page = (tmp_path / "page.html").read_text()
    assert f"<h2>{heading}</h2>" in page
    assert f"<p>{text}</p>" in page
    assert "5 samples became 6 micro-batches" in text
