"""Step plans as files: made once, saved with the key of everything that they depend on, loaded where it is the same.

In: a key and plans by step. Out: a gzipped file of JSON lines, written whole or not at all, and the same plans
from it. Plans that were made for anything else are refused by the parts of the key that differ.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np

from sparsebalance.planning.errors import InputError
from sparsebalance.planning.plan import Latency, MicroBatch, OnlineTuning, Segment, StepPlan, Topology

SCHEMA = 1
Decode = Callable[[Any], Any]
KINDS = (StepPlan, Topology, MicroBatch, Segment, Latency, OnlineTuning)
_PLAIN: dict[Any, tuple[type, ...]] = {int: (int,), float: (float, int), str: (str,), bool: (bool,)}
SHORT = 64  # characters of a part of a key; longer texts are kept as their fingerprint


class OtherPlans(InputError):
    """A file's plans were made for something else; whoever keeps it as a cache may plan again instead."""


@dataclass(frozen=True)
class PlanKey:
    """What plans depend on: two runs with equal keys make equal plans. Made by `plan_key`.

    Attributes:
        parts: (name, value as short text), in the order of `plan_key`.
    """

    parts: tuple[tuple[str, str], ...]

    @property
    def digest(self) -> str:
        """SHA-256, e.g. for the name of a file in a cache."""
        return hashlib.sha256(json.dumps(self.parts).encode()).hexdigest()


def plan_key(
    *,
    data: object,
    tokenizer: object,
    token_cap: int,
    block_size: int,
    unit_size: int | None,
    topology: Topology,
    model: object,
    budget: int,
    policy: object,
    batch_size: int,
    seed: int,
    composition: object,
    latency: object,
    **more: object,
) -> PlanKey:
    """The key of a run's plans. A value that is no number or short text is kept as its `fingerprint`.

    Args:
        data: the samples' lengths and targets in data order, or a fingerprint that covers them.
        model: its sizes, or a path to them. policy: batching and tuning with their settings, or a name that says all.
        composition: how samples come to share a step, e.g. "strict, tail dropped".
        latency: the table or model that times are predicted by. more: whatever else the caller's plans depend on.

    Raises:
        InputError: see `fingerprint`.
    """
    parts = {
        "data": data,
        "tokenizer": tokenizer,
        "token_cap": token_cap,
        "block_size": block_size,
        "unit_size": unit_size,
        "topology": topology,
        "model": model,
        "budget": budget,
        "policy": policy,
        "batch_size": batch_size,
        "seed": seed,
        "composition": composition,
        "latency": latency,
        **dict(sorted(more.items())),
    }
    return PlanKey(tuple((name.replace("_", " "), _text(value)) for name, value in parts.items()))


def _text(value: object) -> str:
    if isinstance(value, Topology):
        return " ".join(f"{name}{getattr(value, name)}" for name in ("dp", "pp", "tp", "sp"))
    if value is None or isinstance(value, (bool, int, float, str, Path)):
        text = "none" if value is None else str(value)
        return text if len(text) <= SHORT else fingerprint(text)
    return fingerprint(value)


def fingerprint(value: object) -> str:
    """SHA-256 of plain values and of dataclasses, mappings and sequences of them; equal in every process.

    A function counts by its name, a dataclass by its name and fields, a mapping without its order.

    Raises:
        InputError: a value of any other type, whose text might change from process to process.
    """
    return hashlib.sha256(json.dumps(_plain(value), sort_keys=True).encode()).hexdigest()


def _plain(value: object) -> object:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return [type(value).__name__, {field.name: _plain(getattr(value, field.name)) for field in fields(value)}]
    if isinstance(value, Mapping):
        return sorted(([_plain(key), _plain(item)] for key, item in value.items()), key=json.dumps)
    if isinstance(value, (np.ndarray, np.generic)):
        return _plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    name = getattr(value, "__qualname__", "<")
    if callable(value) and "<" not in name:  # lambdas share a name
        return f"{value.__module__}.{name}"
    raise InputError(
        f"plans are keyed by plain values, dataclasses and named functions, but {value!r:.60} is none of them; "
        "give its text or a fingerprint of your own"
    )


def describe_change(old: PlanKey, new: PlanKey) -> str:
    """What differs, such as "token cap (was 4096, is 8192), seed (was 0, is 1)"; empty where the keys are equal."""
    before, after = dict(old.parts), dict(new.parts)
    names = list(dict.fromkeys([*after, *before]))
    return ", ".join(
        f"{name} (was {_shown(before.get(name))}, is {_shown(after.get(name))})"
        for name in names
        if before.get(name) != after.get(name)
    )


def _shown(value: str | None) -> str:
    if value is None:
        return "not part of the key"
    return f"{value[:12]}..." if len(value) == 64 and set(value) <= set("0123456789abcdef") else value or "empty"


def save_plans(path: Path, key: PlanKey, plans: Mapping[int, StepPlan] | Iterable[StepPlan]) -> None:
    """Write plans with their key. Plans may be made while they are written; nothing is left where that fails.

    Equal keys and plans give equal bytes.

    Args:
        path: any name; ".jsonl.gz" says what it is.
        plans: step -> plan, or the plans of steps 0, 1, 2, ...

    Raises:
        InputError: no plan.
    """
    steps = plans.items() if isinstance(plans, Mapping) else enumerate(plans)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file, gzip.GzipFile("", "wb", 6, file, mtime=0) as packed:
            for line in _lines_of(key, steps):
                packed.write(f"{json.dumps(line, separators=(',', ':'))}\n".encode())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _lines_of(key: PlanKey, steps: Iterable[tuple[int, StepPlan]]) -> Iterator[object]:
    names = {kind.__name__: [field.name for field in fields(kind)] for kind in KINDS}
    yield {"schema": SCHEMA, "key": dict(key.parts), "fields": names}
    count = 0
    for step, plan in steps:
        yield [step, _packed(plan)]
        count += 1
    if not count:
        raise InputError("there are no plans to save; plan at least one step")
    yield {"plans": count}  # what a file that was cut short lacks


