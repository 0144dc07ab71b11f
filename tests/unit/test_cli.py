"""The commands as users type them, in one process: results, help, and every kind of bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from sparsebalance.cli import main
from sparsebalance.planning.table_file import load_table
from tests.models import TOKENIZER, chat_rows, document_rows, tiny_run, write_rows


def config(folder: Path, **changes: Any) -> str:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(tiny_run(folder, parallel={"dp": 1}, **changes)))
    return str(path)


def failure(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on standard error of a call that must end with status 2."""
    capsys.readouterr()
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


def test_train_writes_metrics_and_checkpoints_and_the_loss_falls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--config", config(tmp_path, steps=12, optimizer={"lr": 3e-3}), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    run = tmp_path / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(12))
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.1
    assert result["steps"] == 12
    assert result["loss"] == lines[-1]["loss"]
    assert sorted(p.name for p in run.iterdir()) == [
        "checkpoint-10", "checkpoint-12", "data.json", "latency_table.json", "metrics.jsonl", "trace.json",
    ]  # fmt: skip
    assert result["data"] == json.loads((run / "data.json").read_text())
    assert result["data"]["seen"]["epochs"] == 3.0
    assert lines[-1]["coverage"] is not None

    # Trained to the end: resuming has nothing to do, starting over is refused.
    assert main(["train", "--config", config(tmp_path, steps=12), "--resume"]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert "already holds checkpoint-12; use --resume" in failure(["train", "--config", config(tmp_path)], capsys)


def test_options_override_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "--config", config(tmp_path), "--steps", "1", "--data.batch-size", "3", "--json"]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 1


