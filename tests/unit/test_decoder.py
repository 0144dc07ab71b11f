"""Decoders: counted parameters against published totals, config files, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsebalance.planning.decoder import PRESETS, Decoder, decoder_from_config, named_decoder
from sparsebalance.planning.errors import InputError

# Parameters of the published checkpoints (tied matrices once).
PUBLISHED = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_248_023_552,
    "smollm2-135m": 134_515_008,
}
TINY = Decoder(layers=2, hidden=8, intermediate=16, heads=4, kv_heads=2, head_dim=4, vocabulary=10, tied=False)
CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 10,
    "tie_word_embeddings": False,
    "layer_types": ["full_attention", "sliding_attention"],
}


def config(**changes: object) -> dict[str, Any]:
    """CONFIG with changes; a key that is None is left out."""
    return {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}


def uncounted(name: str, decoder: Decoder) -> int:
    """Qwen2.5 has biases on queries, keys and values, Qwen3 norms on the heads of queries and keys."""
    if name.startswith("qwen2.5"):
        return decoder.layers * decoder.head_dim * (decoder.heads + 2 * decoder.kv_heads)
    return decoder.layers * 2 * decoder.head_dim if name.startswith("qwen3") else 0


def test_every_preset_has_a_published_total_to_compare_with() -> None:
    assert PRESETS.keys() == PUBLISHED.keys()


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_counts_the_published_parameters(name: str) -> None:
    decoder = PRESETS[name]
    assert decoder.parameters == pytest.approx(PUBLISHED[name], rel=0.02)
    assert decoder.parameters + uncounted(name, decoder) == PUBLISHED[name]


def test_parameters_follow_from_the_sizes_by_hand() -> None:
    projections = 8 * 16 + 8 * 8 + 8 * 8 + 16 * 8  # q, k, v, o
    assert TINY.layer_parameters == projections + 3 * 8 * 16 + 2 * 8
    assert TINY.embedding_parameters == 2 * 10 * 8
    assert TINY.parameters == 2 * TINY.layer_parameters + 160 + 8
    assert replace(TINY, tied=True).parameters == TINY.parameters - 80


@given(st.sampled_from(sorted(PRESETS)), st.integers(1, 5))
def test_parameters_are_linear_in_layers(name: str, more: int) -> None:
    decoder = PRESETS[name]
    deeper = replace(decoder, layers=decoder.layers + more)
    assert deeper.parameters - decoder.parameters == more * decoder.layer_parameters


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "8", None])
def test_a_size_must_be_a_whole_number_above_zero(value: Any) -> None:
    with pytest.raises(InputError, match=r"hidden is .*, but it must be a whole number >= 1"):
        replace(TINY, hidden=value)


def test_heads_must_be_a_multiple_of_kv_heads_and_tied_a_truth_value() -> None:
    with pytest.raises(InputError, match=r"heads is 4, but it must be a multiple of kv_heads \(3\)"):
        replace(TINY, kv_heads=3)
    with pytest.raises(InputError, match="tied is 1, but it must be true or false"):
        replace(TINY, tied=1)  # type: ignore[arg-type]


def test_a_config_gives_its_sizes() -> None:
    assert decoder_from_config(CONFIG, "config.json") == TINY
    assert decoder_from_config(config(num_experts=1, n_routed_experts=0), "here") == TINY


def test_missing_optional_keys_have_the_defaults_of_transformers() -> None:
    bare = decoder_from_config(config(head_dim=None, num_key_value_heads=None, tie_word_embeddings=None), "here")
    assert (bare.head_dim, bare.kv_heads, bare.tied) == (2, 4, False)
    assert decoder_from_config(config(model_type="gemma2", tie_word_embeddings=None), "here").tied
    assert decoder_from_config(config(tie_word_embeddings=True), "here").tied


def test_a_nested_text_config_goes_first() -> None:
    outer = {"model_type": "vlm", "hidden_size": 99, "tie_word_embeddings": True, "text_config": CONFIG}
    assert decoder_from_config(outer, "here") == replace(TINY, tied=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": None, "hidden_size": None}, "here has no hidden_size, vocab_size; give the config.json"),
        ({"hidden_size": "8"}, "here: decoder: hidden is '8'"),
        ({"num_attention_heads": 0}, "here: decoder: heads is 0"),
        ({"num_attention_heads": 0, "head_dim": None}, "here: decoder: heads is 0"),
        ({"num_attention_heads": 3, "head_dim": None}, "here: hidden 8 is not a multiple of heads 3, and no head_dim"),
        ({"num_key_value_heads": 3}, "here: decoder: heads is 4, but it must be a multiple"),
        ({"num_experts": 128}, r"here is a mixture of experts \(num_experts is 128\)"),
        ({"num_local_experts": 8}, r"mixture of experts \(num_local_experts is 8\)"),
        ({"n_routed_experts": [64, 64]}, r"mixture of experts \(n_routed_experts is \[64, 64\]\)"),
        ({"kv_lora_rank": 512}, "uses latent attention"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "has layers of type linear_attention"),
        ({"model_type": "gpt_neox"}, "is a gpt_neox model, whose MLP has two matrices"),
    ],
)
def test_a_config_that_cannot_be_counted_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        decoder_from_config(config(**changes), "here")


def test_a_name_is_a_preset_in_any_case_a_file_or_a_directory(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    assert named_decoder("Qwen2.5-3B") is PRESETS["qwen2.5-3b"]
    assert named_decoder(str(path)) == named_decoder(str(tmp_path)) == TINY


def test_a_preset_goes_before_a_directory_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("qwen3-4b").mkdir()
    Path("qwen3-4b/config.json").write_text(json.dumps(CONFIG))
    assert named_decoder("qwen3-4b") is PRESETS["qwen3-4b"]
    assert named_decoder("./qwen3-4b") == TINY


def test_an_unknown_name_is_met_with_the_nearest_one_and_all_others() -> None:
    with pytest.raises(InputError, match=r"'Qwen2.5-4B'.*did you mean 'qwen2.5-.*one of qwen2.5-0.5b.*smollm2-135m"):
        named_decoder("Qwen2.5-4B")
    with pytest.raises(InputError, match="no model is called ''"):
        named_decoder("")


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not a readable JSON file"), ("[1]", "holds a list, but a config.json is a JSON object")],
)
def test_a_broken_config_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=f"config.json {message}"):
        named_decoder(str(tmp_path))


def test_a_directory_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no config\.json"):
        named_decoder(str(tmp_path))
