"""From estimated to measured coverage: what exact probes taught about estimates made from the router's scores alone.

In: probes, which hold estimated and router coverage of the same queries. Out: `Calibration`, frozen: per layer an
offset in logit space at every budget of BUDGET_GRID, which tuning adds while a micro-batch runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from sparsebalance.planning.coverage import BUDGET_GRID, check_decay
from sparsebalance.planning.errors import InputError

Floats = NDArray[np.float64]

EDGE = 1e-4
"""Coverage this near to 0 or 1 has no useful logit: it is not learned from, and near 1 it is not moved."""


@dataclass(frozen=True)
class Calibration:
    """Attributes:
    offsets: layer -> what to add to the logit of estimated coverage, [len(BUDGET_GRID)]; NaN at budgets that no
        probe told anything of, such as those that read all of every sample probed.
    """

    offsets: Mapping[int, Floats] = field(default_factory=dict)

    def offset(self, layer: int) -> Floats:
        """[len(BUDGET_GRID)] of a layer; of an unknown one the mean of those known; 0 where nothing is known.
        A budget without a value has that of the nearest ones, linear in between by place in BUDGET_GRID."""
        own = self.offsets.get(layer)
        if own is None or np.isnan(own).all():
            known = [_filled(offset) for offset in self.offsets.values() if not np.isnan(offset).all()]
            return np.mean(known, axis=0) if known else np.zeros(len(BUDGET_GRID))
        return _filled(own)

    def apply(self, layer: int, estimated: Sequence[float] | Floats) -> Floats:
        """Estimated coverage at BUDGET_GRID -> what router coverage is expected: not decreasing, in (0, 1]."""
        curve = np.asarray(estimated, dtype=np.float64)
        moved = 1 / (1 + np.exp(-(_logit(curve) + self.offset(layer))))
        rising: Floats = np.maximum.accumulate(np.where(curve > 1 - EDGE, curve, moved))
        return np.minimum(rising, 1.0)

    def state_dict(self) -> dict[str, Any]:
        """JSON-compatible; numbers survive exactly."""
        return {
            "offsets": [
                [layer, [None if np.isnan(value) else value for value in offset.tolist()]]
                for layer, offset in self.offsets.items()
            ]
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        return cls({layer: np.array(offset, dtype=np.float64) for layer, offset in state["offsets"]})


UNCALIBRATED = Calibration()


class Calibrator:
    """Exponential moving averages of offsets, per layer; every rank feeds it the same and so keeps the same state."""

    def __init__(self, decay: float = 0.8) -> None:
        """Args:
            decay: weight of the past, in [0, 1).

        Raises:
            InputError: a decay out of range.
        """
        check_decay(decay)
        self.decay = decay
        self._offsets: dict[int, Floats] = {}

    def update(self, layer: int, estimated: Floats, router: Floats, tokens: Floats) -> None:
        """Take in one layer's probes of a step.

        Args:
            estimated, router: coverage at BUDGET_GRID, [probes, len(BUDGET_GRID)].
            tokens: weights, [probes].

        Raises:
            InputError: a wrong number of points, or a value that is not in [0, 1].
        """
        for curves in (estimated, router):
            if curves.shape != (len(tokens), len(BUDGET_GRID)):
                raise InputError(
                    f"layer {layer}: probes of shape {curves.shape} do not fit {len(tokens)} weights and "
                    f"{len(BUDGET_GRID)} budgets; measure at BUDGET_GRID"
                )
            if not ((curves >= 0) & (curves <= 1 + 1e-6)).all():  # written so that NaN is wrong
                raise InputError(
                    f"layer {layer}: coverage must lie in [0, 1], but the probes span "
                    f"[{curves.min()}, {curves.max()}]; check the attention scores for NaN"
                )
        telling = (np.minimum(estimated, router) > EDGE) & (np.maximum(estimated, router) < 1 - EDGE)
        weights = telling * tokens[:, None]
        total = weights.sum(0)
        sums = ((_logit(router) - _logit(estimated)) * weights).sum(0)
        new = np.where(total > 0, sums / np.where(total > 0, total, 1.0), np.nan)
        old = self._offsets.get(layer, np.full(len(BUDGET_GRID), np.nan))
        mean = self.decay * old + (1 - self.decay) * new
        self._offsets[layer] = np.where(np.isnan(old), new, np.where(np.isnan(new), old, mean))

    def calibration(self) -> Calibration:
        """A frozen snapshot; arrays are replaced, never changed, so it shares them."""
        return Calibration(dict(self._offsets))

    def state_dict(self) -> dict[str, Any]:
        """JSON-compatible state; numbers survive exactly."""
        return {"decay": self.decay, **self.calibration().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.decay = state["decay"]
        self._offsets = dict(Calibration.from_state_dict(state).offsets)


def _logit(coverage: Floats) -> Floats:
    inside = np.clip(coverage, EDGE, 1 - EDGE)
    found: Floats = np.log(inside) - np.log1p(-inside)
    return found


def _filled(offset: Floats) -> Floats:
    known = np.flatnonzero(~np.isnan(offset))
    return np.interp(np.arange(len(offset)), known, offset[known])
