"""The planned-versus-actual page, trace and table say what the step records hold, and the reasons are right."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from sparsebalance.planning.accounting import Account, account
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.plan import Latency, MicroBatch, Segment, StepPlan, Topology
from sparsebalance.reporting.accounting import account_of
from sparsebalance.reporting.planned.command import report, write_planned_page, write_planned_trace
from sparsebalance.reporting.planned.page import headline
from sparsebalance.reporting.planned.reasons import candidates, explain
from sparsebalance.reporting.planned.records import TERMS, Step, parse_step, read_run
from sparsebalance.reporting.planned.timeline import COLORS, HALVES, measured_bars, planned_bars, timeline
from sparsebalance.reporting.planned.totals import run_figures, verdict
from sparsebalance.reporting.planned.trace import chosen, trace_events

SHARES = {"linear": 0.5, "router": 0.05, "attend": 0.4, "head": 0.05}


def times(start: float, total: float, terms: dict[str, float] | None = None) -> dict[str, Any]:
    """A third of it forward."""
    split = terms or {name: share * total for name, share in SHARES.items()}
    return {"start_ms": start, "forward_ms": total / 3, "backward_ms": 2 * total / 3, "terms": split}


def unit(planned: float, measured: float, lengths: list[int] | None = None) -> dict[str, Any]:
    """Start times are set by `step_record`. Without `lengths`, two samples; with a planned 0, an empty unit."""
    found = ([round(6 * planned), round(4 * planned)] if lengths is None else lengths) if planned else []
    return {
        "lengths": found,
        "tokens": sum(found),
        "targets": sum(found) // 10,
        "budgets": [8, 8] if planned else [],
        "planned": times(0.0, planned),
        "measured": times(0.0, measured),
    }


def step_record(
    ranks: list[list[dict[str, Any]]], step: int = 0, exchange: float = 0.0, outside: float = 0.0, pause: float = 0.0
) -> dict[str, Any]:
    """Units one after another on every rank; the all-reduce takes `exchange` once the slowest rank is there."""
    ranks = json.loads(json.dumps(ranks))  # a unit that is used twice becomes two
    ends: dict[str, list[float]] = {}
    for side in ("planned", "measured"):
        for units in ranks:
            start = 0.0
            for index, entry in enumerate(units):
                start += pause if side == "measured" and index and units is ranks[0] else 0.0
                entry[side]["start_ms"] = start if entry["tokens"] else 0.0
                start += entry[side]["forward_ms"] + entry[side]["backward_ms"]
            ends.setdefault(side, []).append(start)
    slowest = max(ends["measured"])
    return {
        "step": step,
        "policy": "sab_dst",
        "loss": 5.0,
        "step_ms": slowest + exchange + outside,
        "predicted_step_ms": max(ends["planned"]) + exchange,
        "planning_ms": 3.0,
        "rank_factors": [1.0] * len(ranks),
        "term_factors": dict.fromkeys(TERMS, 1.0),
        "workers": [
            {"rank": rank, "stage": 0, "all_reduce_ms": slowest - ends["measured"][rank] + exchange, "units": units}
            for rank, units in enumerate(ranks)
        ],
    }


def parsed(ranks: list[list[dict[str, Any]]], **more: Any) -> Step:
    return parse_step(step_record(ranks, **more), "it")


def run_of(steps: int, ranks: int, seed: int = 0, slow_from: int = 12, terms: bool = True) -> list[dict[str, Any]]:
    """A run on a noisy machine: rank 1 is 1.5x slower from `slow_from` on, and the correction follows.

    Units go to the rank that is planned to finish first, longest first; costs are a table's, times its correction.
    """
    rng = np.random.default_rng(seed)
    factors, term_factors = np.ones(ranks), dict.fromkeys(TERMS, 1.0)
    truth = {"linear": 1.05, "router": 1.1, "attend": 0.93, "head": 1.0}
    records = []
    for step in range(steps):
        speed = np.ones(ranks)
        if step >= slow_from and ranks > 1:
            speed[1] = 1.5
        speed *= rng.normal(1.0, 0.015) * (1.15 if step == 5 else 1.0)
        samples = np.sort(np.clip(rng.lognormal(7.6, 0.9, 7 * ranks), 60, 30000).astype(int))[::-1]
        ends, lists = np.zeros(ranks), [[] for _ in range(ranks)]
        costs = []
        for length in samples:
            budget = int(rng.integers(6, 12))
            table = {
                "linear": 0.045 * length,
                "router": 2e-7 * length**2 + 0.3,
                "attend": 0.0042 * length * budget,
                "head": 0.006 * length,
            }
            base = sum(table[name] * term_factors[name] for name in TERMS)
            rank = int(np.argmin(ends + base * factors))
            ends[rank] += base * factors[rank]
            costs.append((rank, length, budget, table))
        for index, (rank, length, budget, table) in enumerate(costs):
            planned = {name: table[name] * term_factors[name] * factors[rank] for name in TERMS}
            odd = 1.9 if (step, index) == (20, 1) else 1.0
            measured = {
                name: table[name]
                * truth[name]
                * speed[rank]
                * float(rng.normal(1, 0.03))
                * (odd if name == "attend" else 1.0)
                for name in TERMS
            }
            entry = unit(1.0, 1.0, [int(length)] if length > 1500 else [int(length) // 3, int(length) - length // 3])
            entry["lengths"] = [int(value) for value in entry["lengths"]]
            entry["tokens"], entry["targets"], entry["budgets"] = int(length), int(length) // 12, [budget] * 4
            entry["planned"] = times(0.0, sum(planned.values()), planned)
            entry["measured"] = times(0.0, sum(measured.values()), measured)
            lists[rank].append(entry)
        record = step_record(lists, step, exchange=25.0 + float(rng.exponential(4)), outside=4.0)
        record["rank_factors"], record["term_factors"] = factors.tolist(), dict(term_factors)
        records.append(record)
        factors = factors + 0.35 * (speed - factors)
        term_factors = {name: old + 0.3 * (truth[name] - old) for name, old in term_factors.items()}
    if not terms:
        for record in records:
            for worker in record["workers"]:
                for entry in worker["units"]:
                    entry["measured"]["terms"] = None
    return records


def pipeline_record(step: int = 0) -> dict[str, Any]:
    """Two stages, two ranks, two units, forwards and backwards apart: F0 F1 B1 B0."""
    workers = []
    for rank in range(2):
        for stage in range(2):
            units = []
            for index in range(2):
                entry = unit(30.0, 30.0)
                for side, slower in (("planned", 1.0), ("measured", 1.1)):
                    start = 10.0 * (stage + index) * slower
                    back = (40.0 + 20.0 * (1 - stage) + 20.0 * (1 - index)) * slower
                    entry[side] = times(start, 30.0 * slower) | {"backward_start_ms": back}
                units.append(entry)
            end = 1.1 * (80.0 + 20.0 * (1 - stage))
            workers.append({"rank": rank, "stage": stage, "all_reduce_ms": 115.0 - end, "units": units})
    return step_record([[unit(1, 1)]], step) | {"workers": workers, "step_ms": 115.0, "predicted_step_ms": 100.0}


def chain_of(sample: int, *chunks: tuple[int, float, float], recomputed: int = 0) -> list[dict[str, Any]]:
    """Chunks (tokens, planned ms, measured ms) of one sample, the first `recomputed` of them run forward twice."""
    start, found = 0, []
    for place, (tokens, planned, measured) in enumerate(chunks):
        entry = unit(planned, measured, [tokens])
        length = sum(size for size, _, _ in chunks)
        entry["chunk"] = {"sample": sample, "start": start, "of": length, "recomputed": place < recomputed}
        found.append(entry)
        start += tokens
    return found


def chained_record(*ranks: list[list[dict[str, Any]]], pause: float = 0.0, exchange: float = 0.0) -> dict[str, Any]:
    """Per rank its chains; each runs forward in order, `pause` ms later (as measured) backward last to first."""
    record = step_record([[entry for chain in chains for entry in chain] for chains in ranks], exchange=exchange)
    ends: list[float] = []
    for worker in record["workers"]:
        for side, idle in (("planned", 0.0), ("measured", pause)):
            now, units = 0.0, list(worker["units"])
            for chain in ranks[worker["rank"]]:
                own, units = units[: len(chain)], units[len(chain) :]
                for entry in own:
                    entry[side]["start_ms"] = now
                    now += entry[side]["forward_ms"]
                now += idle
                for entry in reversed(own):
                    entry[side]["backward_start_ms"] = now
                    now += entry[side]["backward_ms"]
        ends.append(now)
    for worker, end in zip(record["workers"], ends):
        worker["all_reduce_ms"] = max(ends) - end + exchange
    return record | {"step_ms": max(ends) + exchange}


def write_run(path: Path, records: list[dict[str, Any]]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def quiet() -> Console:
    return Console(width=80, record=True, file=open("/dev/null", "w"))


def validate_trace(record: Any) -> None:
    """Chrome's trace event format: required keys, no negative durations, no overlap inside a thread."""
    assert record["displayTimeUnit"] in ("ms", "ns")
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = {}
    named = set()
    for event in record["traceEvents"]:
        assert event["ph"] in ("M", "X", "C")
        assert isinstance(event["name"], str)
        assert event["name"]
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            key = {"process_name": "name", "thread_name": "name"}.get(event["name"], "sort_index")
            assert list(event["args"]) == [key]
            if event["name"] == "thread_name":
                named.add((event["pid"], event["tid"]))
            continue
        assert event["ts"] >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, float | int) for value in event["args"].values())
        else:
            assert event["dur"] >= 0
            lanes.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert set(lanes) <= named
    for slices in lanes.values():
        for (_, end), (start, _) in pairwise(sorted(slices)):
            assert start >= end - 0.01, "two slices of a thread overlap by more than rounding"


