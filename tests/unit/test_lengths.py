"""Sample lengths: every format, every wrong value with its place, and the built-in distributions."""

from __future__ import annotations

import gzip
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparsebalance.planning.errors import InputError
from sparsebalance.planning.lengths import DISTRIBUTIONS, MAX_LENGTH, draw, read_lengths

FOLDER = Path(sys.modules[read_lengths.__module__].__file__ or "").parent / "distributions"
Write = Callable[[str, str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """write(name, text): a file, gzipped where its name says so; returns its path."""

    def write_file(name: str, text: str) -> str:
        path = tmp_path / name
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return str(path)

    return write_file


def table(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return record


GOOD = [
    ("a.jsonl", "5\n\n7\n1000000\n", None),
    ("b.jsonl", '{"length": 5}\n{"length": 7.0}\n{"length": 1e6}\n', None),
    ("c.json-lines", '{"n": 5, "length": "x"}\n{"n": 7}\n{"n": 1000000}', "n"),
    ("d.jsonl.gz", '{"length": 5}\n7\n1000000\n', None),
    ("e.csv", "length,name\n5,a\n7.0,b\n\n1000000,c\n", None),
    ("f.csv", '\ufeffid, "n tokens"\r\n1, 5\r\n2, "7"\r\n3, 1000000\r\n', "n tokens"),
    ("g.txt", "5\n  7 \n\n1000000", None),
    ("H.TXT.GZ", "5\n7\n1e6\n", None),
    ("i.csv.gz", "length\n5\n7\n1000000\n", None),
]


@pytest.mark.parametrize(("name", "text", "column"), GOOD)
def test_a_file_of_every_format_gives_its_lengths(
    write: Write, tmp_path: Path, name: str, text: str, column: str | None
) -> None:
    path = write(name, text)
    if name.endswith(".GZ"):
        Path(path).write_bytes(gzip.compress(text.encode()))
    lengths = read_lengths(path, column=column)
    assert lengths.values.tolist() == [5, 7, 1_000_000]
    assert lengths.values.dtype == np.int64
    assert lengths.targets is None
    assert lengths.source == path
    assert lengths.provenance == f"3 lengths read from {path}" + (f", column {column}" if column else "")


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.int32, np.float64])
def test_an_array_gives_its_lengths(tmp_path: Path, dtype: Any) -> None:
    np.save(tmp_path / "a.npy", np.array([5, 7, 200], dtype=dtype))
    assert read_lengths(str(tmp_path / "a.npy")).values.tolist() == [5, 7, 200]


@pytest.mark.parametrize(
    ("text", "column"),
    [("5\n7\n", None), ('\n{"length": 5}\n{"length": 7}\n', None), ('{"n": 5}\n{"n": 7}', "n"), ("\n\n5.0\n7", None)],
)
def test_standard_input_holds_json_lines_or_one_number_a_line(text: str, column: str | None) -> None:
    lengths = read_lengths("-", column=column, stdin=io.StringIO(text))
    assert (lengths.values.tolist(), lengths.source) == ([5, 7], "standard input")


def test_standard_input_is_that_of_the_process_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("42\n"))
    assert read_lengths("-").values.tolist() == [42]


def test_targets_are_read_where_there_are_any(write: Write) -> None:
    for name, text in (
        ("a.jsonl", '{"length": 5, "targets": 0}\n{"length": 7, "targets": 7}\n'),
        ("a.csv", "targets,length\n0,5\n7,7\n"),
    ):
        targets = read_lengths(write(name, text)).targets
        assert targets is not None
        assert targets.tolist() == [0, 7]
        assert targets.dtype == np.int64


def test_a_column_called_targets_may_hold_the_lengths(write: Write) -> None:
    lengths = read_lengths(write("a.csv", "targets\n5\n7\n"), column="targets")
    assert (lengths.values.tolist(), lengths.targets) == ([5, 7], None)


