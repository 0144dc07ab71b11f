"""A model spread over the processes of a topology: what each of them holds, and whether it can be spread so.

In: an engine that holds the whole model, this process's place, the layers of each stage. Out: an engine that holds its
part alone, under the parameters' names in the whole model, and their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedConfig

from sparsebalance.attention.ulysses import HeadExchange, check_sequence_degree
from sparsebalance.planning.pipeline import PipelineModel, split_layers
from sparsebalance.training.config import ParallelConfig
from sparsebalance.training.engine import Engine
from sparsebalance.training.gradients import FlatGradients, Gradients
from sparsebalance.training.parallel import Ranks
from sparsebalance.training.sharded import ShardedGradients
from sparsebalance.training.stage import cut, untie
from sparsebalance.training.tensor_parallel import check_tensor_degree, parallelize


def own_part(engine: Engine, ranks: Ranks, layers: Sequence[int]) -> tuple[Engine, Gradients]:
    """All processes call it at once.

    Args:
        engine: of the whole model, which is cut in place under tensor parallelism.
        layers: of each stage; a worker holds every `pp`-th stage.

    Raises:
        InputError: see `cut` and `parallelize`.
    """
    whole = engine.stages[0].model
    tensor = None if ranks.tensor is None else parallelize(whole, ranks.tensor)  # before cutting: weights may be tied
    own = tuple(cut(whole, layers)[ranks.stage_worker :: ranks.topology.pp])
    untie(own)
    if tensor is not None:
        own[-1].cross_entropy = tensor.cross_entropy
    part = replace(
        engine,
        stages=own,
        worker=ranks.stage_worker,
        groups=ranks.pipeline,
        sequence=None if ranks.sequence is None else HeadExchange(ranks.sequence),
        tensor=tensor,
        heads=ranks.heads,
    )
    if ranks.shards is not None:
        return part, ShardedGradients(part, ranks, ranks.shards)
    return part, FlatGradients(part.named_parameters, ranks, part.tied_elsewhere, tensor)


def check_topology(parallel: ParallelConfig, decoder: PreTrainedConfig) -> None:
    """Raises:
    InputError: a decoder whose layers or heads cannot be shared out so; names the degrees that work.
    """
    topology = parallel.topology
    heads, kv_heads = decoder.num_attention_heads, decoder.num_key_value_heads
    check_tensor_degree(heads, kv_heads, topology.tp)
    check_sequence_degree(heads // topology.tp, kv_heads // topology.tp, topology.sp)
    split_layers(decoder.num_hidden_layers, PipelineModel(parallel.schedule).stages(topology))