def test_a_unit_size_is_chosen_or_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The longest sample is over the cap, so it must run in chunks; how large they are is said."""
    write_rows(tmp_path / "chat.jsonl", document_rows(20, 200, 30, 40, 10, 50))
    path = config(tmp_path, steps=1, balance={"token_cap": 150}, out=str(tmp_path / "auto"))
    assert main(["train", "--config", path]) == 0
    printed = capsys.readouterr().out
    assert "micro-batches of up to 144 tokens: predicted fastest for the first steps" in " ".join(printed.split())
    (line,) = (tmp_path / "auto" / "metrics.jsonl").read_text().splitlines()
    units = json.loads(line)["workers"][0]["units"]
    assert [unit["chunk"] for unit in units if "chunk" in unit] == [
        {"sample": 1, "start": 0, "of": 202, "recomputed": False},
        {"sample": 1, "start": 112, "of": 202, "recomputed": False},
    ]
    table = ["--balance.table", str(tmp_path / "auto" / "latency_table.json")]
    given = [*table, "--out", str(tmp_path / "given"), "--balance.unit-size", "64", "--balance.keep-chunks", "1"]
    assert main(["train", "--config", path, *given]) == 0
    assert "predicted fastest" not in capsys.readouterr().out
    (line,) = (tmp_path / "given" / "metrics.jsonl").read_text().splitlines()
    chunks = [unit["chunk"] for unit in json.loads(line)["workers"][0]["units"] if "chunk" in unit]
    assert [chunk["recomputed"] for chunk in chunks] == [True, True, True, False]
    wrong = ["train", "--config", path, *table, "--out", str(tmp_path / "wrong"), "--balance.unit-size"]
    assert "sample 1 has 202 tokens, over the cap of 150 tokens" in failure([*wrong, "whole"], capsys)
    assert "unit size 100 is no multiple of the block size 16" in failure([*wrong, "100"], capsys)


def test_a_given_unit_size_counts_when_a_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is chosen stays as it was chosen; what is given may be given anew."""
    changes = {"balance": {"correction": False, "unit_size": 64}, "attention": {"probe_every": 0}}
    assert main(["train", "--config", config(tmp_path, steps=1, **changes)]) == 0
    path = config(tmp_path, steps=2, **changes)
    assert main(["train", "--config", path, "--resume", "--balance.unit-size", "32"]) == 0
    assert main(["train", "--config", path, "--resume", "--steps", "3", "--balance.unit-size", "auto"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    most = [max(unit["tokens"] for worker in line["workers"] for unit in worker["units"]) for line in lines]
    assert most[0] > 32
    assert max(most[1:]) <= 32
    capsys.readouterr()


def test_samples_that_train_nothing_are_reported_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A document so long that truncation cuts off every target."""
    rows = chat_rows(8)
    rows[2]["messages"][0]["content"] = "word " * 900
    write_rows(tmp_path / "chat.jsonl", rows)
    shorter = {"max_length": 700, "on_long": "truncate"}
    for command in ("train", "compare"):
        path = config(tmp_path, steps=1, data=shorter, out=str(tmp_path / command))
        assert main([command, "--config", path]) == 0
        printed = capsys.readouterr().out
        assert "1 of 8 samples truncated to max_length" in printed
        assert "1 of 8 samples without any target token" in printed


def test_compare_writes_every_promised_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path, steps=2)
    record = yaml.safe_load(Path(path).read_text())
    Path(path).write_text(yaml.safe_dump({**record, "policies": ["random", "kk_tokens", "sab", "dst", "sab_dst"]}))
    assert main(["compare", "--config", path, "--json"]) == 0
    captured = capsys.readouterr()
    summary = json.loads(captured.out)
    run = tmp_path / "run"
    assert json.loads((run / "summary.json").read_text()) == summary
    assert sorted(p.name for p in run.iterdir()) == [
        "latency_table.json", "metrics.jsonl", "planned.html", "planned_trace.json", "report.html", "summary.json",
        "trace.json",
    ]  # fmt: skip
    for key in ("schema", "machine", "topology", "best_baseline", "policies", "predictor", "checks"):
        assert key in summary
    for name, policy in summary["policies"].items():
        for key in (
            "step_ms", "step_ms_p10", "step_ms_p90", "speedup_vs_random", "speedup_vs_best_baseline", "busy_fraction",
            "coverage", "loss", "planning_ms", "planning_share", "peak_memory_mb",
        ):  # fmt: skip
            assert policy[key] is not None, (name, key)
            assert policy[key] >= 0
        assert set(policy["imbalance"]) == {"all", "slot", "rank"}
    assert {"heldout_mape", "step_error_median"} <= set(summary["predictor"])
    assert summary["checks"]["passed"]
    assert summary["checks"]["strict_loss_rel_diff_max"] < 1e-5
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".run")] == []


def test_a_time_limit_ends_the_comparison_after_whole_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path, steps=50, time_limit_s=0.001, policies=["random", "sab"])
    assert main(["compare", "--config", path, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["settings"]["steps"], summary["settings"]["steps_configured"]) == (1, 50)


def test_a_comparison_whose_policies_train_differently_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong denominator under one policy is what the check is there for."""
    from sparsebalance.training.engine import Engine

    honest = Engine.run

    def wrong(self: Engine, units: Any, examples: Any, denominator: int, *rest: Any) -> Any:
        return honest(self, units, examples, denominator + (len(units) == 1), *rest)

    monkeypatch.setattr(Engine, "run", wrong)
    path = config(tmp_path, steps=1, policies=["random", "nextfit_packing"])
    assert main(["compare", "--config", path]) == 1
    assert "did not train the same batch" in capsys.readouterr().err
    assert not json.loads((tmp_path / "run" / "summary.json").read_text())["checks"]["passed"]


def test_profile_writes_a_table_that_training_accepts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "table.json"
    arguments = ["profile", "--config", config(tmp_path), "--table", str(table), "--check", "--json"]
    assert main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    assert 0 <= result["heldout_mape"] < 5  # a smoke check: the figure itself is a benchmark's business
    assert len(result["heldout"]) >= 8
    assert {"host", "torch", "date", "rounds"} <= set(load_table(table).provenance)
    assert main(["train", "--config", config(tmp_path, steps=1, balance={"table": str(table)})]) == 0


def test_data_stats_prints_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_rows(tmp_path / "chat.jsonl", chat_rows(9))
    page = tmp_path / "page.html"
    arguments = ["data", "stats", str(data), "--tokenizer", str(TOKENIZER), "--html", str(page), "--json"]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 9
    assert page.is_file()
    assert main(arguments[:-1]) == 0
    assert "9 samples" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["plan"],
        ["train"],
        ["compare"],
        ["report"],
        ["profile"],
        ["table", "compare"],
        ["table", "merge"],
        ["data", "stats"],
    ],
)
def test_every_help_has_an_example(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main([*command, "--help"])
    except SystemExit as stopped:
        status = int(stopped.code or 0)
    assert status == 0
    text = capsys.readouterr().out
    assert "sparsebalance" in text
    if command:
        assert "xample: sparsebalance" in " ".join(text.replace("│", " ").split())


def test_unknown_commands_and_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no command 'fly'; choose from plan, compare, train, report, profile" in failure(["fly"], capsys)
    assert main([]) == 2
    assert main(["--version"]) == 0


@pytest.mark.parametrize("command", ["train", "compare"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no sample to train on: it is empty"),
        ('{"text": "fine"}\n{"text": \n', "chat.jsonl line 2 is not valid JSON"),
        ('{"text": "' + "word " * 2000 + '"}\n', r"line 1: 2002 tokens, over max_length 1024"),
        ('{"text": ""}\n', "line 1 has neither"),
    ],
    ids=["empty", "broken line", "over the cap", "empty text"],
)
def test_bad_data_is_found_before_anything_is_written(
    command: str, content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "chat.jsonl").write_text(content)
    assert message in failure([command, "--config", config(tmp_path)], capsys)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["train", "compare", "profile"])
