"""Budgets that follow a micro-batch's own routing scores, layer by layer, while it runs.

In: the plan's wishes and limits, and a layer's estimated coverage. Out: its budget as a tensor on the scores' device:
nothing here waits for the device. Planning has its own, slower look at the same questions before the step.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from sparsebalance.planning.calibration import EDGE, Calibration
from sparsebalance.planning.coverage import BUDGET_GRID
from sparsebalance.planning.errors import InputError
from sparsebalance.planning.plan import OnlineTuning

SLOP = 1e-9  # rounding of coverage differences


class OnlineBudgets:
    """One micro-batch's budgets, chosen in the order of its layers.

    Without a price ("clamp") a layer gets the budget nearest to its wish among those whose coverage is within
    `threshold` of the default budget's, the smaller one of two equally near. With a price ("share") it gets the one
    with most coverage less price * milliseconds, the smallest among equals, out of those that take no more time than
    the plan gave this layer and earlier layers left; coverage falls below that of the default less `threshold` only
    where no such budget can be afforded, and then as little as possible.

    Attributes:
        unspent_ms: predicted milliseconds that earlier layers left, a 0-d float64 tensor, never negative.
    """

    def __init__(self, tuning: OnlineTuning, blocks: int, calibration: Calibration, device: torch.device) -> None:
        """Args:
            blocks: of the row's longest segment: from there on a budget reads everything.
            calibration: from estimated to router coverage.

        Raises:
            InputError: a price without the milliseconds that it is asked for.
        """
        if tuning.price is not None and len(tuning.attention_ms) != len(BUDGET_GRID):
            raise InputError(
                f"online tuning has a price and {len(tuning.attention_ms)} attention times, but it needs "
                f"{len(BUDGET_GRID)}, one for each of BUDGET_GRID; plan with a latency model, or without a price"
            )
        self._tuning, self._blocks, self._calibration = tuning, blocks, calibration
        tried = np.union1d(np.arange(tuning.min_budget, tuning.max_budget + 1), [tuning.default])
        places = np.interp(np.log(tried), np.log(BUDGET_GRID), np.arange(len(BUDGET_GRID)))
        lower = np.minimum(places.astype(np.int64), len(BUDGET_GRID) - 2)
        self._default = int(np.searchsorted(tried, tuning.default))
        self._tried = torch.from_numpy(tried).to(device)
        self._lower = torch.from_numpy(lower).to(device)
        self._beyond = torch.from_numpy(places - lower).to(device)
        self._full = torch.from_numpy(tried >= blocks).to(device)
        self.unspent_ms = torch.zeros((), dtype=torch.float64, device=device)
        if tuning.price is not None:
            self._ms = torch.tensor([self._attention_ms(int(k)) for k in tried], dtype=torch.float64, device=device)

    def choose(self, layer: int, wish: int, estimated: Tensor) -> Tensor:
        """Args:
            wish: the planned budget of the layer.
            estimated: [Hk, len(BUDGET_GRID)], see `estimated_coverage`.

        Returns:
            The budget in blocks, a 0-d int64 tensor.
        """
        coverage = self._at_tried(calibrated(estimated.double().mean(0), self._calibration, layer))
        price = self._tuning.price
        return self._clamped(wish, coverage) if price is None else self._shared(wish, coverage, price)

    def _clamped(self, wish: int, coverage: Tensor) -> Tensor:
        near = (coverage - coverage[self._default]).abs() <= self._tuning.threshold + SLOP
        far = (self._tried - wish).abs().double().masked_fill(~near, math.inf)
        return torch.take(self._tried, far.argmin())  # the default is always near: there is a minimum

    def _shared(self, wish: int, coverage: Tensor, price: float) -> Tensor:
        allowed = self.unspent_ms + self._attention_ms(wish)
        affordable = self._ms <= allowed.clamp(min=self._ms.min())
        enough = affordable & (coverage >= coverage[self._default] - self._tuning.threshold - SLOP)
        worth = (coverage - price * self._ms).masked_fill(~enough, -math.inf)
        most = coverage.masked_fill(~affordable, -math.inf)
        place = torch.where(enough.any(), worth.argmax(), most.argmax())
        self.unspent_ms = (allowed - torch.take(self._ms, place)).clamp(min=0.0)
        return torch.take(self._tried, place)

    def _attention_ms(self, budget: int) -> float:
        """Linear between BUDGET_GRID, and on beyond its end as far as there are blocks to read."""
        k, (before, last) = min(budget, self._blocks), BUDGET_GRID[-2:]
        ms = self._tuning.attention_ms
        if k > last:
            return ms[-1] + (k - last) * (ms[-1] - ms[-2]) / (last - before)
        return float(np.interp(k, BUDGET_GRID, ms))

    def _at_tried(self, curve: Tensor) -> Tensor:
        """A curve at BUDGET_GRID read at the budgets that may be chosen, as `planning.coverage.at_budgets` does."""
        left = curve[self._lower]
        read = left + self._beyond * (curve[self._lower + 1] - left)
        return read.clamp(max=1.0).masked_fill(self._full, 1.0)


def calibrated(curve: Tensor, calibration: Calibration, layer: int) -> Tensor:
    """`Calibration.apply` on the device: [len(BUDGET_GRID)] float64 -> the same."""
    offset = torch.from_numpy(calibration.offset(layer)).to(curve.device)
    inside = curve.clamp(EDGE, 1 - EDGE)
    moved = (inside.log() - torch.log1p(-inside) + offset).sigmoid()
    return torch.where(curve > 1 - EDGE, curve, moved).cummax(0).values.clamp(max=1.0)
