"""What training and comparison share: data, model, engine and latency table of a run, on every rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from sparsebalance.planning.budgets import Anchor
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.pipeline import PipelineModel
from sparsebalance.planning.plan import StepPlan, Topology
from sparsebalance.planning.policy import Policy, named_policy
from sparsebalance.planning.simulator import Network
from sparsebalance.planning.table import Identity, LatencyTable
from sparsebalance.planning.table_file import check_same_identity, load_table
from sparsebalance.profiling.measure import Progress, measure
from sparsebalance.profiling.network import measure_network
from sparsebalance.training import token_cache
from sparsebalance.training.config import DataConfig, RunConfig, check_config
from sparsebalance.training.data import TokenisedDataset, load_examples
from sparsebalance.training.engine import Engine, RankResult
from sparsebalance.training.memory import check_memory
from sparsebalance.training.model import build_model, decoder_config, identity_of
from sparsebalance.training.parallel import FlatGradients, Ranks
from sparsebalance.training.sampler import GlobalBatches


@dataclass(frozen=True)
class Session:
    """Attributes:
    config, ranks: of the run and of this process.
    data: tokenised examples; sample ids index them.
    batches: step -> samples.
    engine: the model, ready to run planned units.
    gradients: of the model, one buffer.
    identity: what a latency table must have been measured for.
    """

    config: RunConfig
    ranks: Ranks
    data: TokenisedDataset
    batches: GlobalBatches
    engine: Engine
    gradients: FlatGradients
    identity: Identity

    @property
    def topology(self) -> Topology:
        return Topology(dp=self.ranks.world)

    def pipeline(self, table: LatencyTable) -> PipelineModel:
        """What a step costs besides its micro-batches: the gradient all-reduce."""
        megabytes = self.gradients.buffer.numel() * self.gradients.buffer.element_size() / 1e6
        reduce_ms = table.network.all_reduce.ms(megabytes) if table.network and self.ranks.world > 1 else 0.0
        return PipelineModel(network=Network(all_reduce_ms=reduce_ms))

    def latency_table(self, progress: Progress | None = None) -> tuple[LatencyTable, tuple[float, ...]]:
        """The configured table, checked; or one measured now, on all ranks at once as they will run.

        Returns:
            The table, and how much slower each rank is than it says: all 1 for a configured table.
        """
        path = self.config.balance.table
        if path is not None:
            table = load_table(path)
            check_same_identity(table.identity, self.identity)
            return table, (1.0,) * self.ranks.world
        measured = measure(
            self.engine.model,
            self.identity,
            max_length=max(sample.length for sample in self.batches.samples),
            max_budget=2 * self.config.attention.budget,
            limit_s=self.config.balance.measure_s,
            progress=progress,
            gather=self.ranks.gather,
        )
        self.gradients.zero()
        return replace(measured.table, network=measure_network(self.ranks)), measured.rank_factors

    def run(self, plan: StepPlan, where: str, probe_rows: int = 0) -> tuple[RankResult, float, float]:
        """This rank's part of a plan and the gradient all-reduce.

        Args:
            where: begins the message of an error, e.g. "step 3".

        Returns:
            The result, and the milliseconds of everything and of the all-reduce, waiting included.

        Raises:
            RuntimeError: anything failed; names where.
        """
        self.gradients.zero()
        begin = time.perf_counter()
        try:
            result = self.engine.run(plan.ranks[self.ranks.rank], self.data.examples, plan.targets, probe_rows)
        except Exception as error:
            raise RuntimeError(f"{where}: {type(error).__name__}: {error}") from error
        computed = time.perf_counter()
        self.ranks.all_reduce(self.gradients.buffer)
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


def configured_policy(config: RunConfig, name: str) -> Policy:
    """The policy of that name with the run's budget, cap and anchor.

    Raises:
        InputError: no such policy, or an anchor setting out of range.
    """
    balance = config.balance
    anchor = Anchor(
        kind=balance.anchor,
        threshold=balance.threshold,
        min_budget=balance.min_budget,
        max_budget=balance.max_budget,
    )
    return named_policy(name, budget=config.attention.budget, token_cap=balance.token_cap, anchor=anchor)


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
    if config.balance.table is not None:
        check_same_identity(load_table(config.balance.table).identity, identity_of(decoder, config))
    data, _ = read_data(config.data)
    batches = _batches(config, data)
    check_memory(config, identity_of(decoder, config), batches.samples)


def open_session(config: RunConfig, ranks: Ranks) -> Session:
    """Load data and build the model, the same on every rank.

    Raises:
        InputError: see `check_config` and `read_data`.
    """
    check_config(config)
    data, tokenizer = read_data(config.data)
    batches = _batches(config, data)
    longest = max(sample.length for sample in batches.samples)
    model = build_model(config.model, config.attention, len(tokenizer), longest, config.seed)
    attention = config.attention
    engine = Engine(model, attention.block_size, attention.granularity, config.model.checkpointing)
    return Session(config, ranks, data, batches, engine, FlatGradients(model), identity_of(model.config, config))


def _batches(config: RunConfig, data: TokenisedDataset) -> GlobalBatches:
    return GlobalBatches(
        tuple(data.samples()), config.data.batch_size, config.seed, config.data.tail, config.parallel.dp
    )