# Reasons, each rule with hand-made steps.


def test_a_rank_that_is_slow_in_all_its_units_is_named_with_its_factor() -> None:
    step = parsed([[unit(50, 50), unit(50, 50)], [unit(40, 60), unit(60, 88)]])
    reason = explain(step)
    assert (reason.kind, reason.text) == ("rank", "rank 1 ran 1.48x slower than planned in all its units")
    # The pace is the middle unit's, 88 / 60: 148 ms become 100.9, and rank 0 ends at 100 anyway.
    assert reason.lost_ms == pytest.approx(148 - 148 / (88 / 60))


def test_a_rank_that_is_slow_in_most_units_is_not_said_to_be_slow_in_all() -> None:
    reason = explain(parsed([[unit(50, 50), unit(50, 50)], [unit(20, 20), unit(40, 64), unit(40, 64)]]))
    assert reason.text == "rank 1 ran 1.48x slower than planned in most of its units"


def test_two_slow_ranks_are_one_reason() -> None:
    slow, even = [unit(50, 75), unit(50, 75)], [unit(50, 50), unit(50, 50)]
    reason = explain(parsed([slow, even, slow]))
    assert (reason.kind, reason.text) == ("rank", "ranks 0, 2 ran up to 1.50x slower than planned")
    assert reason.lost_ms == pytest.approx(50)


