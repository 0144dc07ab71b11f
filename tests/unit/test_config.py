"""Configs: strict, and errors that name field, value, limit and way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from sparsebalance.planning.errors import InputError
from sparsebalance.training.config import CompareConfig, RunConfig, check_config, config_record, load_config
from tests.conftest import ROOT


def write(folder: Path, record: Any) -> Path:
    path = folder / "config.yaml"
    path.write_text(record if isinstance(record, str) else yaml.safe_dump(record))
    return path


def test_defaults_fill_what_a_file_does_not_name(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, {"steps": 7, "model": {"layers": 3}}), RunConfig)
    assert (config.steps, config.model.layers, config.model.hidden) == (7, 3, RunConfig().model.hidden)
    assert load_config(write(tmp_path, ""), CompareConfig) == CompareConfig()


@pytest.mark.parametrize("name", ["demo.yaml", "train.yaml"])
def test_the_examples_are_valid(name: str) -> None:
    config = load_config(ROOT / "examples" / name, CompareConfig if name == "demo.yaml" else RunConfig)
    check_config(config)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"stepz": 3}, r"unknown field 'stepz'; did you mean 'steps'\?"),
        ({"model": {"hiden": 3}}, r"unknown field 'model.hiden'; did you mean 'hidden'\?"),
        ({"model": {"qqq": 3}}, "unknown field 'model.qqq'; known fields are path, layers"),
        ({"steps": "many"}, "field 'steps' is 'many'"),
        ({"steps": 1.5}, "field 'steps' is 1.5"),
        ({"attention": {"granularity": "page"}}, "field 'attention.granularity' is 'page'"),
        ({"data": 3}, "field 'data' is 3"),
        ({"data": {"tail": "cut"}}, "field 'data.tail' is 'cut': input should be 'drop', 'keep' or 'fill'"),
        (
            {"balance": {"mode": "sorted"}},
            "field 'balance.mode' is 'sorted': input should be 'strict', 'window' or 'group_by_length'",
        ),
        ({"balance": {"unit_size": "half"}}, "field 'balance.unit_size"),
        ({"balance": {"keep_chunks": "all"}}, "field 'balance.keep_chunks' is 'all'"),
        ("steps: [", "not valid YAML"),
        ("- 1\n- 2\n", "must be a mapping of fields, but it is a list"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, record: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_config(write(tmp_path, record), RunConfig)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no config file at"):
        load_config(tmp_path / "none.yaml", RunConfig)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"steps": 0}, "steps is 0, but it must be at least 1"),
        ({"parallel": {"dp": 0}}, "parallel.dp is 0"),
        ({"parallel": {"shard": 0}}, "parallel.shard is 0"),
        ({"parallel": {"dp": 2, "sp": 2, "shard": 3}}, "parallel.shard is 3, but it must divide the dp 2 x sp 2"),
        ({"attention": {"budget": 0}}, "attention.budget is 0"),
        ({"attention": {"block_size": -4}}, "attention.block_size is -4"),
        ({"model": {"hidden": 30, "heads": 4}}, "hidden 30 must be a multiple of heads 4"),
        ({"data": {"batch_size": 2}, "parallel": {"dp": 4}}, r"parallel.dp has 4 ranks.*raise batch_size or lower dp"),
        ({"data": {"target_tokens": 0}}, "data.target_tokens is 0, but it must be at least 1, or unset"),
        ({"balance": {"keep_chunks": 0}}, "balance.keep_chunks is 0, but it must be at least 1, or unset"),
        ({"balance": {"window_ranks": 0}}, "balance.window_ranks is 0"),
        ({"balance": {"window": 0}}, "balance.window is 0, but it must be at least 1"),
        ({"balance": {"token_cap": 0}}, "balance.token_cap is 0"),
        ({"balance": {"unit_size": 100}}, "unit size 100 is no multiple of the block size 64; chunks are whole blocks"),
        ({"balance": {"unit_size": 0}}, "unit size 0 is no multiple of the block size 64"),
        ({"balance": {"unit_size": 65536}}, "unit size 65536 is over the cap of 32768 tokens.*lower it"),
        (
            {"data": {"target_tokens": 500}, "balance": {"mode": "window"}},
            r'balance.mode is "window".*data.target_tokens 500 makes batches of unequal number; set mode to "strict"',
        ),
        (
            {"data": {"target_tokens": 500}, "balance": {"mode": "group_by_length"}},
            r'balance.mode is "group_by_length".*set mode to "strict"',
        ),
        (
            {"balance": {"plans": "p.gz", "table": "t.json"}, "attention": {"probe_every": 0}},
            r"balance.plans p.gz needs plans that nothing measured can change; set balance.correction to false",
        ),
        ({"balance": {"plans": "p.gz", "correction": False}, "attention": {"probe_every": 0}}, "balance.table to a"),
        ({"balance": {"plans": "p.gz", "correction": False, "table": "t.json"}}, "attention.probe_every to 0"),
    ],
)
def test_ranges_and_combinations_are_checked(tmp_path: Path, record: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_config(load_config(write(tmp_path, record), RunConfig))


@pytest.mark.parametrize(
    "record",
    [
        {"balance": {"unit_size": 64, "token_cap": 64}},
        {"balance": {"unit_size": "whole"}},
        {"balance": {"unit_size": "auto", "token_cap": 1}},
        {"data": {"max_length": 100_000}},  # over the cap: it will run in chunks
        {"data": {"target_tokens": 500, "batch_size": 1}, "parallel": {"dp": 4}},  # batch_size does not count then
        {"balance": {"mode": "window", "window": 1, "window_ranks": 8}},
        {"balance": {"plans": "p.gz", "correction": False, "table": "t.json"}, "attention": {"probe_every": 0}},
    ],
    ids=str,
)
def test_settings_that_go_together_are_accepted(tmp_path: Path, record: Any) -> None:
    check_config(load_config(write(tmp_path, record), RunConfig))


def test_the_record_of_a_config_is_plain_json() -> None:
    import json

    record = json.loads(json.dumps(config_record(CompareConfig())))
    assert record["data"]["path"] == "data/longdoc_sft.jsonl.gz"
    assert record["policies"][0] == "random"