def test_bad_configs_are_found_before_anything_is_written(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(config(tmp_path))
    path.write_text(path.read_text().replace("block_size", "blok_size"))
    assert "unknown field 'attention.blok_size'; did you mean 'block_size'?" in failure(
        [command, "--config", str(path)], capsys
    )
    assert "no config file at nowhere.yaml" in failure([command, "--config", "nowhere.yaml"], capsys)
    assert not (tmp_path / "run").exists()


def test_more_ranks_than_samples_are_refused_before_a_process_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a batch, that is; a short tail leaves ranks without a sample, which they say."""
    write_rows(tmp_path / "chat.jsonl", chat_rows(3))
    path = Path(config(tmp_path, data={"batch_size": 8}))
    arguments = ["train", "--config", str(path), "--parallel.dp", "8"]
    message = failure(arguments, capsys)
    assert 'fewer than one batch of 8; lower data.batch_size or set data.tail to "keep"' in message
    arguments = ["train", "--config", str(path), "--parallel.dp", "9"]
    assert "data.batch_size is 8, but parallel.dp has 9 ranks" in failure(arguments, capsys)


def test_a_table_of_another_block_size_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "table.json"
    assert main(["profile", "--config", config(tmp_path), "--table", str(table)]) == 0
    path = config(tmp_path, balance={"table": str(table)}, attention={"block_size": 32})
    for command in ("train", "compare"):
        message = failure([command, "--config", path], capsys)
        assert "block_size (table 16, run 32)" in message
        assert "sparsebalance profile" in message
    assert "no latency table at" in failure(
        ["train", "--config", path, "--balance.table", str(tmp_path / "no.json")], capsys
    )
    assert not (tmp_path / "run").exists()


def test_resume_without_a_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "to resume from" in failure(["train", "--config", config(tmp_path), "--resume"], capsys)


def test_policies_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = failure(["train", "--config", config(tmp_path, balance={"policy": "best"})], capsys)
    assert "no policy is called 'best'; choose from random" in wrong
    for policies, message in (
        (["sab", "random"], "put it first"),
        (["random", "sab", "sab"], "name one twice"),
        (["random", "magic"], "no policy is called 'magic'"),
    ):
        assert message in failure(["compare", "--config", config(tmp_path, policies=policies)], capsys)
    assert not (tmp_path / "run").exists()


def test_a_missing_checkpoint_directory_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path, model={"path": str(tmp_path / "nothing")})
    assert "no checkpoint at" in failure(["train", "--config", path], capsys)
    assert "no tokenizer at" in failure(
        ["train", "--config", config(tmp_path), "--data.tokenizer", str(tmp_path / "none")], capsys
    )