def test_a_rank_that_the_plan_took_for_slow_waits() -> None:
    reason = explain(parsed([[unit(50, 34), unit(50, 34)], [unit(50, 50), unit(50, 50)]]))
    assert (reason.kind, reason.text) == ("fast", "rank 0 took only 0.68x the planned time, then waited")
    assert reason.lost_ms == pytest.approx(16)


def test_a_single_slow_unit_is_named_with_its_worst_term() -> None:
    odd = unit(40, 76, [12034])
    odd["measured"]["terms"] |= {"attend": 38.4, "linear": 34.0}
    reason = explain(parsed([[unit(50, 50), unit(50, 50)], [unit(30, 30), unit(30, 30), odd]]))
    assert reason.kind == "unit"
    assert reason.text == "one unit of rank 1 (12,034 tokens) took 1.9x its prediction, attend 2.4x"
    assert reason.lost_ms == pytest.approx(36)


def test_a_slow_unit_without_measured_terms_is_named_without_them() -> None:
    odd = unit(40, 76, [12034])
    odd["measured"]["terms"] = None
    reason = explain(parsed([[unit(50, 50), unit(50, 50)], [unit(30, 30), unit(30, 30), odd]]))
    assert reason.text == "one unit of rank 1 (12,034 tokens) took 1.9x its prediction"


def test_the_only_unit_of_a_rank_is_not_taken_for_a_slow_rank() -> None:
    reason = explain(parsed([[unit(50, 50), unit(50, 50)], [unit(100, 150, [9000])]]))
    assert reason.text == "the only unit of rank 1 (9,000 tokens) took 1.5x its prediction"
    assert reason.lost_ms == pytest.approx(50)


def test_several_slow_units_are_counted() -> None:
    even = [unit(25, 25)] * 4
    reason = explain(parsed([[*even, unit(20, 30)], [*even, unit(20, 40)]]))
    assert (
        reason.text == "2 units took longer than predicted; the worst, of rank 1, (200 tokens) took 2.0x its prediction"
    )
    assert reason.lost_ms == pytest.approx(20)


def test_a_sample_longer_than_a_ranks_share_cannot_be_balanced() -> None:
    step = parsed([[unit(61, 61, [30112]), unit(39, 39)], [unit(20, 20)]])
    reason = explain(step)
    text = "one sample of 30,112 tokens is 61% of rank 0's time: no placement can balance it"
    assert (reason.kind, reason.text) == ("plan", text)
    assert reason.lost_ms == pytest.approx(40)  # 100 planned on the slowest rank, 60 on the mean one


def test_an_uneven_plan_of_small_samples_is_the_plans_fault() -> None:
    reason = explain(parsed([[unit(50, 50), unit(50, 50)], [unit(40, 40), unit(20, 20)]]))
    assert reason.text == "the plan itself was uneven: rank 0 had 1.25x the mean rank's time"
    assert reason.lost_ms == pytest.approx(20)


def test_a_rank_without_work_is_named() -> None:
    reason = explain(parsed([[unit(50, 50), unit(50, 50)], [unit(0, 0)]]))
    assert reason.text == "rank 1 had no work: the plan gave everything to the others"
    assert reason.lost_ms == pytest.approx(50)


def test_a_slow_machine_is_not_a_slow_rank() -> None:
    slow = [unit(50, 60), unit(50, 60)]
    reason = explain(parsed([slow, slow]))
    assert (reason.kind, reason.text) == ("drift", "everything ran 1.20x slower on all ranks (machine drift)")
    assert reason.lost_ms == pytest.approx(20)
    assert explain(parsed([slow])).text == "everything ran 1.20x slower than planned"


def test_drift_and_a_slow_rank_are_priced_apart() -> None:
    """All are 1.2x slower, rank 1 is 1.8x: 20 ms are the machine's, 60 are rank 1's."""
    step = parsed([[unit(50, 60), unit(50, 60)], [unit(50, 90), unit(50, 90)]])
    prices = {reason.kind: reason.lost_ms for reason in candidates(step)}
    assert prices["rank"] == pytest.approx(60)
    assert prices["drift"] == pytest.approx(30)  # 180 ms at 1.2x
    assert explain(step).kind == "rank"