def test_a_column_of_lists_counts_their_items(write: Write) -> None:
    path = write("a.jsonl", '{"input_ids": [3, 1, 2]}\n{"input_ids": [9]}\n')
    assert read_lengths(path, column="input_ids").values.tolist() == [3, 1]


def test_only_as_many_samples_are_read_as_the_limit_says(write: Write) -> None:
    path = write("a.txt", "5\n7\nbroken\n")
    assert read_lengths(path, limit=2).values.tolist() == [5, 7]
    with pytest.raises(InputError, match="line 3"):
        read_lengths(path, limit=3)
    with pytest.raises(InputError, match="limit is 0, but at least 1 sample"):
        read_lengths(path, limit=0)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(values=st.lists(st.integers(1, MAX_LENGTH), min_size=1, max_size=30))
def test_all_formats_agree(write: Write, values: list[int]) -> None:
    texts = {
        "a.jsonl": "\n".join(json.dumps({"length": n}) for n in values),
        "a.csv": "length\n" + "\n".join(map(str, values)),
        "a.txt": "\n".join(map(str, values)),
    }
    for name, text in texts.items():
        assert read_lengths(write(name, text)).values.tolist() == values


WRONG = [
    ("0", "length is 0, but a sample has at least 1 token"),
    ("-3", "length is -3, but a sample has at least 1 token"),
    ("16777217", "length is 16777217, over the limit of 16,777,216 tokens"),
    ("12.5", "length is 12.5, but it must be a whole number"),
    ("NaN", "length is nan, but it must be a whole number"),
    ("Infinity", "length is inf, but it must be a whole number"),
    ("-Infinity", "length is -inf, but it must be a whole number"),
    ("true", "length is true, but it must be a whole number"),
]
WRONG_JSON = [
    ('"12"', 'length is "12", but it must be a whole number'),
    ('"long"', 'length is "long", but it must be a whole number'),
    ("null", "length is null, but it must be a whole number"),
    ("1e999", "length is inf, but it must be a whole number"),
]
WRONG_TEXT = [
    ("1_000", "length is 1_000"),
    ("0x10", "length is 0x10"),
    ("many", "length is many"),
    ("True", "length is True"),
]


@pytest.mark.parametrize(("value", "message"), WRONG + WRONG_JSON)
def test_a_wrong_value_in_json_lines_is_named_with_its_line(write: Write, value: str, message: str) -> None:
    for text in (f'{{"length": 5}}\n\n{{"length": {value}}}\n', f"5\n\n{value}\n"):
        path = write("a.jsonl", text)
        with pytest.raises(InputError) as caught:
            read_lengths(path)
        assert str(caught.value).startswith(f"{path} line 3: {message}")


@pytest.mark.parametrize(("value", "message"), WRONG + WRONG_TEXT)
def test_a_wrong_value_in_text_is_named_with_its_line(write: Write, value: str, message: str) -> None:
    csv_path, txt_path = write("a.csv", f"length,x\n5,1\n{value},2\n"), write("a.txt", f"5\n\n{value}\n")
    for where, source, stdin in (
        (f"{csv_path} line 3", csv_path, None),
        (f"{txt_path} line 3", txt_path, None),
        ("standard input line 2", "-", io.StringIO(f"5\n{value}\n")),
    ):
        with pytest.raises(InputError) as caught:
            read_lengths(source, stdin=stdin)
        assert str(caught.value).replace('"', "").startswith(f"{where}: {message}")


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([5, 0]), r"item 1: length is 0"),
        (np.array([5.0, np.nan]), r"item 1: length is nan"),
        (np.array([5.0, 2.5]), r"item 1: length is 2\.5"),
        (np.array([True]), r"holds bool of shape \[1\]"),
        (np.array(["5"]), r"holds <U1 of shape \[1\]"),
        (np.ones((2, 2)), r"holds float64 of shape \[2, 2\]"),
        (np.array([]), r"holds no lengths"),
        (np.array([{}], dtype=object), r"is not a readable array"),
    ],
)
def test_a_wrong_array_is_refused(tmp_path: Path, array: Any, message: str) -> None:
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(InputError, match=message):
        read_lengths(str(tmp_path / "a.npy"))


