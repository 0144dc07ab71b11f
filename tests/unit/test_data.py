"""Reading, tokenising, and labels: checked against the chat template, on both ways to find assistant turns."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from sparsebalance.planning.errors import InputError
from sparsebalance.training import token_cache
from sparsebalance.training.config import DataConfig
from sparsebalance.training.data import IGNORE, Example, load_examples, tokenise_chat
from sparsebalance.training.session import read_data
from tests.models import TOKENIZER, chat_rows, write_rows

CHAT = [
    {"role": "system", "content": "Answer from the document."},
    {"role": "user", "content": "A long document.\n\nWhat does it say?"},
    {"role": "assistant", "content": "It says: hello, world."},
    {"role": "user", "content": "And then?"},
    {"role": "assistant", "content": " Nothing more.\n"},
]
PLAIN_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(TOKENIZER, local_files_only=True)


@pytest.fixture
def unmarked(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The same tokenizer with a template that does not mark generated turns."""
    other = AutoTokenizer.from_pretrained(TOKENIZER, local_files_only=True)
    other.chat_template = PLAIN_CHATML
    return other


def trained_text(example: Example, tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(example.targets[example.targets != IGNORE].tolist()))


def load(path: Path, tokenizer: PreTrainedTokenizerBase, **options: object):
    return load_examples(path, tokenizer, **{"max_length": 4096, **options})  # type: ignore[arg-type]


