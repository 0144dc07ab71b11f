"""Will a run fit in memory? What the memory model says about its largest micro-batch, against what there is.

In: a run's config and data. Out: nothing, or one error that names the micro-batch, before a process is started.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sparsebalance.planning.errors import InputError
from sparsebalance.planning.memory import MemoryModel, MemoryParts, StageLayers
from sparsebalance.planning.plan import MicroBatch, Sample
from sparsebalance.planning.table import Identity
from sparsebalance.training.config import RunConfig

_MEMINFO = Path("/proc/meminfo")


def memory_model(config: RunConfig, identity: Identity) -> MemoryModel:
    """Of a data-parallel rank: nothing is spread, and tuning may raise the budget up to its limit."""
    balance, attention = config.balance, config.attention
    return MemoryModel(
        identity.decoder,
        identity.block_size,
        identity.granularity,
        balance.max_budget or 4 * attention.budget,
        identity.dtype,
        identity.checkpointing,
    )


def unit_memory(config: RunConfig, identity: Identity, tokens: int, targets: int) -> MemoryParts:
    """Peak megabytes of a rank that runs a micro-batch of so many tokens."""
    stage = StageLayers(identity.decoder.layers)
    return memory_model(config, identity).single_unit(tokens, targets, stage)


def available_mb(config: RunConfig) -> float | None:
    """Memory for each rank: as configured, or what this host has free, shared out; None where it does not tell."""
    if config.parallel.memory_gb is not None:
        return config.parallel.memory_gb * 1e3
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    free = next((line for line in lines if line.startswith("MemAvailable:")), None)
    return None if free is None else int(free.split()[1]) * 1024 / 1e6 / config.parallel.dp


def check_memory(config: RunConfig, identity: Identity, samples: Sequence[Sample]) -> None:
    """Samples are never cut, so each makes at least a micro-batch of its own.

    Raises:
        InputError: the micro-batch of the sample that needs most does not fit in a rank's memory.
    """
    limit = available_mb(config)
    # Only long samples, or those with many targets, can be it: one for each of the two is enough to look at.
    most = (max(samples, key=lambda s: (s.length, -s.id)), max(samples, key=lambda s: (s.targets, -s.id)))
    needed = [unit_memory(config, identity, sample.length, sample.targets) for sample in most]
    parts, longest = max(zip(needed, most), key=lambda pair: pair[0].total)
    if limit is not None and parts.total > limit:
        raise InputError(
            f"sample {longest.id} with {longest.length:,} tokens makes a micro-batch that needs about "
            f"{parts.total / 1e3:,.1f} GB on its rank ({describe(parts)}), but each has {limit / 1e3:,.1f} GB; "
            "lower data.max_length, set model.checkpointing, use a smaller model, or raise parallel.memory_gb"
        )


def largest_units(config: RunConfig, identity: Identity, units: Sequence[MicroBatch], count: int) -> list[MicroBatch]:
    """The `count` micro-batches that need most memory, the largest first, one of each size."""
    by_size = {(unit.tokens, unit.targets): unit for unit in units if unit.segments}
    needed = {size: unit_memory(config, identity, *size).total for size in by_size}
    return [by_size[size] for size in sorted(by_size, key=lambda size: (needed[size], size), reverse=True)[:count]]


def describe(parts: MemoryParts) -> str:
    """Megabytes by part, the largest first."""
    named = sorted(vars(parts).items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {mb:,.0f} MB" for name, mb in named if mb >= 0.5)
