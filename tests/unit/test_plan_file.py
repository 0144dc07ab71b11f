"""Saved plans come back exactly, only for the key that they were made for, and a broken file says where."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparsebalance.planning import plan_file
from sparsebalance.planning.baselines import BASELINES
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.plan import Latency, MicroBatch, Sample, Segment, StepPlan, Topology
from sparsebalance.planning.plan_file import (
    OtherPlans,
    PlanKey,
    describe_change,
    fingerprint,
    load_plans,
    plan_key,
    save_plans,
)
from sparsebalance.planning.policy import OURS, named_policy, plan_step
from tests.unit.test_latency import make_table

CAP = 512


def key(**changed: Any) -> PlanKey:
    parts: dict[str, Any] = {
        "data": "a" * 64,
        "tokenizer": None,
        "token_cap": CAP,
        "block_size": 16,
        "unit_size": 64,
        "topology": Topology(dp=2),
        "model": "small",
        "budget": 4,
        "policy": "sab",
        "batch_size": 16,
        "seed": 0,
        "composition": "strict",
        "latency": "table",
    }
    return plan_key(**{**parts, **changed})


def made(lengths: list[int], name: str = "sab_dst", step: int = 0) -> StepPlan:
    samples = [Sample(100 * step + i, length, length // 3) for i, length in enumerate(lengths)]
    policy = named_policy(name, budget=4, token_cap=CAP, unit_size=64)
    return plan_step(samples, make_table(), Topology(dp=2, pp=2), policy)


PLANS = [made([500, 3, 70, 40], step=0), made([1], "random", 1), made([64, 64], "kk_tokens", 2)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "plans.jsonl.gz"


def text_of(path: Path) -> list[str]:
    return gzip.decompress(path.read_bytes()).decode().splitlines()


def write(path: Path, lines: list[str]) -> None:
    path.write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode()))


def test_plans_come_back_as_they_were(path: Path) -> None:
    save_plans(path, key(), PLANS)
    loaded = load_plans(path, key())
    assert loaded == dict(enumerate(PLANS))
    assert [plan.digest() for plan in loaded.values()] == [plan.digest() for plan in PLANS]
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    steps = {7: PLANS[1], 3: PLANS[0]}
    save_plans(path, key(), steps)  # over the first file
    assert list(load_plans(path, key()).items()) == list(steps.items())


@pytest.mark.parametrize("name", [*BASELINES, *OURS])
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(1, CAP), min_size=1, max_size=9))
def test_plans_of_every_policy_come_back(tmp_path: Path, name: str, lengths: list[int]) -> None:
    plan = made(lengths, name)
    save_plans(tmp_path / "plans", key(), [plan])
    (loaded,) = load_plans(tmp_path / "plans", key()).values()
    assert loaded == plan
    assert loaded.digest() == plan.digest()


def test_fields_with_defaults_come_back_and_cost_nothing(path: Path) -> None:
    units = PLANS[0].ranks[0]
    plan = replace(PLANS[0], ranks=((replace(units[0], recompute=True), *units[1:]), *PLANS[0].ranks[1:]))
    save_plans(path, key(), [plan])
    assert load_plans(path, key())[0] == plan
    assert text_of(path)[1].count("true") == 1
    assert "false" not in text_of(path)[1]


def test_a_file_from_before_a_field_was_added_is_read(path: Path) -> None:
    save_plans(path, key(), PLANS)
    header, *rest = text_of(path)
    record = json.loads(header)
    record["fields"]["MicroBatch"].remove("recompute")
    write(path, [json.dumps(record), *rest])
    assert load_plans(path, key()) == dict(enumerate(PLANS))


def test_fields_in_another_order_are_read_by_name(path: Path) -> None:
    save_plans(path, key(), [StepPlan("p", Topology(), 16, ((MicroBatch((), (4,), Latency(1.0, 2.5)),),), 3.0)])
    header, plan, end = text_of(path)
    record = json.loads(header)
    assert record["fields"]["Latency"] == ["forward_ms", "backward_ms"]
    record["fields"]["Latency"].reverse()
    assert "[1.0,2.5]" in plan
    write(path, [json.dumps(record), plan.replace("[1.0,2.5]", "[2.5,1.0]"), end])
    assert load_plans(path, key())[0].ranks[0][0].latency == Latency(1.0, 2.5)


def test_the_file_is_compact_and_reproducible(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    plans = []
    for step in range(625):
        segments = [Segment(16 * step + i, 0, int(n), int(n), 100) for i, n in enumerate(rng.integers(500, 60000, 16))]
        times = rng.random((16, 2)).tolist()
        units = [MicroBatch((s,), (32,) * 28, Latency(*ms)) for s, ms in zip(segments, times)]
        plans.append(StepPlan("sab", Topology(dp=4), 256, tuple(tuple(units[r::4]) for r in range(4)), times[0][0]))
    for name in ("one", "two"):
        save_plans(tmp_path / name, key(), plans)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert (tmp_path / "one").stat().st_size < 400_000
    assert list(load_plans(tmp_path / "one", key()).values()) == plans


def test_plans_may_be_made_while_they_are_written_and_a_failure_leaves_nothing(path: Path) -> None:
    def plans(fail: bool) -> Iterator[StepPlan]:
        yield PLANS[0]
        if fail:
            raise RuntimeError("out of luck")

    save_plans(path, key(), plans(fail=False))
    before = path.read_bytes()
    with pytest.raises(RuntimeError, match="out of luck"):
        save_plans(path, key(), plans(fail=True))
    with pytest.raises(InputError, match="no plans to save; plan at least one step"):
        save_plans(path, key(), [])
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


CHANGES = [
    ({"token_cap": 4096}, "token cap (was 512, is 4096)"),
    ({"unit_size": None}, "unit size (was 64, is none)"),
    ({"tokenizer": "bpe"}, "tokenizer (was none, is bpe)"),
    ({"data": "b" * 64}, "data (was aaaaaaaaaaaa..., is bbbbbbbbbbbb...)"),
    ({"topology": Topology(dp=2, pp=4)}, "topology (was dp2 pp1 tp1 sp1, is dp2 pp4 tp1 sp1)"),
    ({"tail": "drop"}, "tail (was not part of the key, is drop)"),
    ({"seed": 7, "budget": 8}, "budget (was 4, is 8), seed (was 0, is 7)"),
    ({"model": ""}, "model (was small, is empty)"),
]


@pytest.mark.parametrize(("changed", "text"), CHANGES)
def test_plans_for_something_else_are_refused_by_what_differs(path: Path, changed: dict[str, Any], text: str) -> None:
    save_plans(path, key(), PLANS)
    assert describe_change(key(), key(**changed)) == text
    with pytest.raises(OtherPlans) as error:
        load_plans(path, key(**changed))
    assert str(error.value) == (
        f"{path} holds plans that were made for something else: {text}; "
        "delete it or name another file to plan again, or run what they were made for"
    )
    assert key(**changed).digest != key().digest


def test_a_part_that_is_gone_is_told() -> None:
    assert describe_change(key(tail="drop"), key()) == "tail (was drop, is not part of the key)"
    assert describe_change(key(), key()) == ""


def test_a_file_of_another_schema_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_plans(path, key(), PLANS)
    monkeypatch.setattr(plan_file, "SCHEMA", 2)
    with pytest.raises(OtherPlans, match="has schema 1, but this version reads 2; delete it"):
        load_plans(path, key())


def test_no_file_is_told(path: Path) -> None:
    with pytest.raises(InputError, match=r"no plans at .*plans.jsonl.gz; make them first"):
        load_plans(path, key())


# What is done to the five lines of a file of three plans, and the line that must be named.
DAMAGES: dict[str, tuple[Any, int, str]] = {
    "nothing in it": (lambda lines: [], 1, "it is empty"),
    "no header": (lambda lines: lines[1:], 1, ""),
    "header without fields": (lambda lines: ['{"schema":1}', *lines[1:]], 1, "no 'key'"),
    "unknown field": (lambda lines: [lines[0].replace("recompute", "colour"), *lines[1:]], 1, "no field 'colour'"),
    "end is missing": (lambda lines: lines[:-1], 5, "it ends before its last line"),
    "plan is missing": (lambda lines: [*lines[:2], *lines[3:]], 4, "2 of 3 plans are there"),
    "step twice": (lambda lines: [*lines[:2], lines[1], *lines[3:]], 3, "step 0 is there twice"),
    "more after the end": (lambda lines: [*lines, lines[1]], 6, "something follows"),
    "cut inside a line": (lambda lines: [*lines[:2], lines[2][:40]], 3, ""),
    "number as text": (lambda lines: [lines[0], lines[1].replace(",500,", ',"500",'), *lines[2:]], 2, "is no int"),
    "truth as number": (lambda lines: [lines[0], lines[1].replace(",16,", ",true,"), *lines[2:]], 2, "is no int"),
    "a field too many": (
        lambda lines: [*lines[:2], lines[2].replace("[2,2]", "[2,2,1,1,9]"), *lines[3:]],
        3,
        "no Topology",
    ),
    "a field's own check": (lambda lines: [lines[0], lines[1].replace("[2,2]", "[0,2]"), *lines[2:]], 2, "dp is 0"),
    "list for a plan": (lambda lines: [lines[0], "[0,[]]", *lines[2:]], 2, "missing"),
    "end without a count": (lambda lines: [*lines[:-1], "{}"], 5, "no 'plans'"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_broken_file_names_the_line(path: Path, name: str) -> None:
    damage, line, why = DAMAGES[name]
    save_plans(path, key(), PLANS)
    lines = text_of(path)
    assert len(lines) == 5
    assert damage(lines) != lines
    write(path, damage(lines))
    with pytest.raises(InputError, match=rf"is broken at line {line} \(.*\); delete it and make the plans") as error:
        load_plans(path, key())
    assert why in str(error.value)
    assert not isinstance(error.value, OtherPlans)


def test_broken_bytes_are_told(path: Path) -> None:
    save_plans(path, key(), PLANS)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[-6] ^= 1  # of the checksum
    for data in (whole[: len(whole) // 2], whole[:-3], bytes(flipped), b"", b"no gzip", whole + b"more"):
        path.write_bytes(data)
        with pytest.raises(InputError, match=r"is broken at line \d \(.+\); delete it"):
            load_plans(path, key())


@dataclass(frozen=True)
class Thing:
    name: str
    inner: Any = None


def test_fingerprints_tell_values_apart() -> None:
    values = [
        1, "1", 1.5, True, None, [1], {"a": 1}, {"a": 2}, {1: "a"}, Thing("a"), Thing("a", Thing("b")), Topology(),
        BASELINES, make_table(), make_table(2e-4), named_policy("sab", budget=4, token_cap=9),
        named_policy("sab", budget=4, token_cap=9, unit_size=16), named_policy("random", budget=4, token_cap=9),
        {(1, 2): np.array([0.5, 1.0])}, {(1, 2): np.array([0.5, 1.5])},
    ]  # fmt: skip
    assert len({fingerprint(value) for value in values}) == len(values)
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    assert fingerprint(make_table()) == fingerprint(make_table())
    assert fingerprint((1, 2)) == fingerprint([1, 2]) == fingerprint(np.array([1, 2]))


@pytest.mark.parametrize("value", [object(), {1, 2}, lambda: None, Thing("a", lambda: None), b"x"], ids=repr)
def test_what_has_no_stable_text_is_refused(value: Any) -> None:
    with pytest.raises(
        InputError, match=r"keyed by plain values, dataclasses and named functions, but .*give its text"
    ):
        fingerprint(value)
    with pytest.raises(InputError, match="give its text"):
        key(policy=value)


def test_keys_keep_short_texts_and_the_fingerprints_of_all_else() -> None:
    parts = dict(key(policy=named_policy("sab", budget=4, token_cap=9), model="m" * 65, data=Path("data/x")).parts)
    assert list(parts) == [
        "data", "tokenizer", "token cap", "block size", "unit size", "topology", "model", "budget", "policy",
        "batch size", "seed", "composition", "latency",
    ]  # fmt: skip
    assert (parts["data"], parts["token cap"], parts["topology"]) == ("data/x", "512", "dp2 pp1 tp1 sp1")
    assert (parts["policy"], parts["model"]) == (
        fingerprint(named_policy("sab", budget=4, token_cap=9)),
        fingerprint("m" * 65),
    )
    assert key(a="1", b="2") == key(b="2", a="1")


def test_keys_are_equal_in_another_process() -> None:
    code = (
        "from sparsebalance.planning.plan_file import fingerprint; "
        "from sparsebalance.planning.policy import named_policy; "
        "print(fingerprint(named_policy('random', budget=4, token_cap=9)))"
    )
    other = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    assert other == fingerprint(named_policy("random", budget=4, token_cap=9))