def test_the_all_reduce_counts_without_the_waiting_before_it() -> None:
    even = [unit(44, 44), unit(44, 44)]
    reason = explain(parsed([even, even], exchange=12))
    assert (reason.kind, reason.text, reason.lost_ms) == ("all_reduce", "all-reduce took 12% of the step", 12)
    prices = {r.kind: r.lost_ms for r in candidates(parsed([even, [unit(44, 44)]], exchange=12))}
    assert prices["all_reduce"] == pytest.approx(12)


def test_time_outside_the_units_is_seen() -> None:
    even = [unit(40, 40), unit(40, 40)]
    reason = explain(parsed([even, even], outside=20))
    assert reason.text == "20% of the step passed outside micro-batches and all-reduce"
    assert reason.lost_ms == pytest.approx(20)


def test_pauses_between_units_are_seen() -> None:
    even = [unit(40, 40), unit(40, 40)]
    reason = explain(parsed([even, even], pause=15))
    assert (reason.kind, reason.text) == ("gap", "rank 0 paused for 15 ms between its units")
    assert reason.lost_ms == pytest.approx(15)


def test_a_step_as_planned_needs_no_reason() -> None:
    even = [unit(50, 51), unit(50, 49)]
    assert explain(parsed([even, even])).text == "as planned, to within 1%"
    fast = [unit(50, 40), unit(50, 40)]
    assert explain(parsed([fast, fast])).text == "nothing lost: it took 0.80x the planned time"


def test_several_small_causes_are_called_so() -> None:
    step = parsed([[unit(50, 51.5), unit(50, 51.5)], [unit(50, 51), unit(50, 51)]], exchange=2.5, outside=4)
    assert (
        explain(step).text
        == "several small causes, the largest: 4% of the step passed outside micro-batches and all-reduce"
    )


def test_bubbles_of_a_pipeline_are_the_plans() -> None:
    step = parse_step(pipeline_record(), "it")
    assert explain(step).text == "the plan itself keeps ranks and stages waiting for 40% of its time"
    assert step.workers[0].measured_end_ms == pytest.approx(110)


# Chunks of a sample: forwards in order, then backwards in reverse.

THREE = [(4096, 30.0, 30.0), (4096, 36.0, 36.0), (808, 9.0, 9.0)]


def placed(bars: Any) -> list[tuple[str, float, float]]:
    found = [(bar.text or bar.kind, round(bar.start_ms, 6), round(bar.took_ms, 6)) for bar in bars]
    return sorted(found, key=lambda bar: bar[1:])


def test_bars_of_a_chain_touch_and_no_waiting_is_seen_between_a_forward_and_its_backward() -> None:
    record = chained_record([chain_of(17, *THREE), [unit(15, 15)]], [[unit(90, 90)]])
    step = parse_step(record, "it")
    chain = [("F0", 0, 10), ("F1", 10, 12), ("F2", 22, 3), ("B2", 25, 6), ("B1", 31, 24), ("B0", 55, 20)]
    expected = [*chain, ("F3", 75, 5), ("B3", 80, 10)]
    assert placed(measured_bars(step, step.workers[0])) == expected
    assert placed(planned_bars(step, step.workers[0])) == expected
    assert [step.waiting_ms(worker) for worker in step.workers] == pytest.approx([0, 0])
    assert explain(step).kind == "planned"


def test_waiting_of_a_chain_is_the_gaps_between_its_bars() -> None:
    """Ranks stand still for 8 ms between forwards and backwards; rank 0 ends at 83, rank 1 at 70 and waits for it."""
    record = chained_record([chain_of(17, *THREE)], [[unit(70, 62)]], pause=8, exchange=5)
    step = parse_step(record, "it")
    first, second = (placed(measured_bars(step, worker)) for worker in step.workers)
    assert [bar for bar in first if bar[0] not in ("F0", "F1", "F2", "B0", "B1", "B2")] == [
        ("waiting", 25, 8),
        ("all-reduce", 83, 5),
    ]
    assert [bar for bar in second if bar[0] not in ("F0", "B0")] == [
        ("waiting", pytest.approx(62 / 3), 8),
        ("waiting", 70, 13),
        ("all-reduce", 83, 5),
    ]
    assert [step.waiting_ms(worker) for worker in step.workers] == pytest.approx([8, 83 - 62])
    parts = run_figures([step], [])["workers"]
    assert [worker["parts_ms"]["waiting"] for worker in parts] == pytest.approx([8, 21])
    assert sum(parts[0]["parts_ms"].values()) == pytest.approx(step.step_ms)
    prices = {reason.kind: reason for reason in candidates(step)}
    assert prices["gap"].lost_ms == pytest.approx(8)
    assert prices["gap"].text == "rank 0 paused for 8 ms between its units"


def test_the_trace_of_chains_keeps_their_order() -> None:
    record = chained_record([chain_of(17, *THREE), chain_of(3, (64, 6.0, 7.0), (20, 3.0, 4.0))], [[unit(90, 90)]])
    events = trace_events([parse_step(record, "it")])
    validate_trace({"traceEvents": events, "displayTimeUnit": "ms"})
    for thread in (0, 1):
        lane = [event["name"] for event in events if event["ph"] == "X" and (event["pid"], event["tid"]) == (0, thread)]
        assert lane[:10] == ["F0", "F1", "F2", "B2", "B1", "B0", "F3", "F4", "B4", "B3"]


