"""The decoder of a run: built by transformers from a config, with our attention plugged in."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, Qwen2Config
from transformers.utils import logging as transformers_logging

from sparsebalance.planning.decoder import decoder_from_config
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.table import Identity
from sparsebalance.training.config import AttentionConfig, ModelConfig, RunConfig
from sparsebalance.training.sparse_attention import activate

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def build_model(
    config: ModelConfig, attention: AttentionConfig, vocabulary: int, max_length: int, seed: int
) -> PreTrainedModel:
    """A Qwen2-family decoder with random weights from `seed`, or the checkpoint at `config.path`.

    Raises:
        InputError: no checkpoint there, or a model whose output projection we cannot train
            (a bias or a soft-capped logit).
    """
    transformers_logging.disable_progress_bar()
    dtype = DTYPES[config.dtype]
    decoder = decoder_config(config, vocabulary, max_length)
    if config.path is not None:
        model = AutoModelForCausalLM.from_pretrained(config.path, dtype=dtype, local_files_only=True)
    else:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(decoder, dtype=dtype)
    head = model.get_output_embeddings()
    if head.bias is not None or getattr(model.config, "final_logit_softcapping", None):
        raise InputError(
            f"{type(model).__name__} has a biased or soft-capped output projection, which the sliced loss "
            "does not compute; use a Qwen2- or Llama-family decoder"
        )
    if vocabulary > head.weight.shape[0]:
        raise InputError(
            f"the tokenizer has {vocabulary} tokens, but the model's vocabulary is {head.weight.shape[0]}; "
            "use the tokenizer that belongs to the checkpoint"
        )
    activate(model, attention.block_size, attention.budget, attention.granularity)
    if config.checkpointing:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    return model


def decoder_config(config: ModelConfig, vocabulary: int, max_length: int) -> PreTrainedConfig:
    """The transformers config of the decoder, without building it.

    Raises:
        InputError: no checkpoint at `config.path`.
    """
    if config.path is not None:
        if not (config.path / "config.json").is_file():
            raise InputError(
                f"no checkpoint at {config.path}: it has no config.json; give a local checkpoint directory"
            )
        read: PreTrainedConfig = AutoConfig.from_pretrained(config.path, local_files_only=True)
        return read
    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        max_position_embeddings=max_length,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=True,
        use_sliding_window=False,
    )


def identity_of(decoder: PreTrainedConfig, config: RunConfig) -> Identity:
    """What a latency table must have been measured for, to predict this run."""
    return Identity(
        decoder=decoder_from_config(decoder.to_dict(), str(config.model.path or "the configured model")),
        block_size=config.attention.block_size,
        granularity=config.attention.granularity,
        device="cpu",
        dtype=config.model.dtype,
        threads=config.parallel.threads,
        checkpointing=config.model.checkpointing,
    )
