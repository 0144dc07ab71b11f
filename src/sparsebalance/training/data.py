"""Reads a data set, tokenises it, and marks which tokens are targets.

In: JSONL (.jsonl, .jsonl.gz) with `messages` (chat) or `text`, or a directory saved by `datasets`. Out: token
ids and, per position, the token to predict or IGNORE. Targets are shifted here, once: position t holds token
t + 1, so later cutting and packing cannot shift across a border.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from sparsebalance.planning.errors import InputError
from sparsebalance.planning.plan import Sample

IGNORE = -100
ROLES = ("system", "user", "assistant", "tool")
OnLong = Literal["error", "truncate", "drop"]
Tokens = NDArray[np.int32]


@dataclass(frozen=True)
class Example:
    """One tokenised sample.

    Attributes:
        input_ids: [length] int32.
        targets: [length] int32, the next token where it is a target, else IGNORE; the last is IGNORE.
    """

    input_ids: Tokens
    targets: Tokens

    @property
    def target_count(self) -> int:
        return int((self.targets != IGNORE).sum())


@dataclass(frozen=True)
class DataReport:
    """What happened to the rows, so that nothing is lost silently.

    Attributes:
        rows: read. truncated, dropped: for being over the length limit.
        truncated_tokens, dropped_tokens: tokens lost that way.
        without_targets: samples with no target token, or none left after truncation; they train nothing.
        control_tokens: samples whose own text contains a control token of the tokenizer.
    """

    rows: int = 0
    truncated: int = 0
    truncated_tokens: int = 0
    dropped: int = 0
    dropped_tokens: int = 0
    without_targets: int = 0
    control_tokens: int = 0

    def notes(self) -> list[str]:
        """One sentence for everything that a user should know before training."""
        found = {
            "truncated to max_length": self.truncated,
            "dropped for being over max_length": self.dropped,
            "without any target token: they train nothing": self.without_targets,
            "with a control token inside their own text": self.control_tokens,
        }
        return [f"{count} of {self.rows} samples {what}" for what, count in found.items() if count]


@dataclass(frozen=True)
class TokenisedDataset:
    """Examples in file order; a sample's id is its index.

    Attributes:
        fingerprint: SHA-256 over everything that the tokens depend on.
    """

    examples: tuple[Example, ...]
    report: DataReport
    fingerprint: str

    def __len__(self) -> int:
        return len(self.examples)

    def samples(self) -> list[Sample]:
        return [
            Sample(index, len(example.input_ids), example.target_count) for index, example in enumerate(self.examples)
        ]


def load_examples(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    on_long: OnLong = "error",
    limit: int | None = None,
) -> TokenisedDataset:
    """Read and tokenise a data set.

    Args:
        path: file or directory.
        max_length: most tokens of a sample.
        on_long: what to do with longer samples.
        limit: read only the first so many rows.

    Raises:
        InputError: no or unreadable data (the line is named), a row without `messages` or `text`, a sample
            that is too long under on_long="error", or not one target token in the whole data set.
    """
    examples: list[Example] = []
    report = DataReport()
    digest = hashlib.sha256(f"{max_length} {on_long} {limit}".encode())
    for where, row in _rows(path):
        if limit is not None and report.rows == limit:
            break
        example = _tokenise(row, tokenizer, where)
        report = replace(
            report,
            rows=report.rows + 1,
            control_tokens=report.control_tokens + _has_control_tokens(row, tokenizer),
        )
        if len(example.input_ids) > max_length:
            if on_long == "error":
                raise InputError(
                    f"{where}: {len(example.input_ids)} tokens, over max_length {max_length}; "
                    "raise it, or set data.on_long to truncate or drop"
                )
            if on_long == "drop":
                tokens = report.dropped_tokens + len(example.input_ids)
                report = replace(report, dropped=report.dropped + 1, dropped_tokens=tokens)
                continue
            tokens = report.truncated_tokens + len(example.input_ids) - max_length
            report = replace(report, truncated=report.truncated + 1, truncated_tokens=tokens)
            example = _truncate(example, max_length)
        if example.target_count == 0:
            report = replace(report, without_targets=report.without_targets + 1)
        examples.append(example)
        digest.update(example.input_ids.tobytes() + example.targets.tobytes())
    if not examples:
        why = f"all {report.dropped} are over max_length {max_length}" if report.dropped else "it is empty"
        raise InputError(f"{path} holds no sample to train on: {why}")
    if report.without_targets == len(examples):
        raise InputError(
            f"{path}: none of {len(examples)} samples has a target token; `messages` need assistant turns "
            f"within max_length {max_length}"
        )
    return TokenisedDataset(tuple(examples), report, digest.hexdigest())


def _truncate(example: Example, length: int) -> Example:
    targets = example.targets[:length].copy()
    targets[-1] = IGNORE  # its token to predict was cut off
    return Example(example.input_ids[:length], targets)


def _rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(place for error messages, row) of a file or a saved data set."""
    if path.is_dir():
        yield from _saved_rows(path)
        return
    if not path.is_file():
        raise InputError(f"no data at {path}; give a .jsonl or .jsonl.gz file, or a saved `datasets` directory")
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        raise InputError(f"{path} is neither .jsonl nor .jsonl.gz; convert it, or save it with `datasets`")
    open_text = gzip.open if path.suffix == ".gz" else open
    with open_text(path, "rt", encoding="utf-8") as file:
        number = 0
        try:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path} line {number}", _parse(line, f"{path} line {number}")
        except (OSError, EOFError, UnicodeDecodeError) as error:
            raise InputError(f"{path} is broken after line {number}: {error}; fetch or write it again") from error