def test_a_chunk_says_which_part_of_which_sample_it_is() -> None:
    step = parse_step(chained_record([chain_of(17, *THREE, recomputed=1)], [[unit(75, 75)]]), "it")
    hovers = {bar.text: bar.hover for bar in measured_bars(step, step.workers[0])}
    assert "chunk 0..4,096 of sample 17 (9,000 tokens), recomputed in its backward<br>" in hovers["B0"]
    assert "808 tokens, 80 targets, chunk 8,192..9,000 of sample 17 (9,000 tokens)<br>" in hovers["F2"]
    assert "chunk" not in next(measured_bars(step, step.workers[1])).hover
    figure = timeline(step)
    assert any("chunk 4,096..8,192 of sample 17" in text for bars in figure.data for text in bars.hovertext)


def test_a_sample_in_chunks_that_is_longer_than_a_ranks_share_cannot_be_balanced() -> None:
    chunks = [(4096, 20.0, 20.0)] * 4
    step = parse_step(chained_record([chain_of(5, *chunks), [unit(20, 20)]], [[unit(20, 20)]]), "it")
    reason = explain(step)
    assert reason.text == "one sample of 16,384 tokens in 4 chunks is 80% of rank 0's time: no placement can balance it"
    assert reason.lost_ms == pytest.approx(40)
    short = parse_step(chained_record([chain_of(5, *chunks[:2]), [unit(60, 60)]], [[unit(20, 20)]]), "it")
    assert explain(short).text == "the plan itself was uneven: rank 0 had 1.67x the mean rank's time"


def test_a_slow_chunk_is_named_as_one() -> None:
    slow = [*[(4096, 30.0, 30.0)] * 3, (4096, 30.0, 75.0)]
    step = parse_step(chained_record([chain_of(5, *slow)], [[unit(60, 60)], [unit(60, 60)]]), "it")
    assert explain(step).text == "one unit of rank 0 (4,096 tokens, a chunk of sample 5) took 2.5x its prediction"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.lists(st.tuples(st.floats(0.01, 50), st.floats(0.01, 50)), min_size=1, max_size=4), max_size=3),
        min_size=1,
        max_size=3,
    ),
    st.floats(0, 20),
    st.floats(0, 20),
)
def test_time_of_ranks_with_chains_adds_up(
    ranks: list[list[list[tuple[float, float]]]], pause: float, exchange: float
) -> None:
    chains = [[chain_of(i, *((16, p, m) for p, m in chain)) for i, chain in enumerate(rank)] for rank in ranks]
    record = chained_record(*chains, pause=pause, exchange=exchange)
    if record["step_ms"] == 0:
        return
    step = parse_step(record, "it")
    for worker in step.workers:
        bars = placed(measured_bars(step, worker))
        for (_, start, took), (_, following, _) in pairwise(bars):
            assert start + took <= following + 1e-5
        waited = sum(took for name, _, took in bars if name == "waiting")
        assert step.waiting_ms(worker) == pytest.approx(waited, abs=0.05)  # bars of 0.01 ms are left out
        assert step.waiting_ms(worker) + worker.measured_ms + exchange == pytest.approx(step.step_ms)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 200)), max_size=4), min_size=1, max_size=4),
    st.floats(0, 50),
    st.floats(0, 50),
)
@example([[(5e-324, 1.0)]], 0.0, 0.0)
@example([[(1e-300, 1.0), (1e-300, 90.0)], [(50.0, 70.0)]], 0.0, 0.0)
def test_every_step_has_a_reason_no_dearer_than_the_step(
    ranks: list[list[tuple[float, float]]], exchange: float, outside: float
) -> None:
    step = parsed([[unit(p, m, [7]) for p, m in rank] for rank in ranks], exchange=exchange, outside=outside + 1)
    largest = max(step.step_ms, step.predicted_step_ms)
    drift = max(1.0, *(unit_.ratio for worker in step.workers for unit_ in worker.units), 1.0)
    for reason in candidates(step):
        assert 0 <= reason.lost_ms <= largest * drift + 1e-6
        assert reason.text
    assert explain(step).kind


# Figures of the run.


def test_the_figures_by_hand() -> None:
    """Rank 1 takes 150 for 100 and rank 0 waits 50; the exchange takes 10 and 20 ms pass outside, of 180."""
    record = step_record([[unit(50, 50), unit(50, 50)], [unit(50, 75), unit(50, 75)]], exchange=10, outside=20)
    found = run_figures([parse_step(record, "it")], [])
    assert found["step_error_median"] == pytest.approx(110 / 180 - 1)
    assert found["step_error_median_abs"] == pytest.approx(70 / 180)
    assert found["unit_error_mean_abs"] == pytest.approx((0 + 0 + 1 / 3 + 1 / 3) / 4)
    assert found["shares"]["waiting"] == pytest.approx(50 / 360)
    assert found["shares"]["all_reduce"] == pytest.approx(20 / 360)
    assert found["shares"]["outside"] == pytest.approx(40 / 360)
    assert found["shares"]["linear"] == pytest.approx(125 / 360)
    assert found["compute_share"] == pytest.approx(250 / 360)
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert found["planning_share"] == pytest.approx(3 / 180)
    assert found["terms"]["attend"]["share"] == pytest.approx(0.4)
    assert [worker["error"] for worker in found["workers"]] == [pytest.approx(0), pytest.approx(-1 / 3)]
    assert [worker["waiting_share"] for worker in found["workers"]] == [pytest.approx(50 / 180), pytest.approx(0)]
    assert found["worst"][0]["lost_ms"] == pytest.approx(70)
    assert json.loads(json.dumps(found)) == found


