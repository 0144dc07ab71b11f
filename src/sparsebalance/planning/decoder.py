"""The sizes of a decoder, from a preset, or from the config.json of a checkpoint.

In: a name or a path. Out: a `Decoder`, from which parameters, memory and time follow. Dense decoders with grouped
query attention and a gated MLP; anything else is refused, because its parameters would be counted wrongly.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from sparsebalance.planning.errors import InputError, did_you_mean


@dataclass(frozen=True)
class Decoder:
    """A dense decoder.

    Attributes:
        layers: attention layers. hidden: width of the residual stream. intermediate: width of the gated MLP.
        heads: query heads, a multiple of `kv_heads`. head_dim: width of one head.
        vocabulary: rows of the embedding. tied: the output projection is the embedding, so it counts once.

    Raises:
        InputError: a size is not a whole number above 0, or heads is not a multiple of kv_heads.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self) if field.name != "tied"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"decoder: {name} is {value!r}, but it must be a whole number >= 1")
        if not isinstance(self.tied, bool):
            raise InputError(f"decoder: tied is {self.tied!r}, but it must be true or false")
        if self.heads % self.kv_heads:
            raise InputError(
                f"decoder: heads is {self.heads}, but it must be a multiple of kv_heads ({self.kv_heads}); "
                "every group of query heads shares one key-value head"
            )

    @property
    def layer_parameters(self) -> int:
        """Query, key, value and output projections, the three matrices of the MLP, two norms; no biases."""
        projections = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return projections + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """The embedding and the output projection: one matrix where they are tied, else two."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """All of them, the last norm included."""
        return self.layers * self.layer_parameters + self.embedding_parameters + self.hidden


# Sizes of the published config.json files: layers, hidden, intermediate, heads, kv_heads, head_dim, vocabulary, tied.
PRESETS: dict[str, Decoder] = {
    "qwen2.5-0.5b": Decoder(24, 896, 4864, 14, 2, 64, 151_936, True),
    "qwen2.5-1.5b": Decoder(28, 1536, 8960, 12, 2, 128, 151_936, True),
    "qwen2.5-3b": Decoder(36, 2048, 11_008, 16, 2, 128, 151_936, True),
    "qwen2.5-7b": Decoder(28, 3584, 18_944, 28, 4, 128, 152_064, False),
    "qwen2.5-14b": Decoder(48, 5120, 13_824, 40, 8, 128, 152_064, False),
    "qwen2.5-32b": Decoder(64, 5120, 27_648, 40, 8, 128, 152_064, False),
    "qwen2.5-72b": Decoder(80, 8192, 29_568, 64, 8, 128, 152_064, False),
    "qwen3-0.6b": Decoder(28, 1024, 3072, 16, 8, 128, 151_936, True),
    "qwen3-1.7b": Decoder(28, 2048, 6144, 16, 8, 128, 151_936, True),
    "qwen3-4b": Decoder(36, 2560, 9728, 32, 8, 128, 151_936, True),
    "qwen3-8b": Decoder(36, 4096, 12_288, 32, 8, 128, 151_936, False),
    "qwen3-14b": Decoder(40, 5120, 17_408, 40, 8, 128, 151_936, False),
    "qwen3-32b": Decoder(64, 5120, 25_600, 64, 8, 128, 151_936, False),
    "llama-3.1-8b": Decoder(32, 4096, 14_336, 32, 8, 128, 128_256, False),
    "llama-3.1-70b": Decoder(80, 8192, 28_672, 64, 8, 128, 128_256, False),
    "llama-3.2-1b": Decoder(16, 2048, 8192, 32, 8, 64, 128_256, True),
    "llama-3.2-3b": Decoder(28, 3072, 8192, 24, 8, 128, 128_256, True),
    "mistral-7b": Decoder(32, 4096, 14_336, 32, 8, 128, 32_768, False),  # v0.3; v0.1 has 32,000 entries
    "smollm2-135m": Decoder(30, 576, 1536, 9, 3, 64, 49_152, True),
}

_KEYS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "heads": "num_attention_heads",
    "vocabulary": "vocab_size",
}
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_ATTENTION_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")
_UNGATED = ("gpt_neox", "phi", "starcoder2", "nemotron")
_TIED_BY_DEFAULT = ("gemma", "cohere", "smollm3")


def named_decoder(name: str) -> Decoder:
    """A preset by its name, in any case; else the decoder of a config.json, or of a directory that holds one.

    A preset goes before a directory of the same name; write `./NAME` for the directory.

    Raises:
        InputError: neither a preset nor a path, or a config.json that `decoder_from_config` refuses.
    """
    if preset := PRESETS.get(name.strip().lower()):
        return preset
    path = Path(name)
    if not name.strip() or not os.path.exists(name):
        hint = did_you_mean(name.strip().lower(), PRESETS)
        raise InputError(
            f"no model is called {name!r} and no such path exists{hint}; give the path of a config.json, "
            f"or one of {', '.join(PRESETS)}"
        )
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise InputError(f"{name} holds no config.json; give a checkpoint's directory, or one of its config.json")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not a readable JSON file ({error}); give the model's config.json") from error
    if not isinstance(record, Mapping):
        raise InputError(f"{path} holds a {type(record).__name__}, but a config.json is a JSON object")
    return decoder_from_config(record, str(path))


def decoder_from_config(record: Mapping[str, Any], where: str) -> Decoder:
    """The decoder of a transformers config.json; a `text_config` in it (vision-language models) goes first.

    Args:
        record: the parsed file. `head_dim` defaults to hidden / heads, `num_key_value_heads` to heads.
        where: what error messages call it.

    Raises:
        InputError: a key is missing or no whole number, or the model is no dense decoder with a gated MLP.
    """
    nested = record.get("text_config")
    text: Mapping[str, Any] = nested if isinstance(nested, Mapping) else record
    _refuse_other_kinds(text, where)
    if missing := [key for key in _KEYS.values() if text.get(key) is None]:
        raise InputError(
            f"{where} has no {', '.join(missing)}; give the config.json of a decoder in the transformers format"
        )
    sizes = {name: text[key] for name, key in _KEYS.items()}
    sizes["kv_heads"] = _first(text.get("num_key_value_heads"), sizes["heads"])
    sizes["head_dim"] = text.get("head_dim")
    try:
        if sizes["head_dim"] is None:
            sizes["head_dim"] = _head_dim(sizes["hidden"], sizes["heads"])
        return Decoder(**sizes, tied=_tied(record, text))
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def _refuse_other_kinds(text: Mapping[str, Any], where: str) -> None:
    """Models for which the dense formula would give wrong parameters and wrong times."""
    for key in _EXPERT_KEYS:
        if text.get(key) not in (None, 0, 1):
            raise InputError(
                f"{where} is a mixture of experts ({key} is {text[key]}), but parameters and times are counted for "
                "dense decoders; give a dense model"
            )
    if text.get("kv_lora_rank") is not None:
        raise InputError(f"{where} uses latent attention (kv_lora_rank), which is not counted; give a dense decoder")
    layer_types = text.get("layer_types")
    kinds = set(map(str, layer_types)) if isinstance(layer_types, list) else set()
    if other := sorted(kinds.difference(_ATTENTION_LAYERS)):
        raise InputError(f"{where} has layers of type {', '.join(other)}, but all must be attention; give such a model")
    if text.get("model_type") in _UNGATED:
        raise InputError(
            f"{where} is a {text['model_type']} model, whose MLP has two matrices, but a gated one's three are "
            "counted; give a model with a gated MLP"
        )


def _head_dim(hidden: object, heads: object) -> int:
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
        return 1  # the decoder's own check names the wrong value
    if hidden % heads:
        raise InputError(f"hidden {hidden} is not a multiple of heads {heads}, and no head_dim is given")
    return hidden // heads


def _tied(record: Mapping[str, Any], text: Mapping[str, Any]) -> Any:
    """As a key says, the outer one first; a file without it relies on its family's default."""
    default = str(text.get("model_type", "")).startswith(_TIED_BY_DEFAULT)
    return _first(record.get("tie_word_embeddings"), text.get("tie_word_embeddings"), default)


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
