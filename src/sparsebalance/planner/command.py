"""`sparsebalance plan`: read, forecast, show, recommend."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console

from sparsebalance.planner.config import PlanConfig
from sparsebalance.planner.forecast import (
    Batches,
    Forecast,
    Recommendation,
    Variant,
    best_unit_size,
    check_static,
    forecast,
    global_batches,
    plans,
    recommend,
    variants_of,
)
from sparsebalance.planner.scenario import Scenario
from sparsebalance.planner.sweep import sweep
from sparsebalance.planning.accounting import Account, account
from sparsebalance.planning.batching import check_unit_size
from sparsebalance.planning.decoder import named_decoder
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.hardware import named_device
from sparsebalance.planning.lengths import Lengths, read_lengths
from sparsebalance.planning.plan import Topology
from sparsebalance.planning.policy import cuts, named_policy
from sparsebalance.planning.table_file import load_table
from sparsebalance.reporting.accounting import print_account
from sparsebalance.reporting.plan.console import print_choices, print_forecast
from sparsebalance.reporting.plan.page import write_plan_page, write_sweep_page
from sparsebalance.reporting.plan.trace import write_plan_trace
from sparsebalance.reporting.progress import follow, progress_bars

SCHEMA = 1
UNIT_SIZES = (2048, 4096, 8192, 16384)  # tokens, tried by "auto" besides whole samples
STEPS, SWEEP_STEPS = 24, 12
CHOOSING_STEPS = 6  # global batches on which the unit size is chosen


def plan(config: PlanConfig, console: Console) -> dict[str, Any]:
    """Returns the JSON-compatible result.

    Raises:
        InputError: lengths, model, device, table or topology that cannot be used, or nothing fits, which is said after
            the table; nothing is written then.
    """
    _check(config)
    scenario = scenario_of(config, config.sweep)
    lengths = read_lengths(config.lengths, column=config.column, limit=config.limit)
    return _sweep(config, scenario, lengths, console) if config.sweep else _forecast(config, scenario, lengths, console)


def scenario_of(config: PlanConfig, sweeping: bool = False) -> Scenario:
    """Raises:
    InputError: see `Scenario`; or a topology without meaning.
    """
    table = load_table(config.table) if config.table is not None else None
    identity = table.identity if table is not None else None
    # A sweep replaces the topology; one that cannot be must not stop it.
    topology = Topology() if sweeping else Topology(config.dp, config.pp, config.tp, config.sp)
    return Scenario(
        decoder=identity.decoder if identity else named_decoder(config.model),
        device=None if table is not None else named_device(config.device),
        topology=topology,
        block_size=identity.block_size if identity else config.block_size,
        budget=config.budget,
        granularity=identity.granularity if identity else config.granularity,
        schedule=config.schedule,
        dtype=identity.dtype if identity else config.dtype,  # type: ignore[arg-type]
        checkpointing=identity.checkpointing if identity else config.checkpointing,
        zero=config.zero,
        table=table,
    )


def _check(config: PlanConfig) -> None:
    """What needs neither data nor model.

    Raises:
        InputError: a number out of range, an unknown policy, outputs that exclude each other or cannot be written.
    """
    at_least = {
        "dp": (config.dp, 1),
        "pp": (config.pp, 1),
        "tp": (config.tp, 1),
        "sp": (config.sp, 1),
        "devices": (config.devices, 1),
        "batch_size": (config.batch_size, 1),
        "block_size": (config.block_size, 1),
        "budget": (config.budget, 1),
        "token_cap": (config.token_cap, 1),
        "steps": (config.steps, 1),
        "seed": (config.seed, 0),
    }
    for name, (value, limit) in at_least.items():
        if value is not None and value < limit:
            raise InputError(f"{name} is {value}, but it must be at least {limit}")
    for name in config.policies:
        named_policy(name, budget=config.budget, token_cap=1)
    if config.sweep and config.trace is not None:
        raise InputError("--trace shows one plan, and --sweep makes many; choose one of the two")
    for path in (config.html, config.trace):
        if path is not None and path.is_dir():
            raise InputError(f"{path} is a directory; give the name of a file to write")


def _batch_size(config: PlanConfig, dp: int) -> int:
    return config.batch_size or max(16, 4 * dp)


def _token_cap(config: PlanConfig, lengths: Lengths) -> int:
    return config.token_cap or int(lengths.values.max())


def _unit_sizes(config: PlanConfig, block_size: int, token_cap: int) -> list[int | None]:
    """Sizes to try for units; None is whole samples.

    Raises:
        InputError: a size that is no multiple of the block size, or over the cap.
    """
    if config.unit_size == "whole" or (config.unit_size == "auto" and config.schedule == "interleaved"):
        return [None]
    if config.unit_size == "auto":
        return [None, *(size for size in UNIT_SIZES if size % block_size == 0 and size <= token_cap)]
    check_unit_size(config.unit_size, block_size, token_cap)
    return [config.unit_size]


def _forecast(config: PlanConfig, scenario: Scenario, lengths: Lengths, console: Console) -> dict[str, Any]:
    dp = scenario.topology.dp
    batch_size = _batch_size(config, dp)
    batches = global_batches(lengths, batch_size, dp, config.steps or STEPS, config.seed)
    token_cap = _token_cap(config, lengths)
    check_static(scenario)
    with progress_bars(console) as progress:
        sizes = _unit_sizes(config, scenario.block_size, token_cap)
        size = best_unit_size(batches[:CHOOSING_STEPS], scenario, sizes, token_cap)
        variants = variants_of(scenario, config.policies, [size])
        result = forecast(batches, variants, token_cap, follow(progress, "simulating steps") or (lambda *_: None))
    settings = _settings(config, scenario, lengths, batch_size, len(batches))
    try:
        advice = recommend(result.rows, scenario.capacity_mb)
    except InputError:
        print_forecast(console, settings, result, None)  # by how much nothing fits
        raise
    print_forecast(console, settings, result, advice)
    found = _account(batches, variants[result.rows.index(advice.row)], token_cap, lengths)
    print_account(console, found)
    _write(config, settings, result, advice, lengths, found, console)
    return {
        "schema": SCHEMA,
        "settings": settings,
        "rows": [{**asdict(row), "name": row.name, "kind": "simulated"} for row in result.rows],
        "best_baseline": result.best_baseline,
        "bound_ms": result.bound_ms,
        "recommendation": {"name": advice.row.name, "reason": advice.reason},
        "account": asdict(found),
    }


def _account(batches: Batches, variant: Variant, token_cap: int, lengths: Lengths) -> Account:
    """What becomes of the samples in the simulated steps of one variant."""
    size = variant.scenario.unit_size if cuts(variant.policy) else None
    targets = lengths.targets
    return account(
        plans(batches, variant, token_cap),
        capacity=size or token_cap,
        rows_read=len(lengths.values),
        without_targets=0 if targets is None else int((targets == 0).sum()),
        not_used=len(lengths.values) - sum(map(len, batches)),
    )


def _write(
    config: PlanConfig,
    settings: dict[str, Any],
    result: Forecast,
    advice: Recommendation,
    lengths: Lengths,
    found: Account,
    console: Console,
) -> None:
    if config.html is not None:
        write_plan_page(config.html, settings, result, advice, lengths.values.tolist(), found)
        console.print(f"page: {config.html}")
    if config.trace is not None:
        write_plan_trace(config.trace, settings, result, advice)
        console.print(f"trace: {config.trace} (open it in ui.perfetto.dev)")


def _sweep(config: PlanConfig, scenario: Scenario, lengths: Lengths, console: Console) -> dict[str, Any]:
    devices = config.devices or config.dp * config.pp * config.tp * config.sp
    batch_size = _batch_size(config, 1)
    token_cap, steps = _token_cap(config, lengths), config.steps or SWEEP_STEPS
    sizes = _unit_sizes(config, scenario.block_size, token_cap)
    with progress_bars(console) as progress:
        watch = follow(progress, "simulating topologies") or (lambda *_: None)
        choices = sweep(lengths, scenario, devices, batch_size, steps, token_cap, sizes, config.seed, watch)
    settings = {**_settings(config, scenario, lengths, batch_size, steps), "devices": devices}
    print_choices(console, settings, choices)
    if config.html is not None:
        write_sweep_page(config.html, settings, choices)
        console.print(f"page: {config.html}")
    return {
        "schema": SCHEMA,
        "settings": settings,
        "choices": [
            {**asdict(choice), "name": choice.row.name if choice.row else None, "kind": "simulated"}
            for choice in choices
        ],
    }


def _settings(config: PlanConfig, scenario: Scenario, lengths: Lengths, batch_size: int, steps: int) -> dict[str, Any]:
    return {
        "lengths": lengths.source,
        "provenance": lengths.provenance,
        "samples": len(lengths.values),
        "batches": len(lengths.values) // batch_size,
        "model": str(config.table or config.model),
        "source": scenario.source,
        "topology": asdict(scenario.topology),
        "block_size": scenario.block_size,
        "budget": scenario.budget,
        "granularity": scenario.granularity,
        "dtype": scenario.dtype,
        "checkpointing": scenario.checkpointing,
        "zero": scenario.zero,
        "schedule": scenario.schedule,
        "batch_size": batch_size,
        "steps": steps,
        "capacity_mb": scenario.capacity_mb,
        "seed": config.seed,
    }