def test_the_verdict_weighs_error_and_waiting() -> None:
    found = {"step_error_median_abs": 0.03, "shares": {"waiting": 0.01}, "steps": 9, "lost_to": {"planned": {}}}
    assert verdict(found) == "The plans held, and ranks hardly waited; every step went as planned."
    found |= {"step_error_median_abs": 0.3, "shares": {"waiting": 0.2}}
    found["lost_to"] = {"rank": {"steps": 3, "lost_ms": 90.0}, "drift": {"steps": 5, "lost_ms": 80.0}}
    assert verdict(found) == (
        "The plans were wrong, and ranks waited for a good part of the time; most time was lost to ranks that ran "
        "slower than planned, in 3 steps of 9."
    )


def test_the_headline_says_which_way_the_error_goes() -> None:
    slow, fast = [unit(50, 60)], [unit(50, 40)]
    assert "the median one took longer, by 16.7%" in headline(run_figures([parsed([slow, slow])], []))
    assert "the median one took less, by 25.0%" in headline(run_figures([parsed([fast, fast])], []))


def test_the_slow_rank_of_a_run_is_found_when_it_turns_slow() -> None:
    steps = [parse_step(record, "it") for record in run_of(30, 2)]
    worst = run_figures(steps, [])["worst"]
    assert worst[0]["step"] == 12
    assert re.fullmatch(r"rank 1 ran 1\.[45]\dx slower than planned in (all|most of) its units", worst[0]["reason"])
    assert explain(steps[20]).kind == "unit"
    assert explain(steps[5]).kind == "drift"
    assert explain(steps[29]).kind == "planned"


# The timeline.


def test_planned_and_actual_lanes_lie_next_to_each_other() -> None:
    figure = timeline(parsed([[unit(60, 90)], [unit(40, 40), unit(10, 10)]], exchange=5))
    lanes = [text.strip() for text in figure.layout.yaxis.ticktext]
    assert lanes == ["<b>rank 0</b>  planned", "actual", "<b>rank 1</b>  planned", "actual"]
    bars = {trace.name: trace for trace in figure.data}
    kinds = [kind for kind in COLORS if kind not in HALVES]
    assert set(bars) == {name for kind in kinds for name in (kind, f"{kind}, planned")}
    assert list(zip(bars["forward"].y, bars["forward"].base, bars["forward"].x)) == [
        (1.0, 0.0, 30.0),
        (3.5, 0.0, pytest.approx(40 / 3)),
        (3.5, 40.0, pytest.approx(10 / 3)),
    ]
    assert (bars["waiting"].y, bars["waiting"].base, bars["waiting"].x) == ((3.5,), (50.0,), (40.0,))
    assert (bars["waiting, planned"].base, bars["waiting, planned"].x) == ((50.0,), (10.0,))
    assert set(bars["all-reduce, planned"].base) == {60.0}
    assert set(bars["all-reduce"].base) == {90.0}
    assert [a.text for a in figure.layout.annotations] == ["planned end 65 ms", "actual end 95 ms"]


# The trace.


@pytest.mark.parametrize("steps", [1, 2, 19, 20, 21, 57])
def test_the_trace_follows_chromes_format_and_keeps_the_worst_step(steps: int, tmp_path: Path) -> None:
    records = run_of(steps, 2, slow_from=3)
    write_planned_trace(tmp_path / "trace.json", records)
    trace = json.loads((tmp_path / "trace.json").read_text())
    validate_trace(trace)
    counters = [event for event in trace["traceEvents"] if event["ph"] == "C"]
    assert len(counters) == min(20, steps)
    all_steps = [parse_step(record, "it") for record in records]
    worst = max(all_steps, key=lambda step: step.lost_ms)
    kept = chosen(all_steps)
    assert worst in kept
    assert kept[0] is all_steps[0]
    assert kept[-1] is all_steps[-1]
    assert [event["args"]["actual"] for event in counters] == [step.step_ms for step in kept]


def test_the_trace_of_a_pipeline_has_a_thread_a_stage_and_lane() -> None:
    events = trace_events([parse_step(pipeline_record(step), "it") for step in range(3)])
    validate_trace({"traceEvents": events, "displayTimeUnit": "ms"})
    threads = [event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == 1]
    assert threads == ["planned stage 0", "actual stage 0", "planned stage 1", "actual stage 1"]
    lane = [e["name"] for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (1, 3) and e["args"]["step"] == 0]
    assert lane == ["waiting", "F0", "F1", "waiting", "B1", "B0", "waiting", "all-reduce"]


