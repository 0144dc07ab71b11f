"""Coverage curves of a real model: what dynamic sparsity tuning can expect before a run has measured its own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from sparsebalance.planning.coverage import (
    BUDGET_GRID,
    PRIOR_EXPONENT,
    STEP_TYPE,
    STEPS,
    CoverageCurves,
    length_bucket,
)
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.sample_memory import decode_arrays, encode_arrays

Floats = NDArray[np.float64]
Split = Literal["fit", "held_out"]
FILE = "smollm2-135m-instruct.json"
BLOCK_SIZE = 64
"""Keys per block when the documents were measured."""


@dataclass(frozen=True, eq=False)
class MeasuredDocument:
    """Coverage of one document in every layer of the measured model.

    Attributes:
        id, source: name the document in `data/longdoc_sft.jsonl.gz`.
        tokens: of its beginning that were read.
        split: half of the documents are there to learn from ("fit"), half to test with ("held_out").
        router, oracle: [layers, len(BUDGET_GRID)] float64 in (0, 1], not decreasing, mean over queries and heads; with
            the MoBA router's choice of blocks (each query for itself), and with the best choice.
    """

    id: str
    source: str
    tokens: int
    split: Split
    router: Floats
    oracle: Floats


def encoded(documents: Sequence[MeasuredDocument]) -> dict[str, Any]:
    """JSON-compatible form of the documents; coverage in steps of 1 / STEPS."""
    kinds = {
        kind: {place: np.rint(getattr(document, kind) * STEPS) for place, document in enumerate(documents)}
        for kind in ("router", "oracle")
    }
    return {
        "documents": [{"id": d.id, "source": d.source, "tokens": d.tokens, "split": d.split} for d in documents],
        **{kind: encode_arrays(arrays, STEP_TYPE) for kind, arrays in kinds.items()},
    }


def decoded(record: Mapping[str, Any]) -> tuple[MeasuredDocument, ...]:
    """What `encoded` was given, to half a step."""
    kinds = {
        kind: [steps / STEPS for steps in decode_arrays(record[kind], STEP_TYPE, (len(BUDGET_GRID),)).values()]
        for kind in ("router", "oracle")
    }
    return tuple(
        MeasuredDocument(**head, router=router, oracle=oracle)
        for head, router, oracle in zip(record["documents"], kinds["router"], kinds["oracle"], strict=True)
    )


@cache
def measured_documents(split: Split | None = None) -> tuple[MeasuredDocument, ...]:
    """The documents that come with the package, those of one split or all; longest first.

    Raises:
        InputError: no such split.
    """
    if split is not None:
        if split not in get_args(Split):
            raise InputError(f"split is {split!r}; choose one of {', '.join(get_args(Split))}, or None for all")
        return tuple(document for document in measured_documents() if document.split == split)
    text = (resources.files("sparsebalance.planning") / "curves" / FILE).read_text(encoding="utf-8")
    documents = decoded(json.loads(text))
    for document in documents:  # shared by all callers
        document.router.flags.writeable = document.oracle.flags.writeable = False
    return documents


LONGEST_BUCKET = 20  # of the curves that are made: a million blocks
GROWTH = 0.6
"""Twice the blocks need 2 ** GROWTH times the budget for equal coverage. Read from the "fit" documents; each measured
length then predicts the mean of the next, of "held_out" documents too, to 0.2 points, and the one after to 1. With 1,
where coverage depends on the share of blocks alone, it would be 5 to 7 and 10 to 12 points too low."""


@cache
def measured_curves(layers: int, block_size: int, split: Split | None = None) -> CoverageCurves:
    """Mean router curves by layer and length range, for a model of any depth and blocks of any size.

    A layer is given the curves of the measured layer at the same relative depth. Lengths count in blocks: so many
    blocks of another size are taken to be chosen between as well. Length ranges that were not measured are read from
    the nearest one by `at_doublings`.

    Raises:
        InputError: no layers, empty blocks, or no such split.
    """
    if layers < 1 or block_size < 1:
        raise InputError(f"curves for {layers} layers and blocks of {block_size} keys; both must be at least 1")
    documents = measured_documents(split)
    buckets = {document.tokens: length_bucket(document.tokens // BLOCK_SIZE) for document in documents}
    means = {
        bucket: np.mean([d.router for d in documents if d.tokens == tokens], axis=0)
        for tokens, bucket in buckets.items()
    }
    depth = len(documents[0].router)
    sources = [round(layer * (depth - 1) / max(layers - 1, 1)) for layer in range(layers)]
    values = {}
    for bucket in range(LONGEST_BUCKET + 1):
        nearest = min(means, key=lambda measured: abs(measured - bucket))
        curves = at_doublings(means[nearest], bucket - nearest)
        for layer, source in enumerate(sources):
            values[layer, bucket] = curves[source]
    return CoverageCurves(block_size, values)


def at_doublings(curves: Floats, doublings: int) -> Floats:
    """Curves [layers, len(BUDGET_GRID)] of samples with 2 ** doublings times as many blocks.

    A budget covers what 2 ** (-GROWTH * doublings) times as much covered before; below one block coverage falls as the
    prior does.
    """
    budgets = np.array(BUDGET_GRID) * 2.0 ** (-GROWTH * doublings)
    read = np.array([np.interp(np.log(budgets), np.log(BUDGET_GRID), curve) for curve in curves])
    below: Floats = curves[:, :1] * np.minimum(budgets, 1) ** PRIOR_EXPONENT
    found: Floats = np.where(budgets < 1, below, read)
    return found
