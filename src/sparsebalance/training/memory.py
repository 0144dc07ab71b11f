"""Will a run fit in memory? What the memory model says about its largest micro-batch, against what there is.

In: a run's config and data. Out: nothing, or one error that names the micro-batch, before a process is started.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sparsebalance.planning.errors import InputError
from sparsebalance.planning.memory import MemoryModel, MemoryParts, StageLayers
from sparsebalance.planning.plan import MicroBatch, Sample
from sparsebalance.planning.table import Identity
from sparsebalance.training.config import RunConfig

_MEMINFO = Path("/proc/meminfo")


def memory_model(config: RunConfig, identity: Identity) -> MemoryModel:
    """Of a process: its share of heads and tokens; tuning may raise the budget up to its limit."""
    balance, attention = config.balance, config.attention
    return MemoryModel(
        identity.decoder,
        identity.block_size,
        identity.granularity,
        balance.max_budget or 4 * attention.budget,
        identity.dtype,
        identity.checkpointing,
        config.parallel.tp,
        config.parallel.sp,
        config.parallel.shard,
    )


def static_memory(config: RunConfig, identity: Identity, stage: StageLayers) -> tuple[float, float, float]:
    """Megabytes of weights, gradients and optimiser of a process in a step: where weights are shared out, it holds its
    share beside the whole ones."""
    weights, gradients, optimizer = memory_model(config, identity).static(stage)
    shard = config.parallel.shard
    return weights + (weights / shard if shard > 1 else 0.0), gradients, optimizer


def _of_process(config: RunConfig, identity: Identity, parts: MemoryParts) -> MemoryParts:
    """Of a stage, from those of the whole model: about as many micro-batches are in flight as there are stages, so that
    activations and state stay what they are, and weights are those of the stage that has most."""
    stages, layers = config.parallel.pp, identity.decoder.layers
    most = StageLayers(-(-layers // stages), embedding=True, head=stages == 1 or identity.decoder.tied)
    weights, gradients, optimizer = static_memory(config, identity, most)
    return replace(parts, weights=weights, gradients=gradients, optimizer=optimizer)


def unit_memory(config: RunConfig, identity: Identity, tokens: int, targets: int) -> MemoryParts:
    """Peak megabytes of a rank that runs a micro-batch of so many tokens."""
    stage = StageLayers(identity.decoder.layers)
    return _of_process(config, identity, memory_model(config, identity).single_unit(tokens, targets, stage))


def sample_memory(config: RunConfig, identity: Identity, sample: Sample, unit_size: int | None) -> MemoryParts:
    """Peak megabytes of a rank that runs a sample, in chunks where it is longer than the unit size."""
    if unit_size is None:
        return unit_memory(config, identity, sample.length, sample.targets)
    stage, keep = StageLayers(identity.decoder.layers), config.balance.keep_chunks
    model = memory_model(config, identity)
    parts = model.chunked_sample(sample.length, sample.targets, stage, unit_size, keep)
    return _of_process(config, identity, parts)


def available_mb(config: RunConfig) -> float | None:
    """Memory for each rank: as configured, or what this host has free, shared out; None where it does not tell."""
    if config.parallel.memory_gb is not None:
        return config.parallel.memory_gb * 1e3
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    free = next((line for line in lines if line.startswith("MemAvailable:")), None)
    return None if free is None else int(free.split()[1]) * 1024 / 1e6 / config.parallel.topology.world_size


def longest_whole(config: RunConfig, identity: Identity, tokens: int, limit_mb: float | None) -> int:
    """The most tokens, up to `tokens`, that one micro-batch may hold by the cap and the memory; never so few that
    nothing could be measured (two blocks)."""
    most = min(tokens, config.balance.token_cap)
    if limit_mb is not None:
        sizes = range(1, most + 1)
        most = bisect_right(sizes, limit_mb, key=lambda size: unit_memory(config, identity, size, size).total)
    return max(most, min(tokens, 2 * identity.block_size))


def fitting_sizes(
    config: RunConfig,
    identity: Identity,
    samples: Sequence[Sample],
    sizes: Sequence[int | None],
    limit_mb: float | None,
) -> list[int | None]:
    """Those unit sizes under which every sample fits in a rank's memory.

    Args:
        sizes: that the policy may use, None for whole samples.
        limit_mb: memory of a rank before anything is allocated; None where it is not known.

    Raises:
        InputError: none of them; names the sample that needs most under the size that needs least.
    """
    # Only long samples, or those with many targets, can be it: one for each of the two is enough to look at.
    most = (max(samples, key=lambda s: (s.length, -s.id)), max(samples, key=lambda s: (s.targets, -s.id)))
    needed = {
        size: max(((sample_memory(config, identity, s, size), s) for s in most), key=lambda pair: pair[0].total)
        for size in sizes
    }
    fitting = [size for size, (parts, _) in needed.items() if limit_mb is None or parts.total <= limit_mb]
    if not fitting and limit_mb is not None:
        size, (parts, longest) = min(needed.items(), key=lambda item: item[1][0].total)
        how = "" if size is None or longest.length <= size else f", in chunks of {size:,}"
        raise InputError(
            f"sample {longest.id} with {longest.length:,} tokens{how} needs about {parts.total / 1e3:,.1f} GB on its "
            f"rank ({describe(parts)}), but each has {limit_mb / 1e3:,.1f} GB; {_way_out(config, sizes)}"
        )
    return fitting


def _way_out(config: RunConfig, sizes: Sequence[int | None]) -> str:
    ways = ["lower data.max_length", "use a smaller model", "raise parallel.memory_gb"]
    if not config.model.checkpointing:
        ways.insert(0, "set model.checkpointing")
    if any(size is not None for size in sizes) and config.balance.keep_chunks is None:
        ways.insert(0, "set balance.keep_chunks")
    return ", ".join(ways[:-1]) + f", or {ways[-1]}"


def chain_memory(config: RunConfig, identity: Identity, chain: Sequence[MicroBatch]) -> MemoryParts:
    """Peak megabytes of a rank that runs one planned micro-batch, or all chunks of one sample."""
    tokens, targets = sum(unit.tokens for unit in chain), sum(unit.targets for unit in chain)
    if len(chain) == 1:
        return unit_memory(config, identity, tokens, targets)
    return sample_memory(config, identity, Sample(chain[0].segments[0].sample, tokens, targets), chain[0].tokens)


def largest_chains(
    config: RunConfig, identity: Identity, chains: Sequence[Sequence[MicroBatch]], count: int
) -> list[Sequence[MicroBatch]]:
    """The `count` that need most memory, the largest first, one of each size; without empty ones."""
    sizes = {
        (len(chain), chain[0].tokens, sum(unit.tokens for unit in chain), sum(unit.targets for unit in chain)): chain
        for chain in chains
        if chain[0].segments
    }
    needed = {size: chain_memory(config, identity, chain).total for size, chain in sizes.items()}
    return [sizes[size] for size in sorted(sizes, key=lambda size: (needed[size], size), reverse=True)[:count]]


def describe(parts: MemoryParts) -> str:
    """Megabytes by part, the largest first."""
    named = sorted(vars(parts).items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {mb:,.0f} MB" for name, mb in named if mb >= 0.5)
