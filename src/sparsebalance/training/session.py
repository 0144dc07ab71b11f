"""What training and comparison share: data, model, engine and latency table of a run, on every rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from sparsebalance.planning.anchor import Anchor
from sparsebalance.planning.budget_schedule import BudgetSchedule
from sparsebalance.planning.calibration import Calibration
from sparsebalance.planning.composition import ByTargetTokens, Composition, GroupByLength, Window, in_order
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.latency import LatencyModel
from sparsebalance.planning.pipeline import PipelineModel, layers_by_time
from sparsebalance.planning.plan import Latency, MicroBatch, Sample, Segment, StepPlan, Topology
from sparsebalance.planning.policy import Policy, cuts, named_policy, plan_step
from sparsebalance.planning.schedule import Schedule
from sparsebalance.planning.simulator import Network
from sparsebalance.planning.table import Identity, LatencyTable
from sparsebalance.planning.table_file import check_same_identity, load_table
from sparsebalance.planning.unit_size import fastest_unit_size, unit_sizes
from sparsebalance.planning.units import check_cap
from sparsebalance.planning.work import key_blocks
from sparsebalance.profiling.measure import Progress, measure
from sparsebalance.profiling.network import measure_network
from sparsebalance.training import token_cache
from sparsebalance.training.config import DataConfig, RunConfig, check_config
from sparsebalance.training.data import TokenisedDataset, load_examples
from sparsebalance.training.engine import Engine
from sparsebalance.training.gradients import FlatGradients, Gradients
from sparsebalance.training.memory import available_mb, fitting_sizes, longest_whole, memory_model
from sparsebalance.training.model import build_model, decoder_config, identity_of
from sparsebalance.training.parallel import Ranks
from sparsebalance.training.results import RankResult
from sparsebalance.training.sampler import GlobalBatches
from sparsebalance.training.topology import check_topology, own_part

CHOOSING_STEPS = 6  # global batches on which a unit size is chosen


@dataclass(frozen=True)
class Session:
    """Attributes:
    config, ranks: of the run and of this process.
    data: tokenised examples; sample ids index them.
    batches: step -> samples.
    engine: the model, ready to run planned units.
    gradients: of what this process holds of it.
    identity: what a latency table must have been measured for.
    memory_mb: of each rank before the model was built; None where it is not known.
    layers: of each pipeline stage, once the model is cut (see `staged`); None before, and without a pipeline.
    """

    config: RunConfig
    ranks: Ranks
    data: TokenisedDataset
    batches: GlobalBatches
    engine: Engine
    gradients: Gradients
    identity: Identity
    memory_mb: float | None
    layers: tuple[int, ...] | None = None

    @property
    def topology(self) -> Topology:
        return self.ranks.topology

    def pipeline(self, table: LatencyTable) -> PipelineModel:
        """How a step runs besides its micro-batches: schedule, layers of the stages, messages, gradient all-reduce."""
        largest_mb, buckets = max(self.ranks.gather((self.gradients.megabytes, self.gradients.buckets)))
        network, reduce_ms, point = table.network, 0.0, None
        if network is not None:
            reduce_ms = network.all_reduce.ms(largest_mb) if self.topology.dp > 1 else 0.0
            point = network.point_to_point if self.topology.pp > 1 else None
        return PipelineModel(
            schedule=self.config.parallel.schedule,
            network=Network(
                latency_ms=point.latency_ms if point else 0.0,
                ms_per_mb=point.ms_per_mb if point else 0.0,
                all_reduce_ms=reduce_ms,
                buckets=max(buckets, 1),
            ),
            memory=memory_model(self.config, self.identity) if self.topology.pp > 1 else None,
            layers=self.layers,
        )

    @property
    def budgets(self) -> BudgetSchedule:
        """Default budget by step."""
        attention = self.config.attention
        if attention.schedule == "constant":
            return BudgetSchedule("constant", attention.budget, attention.budget, 0)
        start = attention.start_budget
        if start == "dense":
            start = key_blocks(max(sample.length for sample in self.batches.samples), attention.block_size)
        steps = self.config.steps // 2 if attention.schedule_steps is None else attention.schedule_steps
        return BudgetSchedule(attention.schedule, start, attention.budget, steps)

    def latency_table(self, progress: Progress | None = None) -> tuple[LatencyTable, tuple[float, ...]]:
        """The configured table, checked; or one measured now, on all ranks at once as they will run.

        Returns:
            The table, and how much slower each rank is than it says: all 1 for a configured table.
        """
        path = self.config.balance.table
        if path is not None:
            table = load_table(path)
            check_same_identity(table.identity, self.identity)
            return table, (1.0,) * self.topology.dp
        measured = measure(
            self.engine.stages[0].model,
            self.identity,
            # A longer sample runs in chunks: it may not fit whole.
            max_length=longest_whole(
                self.config,
                self.identity,
                max(sample.length for sample in self.batches.samples),
                self.memory_mb,
            ),
            max_budget=max(2 * self.config.attention.budget, self.budgets.at(0)),
            limit_s=self.config.balance.measure_s,
            progress=progress,
            gather=self.ranks.gather,
        )
        self.gradients.begin()
        # A pipeline is as slow as its slowest process.
        factors = tuple(self.ranks.slowest(measured.rank_factors))
        return replace(measured.table, network=measure_network(self.ranks)), factors

    def staged(self, model: LatencyModel) -> Session:
        """The same, holding this process's part of the model alone: its share of heads and matrices, and the layers of
        its stages, cut so that all stages take the same time.

        Raises:
            InputError: more stages than layers, or heads that cannot be shared out.
        """
        if self.topology.world_size == self.topology.dp and self.ranks.shards is None:
            return self
        stages = PipelineModel(self.config.parallel.schedule).stages(self.topology)
        budgets = (self.config.attention.budget,) * model.layers
        samples = [sample for step in range(CHOOSING_STEPS) for sample in self.batches.at(step)]
        units = [MicroBatch((Segment.whole(sample),), budgets, Latency(0.0, 0.0)) for sample in samples]
        layers = layers_by_time(units, model, stages)
        engine, gradients = own_part(self.engine, self.ranks, layers)
        return replace(self, engine=engine, gradients=gradients, layers=layers)

    def policy(self, name: str, model: LatencyModel) -> Policy:
        """The configured policy of that name; a unit size of "auto" is what `model` predicts fastest for the first
        steps, the smallest among equals. The same on every rank, and when a run goes on with the same table."""
        sizes = possible_unit_sizes(self.config, self.identity, self.batches.samples, name, self.memory_mb)
        steps = [self.batches.at(step) for step in range(CHOOSING_STEPS)] if len(sizes) > 1 else []

        def plan(samples: Sequence[Sample], size: int | None) -> StepPlan:
            return plan_step(samples, model, self.topology, configured_policy(self.config, name, size))

        return configured_policy(self.config, name, fastest_unit_size(steps, sizes, plan))

    def calibrated(self, calibration: Calibration) -> Session:
        """The same, but micro-batches that are tuned while they run read their scores by this calibration."""
        return replace(self, engine=replace(self.engine, calibration=calibration))

    def run(
        self, plan: StepPlan, where: str, probe_rows: int = 0, schedule: Schedule | None = None
    ) -> tuple[RankResult, float, float]:
        """This rank's part of a plan and the gradient all-reduce.

        Args:
            schedule: of its pipeline.
            where: begins the message of an error, e.g. "step 3".

        Returns:
            The result, and the milliseconds of everything and of the all-reduce, waiting included.

        Raises:
            RuntimeError: anything failed; names where.
        """
        begin = time.perf_counter()
        self.gradients.begin()
        try:
            units, examples = plan.ranks[self.ranks.replica], self.data.examples
            result = self.engine.run(units, examples, plan.targets, probe_rows, schedule, self.gradients)
        except Exception as error:
            raise RuntimeError(f"{where}: {type(error).__name__}: {error}") from error
        computed = time.perf_counter()
        self.gradients.reduce()
        end = time.perf_counter()
        return result, (end - begin) * 1e3, (end - computed) * 1e3

    def check_same_plan(self, plan: StepPlan) -> None:
        """Raises:
        RuntimeError: ranks planned differently; that would train on wrong gradients.
        """
        digests = self.ranks.gather(plan.digest())
        if len(set(digests)) > 1:
            raise RuntimeError(
                f"ranks made different plans for policy {plan.policy}: {digests}; "
                "they must see the same data, config and latency table"
            )

    def check_same_data(self, saved: dict[str, Any]) -> None:
        """Raises:
        InputError: a run goes on with other data or batches than it began with.
        """
        own = self.batches.fingerprint()
        if different := [name for name in own if saved.get(name) != own[name]]:
            shown = ", ".join(f"{name} (was {saved.get(name)}, is {own[name]})" for name in different)
            raise InputError(
                f"the checkpoint was written for other batches: {shown}; go on with the same data, seed, batch size "
                "and mode (balance.window_ranks keeps a window's ranks), or start a new run with another --out"
            )


def configured_policy(config: RunConfig, name: str, unit_size: int | None = None) -> Policy:
    """The policy of that name with the run's budget, cap and anchor.

    Args:
        unit_size: of a policy that has one; see `Session.policy`.

    Raises:
        InputError: no such policy, or an anchor setting out of range.
    """
    balance = config.balance
    anchor = Anchor(
        kind=balance.anchor,
        level=balance.level,
        threshold=balance.threshold,
        min_budget=balance.min_budget,
        max_budget=balance.max_budget,
    )
    return named_policy(
        name,
        budget=config.attention.budget,
        token_cap=balance.token_cap,
        anchor=anchor,
        aim=balance.aim,
        timing=balance.timing,
        unit_size=unit_size,
        keep_chunks=balance.keep_chunks,
    )


def possible_unit_sizes(
    config: RunConfig, identity: Identity, samples: Sequence[Sample], policy: str, limit_mb: float | None
) -> list[int | None]:
    """Unit sizes that the policy may use on these samples and this machine: one, or several under "auto".

    Raises:
        InputError: a sample is over the cap and the policy does not cut, or nothing fits in memory.
    """
    wished, cap = config.balance.unit_size, config.balance.token_cap
    if not cuts(policy) or wished == "whole":
        check_cap(samples, cap)
        sizes: list[int | None] = [None]
    elif wished == "auto":
        sizes = unit_sizes(samples, identity.block_size, cap)
    else:
        sizes = [int(wished)]
    return fitting_sizes(config, identity, samples, sizes, limit_mb)


def read_data(config: DataConfig) -> tuple[TokenisedDataset, PreTrainedTokenizerBase]:
    """Tokenised examples and their tokenizer.

    Raises:
        InputError: see `load_examples`; or no tokenizer at the configured place.
    """
    tokenizer = read_tokenizer(config.tokenizer)
    if not config.path.exists():  # before its bytes are asked for
        raise InputError(f"no data at {config.path}; give a .jsonl or .jsonl.gz file, or a saved `datasets` directory")
    key = token_cache.cache_key(config)
    data = token_cache.load(key)
    if data is None:
        data = load_examples(config.path, tokenizer, config.max_length, config.on_long, config.limit)
        token_cache.store(key, data)
    return data, tokenizer


def read_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Raises:
    InputError: no tokenizer directory there.
    """
    if not path.is_dir():
        raise InputError(f"no tokenizer at {path}; give a local tokenizer directory")
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, local_files_only=True)
    return tokenizer


