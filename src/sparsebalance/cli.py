"""The command line: `sparsebalance plan | compare | train | report | profile | table | data stats`.

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
  plan           what would a step cost? step time, balance and memory of every policy, before anything runs
  compare        run every policy on the same batches, measure, and write a report
  train          train a model with balanced micro-batches (data parallel); --dry-run tries its largest units
  report         build the planned-versus-actual page of a training run
  profile        measure this machine and write a latency table
  table compare  show where two latency tables differ
  table merge    make one latency table of several
  data stats     show the length distribution of a data set

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
    if f"{command} {' '.join(rest[:1])}" in ("data stats", "table compare", "table merge"):
        command, rest = f"{command} {rest[0]}", rest[1:]
    commands = {
        "plan": _plan,
        "compare": _compare,
        "train": _train,
        "report": _report,
        "profile": _profile,
        "table compare": _table_compare,
        "table merge": _table_merge,
        "data stats": _data_stats,
    }
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
    arguments: list[str], kind: type[Config], command: str, example: str, flags: Sequence[str] = ()
) -> tuple[Config, argparse.Namespace]:
    """`--config FILE`, `--json`, the command's own `flags`, and an option for every config field."""
    import tyro

    from sparsebalance.training.config import load_config

    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--config", type=Path)
    own.add_argument("--json", action="store_true")
    for flag in flags:
        own.add_argument(flag, action="store_true")
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
    """Check the input here, then do `work` in each of the processes of `parallel` (or in those of torchrun)."""
    from sparsebalance.training.launch import is_worker, launch, record_failure
    from sparsebalance.training.parallel import start, stop

    if not is_worker():
        check()
        if config.parallel.topology.world_size > 1:
            return launch(arguments, config.parallel.topology.world_size)
    try:
        ranks = start(config.parallel)
        result = work(ranks, _console(as_json))
    except Exception as error:
        if not is_worker():
            raise
        record_failure(error)
        return 2 if isinstance(error, InputError) else 1
    stop()
    return _printed(result, as_json)


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
    from sparsebalance.training.dry_run import check_dry_run, dry_run

    example = (
        "Example: sparsebalance train --config examples/train.yaml --optimizer.lr 1e-4. "
        "--resume goes on from the newest checkpoint under --out; --dry-run runs the largest micro-batches of the "
        "planned steps for real, prints their memory, and trains nothing. Started by torchrun, it uses its processes."
    )
    config, options = _configured(arguments, RunConfig, "train", example, ("--resume", "--dry-run"))
    if options.dry_run:
        return _in_processes(
            ["train", *arguments],
            config,
            options.json,
            lambda: check_dry_run(config),
            lambda ranks, console: dry_run(config, ranks, console),
        )
    return _in_processes(
        ["train", *arguments],
        config,
        options.json,
        lambda: check_train(config, options.resume),
        lambda ranks, console: train_command(config, ranks, options.resume, console),
    )


def _profile(arguments: list[str]) -> int:
    from sparsebalance.profiling.command import check_profile, profile
    from sparsebalance.training.config import RunConfig

    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--check", action="store_true")
    own.add_argument("--table", type=Path, default=Path("runs/latency_table.json"))
    mine, rest = own.parse_known_args(arguments)
    example = (
        "Example: sparsebalance profile --table runs/latency_table.json --check. Measures the configured model "
        "on this machine, in as many processes at once as training will run; --check prints the table's error "
        "on micro-batches that it has no point for; --balance.measure-s gives it more time."
    )
    config, options = _configured(rest, RunConfig, "profile", example)
    return _in_processes(
        ["profile", *arguments],
        config,
        options.json,
        lambda: check_profile(config),
        lambda ranks, console: profile(config, ranks, mine.table, mine.check, console),
    )


def _plan(arguments: list[str]) -> int:
    import tyro

    from sparsebalance.planner.command import plan
    from sparsebalance.planner.config import PlanConfig

    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--json", action="store_true")
    options, rest = own.parse_known_args(arguments)
    description = (
        "What would a training step cost? Example: sparsebalance plan longalign-10k --model qwen2.5-3b "
        "--device h200 --dp 4 --pp 4 --html plan.html. --sweep tries every topology of the devices; "
        "--json prints the result as JSON."
    )
    config = tyro.cli(PlanConfig, args=rest, prog="sparsebalance plan", description=description)
    result = plan(config, _console(options.json))
    return _printed(result, options.json)


def _report(arguments: list[str]) -> int:
    from sparsebalance.reporting.planned.command import report

    parser = argparse.ArgumentParser(
        prog="sparsebalance report",
        description="Build the planned-versus-actual page and trace of a training run.",
        epilog="example: sparsebalance report runs/train",
    )
    parser.add_argument("run", type=Path, help="directory of the run (its --out)")
    parser.add_argument("--html", type=Path, help="write the page here instead of RUN/report.html")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args(arguments)
    figures = report(options.run, _console(options.json), options.html)
    return _printed(figures, options.json)


def _table_compare(arguments: list[str]) -> int:
    from sparsebalance.profiling.command import compare

    parser = argparse.ArgumentParser(
        prog="sparsebalance table compare",
        description="Show where two latency tables of one model differ, point by point.",
        epilog="example: sparsebalance table compare runs/monday.json runs/friday.json",
    )
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    result = compare(options.first, options.second, _console(options.json))
    return _printed(result, options.json)


def _table_merge(arguments: list[str]) -> int:
    from sparsebalance.profiling.command import merge

    parser = argparse.ArgumentParser(
        prog="sparsebalance table merge",
        description="Make one latency table of several that were measured for the same model and machine.",
        epilog="example: sparsebalance table merge runs/short.json runs/long.json --out runs/table.json",
    )
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="where to write the merged table")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    result = merge(options.tables, options.out, _console(options.json))
    return _printed(result, options.json)


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
    return _printed(statistics, options.json)


def _printed(result: dict[str, Any] | None, as_json: bool) -> int:
    """Ends a command that succeeded: its result on standard output, where a script wants it."""
    if as_json and result is not None:
        print(json.dumps(result))
    return 0


def _console(as_json: bool) -> Console:
    """For people; on standard error where standard output carries JSON."""
    from rich.console import Console

    return Console(stderr=as_json)