def test_a_clocks_rounding_does_not_make_slices_overlap() -> None:
    record = step_record([[unit(30, 30), unit(30, 30)]])
    record["workers"][0]["units"][1]["measured"]["start_ms"] -= 0.5
    validate_trace({"traceEvents": trace_events([parse_step(record, "it")]), "displayTimeUnit": "ms"})


# The command.


def test_the_report_of_a_run(tmp_path: Path) -> None:
    run, console = write_run(tmp_path / "a<b", run_of(30, 2)), quiet()
    found = report(run, console)
    text = console.export_text()
    assert "…" not in text
    assert all(len(line) <= 80 for line in text.splitlines() if str(tmp_path) not in line)
    assert re.search(r"rank 1 +[\d,]+ +[\d,]+ +-\d+\.\d% +\d+\.\d%", text)
    assert "attend" in text
    assert "rank 1 ran 1." in text
    assert sorted(path.name for path in run.iterdir()) == ["metrics.jsonl", "report.html", "trace.json"]
    page = (run / "report.html").read_text()
    outside = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"(src|href)=['\"]?http", outside)
    assert page.count('class="plotly-graph-div"') == 6
    assert "a&lt;b" in outside
    assert found["verdict"] in outside.replace("&#x27;", "'")
    for entry in found["worst"]:
        assert entry["reason"] in outside.replace("&#x27;", "'")
    assert found["files"] == {"report": str(run / "report.html"), "trace": str(run / "trace.json")}
    assert json.loads(json.dumps(found)) == found
    validate_trace(json.loads((run / "trace.json").read_text()))


def test_the_page_goes_where_it_is_told(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", run_of(2, 1))
    report(run, quiet(), tmp_path / "deep" / "page.html")
    assert (tmp_path / "deep" / "page.html").is_file()
    assert sorted(path.name for path in run.iterdir()) == ["metrics.jsonl", "trace.json"]


def test_without_measured_terms_the_page_says_so(tmp_path: Path) -> None:
    run, console = write_run(tmp_path / "run", run_of(3, 2, terms=False)), quiet()
    found = report(run, console)
    assert found["terms"] == {}
    assert found["shares"]["compute"] == pytest.approx(found["compute_share"])
    note = "no micro-batch had its terms measured, so there are no errors by term"
    assert found["notes"] == [note]
    assert note in " ".join(console.export_text().split())
    assert note in (run / "report.html").read_text()


def test_a_pipelines_page_names_stages(tmp_path: Path) -> None:
    console = quiet()
    report(write_run(tmp_path, [pipeline_record(step) for step in range(3)]), console)
    assert "rank 1 stage 1" in console.export_text()


def test_a_run_without_any_work_is_reported_too(tmp_path: Path) -> None:
    record = step_record([[unit(0, 0)], [unit(0, 0)]], outside=5)
    assert report(write_run(tmp_path, [record]), quiet())["micro_batches"] == 0


def test_old_and_unfinished_lines_are_left_out_with_a_note(tmp_path: Path) -> None:
    records = run_of(3, 2)
    del records[0]["workers"]
    write_run(tmp_path, records)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "pol')
    steps, notes = read_run(tmp_path)
    assert [step.step for step in steps] == [1, 2]
    assert notes == [
        "1 step without planned and measured times left out",
        "the last line of metrics.jsonl is not whole yet and was left out",
    ]


def _old(record: dict[str, Any]) -> None:
    del record["workers"]


def _no_ranks(record: dict[str, Any]) -> None:
    record["workers"] = []


def _no_planned(record: dict[str, Any]) -> None:
    del record["workers"][0]["units"][0]["planned"]


def _negative(record: dict[str, Any]) -> None:
    record["workers"][0]["units"][0]["measured"]["forward_ms"] = -1.0


def _not_finite(record: dict[str, Any]) -> None:
    record["step_ms"] = float("nan")


def _no_time(record: dict[str, Any]) -> None:
    record["step_ms"] = 0.0


def _text(record: dict[str, Any]) -> None:
    record["workers"][0] = "rank 0"


def _chunk_outside(record: dict[str, Any]) -> None:
    record["workers"][0]["units"][0]["chunk"] = {"sample": 3, "start": 32, "of": 40, "recomputed": False}


def _comparison(record: dict[str, Any]) -> None:
    record["policies"] = {}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_old, "made before they were recorded, or it is broken"),
        (_no_ranks, r"line 1 of .*metrics\.jsonl is not a step record: no workers"),
        (_no_planned, r"line 1 of .*metrics\.jsonl is not a step record: 'planned' is missing"),
        (_negative, r"line 1 .*forward_ms is -1\.0, but a time is at least 0"),
        (_not_finite, "line 1 .*step_ms is nan"),
        (_no_time, "line 1 .*step_ms is 0"),
        (_text, "line 1 .*is not a step record"),
        (_chunk_outside, "line 1 .*a chunk holds tokens 32 to 82 of 40"),
        (_comparison, r"a comparison, not a training run; its own page is .*report\.html"),
    ],
)
def test_bad_records_end_in_one_sentence(spoil: Any, message: str, tmp_path: Path) -> None:
    record = step_record([[unit(5, 5)], [unit(5, 5)]])
    spoil(record)
    with pytest.raises(InputError, match=message) as caught:
        report(write_run(tmp_path, [record]), quiet())
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "report.html").exists()


