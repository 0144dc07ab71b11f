"""Samples from rows that a program already has: their lengths from a column, or from a function.

In: a list of rows, a `datasets.Dataset` (no import needed), or plain lengths. Out: samples that can be planned; a
wrong value is refused with its row. Lengths in files: `sparsebalance.planning.lengths`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from sparsebalance.planning.errors import InputError, did_you_mean
from sparsebalance.planning.lengths import MAX_LENGTH
from sparsebalance.planning.plan import Sample

Count = str | Callable[[Any], int]
BATCH = 1000  # rows of a data set that are read at once


def samples_of(data: Any, length: Count = "length", targets: Count | None = None) -> list[Sample]:
    """Samples whose ids are the indices of their rows.

    Args:
        data: a sequence of rows (mappings), a `datasets.Dataset`, or a sequence of whole numbers, which then are the
            lengths. With functions, rows may be anything that these understand.
        length: the column with each sample's tokens, or a function of a row that returns them. A column of lists
            (input_ids) counts their items.
        targets: the same for target tokens; by default every token but the last is one, as in causal language models.

    Raises:
        InputError: no rows, no such column, a function that fails, or a value that is not a whole number of tokens
            from 1 to MAX_LENGTH (its targets: from 0 to the length); names the row.
    """
    _check_data(data)
    lengths = [_length(index, value) for index, value in enumerate(_values(data, length, "length"))]
    if not lengths:
        raise InputError("the data has no rows; give at least one sample")
    if targets is None:
        return [Sample(index, tokens, tokens - 1) for index, tokens in enumerate(lengths)]
    counts = _values(data, targets, "targets")
    return [
        Sample(index, tokens, _targets(index, value, tokens))
        for index, (tokens, value) in enumerate(zip(lengths, counts))
    ]


def _check_data(data: Any) -> None:
    columns = getattr(data, "column_names", None)
    if isinstance(columns, Mapping):
        raise InputError(f"the data holds the splits {', '.join(map(str, columns))}; give one of them")
    if isinstance(data, (str, bytes, Mapping)) or not hasattr(data, "__len__"):
        raise InputError(
            f"the data is a {type(data).__name__}, but samples come from a list of rows, a datasets.Dataset or a list "
            "of lengths; give one of these (a stream as a list, a file by read_lengths)"
        )


def _values(data: Any, what: Count, name: str) -> Iterator[Any]:
    """The column, or the function's results, row by row."""
    if not isinstance(what, str):
        for index, row in enumerate(_rows(data)):
            try:
                value = what(row)
            except Exception as error:
                raise InputError(
                    f"row {index}: the {name} function failed ({type(error).__name__}: {error}); "
                    "mend the function or drop the row"
                ) from error
            yield value
    elif hasattr(data, "column_names"):
        _check_column(what, data.column_names, "the data", name)
        column = data[what]
        for start in range(0, len(data), BATCH):  # many times faster than row by row
            yield from column[start : start + BATCH]
    else:
        for index, row in enumerate(data):
            if isinstance(row, Mapping):
                _check_column(what, row, f"row {index}", name)
                yield row[what]
            elif name == what == "length":
                yield row
            else:
                raise InputError(
                    f"row {index} is a {type(row).__name__}, so it has no column {what!r}; "
                    f"give rows that are mappings, or {name} as a function"
                )


def _rows(data: Any) -> Iterator[Any]:
    if not hasattr(data, "column_names"):
        yield from data
        return
    for start in range(0, len(data), BATCH):
        columns = data[start : start + BATCH]
        for values in zip(*columns.values()):
            yield dict(zip(columns, values))


def _check_column(wanted: str, known: Iterable[Any], where: str, name: str) -> None:
    names = [str(column) for column in known]
    if wanted not in names:
        raise InputError(
            f"{where} has no column {wanted!r}{did_you_mean(wanted, names)}; give {name} as one of those there "
            f"({', '.join(names) or 'none'}) or as a function"
        )


def _length(index: int, value: Any) -> int:
    if isinstance(value, (list, tuple)):
        value = len(value)
    elif len(getattr(value, "shape", ())) == 1:  # an array or a tensor of token ids
        value = value.shape[0]
    tokens = _whole(index, value, "length")
    if not 1 <= tokens <= MAX_LENGTH:
        raise InputError(
            f"row {index}: length is {tokens}, but a sample has from 1 to {MAX_LENGTH:,} tokens; "
            "drop or split the row, or correct the column or function that lengths come from"
        )
    return tokens


def _targets(index: int, value: Any, length: int) -> int:
    targets = _whole(index, value, "targets")
    if not 0 <= targets <= length:
        raise InputError(
            f"row {index}: targets is {targets}, but must be from 0 to the length {length}; targets count its tokens"
        )
    return targets


def _whole(index: int, value: Any, name: str) -> int:
    """The value as a whole number: also of numpy, of a tensor without dimensions, or a float such as 12.0."""
    number = value.item() if getattr(value, "shape", None) == () else value
    if isinstance(number, float) and number.is_integer():
        return int(number)
    if isinstance(number, int) and not isinstance(number, bool):
        return number
    shown = "NaN" if isinstance(number, float) and math.isnan(number) else " ".join(repr(number).split())
    raise InputError(
        f"row {index}: {name} is {shown:.60}, but it must be a whole number of tokens; "
        "correct or drop the row, or give another column or function"
    )