def _parse(line: str, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where} is not valid JSON ({error.msg}); mend or remove the line") from error
    if not isinstance(row, dict):
        raise InputError(f"{where} is a {type(row).__name__}, but a row is a JSON object")
    return row


def _saved_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    from datasets import Dataset, load_from_disk

    try:
        data = load_from_disk(str(path))
    except (FileNotFoundError, ValueError) as error:
        raise InputError(f"{path} is not a saved `datasets` directory: {error}") from error
    if not isinstance(data, Dataset):
        raise InputError(f"{path} holds splits {sorted(data)}; give the directory of one of them")
    for index, row in enumerate(data):
        yield f"{path} row {index}", row


def _tokenise(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, where: str) -> Example:
    if row.get("messages"):
        ids, trained = tokenise_chat(_checked(row["messages"], where), tokenizer, where)
    elif isinstance(row.get("text"), str) and row["text"]:
        ids = tokenizer(row["text"], add_special_tokens=False)["input_ids"]
        if tokenizer.eos_token_id is not None:
            ids = [*ids, tokenizer.eos_token_id]
        trained = [True] * len(ids)
    else:
        raise InputError(f"{where} has neither `messages` nor `text`; its fields are {sorted(row)}")
    input_ids = np.array(ids, dtype=np.int32)
    targets = np.full(len(ids), IGNORE, dtype=np.int32)
    follows = np.array(trained[1:], dtype=bool)
    targets[:-1][follows] = input_ids[1:][follows]
    return Example(input_ids, targets)


def _checked(messages: Any, where: str) -> list[dict[str, str]]:
    if not isinstance(messages, list):
        raise InputError(f"{where}: `messages` is a {type(messages).__name__}, but it must be a list of turns")
    for index, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ROLES:
            raise InputError(f"{where}: turn {index} has role {role!r}; roles are {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str):
            raise InputError(f"{where}: turn {index} has no text content; give `content` as a string")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def tokenise_chat(
    messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, where: str = "sample"
) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation, and which of them belong to assistant turns (their end mark included).

    A chat template with {% generation %} marks says so itself; for others it is derived by rendering the
    conversation turn by turn.

    Raises:
        InputError: no chat template, or one whose rendering of a turn depends on later turns.
    """
    template = tokenizer.chat_template
    if not isinstance(template, str):
        raise InputError(f"{where} has `messages`, but the tokenizer has no chat template; add one or use `text`")
    if "{% generation" in template or "{%- generation" in template:
        encoded: Any = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return list(encoded["input_ids"]), [bool(x) for x in encoded["assistant_masks"]]
    return _turn_by_turn(messages, tokenizer, where)


def _turn_by_turn(
    messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, where: str
) -> tuple[list[int], list[bool]]:
    """Spans of assistant turns as differences of rendered prefixes, mapped to tokens by character offsets."""

    def render(count: int, prompt: bool = False) -> str:
        text = tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=prompt)
        return str(text)

    whole = render(len(messages))
    spans = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before, after = render(index, prompt=True), render(index + 1)
            if not (whole.startswith(after) and after.startswith(before)):
                raise InputError(
                    f"{where}: the chat template renders turn {index} differently when later turns follow, so "
                    "assistant tokens cannot be told apart; add {% generation %} marks to the template"
                )
            # The end of the turn is the last character that is not layout between turns.
            spans.append((len(before), len(after.rstrip())))
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    trained = [
        any(start < stop and first <= start and stop <= last for first, last in spans)
        for start, stop in encoded["offset_mapping"]
    ]
    return list(encoded["input_ids"]), trained


def _has_control_tokens(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a text contains the spelling of a control token; the tokenizer reads it as that token."""
    texts = [m["content"] for m in row["messages"]] if row.get("messages") else [row["text"]]
    return any(token in text for token in set(tokenizer.all_special_tokens) for text in texts)
