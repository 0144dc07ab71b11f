"""Sample lengths from wherever they are: a file, a saved data set, standard input, or a built-in distribution.

In: a source and, where it has several, the column. Out: `Lengths`, whole numbers of tokens that a planner can trust;
a wrong value is refused with its place. Built-in distributions are quantile tables of public data sets, drawn from.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import math
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
from numpy.typing import NDArray

from sparsebalance.planning.errors import InputError, did_you_mean

MAX_LENGTH = 16_777_216
DISTRIBUTIONS = ("longalign-10k", "longalpaca-12k", "chatqa2", "real")
Int = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Lengths:
    """Lengths of samples, in the order of their source.

    Attributes:
        values: [n] int64 tokens, each from 1 to MAX_LENGTH.
        targets: [n] int64 target tokens, each from 0 to the length; None where the source has no `targets` column.
        source: what reports call it. provenance: how the values came about, one sentence.
    """

    values: Int
    targets: Int | None
    source: str
    provenance: str


class Row(NamedTuple):
    """One sample as its source has it, unchecked."""

    where: str
    length: object
    targets: object = None  # None where the row has none


class _Text(str):
    """A cell of a format that has no types, so a number in it is no mistake."""


def read_lengths(
    source: str, *, column: str | None = None, limit: int | None = None, stdin: TextIO | None = None
) -> Lengths:
    """Read lengths.

    Args:
        source: `-` for standard input (JSON lines, or one number a line), the name of a built-in distribution, a
            directory saved by `datasets`, or a file: .jsonl, .json-lines, .csv, .txt (each also .gz) or .npy. A
            distribution goes before a path of the same name; write `./NAME` for the path.
        column: that holds the lengths, `length` by default; a column of lists (input_ids) counts their items.
        limit: read only the first so many samples. A distribution draws so many, but not more than its rows.
        stdin: what `-` reads, sys.stdin by default.

    Raises:
        InputError: no such source, column or option; a broken file; no lengths; or a value that is not a whole number
            of tokens from 1 to MAX_LENGTH (its targets: from 0 to the length).
    """
    if limit is not None and limit < 1:
        raise InputError(f"limit is {limit}, but at least 1 sample must be read; raise it or leave it out")
    if source.lower() in DISTRIBUTIONS:
        if column is not None:
            raise InputError(f"the distribution {source} has no columns; leave out the column {column!r}")
        return _drawn(source.lower(), limit)
    if source == "-":
        name, rows = "standard input", _stdin_rows(sys.stdin if stdin is None else stdin, column)
    else:
        name, rows = source, _reader(source)(Path(source), column)
    values: list[int] = []
    targets: list[int] = []
    for row in itertools.islice(rows, limit):
        values.append(_length(row))
        if row.targets is not None:
            targets.append(_targets(row, values[-1]))
        if targets and len(targets) != len(values):
            raise InputError(f"{row.where} and earlier rows differ: only some have targets; give all of them, or none")
    if not values:
        raise InputError(f"{name} holds no lengths; give at least one sample")
    return Lengths(
        np.array(values, dtype=np.int64),
        np.array(targets, dtype=np.int64) if targets else None,
        name,
        f"{len(values):,} lengths read from {name}" + (f", column {column}" if column else ""),
    )


def _length(row: Row) -> int:
    value = _whole(row.length, row.where, "length")
    if value < 1:
        raise InputError(f"{row.where}: length is {value}, but a sample has at least 1 token; drop empty samples")
    if value > MAX_LENGTH:
        raise InputError(
            f"{row.where}: length is {value}, over the limit of {MAX_LENGTH:,} tokens; "
            "check that it counts tokens, or split the sample"
        )
    return value


def _targets(row: Row, length: int) -> int:
    value = _whole(row.targets, row.where, "targets")
    if not 0 <= value <= length:
        raise InputError(
            f"{row.where}: targets is {value}, but must be from 0 to the length {length}; targets count its tokens"
        )
    return value


def _whole(value: object, where: str, what: str) -> int:
    """The value as a whole number; text only from formats without types, 12.0 as 12."""
    number = _parsed(value) if isinstance(value, _Text) else value
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if isinstance(number, int) and not isinstance(number, bool):
        return number
    shown = str(number) if isinstance(number, float) and not math.isfinite(number) else json.dumps(value, default=repr)
    raise InputError(
        f"{where}: {what} is {shown[:60]}, but it must be a whole number of tokens; correct the row or drop it"
    )


def _parsed(text: str) -> float | str:
    try:
        return float(text) if "_" not in text else text  # Python alone reads 1_000 as a number
    except ValueError:
        return text


def _json_rows(lines: Iterable[str], name: str, column: str | None) -> Iterator[Row]:
    for number, line in enumerate(lines, start=1):
        where = f"{name} line {number}"
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where} is not valid JSON ({error}); mend or remove the line") from error
        if isinstance(value, dict):
            wanted = _check_column(column, value, where)
            yield Row(where, _size(value[wanted]), _targets_cell(value, wanted))
        elif column is not None:
            raise InputError(f"{where} is no object, so it has no column {column!r}; leave the column out")
        else:
            yield Row(where, value)


def _csv_rows(lines: Iterable[str], name: str, column: str | None) -> Iterator[Row]:
    reader = csv.reader(lines, skipinitialspace=True)
    header: list[str] = []
    try:
        for cells in reader:
            where = f"{name} line {reader.line_num}"
            if not cells:
                continue
            if not header:
                header = [cell.strip() for cell in cells]
                wanted = _check_column(column, header, where)
                continue
            row = {key: _Text(cell.strip()) for key, cell in zip(header, cells)}
            if len(cells) < len(header):
                raise InputError(f"{where} has {len(cells)} cells, but the header has {len(header)}; mend the row")
            yield Row(where, row[wanted], _targets_cell(row, wanted))
    except csv.Error as error:
        raise InputError(f"{name} line {reader.line_num} is not valid CSV ({error}); write the file again") from error


def _number_rows(lines: Iterable[str], name: str, column: str | None) -> Iterator[Row]:
    _refuse_column(column, f"{name} holds plain numbers")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield Row(f"{name} line {number}", _Text(line.strip()))


def _stdin_rows(stream: TextIO, column: str | None) -> Iterator[Row]:
    """JSON lines where the first line that is not blank starts an object, else one number a line."""
    name = "standard input"
    lines = _guarded(stream, name)
    start: list[str] = []
    for line in lines:
        start.append(line)
        if line.strip():
            break
    is_json = bool(start) and start[-1].lstrip().startswith("{")
    return (_json_rows if is_json else _number_rows)(itertools.chain(start, lines), name, column)


def _npy_rows(path: Path, column: str | None) -> Iterator[Row]:
    _refuse_column(column, f"{path} is an array")
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path} is not a readable array ({error}); write it with numpy.save") from error
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iuf":
        shape = f"{array.dtype} of shape {list(array.shape)}" if isinstance(array, np.ndarray) else "an archive"
        raise InputError(f"{path} holds {shape}, but lengths are one row of whole numbers; save such an array")
    for index, value in enumerate(array):
        yield Row(f"{path} item {index}", value.item())


def _saved_rows(path: Path, column: str | None) -> Iterator[Row]:
    """A directory saved by `datasets`, a thousand rows at a time; lists are counted without being unpacked."""
    try:
        from datasets import Dataset, load_from_disk
        from pyarrow import compute, types
    except ImportError as error:
        raise InputError(
            f"{path} is a directory, and reading saved data sets needs `datasets`; "
            "install sparsebalance[train], or give a file of lengths"
        ) from error
    try:
        data = load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not a saved `datasets` directory ({error}); give one, or a file") from error
    if not isinstance(data, Dataset):
        raise InputError(f"{path} holds the splits {', '.join(sorted(data))}; give the directory of one of them")
    wanted = _check_column(column, data.column_names, str(path))
    names = [wanted] + (["targets"] if "targets" in data.column_names and wanted != "targets" else [])
    tables = data.select_columns(names).with_format("arrow")
    for start in range(0, len(data), 1000):
        table = tables[start : start + 1000]
        cells = {name: table[name] for name in names}
        kind = cells[wanted].type
        if any(is_kind(kind) for is_kind in (types.is_list, types.is_large_list, types.is_fixed_size_list)):
            cells[wanted] = compute.list_value_length(cells[wanted])
        for index, values in enumerate(zip(*(cells[name].to_pylist() for name in names)), start=start):
            yield Row(f"{path} row {index}", *values)


def _check_column(column: str | None, known: Iterable[str], where: str) -> str:
    wanted = column or "length"
    known = list(known)
    if wanted not in known:
        there = ", ".join(map(str, known)) or "none"
        raise InputError(f"{where} has no column {wanted!r}; choose one with --column from those there: {there}")
    return wanted


def _refuse_column(column: str | None, why: str) -> None:
    if column is not None:
        raise InputError(f"{why}, so it has no column {column!r}; leave the column out")


def _targets_cell(row: Mapping[str, object], wanted: str) -> object:
    return row.get("targets") if wanted != "targets" else None


def _size(value: object) -> object:
    return len(value) if isinstance(value, list) else value


Reader = Callable[[Path, str | None], Iterator[Row]]


def _text_file(rows: Callable[[Iterable[str], str, str | None], Iterator[Row]]) -> Reader:
    def read(path: Path, column: str | None) -> Iterator[Row]:
        return rows(_guarded(_lines(path), str(path)), str(path), column)

    return read


def _lines(path: Path) -> Iterator[str]:
    opened = gzip.open if path.suffix.lower() == ".gz" else open
    with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
        yield from file


READERS: dict[str, Reader] = {
    ".jsonl": _text_file(_json_rows),
    ".json-lines": _text_file(_json_rows),
    ".csv": _text_file(_csv_rows),
    ".txt": _text_file(_number_rows),
    ".npy": _npy_rows,
}


def _reader(source: str) -> Reader:
    path = Path(source)
    if not source or not os.path.exists(source):
        hint = did_you_mean(source.lower(), DISTRIBUTIONS)
        raise InputError(
            f"no file or directory {source!r}{hint}; give one, `-` for standard input, "
            f"or a built-in distribution: {', '.join(DISTRIBUTIONS)}"
        )
    if path.is_dir():
        return _saved_rows
    name = path.name.lower()
    suffix = Path(name.removesuffix(".gz")).suffix
    if suffix not in READERS or (name.endswith(".gz") and suffix == ".npy"):
        raise InputError(
            f"{source} has none of the endings {', '.join(READERS)} (text also .gz), which tell its format; rename it"
        )
    return READERS[suffix]


def _guarded(lines: Iterable[str], name: str) -> Iterator[str]:
    """The lines; what breaks while reading them becomes one sentence."""
    number = 0
    try:
        for line in lines:
            yield line
            number += 1
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InputError(f"{name} is broken after line {number} ({error}); write or fetch it again") from error


@cache
def _distribution(name: str) -> Mapping[str, Any]:
    text = (resources.files("sparsebalance.planning") / "distributions" / f"{name}.json").read_text(encoding="utf-8")
    record: Mapping[str, Any] = json.loads(text)
    return record


def draw(name: str, count: int, seed: int) -> Int:
    """Draw lengths from a built-in distribution by inverse transform.

    The first lengths of a longer draw are those of a shorter one with the same seed.

    Args:
        name: one of DISTRIBUTIONS. count: lengths to draw, at least 1. seed: of numpy's default generator.

    Returns:
        [count] int64 tokens.

    Raises:
        InputError: no distribution has that name, or count is below 1.
    """
    if name not in DISTRIBUTIONS:
        hint = did_you_mean(name, DISTRIBUTIONS)
        raise InputError(f"no distribution is called {name!r}{hint}; choose from {', '.join(DISTRIBUTIONS)}")
    if count < 1:
        raise InputError(f"count is {count}, but at least 1 length must be drawn")
    parts = _distribution(name)["parts"]
    which, where = np.random.default_rng(seed).random((count, 2)).T
    shares = np.cumsum([part["rows"] for part in parts]) / sum(part["rows"] for part in parts)
    chosen = np.searchsorted(shares, which, side="right")
    lengths = [
        np.interp(where, np.linspace(0, 1, len(table)), table).clip(1, part["truncate_to"])
        for part in parts
        for table in [part["quantiles"]]
    ]
    drawn: Int = np.rint(np.choose(chosen, lengths)).astype(np.int64)
    return drawn


def _drawn(name: str, limit: int | None) -> Lengths:
    record = _distribution(name)
    rows = sum(part["rows"] for part in record["parts"])
    count = min(limit or rows, rows)
    return Lengths(
        draw(name, count, seed=0),
        None,
        name,
        f"{count:,} lengths drawn with seed 0 from quantiles of {record['dataset']}, {_origin(record)}; "
        f"assumed: {record['assumed']}",
    )


def _origin(record: Mapping[str, Any]) -> str:
    """Where a distribution's quantiles come from: counted in its sources, or rebuilt from what one publishes."""
    if "sources" in record:
        return f"counted in {len(record['sources'])} public sources"
    source = record["source"]
    return f"rebuilt between the anchors that {source['repository']} publishes at {source['commit'][:12]}"
