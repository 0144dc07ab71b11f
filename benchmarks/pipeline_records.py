"""What the variants of `benchmarks/pipeline_step.py` did -> flat records and their tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from chunked_tables import markdown
from sparsebalance.planning.coverage import CoverageCurves, mean_coverage
from sparsebalance.planning.plan import StepPlan
from sparsebalance.planning.schedule import Action
from sparsebalance.planning.simulator import Network, Pipeline, StageCosts, simulate
from sparsebalance.planning.timeline import Timeline
from sparsebalance.training.results import RankResult, of_replica

Row = dict[str, Any]
KINDS = ("measured", "replayed", "simulated")


@dataclass(frozen=True)
class Run:
    """One variant in one step.

    Attributes:
        pipeline: as simulated, with the schedule that all stages followed.
        results, step_ms, cpu_ms, memory_mb: of each stage; wall time, processor time of everything, highest memory.
    """

    plan: StepPlan
    pipeline: Pipeline
    results: list[RankResult]
    step_ms: list[float]
    cpu_ms: list[float]
    memory_mb: list[float | None]
    grad_norm: float

    @property
    def name(self) -> str:
        return self.plan.policy

    @property
    def loss(self) -> float:
        return sum(result.loss for result in self.results)

    @property
    def ms(self) -> float:
        return max(self.step_ms)

    @cached_property
    def joined(self) -> RankResult:
        return of_replica(self.results)

    @property
    def wall_bubble(self) -> float:
        busy = sum(action.ms for result in self.results for action in result.actions)
        return 1 - busy / (len(self.results) * self.ms)

    @property
    def overhead(self) -> float:
        """Share of processor time that went to anything but the model's code, of the stage where it is largest."""
        return max(
            1 - sum(action.cpu_ms for action in result.actions) / cpu
            for result, cpu in zip(self.results, self.cpu_ms, strict=True)
        )

    @property
    def cpu(self) -> dict[Action, float]:
        return {one.action: one.cpu_ms for result in self.results for one in result.actions}

    @property
    def live_tokens(self) -> list[int]:
        """Most tokens of each stage whose activations are there at once, deferred weight gradients included."""
        found = []
        for own in self.pipeline.schedule:
            last = "W" if any(action.kind == "W" for action in own) else "B"
            held = np.cumsum(
                [{"F": 1, last: -1}.get(action.kind, 0) * self.plan.ranks[0][action.unit].tokens for action in own]
            )
            found.append(int(held.max()))
        return found


def replayed(run: Run, cpu: Mapping[Action, float], network: Network) -> Timeline:
    """The simulator's timeline with what each action really took."""
    forward, whole, weight = (np.zeros_like(run.pipeline.costs.forward_ms) for _ in range(3))
    for action, ms in cpu.items():
        {"F": forward, "B": whole, "I": whole, "W": weight}[action.kind][action.stage, action.unit] = ms
    return simulate([replace(run.pipeline, costs=StageCosts(forward, whole, weight))], network)


def variant_rows(
    lengths: str, runs: Mapping[str, Sequence[Run]], network: Network, curves: CoverageCurves, same_plan: bool
) -> list[Row]:
    """Three records of each variant: measured, replayed, simulated.

    Args:
        same_plan: all runs of a variant follow one plan: then each action takes the median of what it took.
    """
    found: list[Row] = []
    ms: dict[str, dict[str, np.ndarray]] = {kind: {} for kind in KINDS}
    bubbles: dict[str, dict[str, float]] = {kind: {} for kind in KINDS}
    for name, own in runs.items():
        if same_plan:
            median = {action: float(np.median([run.cpu[action] for run in own])) for action in own[0].cpu}
            timelines = [replayed(own[0], median, network)]
        else:
            timelines = [replayed(run, run.cpu, network) for run in own]
        ms["measured"][name] = np.array([run.ms for run in own])
        ms["replayed"][name] = np.array([timeline.step_ms for timeline in timelines])
        ms["simulated"][name] = np.array([run.plan.predicted_step_ms for run in own[: len(timelines)]])
        bubbles["measured"][name] = float(np.mean([run.wall_bubble for run in own]))
        bubbles["replayed"][name] = float(np.mean([1 - timeline.busy_fraction for timeline in timelines]))
    given, packed = next(iter(runs)), "packed"
    for name, own in runs.items():
        errors = {
            "error_vs_replayed": np.abs(ms["simulated"][name] / ms["replayed"][name] - 1),
            "error_vs_measured": np.abs(np.median(ms["simulated"][name]) / ms["measured"][name] - 1)
            if same_plan
            else np.abs(ms["simulated"][name] / ms["measured"][name] - 1),
        }
        for kind in KINDS:
            values = ms[kind]
            low, middle, high = np.quantile(values[name], (0.1, 0.5, 0.9)).tolist()
            found.append(
                {
                    "kind": kind,
                    "lengths": lengths,
                    "variant": name,
                    "runs": len(values[name]),
                    "ms": middle,
                    "ms_p10": low,
                    "ms_p90": high,
                    "speedup_vs_given_order": float(values[given].sum() / values[name].sum()),
                    "speedup_vs_longest_first": float(values["longest first"].sum() / values[name].sum()),
                    "speedup_vs_packed": float(values[packed].sum() / values[name].sum()),
                    "bubble": bubbles[kind].get(name),
                    "units": float(np.mean([len(run.plan.ranks[0]) for run in own])),
                    "live_tokens": [int(tokens) for tokens in np.max([run.live_tokens for run in own], axis=0)],
                    "peak_memory_mb": memory(own),
                    "coverage": float(np.mean([mean_coverage(run.plan, curves) for run in own])),
                    "overhead_share": float(np.median([run.overhead for run in own])),
                    **{key: float(np.median(error)) for key, error in errors.items()},
                }
            )
    return found