def test_an_archive_or_a_broken_array_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    with path.open("wb") as file:
        np.savez(file, a=np.ones(2))
    with pytest.raises(InputError, match="holds an archive"):
        read_lengths(str(path))
    path.write_bytes(b"")
    with pytest.raises(InputError, match="is not a readable array"):
        read_lengths(str(path))


@pytest.mark.parametrize(
    ("name", "text", "column", "message"),
    [
        ("a.jsonl", "", None, "holds no lengths"),
        ("a.csv", "", None, "holds no lengths"),
        ("a.csv", "length\n", None, "holds no lengths"),
        ("a.txt", "\n \n", None, "holds no lengths"),
        ("a.jsonl", '5\n{"length": 5', None, r"line 2 is not valid JSON"),
        ("a.jsonl", "five\n", None, r"line 1 is not valid JSON"),
        ("a.jsonl", "[5, 7]\n", None, r"line 1: length is \[5, 7\], but"),
        ("a.jsonl", '{"tokens": 5, "id": 1}\n', None, r"line 1 has no column 'length'; .*there: tokens, id"),
        ("a.jsonl", '{"length": 5}\n{}\n', None, r"line 2 has no column 'length'; .*there: none"),
        ("a.jsonl", "5\n", "n", r"line 1 is no object, so it has no column 'n'"),
        ("a.jsonl", '{"ids": []}\n', "ids", r"line 1: length is 0"),
        ("a.csv", "tokens,id\n5,1\n", None, r"line 1 has no column 'length'; .*--column .*there: tokens, id"),
        ("a.csv", "length\n5\n", "n", r"line 1 has no column 'n'; .*there: length"),
        ("a.csv", "id,length\n1,5\n2\n", None, r"line 3 has 1 cells, but the header has 2"),
        ("a.csv", "length,targets\n5,1\n7\n", None, r"line 3 has 1 cells, but the header has 2"),
        ("a.csv", "length\n" + "1" * 140_000, None, r"line 2 is not valid CSV"),
        ("a.txt", "5\n", "n", r"holds plain numbers, so it has no column 'n'"),
        ("a.jsonl", '{"length": 5, "targets": 6}\n', None, r"line 1: targets is 6, but must be from 0 to the length 5"),
        ("a.jsonl", '{"length": 5, "targets": -1}\n', None, r"line 1: targets is -1"),
        ("a.csv", "length,targets\n5,1.5\n", None, r'line 2: targets is "1.5", but it must be a whole number'),
        ("a.csv", "length,targets\n5,\n", None, r'line 2: targets is ""'),
        ("a.jsonl", '{"length": 5, "targets": 1}\n{"length": 5}\n', None, r"line 2 and earlier rows differ"),
        ("a.jsonl", '{"length": 5}\n{"length": 5, "targets": 1}\n', None, r"line 2 and earlier rows differ"),
        ("a.parquet", "PAR1", None, r"none of the endings \.jsonl, .*\.npy .*rename it"),
        ("a.npy.gz", "", None, r"none of the endings"),
        ("noending", "5", None, r"none of the endings"),
    ],
)
def test_a_wrong_file_is_refused_with_the_way_out(
    write: Write, name: str, text: str, column: str | None, message: str
) -> None:
    path = write(name, text)
    with pytest.raises(InputError, match=message) as caught:
        read_lengths(path, column=column)
    assert path in str(caught.value)


def test_a_file_that_breaks_while_it_is_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"5\n\xff\xfe\n")
    with pytest.raises(InputError, match=r"a\.txt is broken after line \d"):
        read_lengths(str(path))
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"5\n" * 1000)[:-12])
    with pytest.raises(InputError, match=r"a\.jsonl\.gz is broken after line"):
        read_lengths(str(path))
    path.write_bytes(b"5\n")
    with pytest.raises(InputError, match=r"a\.jsonl\.gz is broken after line 0"):
        read_lengths(str(path))


