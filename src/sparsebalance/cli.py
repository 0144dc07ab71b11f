"""The command line: `sparsebalance profile | train | compare | data stats`.

Bad input ends with one sentence on standard error and status 2; a failed run or check with status 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sparsebalance import __version__
from sparsebalance.planning.errors import CheckFailed, InputError

if TYPE_CHECKING:
    from rich.console import Console

    from sparsebalance.training.config import RunConfig
    from sparsebalance.training.parallel import Ranks

    Config = TypeVar("Config", bound=RunConfig)

USAGE = """usage: sparsebalance COMMAND [OPTIONS]

Load-balanced long-context LLM training with dynamic sparse attention.

commands:
  compare      run every policy on the same batches, measure, and write a report
  train        train a model with balanced micro-batches (data parallel)
  profile      measure this machine and write a latency table
  data stats   show the length distribution of a data set

`sparsebalance COMMAND --help` shows the options of a command and an example.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(__version__)
        return 0
    command, rest = arguments[0], arguments[1:]
    if command == "data" and rest[:1] == ["stats"]:
        command, rest = "data stats", rest[1:]
    commands = {"compare": _compare, "train": _train, "profile": _profile, "data stats": _data_stats}
    if command not in commands:
        print(f"error: no command {command!r}; choose from {', '.join(commands)}", file=sys.stderr)
        return 2
    try:
        return commands[command](rest)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except CheckFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _configured(
    arguments: list[str], kind: type[Config], command: str, example: str
) -> tuple[Config, argparse.Namespace]:
    """`--config FILE`, `--resume`, `--json`, and an option for every config field."""
    import tyro

    from sparsebalance.training.config import load_config

    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--config", type=Path)
    own.add_argument("--json", action="store_true")
    own.add_argument("--resume", action="store_true")
    options, rest = own.parse_known_args(arguments)
    default = load_config(options.config, kind) if options.config else kind()
    description = (
        f"{example} --config FILE reads a YAML file, and the options below override it; "
        "--json prints the result as JSON."
    )
    config = tyro.cli(kind, default=default, args=rest, prog=f"sparsebalance {command}", description=description)
    return config, options


def _in_processes(
    arguments: list[str],
    config: RunConfig,
    as_json: bool,
    check: Callable[[], None],
    work: Callable[[Ranks, Console], dict[str, Any] | None],
) -> int:
    """Check the input here, then do `work` in each of `parallel.dp` processes (or in those of torchrun)."""
    from sparsebalance.training.launch import is_worker, launch, record_failure
    from sparsebalance.training.parallel import start, stop

    if not is_worker():
        check()
        if config.parallel.dp > 1:
            return launch(arguments, config.parallel.dp)
    try:
        ranks = start(config.parallel)
        result = work(ranks, _console(as_json))
    except Exception as error:
        if not is_worker():
            raise
        record_failure(error)
        return 2 if isinstance(error, InputError) else 1
    stop()
    if result is not None and as_json:
        print(json.dumps(result))
    return 0


def _compare(arguments: list[str]) -> int:
    from sparsebalance.comparison.command import check_compare, compare
    from sparsebalance.training.config import CompareConfig

    example = "Example: sparsebalance compare --config examples/demo.yaml --steps 4 --out runs/mine."
    config, options = _configured(arguments, CompareConfig, "compare", example)
    return _in_processes(
        ["compare", *arguments],
        config,
        options.json,
        lambda: check_compare(config),
        lambda ranks, console: compare(config, ranks, console),
    )


def _train(arguments: list[str]) -> int:
    from sparsebalance.training.command import check_train, train_command
    from sparsebalance.training.config import RunConfig

    example = (
        "Example: sparsebalance train --config examples/train.yaml --optimizer.lr 1e-4. "
        "--resume goes on from the newest checkpoint under --out. Started by torchrun, it uses its processes."
    )
    config, options = _configured(arguments, RunConfig, "train", example)
    return _in_processes(
        ["train", *arguments],
        config,
        options.json,
        lambda: check_train(config, options.resume),
        lambda ranks, console: train_command(config, ranks, options.resume, console),
    )


def _profile(arguments: list[str]) -> int:
    from sparsebalance.profiling.command import profile
    from sparsebalance.training.config import RunConfig

    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--check", action="store_true")
    own.add_argument("--table", type=Path, default=Path("runs/latency_table.json"))
    mine, rest = own.parse_known_args(arguments)
    example = (
        "Example: sparsebalance profile --table runs/latency_table.json --check. Measures the configured model "
        "on this machine, in one process with parallel.threads threads; --check prints the table's error on "
        "micro-batches that it has no point for."
    )
    config, options = _configured(rest, RunConfig, "profile", example)
    result = profile(config, mine.table, mine.check, _console(options.json))
    if options.json:
        print(json.dumps(result))
    return 0


def _data_stats(arguments: list[str]) -> int:
    from sparsebalance.training.command import data_stats

    parser = argparse.ArgumentParser(
        prog="sparsebalance data stats",
        description="Show the length distribution of a data set in tokens, chat template included.",
        epilog="example: sparsebalance data stats data/longdoc_sft.jsonl.gz --html lengths.html",
    )
    parser.add_argument("path", type=Path, help="JSONL (.jsonl, .jsonl.gz) or a saved `datasets` directory")
    parser.add_argument("--tokenizer", type=Path, default=Path("data/tokenizer"), help="tokenizer directory")
    parser.add_argument("--html", type=Path, help="also write a page with plots")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    statistics = data_stats(options.path, options.tokenizer, options.html, _console(options.json))
    if options.json:
        print(json.dumps(statistics))
    return 0


def _console(as_json: bool) -> Console:
    """For people; on standard error where standard output carries JSON."""
    from rich.console import Console

    return Console(stderr=as_json)
