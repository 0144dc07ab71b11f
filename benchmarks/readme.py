"""Writes the measured parts of README and docs from the committed results, so that no figure there is typed by hand.

python benchmarks/readme.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import batching_tables
import chunked_tables
import held_out as held_out_tables
import pipeline_records
import planning_time as planning_time_table
import tuning_tables
from sparsebalance.planning.policy import is_ours

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def comparison() -> str:
    """The headline table and the sentences below it."""
    result: dict[str, Any] = json.loads((RESULTS / "comparison.json").read_text())
    best, machine = result["best_baseline"], result["machine"]
    ours = next(row for row in result["rows"] if row["policy"] == "sab")
    lines = [
        f"**`sab` takes {1 / ours['speedup_vs_random']:.0%} of the time of random order and "
        f"{1 / ours['speedup_vs_best_baseline']:.0%} of the fastest baseline's:**",
        "",
        "| policy | ms/step (p10-p90) | vs random (p10-p90) | vs best baseline | rank imbalance | busy | planning |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        name = row["policy"]
        label = f"**`{name}`**" if is_ours(name) else f"`{name}` *" if name == best else f"`{name}`"
        lines.append(
            f"| {label} | {row['step_ms']:,.0f} ({row['step_ms_p10']:,.0f}-{row['step_ms_p90']:,.0f}) "
            f"| {row['speedup_vs_random']:.2f}x "
            f"({row['speedup_vs_random_p10']:.2f}-{row['speedup_vs_random_p90']:.2f}) "
            f"| {row['speedup_vs_best_baseline']:.2f}x | {row['imbalance_rank']:.2f} "
            f"| {row['busy_fraction']:.0%} | {row['planning_share']:.2%} |"
        )
    rows = {row["policy"]: row for row in result["rows"]}
    checks, predictor = result["checks"], result["predictor"]
    lines += [
        "",
        f"Measured wall time, medians over {result['steps']} steps of {result['settings']['data']['batch_size']} real "
        f"samples, 2 processes x 1 thread on {machine['cpu']} ({machine['cores']} shared cores, "
        f"{machine['instructions']}), {result['date'][:10]}; speed-ups are total time per target token trained, their "
        f"spread that of the steps' ratios. \\* fastest baseline. Strict policies' losses differ by at most "
        f"{checks['strict_loss_rel_diff_max']:.0e}, gradient norms by {checks['strict_grad_norm_rel_diff_max']:.0e} "
        f"(relative). Predicted step times are off by {predictor['step_error_median']:.1%} (median), and "
        f"{predictor['pairs_in_order']} of {predictor['pairs']} pairs of policies are in the predicted order. "
        f"`dst` pays for its speed with coverage ({rows['dst']['coverage']:.3f} against "
        f"{rows['random']['coverage']:.3f}); `sab_dst` does not ({rows['sab_dst']['coverage']:.3f}). "
        "Reproduce: `python benchmarks/comparison.py`.",
    ]
    return "\n".join(lines)


def attention() -> str:
    """Speed-ups at 8,192 tokens over the budget, memory, and the fits."""
    result: dict[str, Any] = json.loads((RESULTS / "attention.json").read_text())
    timed = [row for row in result["rows"] if row["seq_len"] == 8192 and row["pass"] == "forward+backward"]
    budgets = sorted({row["budget"] for row in timed})
    lines = [
        "| 8,192 tokens, speed-up over dense | " + " | ".join(f"k = {k}" for k in budgets) + " |",
        "|---|" + "---|" * len(budgets),
    ]
    for granularity in ("block", "token"):
        found = {row["budget"]: row["speedup_vs_dense"] for row in timed if row["granularity"] == granularity}
        lines.append(f"| routing per {granularity} | " + " | ".join(f"{found[k]:.1f}x" for k in budgets) + " |")
    memory = {row["granularity"]: row["peak_memory_mb"] for row in result["rows"] if row["peak_memory_mb"]}
    fits = result["r_squared_over_budget"]
    lines += [
        "",
        f"Time is linear in the budget (R² {fits['block']:.3f} per block, {fits['token']:.3f} per token); one forward "
        f"and backward at 32,768 tokens, k = 8, needs {memory['block']:.0f} MB (block) or {memory['token']:.0f} MB "
        f"(token) beyond q, k, v. {result['machine']['cpu']}, {result['date'][:10]}.",
    ]
    return "\n".join(lines)


def plan() -> str:
    """One call of the planner with what it printed."""
    result: dict[str, Any] = json.loads((RESULTS / "planner.json").read_text())
    timed = next(row for row in result["rows"] if row.get("what") == "plan 10,000 samples")
    return "\n".join(
        [
            "```",
            f"$ {result['command']}",
            result["output"],
            "```",
            "",
            f"Simulated, with analytic times ({result['date'][:10]}); planning 10,000 samples at DP4 PP4 took "
            f"{timed['ms'] / 1e3:.1f} s on one core of {result['machine']['cpu']}.",
        ]
    )


def predictor() -> str:
    """How wrong the table is on micro-batches that it has no point for."""
    result: dict[str, Any] = json.loads((RESULTS / "predictor.json").read_text())
    slowest = max(result["rows"], key=lambda row: row["measured_ms"])
    table, machine = result["table"], result["machine"]
    return (
        f"  Measured: {result['heldout_mape']:.1%} mean absolute error over {len(result['rows'])} whole micro-batches "
        f"of a {result['layers']}-layer decoder that the table has no point for ({result['heldout_mape_raw']:.1%} "
        f"before the machine's drift is taken out), {abs(slowest['error']):.1%} on the slowest, "
        f"{result['heldout_mape_attention']:.1%} for attention alone; "
        f"{table['processes']} process(es), {table['seconds']:.0f} s on {machine['cpu']} "
        f"({machine['instructions']}), {result['date'][:10]}."
    )


def correction() -> str:
    """One rank slowed down, with and without correction."""
    result: dict[str, Any] = json.loads((RESULTS / "correction.json").read_text())
    on, off = sorted(result["rows"], key=lambda row: not row["correction"])
    return (
        f"  Measured: one of two ranks made about 1.5x slower by a busy loop on its core. Slowest rank / mean, "
        f"medians: {on['imbalance_before']:.2f} before, {on['imbalance_first_5_after']:.2f} in the first steps after, "
        f"{on['imbalance_after_20']:.2f} from 20 steps on; without correction {off['imbalance_after_20']:.2f}. "
        f"The step takes {on['step_ms_after_20'] / off['step_ms_after_20']:.0%} of the uncorrected one's time."
    )


def batching() -> str:
    """Every policy on every distribution and topology, simulated."""
    return batching_tables.table(result_of("batching"))


def planning_time() -> str:
    """Milliseconds over the number of samples."""
    return planning_time_table.table(result_of("planning_time"))


def chunked_step() -> str:
    """Chunks for real: step times, and memory."""
    return chunked_tables.table(result_of("chunked_step"))


def tuning() -> str:
    """What tuning budgets brings and costs: simulated, published, measured."""
    return tuning_tables.table(result_of("tuning"))


def pipeline_step() -> str:
    """Two stages for real: replayed, measured, simulated."""
    return pipeline_records.table(result_of("pipeline_step"))


def held_out() -> str:
    """What moved budget covers of documents that it was not chosen by."""
    return held_out_tables.table(result_of("held_out"))


def result_of(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return result


PAGES: dict[str, tuple[Callable[[], str], ...]] = {
    "README.md": (comparison, plan, predictor, correction, attention),
    "docs/batching.md": (batching, planning_time),
    "docs/chunks.md": (chunked_step,),
    "docs/tuning.md": (held_out, tuning),
    "docs/parallel.md": (pipeline_step,),
}
"""Page -> what is generated in it, between marks of the function's name."""


def filled(page: str) -> str:
    """The page's text with all generated parts as the results say."""
    text = (ROOT / page).read_text()
    for make in PAGES[page]:
        name = make.__name__
        text, count = re.subn(
            rf"<!-- {name} -->\n.*?<!-- end -->",
            lambda _, name=name, make=make: f"<!-- {name} -->\n{make()}\n<!-- end -->",
            text,
            flags=re.DOTALL,
        )
        if count != 1:
            raise SystemExit(f"{page} must have the marks of {name} once, found {count}")
    return text


if __name__ == "__main__":
    for page in PAGES:
        (ROOT / page).write_text(filled(page))
        print(f"written: {ROOT / page}")
