"""Tokenised data kept between processes and runs, so that a data set is tokenised once.

In: the settings that tokens depend on, and the bytes of the data and tokenizer files. Out: the data set, read
back, or nothing where it was never stored. A cache that cannot be read or written is no error: the data is
tokenised again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import zipfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np

from sparsebalance import __version__
from sparsebalance.training.config import DataConfig
from sparsebalance.training.data import DataReport, Example, TokenisedDataset

LAYOUT = 2  # of what is stored
KEEP = 8  # data sets; the least recently used ones go


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sparsebalance" / "tokens"


def cache_key(config: DataConfig) -> str:
    """SHA-256 over everything that the tokens depend on, this package's version included."""
    settings = [LAYOUT, __version__, config.max_length, config.on_long, config.limit]
    digest = hashlib.sha256(json.dumps(settings).encode())
    for root in (config.path, config.tokenizer):
        for path in _files(root):
            digest.update(f"{path.relative_to(root)}:{path.stat().st_size}:".encode())
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _files(root: Path) -> Iterator[Path]:
    yield from sorted(path for path in root.rglob("*") if path.is_file()) if root.is_dir() else [root]


def load(key: str) -> TokenisedDataset | None:
    path = cache_folder() / f"{key}.npz"
    try:
        with np.load(path) as stored:
            edges = np.cumsum(stored["lengths"])[:-1]
            ids, targets = np.split(stored["ids"], edges), np.split(stored["targets"], edges)
            report = DataReport(**json.loads(str(stored["report"])))
            data = TokenisedDataset(tuple(map(Example, ids, targets)), report, str(stored["fingerprint"]))
        os.utime(path)
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile):
        return None
    return data


def store(key: str, data: TokenisedDataset) -> None:
    folder = cache_folder()
    temporary = folder / f".{key}.{os.getpid()}.npz"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(
            temporary,
            ids=np.concatenate([example.input_ids for example in data.examples]),
            targets=np.concatenate([example.targets for example in data.examples]),
            lengths=np.array([len(example.input_ids) for example in data.examples]),
            report=json.dumps(asdict(data.report)),
            fingerprint=data.fingerprint,
        )
        os.replace(temporary, folder / f"{key}.npz")
        newest = sorted(folder.glob("[!.]*.npz"), key=lambda path: path.stat().st_mtime, reverse=True)
        for old in newest[KEEP:]:
            old.unlink(missing_ok=True)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