def preflight(config: RunConfig, policies: Sequence[str]) -> None:
    """Everything that can be wrong with a run's input, found before a process is started or a file written.

    Args:
        policies: names of those that the run will use.

    Raises:
        InputError: the first problem.
    """
    check_config(config)
    for name in policies:
        configured_policy(config, name)
    tokenizer = read_tokenizer(config.data.tokenizer)
    decoder = decoder_config(config.model, len(tokenizer), config.data.max_length)
    check_topology(config.parallel, decoder)
    if config.balance.table is not None:
        check_same_identity(load_table(config.balance.table).identity, identity_of(decoder, config))
    data, _ = read_data(config.data)
    batches = _batches(config, data)
    limit_mb = available_mb(config)
    for name in policies:
        possible_unit_sizes(config, identity_of(decoder, config), batches.samples, name, limit_mb)


def open_session(config: RunConfig, ranks: Ranks) -> Session:
    """Load data and build the model, the same on every rank.

    Raises:
        InputError: see `check_config` and `read_data`.
    """
    check_config(config)
    data, tokenizer = read_data(config.data)
    batches = _batches(config, data)
    longest = max(sample.length for sample in batches.samples)
    memory_mb = ranks.from_first(available_mb(config))
    model = build_model(config.model, config.attention, len(tokenizer), longest, config.seed)
    attention = config.attention
    engine = Engine.whole(model, attention.block_size, attention.granularity, config.model.checkpointing)
    gradients = FlatGradients(engine.named_parameters, ranks)
    return Session(config, ranks, data, batches, engine, gradients, identity_of(model.config, config), memory_mb)


def _batches(config: RunConfig, data: TokenisedDataset) -> GlobalBatches:
    return GlobalBatches(
        tuple(data.samples()), config.data.batch_size, config.seed, config.data.tail, composition_of(config)
    )


def composition_of(config: RunConfig) -> Composition:
    """Which samples form a step, as configured. A window weighs samples by their tokens: what it makes must not
    depend on a latency table, or a run could not go on elsewhere."""
    balance = config.balance
    if config.data.target_tokens is not None:
        return ByTargetTokens(config.data.target_tokens)
    if balance.mode == "window":
        return Window(balance.window, balance.window_ranks or config.parallel.dp)
    return GroupByLength() if balance.mode == "group_by_length" else in_order
