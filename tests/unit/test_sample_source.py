"""Samples from rows, data sets and numbers; every wrong value is refused with its row and the way out."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebalance.planning.errors import InputError
from sparsebalance.planning.lengths import MAX_LENGTH
from sparsebalance.planning.plan import Sample
from sparsebalance.planning.sample_source import BATCH, samples_of

ROWS = [{"length": 5, "n": 9, "ids": [1, 2]}, {"length": 1, "n": 3, "ids": [7]}]


def lengths_of(samples: list[Sample]) -> list[int]:
    assert [sample.id for sample in samples] == list(range(len(samples)))
    assert all(type(value) is int for sample in samples for value in (sample.length, sample.targets))
    return [sample.length for sample in samples]


@pytest.mark.parametrize("data", [ROWS, datasets.Dataset.from_list(ROWS)], ids=["rows", "dataset"])
def test_lengths_come_from_a_column_or_a_function(data: Any) -> None:
    assert samples_of(data) == [Sample(0, 5, 4), Sample(1, 1, 0)]
    assert samples_of(data, "n", targets="length") == [Sample(0, 9, 5), Sample(1, 3, 1)]
    assert lengths_of(samples_of(data, "ids")) == [2, 1]
    assert lengths_of(samples_of(data, lambda row: 10 * row["n"] + len(row["ids"]))) == [92, 31]
    assert samples_of(data, targets=lambda row: row["length"] - 1) == [Sample(0, 5, 4), Sample(1, 1, 0)]


@pytest.mark.parametrize(
    "data",
    [[3, 8], (3, 8), np.array([3, 8], dtype=np.uint8), np.array([3.0, 8.0]), torch.tensor([3, 8]), range(3, 9, 5)],
)
def test_plain_numbers_are_lengths(data: Any) -> None:
    assert samples_of(data) == [Sample(0, 3, 2), Sample(1, 8, 7)]
    assert lengths_of(samples_of(data, targets=lambda n: int(n) // 2)) == [3, 8]


def test_functions_read_rows_of_any_kind() -> None:
    assert lengths_of(samples_of(["a b", "a b c"], lambda text: len(text.split()))) == [2, 3]


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_formatted_data_sets_are_read(kind: str) -> None:
    data = datasets.Dataset.from_list(ROWS).with_format(kind)
    assert lengths_of(samples_of(data)) == [5, 1]
    assert lengths_of(samples_of(data, "ids")) == [2, 1]
    assert lengths_of(samples_of(data, lambda row: row["n"])) == [9, 3]


def test_long_data_sets_are_read_in_order() -> None:
    wanted = [1 + i % 977 for i in range(2 * BATCH + 7)]
    data = datasets.Dataset.from_dict({"length": wanted})
    assert lengths_of(samples_of(data)) == wanted
    assert lengths_of(samples_of(data, lambda row: 2 * row["length"])) == [2 * n for n in wanted]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, MAX_LENGTH), min_size=1, max_size=20))
def test_every_way_gives_the_same_samples(wanted: list[int]) -> None:
    rows = [{"length": n} for n in wanted]
    assert samples_of(wanted) == samples_of(rows) == samples_of(rows, lambda row: row["length"])


WRONG = [0, -3, None, True, "12", 1.5, float("nan"), float("inf"), [1, 2, 3], {}, MAX_LENGTH + 1, np.array([[1], [2]])]


@pytest.mark.parametrize("value", [value for value in WRONG if not isinstance(value, list)], ids=repr)
def test_a_wrong_length_is_refused_with_its_row(value: Any) -> None:
    shown = "NaN" if isinstance(value, float) and np.isnan(value) else repr(value).split("\n")[0]
    for data, how in (([{"n": 7}, {"n": value}], "n"), ([7, value], lambda row: row)):
        with pytest.raises(InputError, match=r"^row 1: length is .*(drop|correct) .*(column|function)") as error:
            samples_of(data, how)
        assert shown[:20] in str(error.value)


@pytest.mark.parametrize("value", [value for value in WRONG if not (isinstance(value, int) and value == 0)], ids=repr)
def test_wrong_targets_are_refused_with_their_row(value: Any) -> None:
    with pytest.raises(InputError, match=r"^row 1: targets is .*; (correct|targets count)"):
        samples_of([{"length": 7, "targets": 2}, {"length": 2, "targets": value}], targets="targets")


def test_targets_may_be_all_or_none_of_the_tokens() -> None:
    rows = [{"length": 4, "targets": 0}, {"length": 4, "targets": 4.0}]
    assert samples_of(rows, targets="targets") == [Sample(0, 4, 0), Sample(1, 4, 4)]
    with pytest.raises(InputError, match="row 0: targets is 5, but must be from 0 to the length 4"):
        samples_of([4], targets=lambda n: 5)


def test_a_missing_column_names_those_there() -> None:
    data = datasets.Dataset.from_list(ROWS)
    with pytest.raises(
        InputError, match=r"the data has no column 'lenght' \(did you mean 'length'\?\); give length as"
    ):
        samples_of(data, "lenght")
    with pytest.raises(InputError, match=r"no column 'labels'; give targets .* \(length, n, ids\) or as a function"):
        samples_of(data, targets="labels")
    with pytest.raises(InputError, match=r"row 1 has no column 'n'; give length as one of those there \(none\)"):
        samples_of([{"n": 5}, {}], "n")
    with pytest.raises(InputError, match="row 0 is a int, so it has no column 'n'; give rows"):
        samples_of([5], "n")
    with pytest.raises(InputError, match="row 0 is a int, so it has no column 'targets'"):
        samples_of([5], targets="targets")


@pytest.mark.parametrize("data", [ROWS, datasets.Dataset.from_list(ROWS)], ids=["rows", "dataset"])
def test_a_function_that_fails_names_its_row(data: Any) -> None:
    with pytest.raises(InputError, match=r"^row 1: the length function failed \(ZeroDivisionError: .*mend") as error:
        samples_of(data, lambda row: 6 // (row["length"] - 1))
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    with pytest.raises(InputError, match=r"row 0: the targets function failed \(KeyError: 'x'"):
        samples_of(data, targets=lambda row: row["x"])


def test_data_of_a_wrong_kind_is_refused() -> None:
    data = datasets.Dataset.from_list(ROWS)
    with pytest.raises(InputError, match="the data holds the splits train, test; give one of them"):
        samples_of(datasets.DatasetDict(train=data, test=data))
    for wrong in ({"length": [1, 2]}, "file.jsonl", iter([1]), data.to_iterable_dataset(), 5):
        with pytest.raises(InputError, match=r"the data is a .*list of rows, a datasets.Dataset or a list of lengths"):
            samples_of(wrong)
    for nothing in ([], datasets.Dataset.from_dict({"length": []})):
        with pytest.raises(InputError, match="no rows; give at least one"):
            samples_of(nothing)


def test_planning_does_not_import_datasets() -> None:
    code = (
        "import sys; from sparsebalance.planning.sample_source import samples_of; "
        "assert len(samples_of([1, 2])) == 2; "
        "assert not {'datasets', 'torch', 'pyarrow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