def test_empty_standard_input_and_options_it_cannot_take_are_refused() -> None:
    with pytest.raises(InputError, match="standard input holds no lengths"):
        read_lengths("-", stdin=io.StringIO(""))
    with pytest.raises(InputError, match="standard input holds plain numbers, so it has no column 'n'"):
        read_lengths("-", column="n", stdin=io.StringIO("5\n"))
    with pytest.raises(InputError, match=r"standard input line 2 is not valid JSON"):
        read_lengths("-", stdin=io.StringIO('{"length": 5}\nfive\n'))


def test_an_array_has_no_columns(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([5]))
    with pytest.raises(InputError, match="is an array, so it has no column 'n'"):
        read_lengths(str(tmp_path / "a.npy"), column="n")


def test_a_missing_source_is_met_with_what_there_is() -> None:
    with pytest.raises(
        InputError, match=r"no file or directory 'no\.jsonl'; give one, .*longalign-10k, longalpaca-12k"
    ):
        read_lengths("no.jsonl")
    with pytest.raises(InputError, match=r"'longalign' \(did you mean 'longalign-10k'\?\)"):
        read_lengths("longalign")
    with pytest.raises(InputError, match="no file or directory ''"):
        read_lengths("")


def test_a_saved_data_set_gives_lengths_targets_and_sizes_of_lists(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    counts = [3, 1, 2] * 400  # more than one batch
    data = datasets.Dataset.from_dict(
        {"length": counts, "targets": [1] * len(counts), "input_ids": [[7] * n for n in counts], "text": ["a"] * 1200}
    )
    path = str(tmp_path / "saved")
    data.select(range(1199, -1, -1)).save_to_disk(path)  # an indices mapping, which must be followed
    lengths = read_lengths(path)
    assert lengths.values.tolist() == counts[::-1]
    assert lengths.targets is not None
    assert lengths.targets.tolist() == [1] * 1200
    assert read_lengths(path, column="input_ids").values.tolist() == counts[::-1]
    with pytest.raises(InputError, match=r"has no column 'n'; .*there: length, targets, input_ids, text"):
        read_lengths(path, column="n")
    with pytest.raises(InputError, match='row 0: length is "a"'):
        read_lengths(path, column="text")


def test_a_directory_that_is_no_data_set_or_holds_several_is_refused(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    with pytest.raises(InputError, match="is not a saved `datasets` directory"):
        read_lengths(str(tmp_path))
    data = datasets.Dataset.from_dict({"length": [1]})
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(InputError, match="holds the splits test, train; give the directory of one"):
        read_lengths(str(tmp_path / "both"))
    assert read_lengths(str(tmp_path / "both" / "train")).values.tolist() == [1]


def test_reading_a_directory_without_datasets_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"needs `datasets`; install sparsebalance\[train\]"):
        read_lengths(str(tmp_path))


@pytest.mark.parametrize("name", ["longalign-10k", "longalpaca-12k", "real"])
def test_a_draw_reproduces_the_published_anchors(name: str) -> None:
    (part,) = table(name)["parts"]
    values = draw(name, 200_000, seed=1)
    for anchor in part["anchors"]:
        if 0 < anchor["quantile"] < 1:
            share = float((values < anchor["tokens"]).mean())
            assert share == pytest.approx(anchor["quantile"], abs=0.004), anchor  # 0.001 of the grid, then 3 sigma
    ends = part["anchors"][0]["tokens"], part["anchors"][-1]["tokens"]
    assert ends[0] - 1 <= values.min()
    assert values.max() <= ends[1]


def test_the_mixture_takes_each_part_in_proportion_and_cuts_the_long_one() -> None:
    values = draw("chatqa2", 200_000, seed=1)
    long_share = 28_714 / (128_000 + 28_714)
    is_long = values >= 32_767  # every sample of NarrativeQA is longer than any of long_sft
    assert is_long.mean() == pytest.approx(long_share, abs=0.003)
    assert values.max() == 65_536
    short, long = (part["anchors"] for part in table("chatqa2")["parts"])
    for anchor in short[1:-1]:
        share = float((values[~is_long] < anchor["tokens"]).mean())
        assert share == pytest.approx(anchor["quantile"], abs=0.005), anchor
    assert float((values[is_long] < long[1]["tokens"]).mean()) == pytest.approx(long[1]["quantile"], abs=0.01)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_tables_rise_and_pass_through_their_anchors(name: str) -> None:
    record = table(name)
    assert record["name"] == name
    for source in record.get("sources") or [record["source"]]:
        assert source["repository"].startswith("https://github.com/")
        assert len(source["commit"]) == 40
        assert source["licence"]
    assert ("nothing" if "sources" in record else "low end") in record["assumed"]
    for part in record["parts"]:
        quantiles = np.array(part["quantiles"])
        assert len(quantiles) == 1001
        assert (np.diff(quantiles) >= 0).all()
        for anchor in part["anchors"]:
            # Anchors between two points of the grid, and those where the slope jumps, are met within one point.
            at = anchor["quantile"] * 1000
            low, high = quantiles[max(int(at) - 1, 0)], quantiles[min(int(at) + 2, 1000)]
            assert low - 1 <= anchor["tokens"] <= high + 1, anchor


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_draw_is_deterministic_and_a_shorter_one_is_its_start(name: str) -> None:
    values = draw(name, 1000, seed=3)
    assert values.dtype == np.int64
    assert (values == draw(name, 1000, seed=3)).all()
    assert (values[:10] == draw(name, 10, seed=3)).all()
    assert (values != draw(name, 1000, seed=4)).any()


def test_a_distribution_is_a_source_with_its_own_number_of_rows() -> None:
    lengths = read_lengths("LongAlign-10k")
    assert (len(lengths.values), lengths.targets, lengths.source) == (9_888, None, "longalign-10k")
    assert (lengths.values == draw("longalign-10k", 9_888, seed=0)).all()
    assert len(read_lengths("longalign-10k", limit=5).values) == 5
    assert len(read_lengths("longalign-10k", limit=10**9).values) == 9_888
    assert len(read_lengths("chatqa2").values) == 128_000 + 28_714
    assert lengths.provenance == (
        "9,888 lengths drawn with seed 0 from quantiles of zai-org/LongAlign-10k, rebuilt between the anchors that "
        "https://github.com/aarti-cerebras/verl publishes at a01cbe393e7d; assumed: the low end (6,600 tokens)"
    )


def test_the_real_mix_says_what_was_counted() -> None:
    lengths = read_lengths("real")
    assert (len(lengths.values), lengths.targets, lengths.source) == (12_199, None, "real")
    assert 20 <= lengths.values.min() <= lengths.values.max() <= 130_265
    assert sum(source["samples"] for source in table("real")["sources"]) == 12_199
    assert float((lengths.values < 512).mean()) == pytest.approx(4_845 / 12_199, abs=0.01)  # of all that were counted
    assert lengths.values.sum() == pytest.approx(76.81e6, rel=0.03)
    assert lengths.provenance == (
        "12,199 lengths drawn with seed 0 from quantiles of a mix of real long-document instruction samples, counted "
        "in 9 public sources; assumed: nothing, every sample was counted"
    )


def test_wrong_use_of_a_distribution_is_refused() -> None:
    with pytest.raises(InputError, match="the distribution chatqa2 has no columns"):
        read_lengths("chatqa2", column="length")
    with pytest.raises(InputError, match=r"'chatqa' \(did you mean 'chatqa2'\?\); choose from longalign-10k"):
        draw("chatqa", 1, seed=0)
    with pytest.raises(InputError, match="count is 0, but at least 1"):
        draw("chatqa2", 0, seed=0)