def test_labels_are_the_assistant_turns_and_their_end_marks(
    tokenizer: PreTrainedTokenizerBase, unmarked: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path = write_rows(tmp_path / "chat.jsonl", [{"messages": CHAT}])
    expected = "It says: hello, world.<|im_end|> Nothing more.\n<|im_end|>"
    found = [load(path, each).examples[0] for each in (tokenizer, unmarked)]
    for example, each in zip(found, (tokenizer, unmarked)):
        text = each.decode(example.input_ids.tolist())
        assert text == each.apply_chat_template(CHAT, tokenize=False)
        assert trained_text(example, each) == expected
    assert np.array_equal(found[0].input_ids, found[1].input_ids)
    assert np.array_equal(found[0].targets, found[1].targets)


def test_targets_are_shifted_once(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """Position t holds token t + 1 or IGNORE; the last holds IGNORE."""
    for example in load(write_rows(tmp_path / "c.jsonl", chat_rows(6)), tokenizer).examples:
        kept = np.flatnonzero(example.targets != IGNORE)
        assert np.array_equal(example.targets[kept], example.input_ids[kept + 1])
        assert example.targets[-1] == IGNORE


def test_both_ways_agree_on_real_conversations(
    tokenizer: PreTrainedTokenizerBase, unmarked: PreTrainedTokenizerBase
) -> None:
    """Every source in the shipped data: tools, many turns, odd characters."""
    seen: dict[str, int] = {}
    with gzip.open(TOKENIZER.parent / "longdoc_sft.jsonl.gz", "rt", encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            if seen.get(row["source"], 0) < 4:
                seen[row["source"]] = seen.get(row["source"], 0) + 1
                assert tokenise_chat(row["messages"], tokenizer) == tokenise_chat(row["messages"], unmarked)
    assert len(seen) == 4


def test_text_rows_train_every_token_and_the_end(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    (example,) = load(write_rows(tmp_path / "t.jsonl", [{"text": "one two three"}]), tokenizer).examples
    assert example.target_count == len(example.input_ids) - 1
    assert example.input_ids[-1] == tokenizer.eos_token_id


def test_jsonl_gzip_and_saved_datasets_give_the_same(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    from datasets import Dataset

    rows = chat_rows(5)
    plain = write_rows(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    sets = [load(tmp_path / name, tokenizer) for name in ("a.jsonl", "a.jsonl.gz", "saved")]
    assert len({data.fingerprint for data in sets}) == 1
    assert [sample.length for sample in sets[0].samples()] == [len(e.input_ids) for e in sets[0].examples]


def test_long_samples_are_refused_truncated_or_dropped_and_counted(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    rows = [{"text": "word " * 50}, {"text": "short"}, {"messages": CHAT}]
    path = write_rows(tmp_path / "long.jsonl", rows)
    with pytest.raises(InputError, match=r"long.jsonl line 1: \d+ tokens, over max_length 20.*data.on_long"):
        load(path, tokenizer, max_length=20)
    truncated = load(path, tokenizer, max_length=20, on_long="truncate")
    assert [len(e.input_ids) for e in truncated.examples] == [20, 2, 20]
    assert truncated.examples[0].targets[-1] == IGNORE
    assert (truncated.report.rows, truncated.report.truncated, truncated.report.without_targets) == (3, 2, 1)
    notes = truncated.report.notes()
    assert "2 of 3 samples truncated to max_length" in notes
    assert any(note.startswith("1 of 3 samples without any target token") for note in notes)
    dropped = load(path, tokenizer, max_length=20, on_long="drop")
    assert (len(dropped), dropped.report.dropped) == (1, 2)


def test_control_tokens_inside_a_text_are_counted(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    rows = [{"text": "harmless"}, {"text": "stop <|im_end|> here"}]
    report = load(write_rows(tmp_path / "x.jsonl", rows), tokenizer).report
    assert report.control_tokens == 1
    assert any("control token" in note for note in report.notes())


def test_limit_reads_the_first_rows(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "c.jsonl", chat_rows(9))
    assert len(load(path, tokenizer, limit=4)) == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no sample to train on: it is empty"),
        ("\n\n", "holds no sample"),
        ('{"text": "ok"}\n{"text": "bro', "line 2 is not valid JSON"),
        ('{"text": "ok"}\n\n[1, 2]\n', "line 3 is a list"),
        ('{"prompt": "x"}\n', r"neither `messages` nor `text`; its fields are \['prompt'\]"),
        ('{"text": ""}\n', "neither `messages` nor `text`"),
        ('{"messages": "hello"}\n', "`messages` is a str"),
        ('{"messages": [{"role": "robot", "content": "x"}]}\n', "turn 0 has role 'robot'"),
        ('{"messages": [{"role": "user"}]}\n', "turn 0 has no text content"),
        ('{"messages": [{"role": "user", "content": "x"}]}\n', "none of 1 samples has a target token"),
    ],
)
def test_broken_rows_are_named(content: str, message: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        load(path, tokenizer)


def test_missing_broken_and_unknown_files_are_named(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no data at"):
        load(tmp_path / "none.jsonl", tokenizer)
    (tmp_path / "data.csv").write_text("a,b\n")
    with pytest.raises(InputError, match=r"neither .jsonl nor .jsonl.gz"):
        load(tmp_path / "data.csv", tokenizer)
    whole = gzip.compress(b'{"text": "hello"}\n' * 1000)
    (tmp_path / "half.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="is broken after line"):
        load(tmp_path / "half.jsonl.gz", tokenizer)
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "caf\xe9"}\n')
    with pytest.raises(InputError, match="is broken after line"):
        load(tmp_path / "latin.jsonl", tokenizer)
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="not a saved `datasets` directory"):
        load(tmp_path / "folder", tokenizer)


def test_templates_that_hide_turns_are_refused(tmp_path: Path) -> None:
    other = AutoTokenizer.from_pretrained(TOKENIZER, local_files_only=True)
    path = write_rows(tmp_path / "c.jsonl", [{"messages": CHAT}])
    other.chat_template = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(InputError, match=r"renders turn 2 differently.*generation"):
        load(path, other)
    other.chat_template = None
    with pytest.raises(InputError, match="no chat template"):
        load(path, other)


def test_the_shipped_data_has_the_promised_tail() -> None:
    data, _ = read_data(DataConfig(TOKENIZER.parent / "longdoc_sft.jsonl.gz", TOKENIZER))
    lengths = np.array([sample.length for sample in data.samples()])
    assert len(lengths) > 500
    assert lengths.min() < 150
    assert 30_000 < lengths.max() <= 32_768
    assert np.quantile(lengths, 0.5) < 2_000 < np.mean(lengths)
    assert data.report.without_targets == 0


def test_tokens_are_cached_and_a_changed_byte_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = DataConfig(write_rows(tmp_path / "c.jsonl", chat_rows(5)), TOKENIZER, max_length=4096)
    first, _ = read_data(config)
    with monkeypatch.context() as patch:
        patch.setattr("sparsebalance.training.session.load_examples", None)  # must not be called
        again, _ = read_data(config)
    assert (again.fingerprint, again.report) == (first.fingerprint, first.report)
    for a, b in zip(first.examples, again.examples, strict=True):
        assert np.array_equal(a.input_ids, b.input_ids)
        assert np.array_equal(a.targets, b.targets)
    write_rows(config.path, chat_rows(5, seed=1))
    assert read_data(config)[0].fingerprint != first.fingerprint
    for stored in token_cache.cache_folder().iterdir():
        stored.write_bytes(b"not a zip file")
    assert read_data(config)[0].fingerprint != first.fingerprint


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    config = DataConfig(write_rows(tmp_path / "c.jsonl", chat_rows(3)), TOKENIZER, max_length=4096)
    assert len(read_data(config)[0]) == 3


def test_the_cache_keeps_a_few_data_sets_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_rows(tmp_path / "c.jsonl", chat_rows(3))
    for limit in range(1, token_cache.KEEP + 4):
        read_data(DataConfig(path, TOKENIZER, max_length=4096 + limit))
    assert len(list(token_cache.cache_folder().iterdir())) == token_cache.KEEP