def _packed(value: Any) -> Any:
    """Tuples as lists, one number many times (budgets over layers) as what and how often, and a dataclass as the
    list of its fields, the last ones that hold their defaults left out."""
    if isinstance(value, tuple):
        if len(value) > 1 and type(value[0]) is int and value.count(value[0]) == len(value):
            return {"of": value[0], "times": len(value)}
        return [_packed(item) for item in value]
    if not isinstance(value, KINDS):
        return value
    kind: Any = type(value)
    names, defaults = _fields(kind)
    entries = [getattr(value, name) for name in names]
    while entries and entries[-1] == defaults[len(entries) - 1]:  # MISSING equals nothing
        entries.pop()
    return [_packed(item) for item in entries]


@cache
def _fields(kind: Any) -> tuple[list[str], list[object]]:
    """Names and defaults."""
    return [field.name for field in fields(kind)], [field.default for field in fields(kind)]


def load_plans(path: Path, key: PlanKey) -> dict[int, StepPlan]:
    """Step -> plan, exactly as saved.

    Args:
        key: of the run that is to use them.

    Raises:
        OtherPlans: the plans were made for something else, by the parts of the key that differ, or by another schema.
        InputError: no such file, or a broken one, by its line.
    """
    if not path.is_file():
        raise InputError(f"no plans at {path}; make them first, or leave the file out to plan while training")
    plans: dict[int, StepPlan] = {}
    number, complete = 0, False
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                record = json.loads(line)
                if number == 1:
                    decode = _decoder_of(record, path, key)
                elif complete:
                    raise ValueError("something follows after the last line")
                elif isinstance(record, dict):
                    if record["plans"] != len(plans):
                        raise ValueError(f"{len(plans)} of {record['plans']} plans are there")
                    complete = True
                else:
                    step, packed = record
                    if type(step) is not int or step in plans:
                        raise ValueError(f"step {step!r} is there twice or no number")
                    plans[step] = decode(packed)
    except OtherPlans:
        raise
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:  # while the next line was read
        raise _broken(path, number + 1, error) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _broken(path, number, error) from error
    if not complete:
        raise _broken(path, number + 1, "it ends before its last line" if number else "it is empty")
    return plans


def _broken(path: Path, line: int, why: object) -> InputError:
    reason = f"no {why}" if isinstance(why, KeyError) else why
    return InputError(f"{path} is broken at line {line} ({reason}); delete it and make the plans again")


def _decoder_of(header: Any, path: Path, key: PlanKey) -> Callable[[Any], StepPlan]:
    """What turns a line's list into a plan, by the file's first line.

    Raises:
        OtherPlans: another schema, or another key.
    """
    if header["schema"] != SCHEMA:
        raise OtherPlans(
            f"{path} has schema {header['schema']}, but this version reads {SCHEMA}; delete it and make the plans again"
        )
    change = describe_change(PlanKey(tuple(header["key"].items())), key)
    if change:
        raise OtherPlans(
            f"{path} holds plans that were made for something else: {change}; "
            "delete it or name another file to plan again, or run what they were made for"
        )
    return _decoder(StepPlan, header["fields"])


def _decoder(kind: Any, names: Mapping[str, Sequence[str]]) -> Decode:
    """What turns JSON into a value of that annotation: a dataclass, a tuple of any length, a plain value, or one of
    these or None.

    Args:
        names: of every dataclass's fields in the order of the file; one that the file lacks keeps its default.
    """
    if isinstance(kind, type) and is_dataclass(kind):
        return _dataclass_decoder(kind, names)
    if get_origin(kind) is tuple:
        return _tuple_decoder(_decoder(get_args(kind)[0], names))
    if type(None) in get_args(kind):
        return _optional_decoder(_decoder(get_args(kind)[0], names))
    return _plain_decoder(_PLAIN[kind])


def _dataclass_decoder(kind: type[Any], names: Mapping[str, Sequence[str]]) -> Decode:
    hints, written = get_type_hints(kind), list(names[kind.__name__])
    if unknown := [name for name in written if name not in hints]:
        raise ValueError(f"{kind.__name__} has no field {unknown[0]!r} in this version")
    readers = [_decoder(hints[name], names) for name in written]
    in_order = written == [field.name for field in fields(kind)][: len(written)]

    def decode(value: Any) -> Any:
        if type(value) is not list or len(value) > len(readers):
            raise ValueError(f"{value!r:.40} is no {kind.__name__}")
        items = [read(item) for read, item in zip(readers, value)]
        return kind(*items) if in_order else kind(**dict(zip(written, items)))

    return decode


def _tuple_decoder(read: Decode) -> Decode:
    def decode(value: Any) -> Any:
        if type(value) is dict:
            return (read(value["of"]),) * value["times"]
        if type(value) is not list:
            raise ValueError(f"{value!r:.40} is no list")
        return tuple([read(item) for item in value])

    return decode


def _optional_decoder(read: Decode) -> Decode:
    def decode(value: Any) -> Any:
        return None if value is None else read(value)

    return decode


def _plain_decoder(kinds: tuple[type, ...]) -> Decode:
    def decode(value: Any) -> Any:
        if type(value) not in kinds:  # True is no number here
            raise ValueError(f"{value!r:.40} is no {kinds[0].__name__}")
        return value

    return decode
