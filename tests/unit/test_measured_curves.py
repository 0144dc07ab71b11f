"""Coverage of a real model, as shipped."""

from __future__ import annotations

import json
from importlib import resources

import numpy as np
import pytest

from sparsebalance.planning.coverage import BUDGET_GRID
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.measured_curves import (
    BLOCK_SIZE,
    FILE,
    Split,
    at_doublings,
    decoded,
    encoded,
    measured_curves,
    measured_documents,
)
from sparsebalance.planning.plan import Segment


def test_the_file_says_what_it_is_and_holds_what_it_says() -> None:
    text = (resources.files("sparsebalance.planning") / "curves" / FILE).read_text()
    record = json.loads(text)
    assert record["model"] == "SmolLM2-135M-Instruct"
    assert record["weights"]["licence"] == "Apache-2.0"
    assert record["grid"] == list(BUDGET_GRID)
    assert len(text) < 150_000
    documents = measured_documents()
    assert len({document.id for document in documents}) == len(documents) == 60
    assert {d.tokens: sum(e.tokens == d.tokens for e in documents) for d in documents} == {
        8192: 8,
        4096: 12,
        2048: 16,
        1024: 24,
    }
    for document in documents:
        for curve in (document.router, document.oracle):
            assert curve.shape == (30, len(BUDGET_GRID))
            assert (np.diff(curve, axis=1) >= 0).all()
            assert curve.min() > 0
            assert curve.max() <= 1
        assert (document.oracle >= document.router - 1e-4).all()
        assert document.router[:, BUDGET_GRID.index(128)].min() > 0.999  # 8,192 tokens are 128 blocks


def test_halves_share_no_document() -> None:
    fit, held_out = measured_documents("fit"), measured_documents("held_out")
    assert not {one.id for one in fit} & {one.id for one in held_out}
    assert len(fit) == len(held_out) == 30
    with pytest.raises(InputError, match="split is 'test'"):
        measured_documents("test")  # type: ignore[arg-type]


def test_documents_survive_their_form() -> None:
    documents = measured_documents()[:3]
    again = decoded(json.loads(json.dumps(encoded(documents))))
    for one, other in zip(documents, again, strict=True):
        assert (one.id, one.tokens, one.split) == (other.id, other.tokens, other.split)
        assert np.abs(one.router - other.router).max() < 1e-4


def test_curves_of_the_measured_model_are_the_means_of_its_documents() -> None:
    curves = measured_curves(30, 64, "fit")
    for tokens in (1024, 8192):
        mean = np.mean([d.router for d in measured_documents("fit") if d.tokens == tokens], axis=0)
        for layer in (0, 17, 29):
            assert curves.coverage(layer, tokens, np.array([1, 8, 12])) == pytest.approx(mean[layer, [0, 5, 6]])


@pytest.mark.parametrize("layers", [1, 2, 36])
def test_other_models_get_curves_of_every_layer_and_length(layers: int) -> None:
    curves = measured_curves(layers, 256)
    budgets = np.arange(1, 200)
    units = [[Segment(0, 0, n, n, 0)] for n in (1, 300, 9_000, 70_000, 2_000_000)]
    covered = curves.of_units(layers, units, budgets)
    assert covered.shape == (5, layers, len(budgets))
    assert covered.min() > 0
    assert (np.diff(covered, axis=2) >= -1e-12).all()
    assert (np.diff(covered[:, :, 15].mean(1)) <= 0).all()  # the longer, the less is covered
    assert (covered[0] == 1).all()


@pytest.mark.parametrize("split", ["fit", "held_out"])
def test_each_measured_length_predicts_the_longer_ones(split: Split) -> None:
    means = [
        np.mean([d.router for d in measured_documents(split) if d.tokens == tokens], axis=0)
        for tokens in (1024, 2048, 4096, 8192)
    ]
    for doublings, bias in ((1, 0.005), (2, 0.01)):
        for place, short in enumerate(means[:-doublings]):
            blocks = 1024 * 2 ** (place + doublings) // BLOCK_SIZE
            off = (at_doublings(short, doublings) - means[place + doublings])[:, np.array(BUDGET_GRID) < blocks]
            assert abs(off.mean()) < bias
            assert np.abs(off).mean() < 0.07


def test_a_length_that_was_measured_is_left_as_it_is() -> None:
    router = measured_documents()[0].router
    assert at_doublings(router, 0) == pytest.approx(router)


def test_a_model_without_layers_or_keys_is_refused() -> None:
    with pytest.raises(InputError, match="0 layers"):
        measured_curves(0, 64)
    with pytest.raises(InputError, match="blocks of 0 keys"):
        measured_curves(30, 0)