# What became of the samples.


def books() -> dict[str, Any]:
    """data.json of a run of two steps: samples 1 and 2 packed, 4 in two chunks, 3 alone."""
    layers, latency = (4,), Latency(1.0, 2.0)
    packed = MicroBatch((Segment(1, 0, 30, 30, 3), Segment(2, 0, 50, 50, 5)), layers, latency)
    chunks = [MicroBatch((Segment(4, a, b, 150, 10),), layers, latency) for a, b in ((0, 96), (96, 150))]
    alone = MicroBatch((Segment(3, 0, 90, 90, 9),), layers, latency)
    plans = [StepPlan("sab", Topology(), 16, (units,), 9.0) for units in ((packed, *chunks), (alone,))]
    found = account(plans, capacity=96, rows_read=6, dropped=1, dropped_tokens=400, not_used=1)
    sentences = [*found.sentences(), "Length correlation 0.09 -> 0.10.", "A <sentence> of the run."]
    return {"schema": 1, "account": asdict(found), "batches": {}, "seen": {}, "sentences": sentences}


def test_an_account_comes_back_from_json() -> None:
    record = books()["account"]
    found = account_of(json.loads(json.dumps(record)))
    assert isinstance(found, Account)
    assert asdict(found) == record
    assert (found.packed.samples, found.cut.micro_batches, found.micro_batches) == (2, 2, 4)


def test_the_page_says_what_became_of_the_samples(tmp_path: Path) -> None:
    write_run(tmp_path, run_of(2, 2))
    report(tmp_path, quiet())
    without = (tmp_path / "report.html").read_text()
    assert "What became of the samples" not in without
    (tmp_path / "data.json").write_text(json.dumps(books()))
    report(tmp_path, quiet())
    page = (tmp_path / "report.html").read_text()
    assert page.count('class="plotly-graph-div"') == without.count('class="plotly-graph-div"') + 1
    section = page[page.index("<h2>What became of the samples</h2>") :]
    text = section[: section.index("</p>")]
    assert "4 samples became 4 micro-batches: 2 packed in 1, 1 cut in 2 chunks, 1 alone; of 6 rows read, 1 drop" in text
    assert text.count("4 samples became") == 1
    assert "Length correlation 0.09 → 0.10.<br>A &lt;sentence&gt; of the run." in text


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda record: "{", "is not the account of a run"),
        (lambda record: [], "is not the account of a run"),
        (lambda record: record | {"sentences": "one"}, "its sentences are not a list of texts"),
        (lambda record: {"sentences": []}, "has no 'account'"),
        (lambda record: record | {"account": []}, "is not the account of a run"),
        (lambda record: record | {"account": {}}, "has no 'alone'"),
        (lambda record: record | {"account": record["account"] | {"more": 1}}, "unexpected keyword argument 'more'"),
        (lambda record: record | {"account": record["account"] | {"tokens": -1}}, "its tokens is -1"),
        (lambda record: record | {"account": record["account"] | {"fill_mean": None}}, "its fill_mean is None"),
        (lambda record: record | {"account": record["account"] | {"fill_bins": []}}, "no bins or no capacity"),
        (lambda record: record | {"account": record["account"] | {"alone": {"samples": 1}}}, "has no 'micro_batches'"),
    ],
)
def test_broken_books_end_in_one_sentence(spoil: Any, message: str, tmp_path: Path) -> None:
    spoilt = spoil(books())
    (write_run(tmp_path, run_of(1, 1)) / "data.json").write_text(spoilt if spoilt == "{" else json.dumps(spoilt))
    with pytest.raises(InputError, match=r".*data\.json .*" + message) as caught:
        report(tmp_path, quiet())
    assert "\n" not in str(caught.value)
    assert "delete it to get the page without its section" in str(caught.value)
    assert not (tmp_path / "report.html").exists()


def test_bad_directories_end_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a directory"):
        report(tmp_path / "nothing", quiet())
    with pytest.raises(InputError, match=r"holds no metrics\.jsonl"):
        report(tmp_path, quiet())
    write_run(tmp_path, run_of(1, 1))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("{broken\n")
    with pytest.raises(InputError, match=r"line 2 of .*metrics\.jsonl is not JSON"):
        report(tmp_path, quiet())
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(InputError, match="no line of"):
        report(tmp_path, quiet())


def test_records_may_be_given_directly(tmp_path: Path) -> None:
    found = write_planned_page(tmp_path / "page.html", "Demo", run_of(2, 2), ["a <note>"])
    assert found["steps"] == 2
    assert "a &lt;note&gt;" in (tmp_path / "page.html").read_text()
    with pytest.raises(InputError, match="no step records"):
        write_planned_page(tmp_path / "none.html", "Demo", [])
    with pytest.raises(InputError, match="record 0 is not a step record: 'workers' is missing"):
        write_planned_trace(tmp_path / "none.json", [{"step": 1, "step_ms": 3.0}])