def memory(runs: Sequence[Run]) -> list[float] | None:
    """Of each stage, the highest of all runs."""
    known = [run.memory_mb for run in runs if None not in run.memory_mb]
    return [max(column) for column in zip(*known)] if known else None  # type: ignore[type-var]


COLUMNS = (
    "variant", "units", "replay ms", "vs given", "vs longest first", "vs packed", "bubble", "wall ms", "vs given",
    "vs packed", "simulated ms", "off replay", "off wall", "live tokens by stage", "peak MB by stage", "coverage",
    "executor",
)  # fmt: skip


def cells(rows: Sequence[Row], lengths: str) -> list[list[str]]:
    lines = []
    by_kind = {kind: [r for r in rows if (r["lengths"], r["kind"]) == (lengths, kind)] for kind in KINDS}
    for wall, replay, plan in zip(*(by_kind[kind] for kind in KINDS), strict=True):
        spread = "" if wall["runs"] == 1 else f" ({wall['ms_p10']:,.0f}-{wall['ms_p90']:,.0f})"
        lines.append(
            [
                wall["variant"],
                f"{wall['units']:.0f}",
                f"{replay['ms']:,.0f}",
                f"{replay['speedup_vs_given_order']:.2f}x",
                f"{replay['speedup_vs_longest_first']:.2f}x",
                f"{replay['speedup_vs_packed']:.2f}x",
                f"{replay['bubble']:.1%}",
                f"{wall['ms']:,.0f}{spread}",
                f"{wall['speedup_vs_given_order']:.2f}x",
                f"{wall['speedup_vs_packed']:.2f}x",
                f"{plan['ms']:,.0f}",
                f"{plan['error_vs_replayed']:.1%}",
                f"{plan['error_vs_measured']:.1%}",
                " / ".join(f"{tokens:,}" for tokens in wall["live_tokens"]),
                "-" if wall["peak_memory_mb"] is None else " / ".join(f"{mb:,.0f}" for mb in wall["peak_memory_mb"]),
                f"{wall['coverage']:.3f}",
                f"{wall['overhead_share']:.1%}",
            ]
        )
    return lines


def show(console: Console, record: Mapping[str, Any]) -> None:
    for lengths in ("heavy-tailed", "real"):
        shown = Table(title=f"two stages, {lengths} lengths", box=None, padding=(0, 0, 0, 1), header_style="bold")
        for place, name in enumerate(COLUMNS):
            shown.add_column(name, justify="right" if place else "left")
        for line in cells(record["rows"], lengths):
            shown.add_row(*line, style="green" if line[0].startswith("sab") else None)
        console.print(shown)
    console.print(note(record["settings"]), highlight=False)


def note(settings: Mapping[str, Any]) -> str:
    model = settings["model"]
    own, samples = settings["layers_by_stage"], settings["heavy"]
    sentences = (
        f"Two processes with one thread each; a decoder of {model['layers']} layers of width {model['hidden']}, {own}",
        f"of them on the stages; {settings['budget']} blocks of {settings['block_size']} keys for all but `sab_dst`;",
        f"{settings['targets']:.0%} of the tokens are targets. Heavy-tailed: {len(samples)} samples of",
        f"{min(samples):,} to {max(samples):,} tokens, {settings['rounds']} rounds in turn; real:",
        f"{settings['real_steps']} steps of {settings['real_batch']} samples of real lengths up to",
        f"{settings['longest']:,}. Packed: samples of up to {settings['packed']:,} tokens together. Replay: the",
        "simulator's timeline with the processor time that every action took (heavy-tailed: its median), which other",
        "programs cannot disturb; it is not a measured step time. Simulated: before the step, with a table measured in",
        "the same run and corrected by earlier steps. Executor: processor time outside of the model's code.",
    )
    return " ".join(sentences)


def table(record: Mapping[str, Any]) -> str:
    """Markdown of a result file."""
    machine = record["machine"]
    lines: list[str] = []
    for lengths in ("heavy-tailed", "real"):
        own = [[f"`{name}`", *line] for name, *line in cells(record["rows"], lengths)]
        lines += [f"**{lengths} lengths:**", "", *markdown(COLUMNS, own), ""]
    where = f"{machine['cpu']} ({machine['cores']} shared cores), {record['date'][:10]}."
    return "\n".join([*lines, f"{note(record['settings'])} {where}"])
