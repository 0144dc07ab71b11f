"""The README is true: its examples run, its tables are the committed results, its paths exist."""

from __future__ import annotations

import doctest
import importlib.util
import json
import re
import sys
from types import ModuleType
from typing import Any

import pytest

from sparsebalance.cli import USAGE
from tests.conftest import ROOT

README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def tables() -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))  # as when it is run as a script
    spec = importlib.util.spec_from_file_location("readme", ROOT / "benchmarks" / "readme.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_examples_run_as_shown() -> None:
    planning, trainer, loading = blocks("python")
    names: dict[str, Any] = {}
    test = doctest.DocTestParser().get_doctest(planning, names, "README.md", "README.md", 0)
    runner = doctest.DocTestRunner()
    runner.run(test, clear_globs=False)
    assert runner.failures == 0
    assert runner.tries >= 6
    assert "torch" not in planning
    names = dict(test.globs)
    # The trainer's example runs on the plan of the first one; short documents keep the test quick.
    exec("samples = [Sample(i, n, n // 10) for i, n in enumerate((300, 700, 90))]", names)
    exec("plan = plan_step(samples, model, Topology(dp=2), named_policy('sab', budget=32, token_cap=4096))", names)
    exec(trainer, names)
    assert names["hidden"].shape == (1, names["unit"].tokens, 64)
    exec(loading, names)
    assert names["state"]["step"] == 2
    assert sum(names["tokens"]) <= 256


@pytest.mark.parametrize(
    "page", ["README.md", "docs/batching.md", "docs/chunks.md", "docs/tuning.md", "docs/parallel.md"]
)
def test_the_tables_are_the_committed_results(page: str) -> None:
    assert tables().filled(page) == (ROOT / page).read_text()


RESULTS = (
    "attention", "predictor", "planner", "correction", "comparison", "batching", "planning_time", "chunked_step",
    "tuning", "held_out", "pipeline_step",
)  # fmt: skip


@pytest.mark.parametrize("name", RESULTS)
def test_results_have_the_common_form(name: str) -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    assert {"schema", "machine", "date", "rows"} <= set(result)
    assert result["rows"]
    for row in result["rows"]:
        assert row["kind"] in ("measured", "replayed", "simulated")


def test_paths_and_commands_exist() -> None:
    for path in re.findall(r"\]\(((?!http)[^)#]+)\)", README):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"(?:examples|benchmarks)/[\w/.]+\.(?:yaml|py|json)", README):
        assert (ROOT / path).exists(), path
    for command in re.findall(r"sparsebalance (data stats|table \w+|\w+)", "\n".join(blocks("bash"))):
        assert f"  {command}" in USAGE
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"make (\w+)", README)) <= targets
