"""Faults of other ranks, told apart from a rank's own: who waited in vain, in which step, for what.

In: errors of exchanges between processes (gloo, NCCL), which speak of sockets. Out: `LostRank`, one sentence that names
the step and the exchange, and where every rank is (see `position`).
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from sparsebalance.training import position

PACKAGE = str(Path(__file__).parents[1]) + os.sep
EXCHANGES = str(Path(dist.__file__).parent) + os.sep


class LostRank(RuntimeError):
    """Another rank did not come to an exchange, or is gone: the fault is not this rank's."""


def is_lost(error: BaseException) -> bool:
    """Whether the first cause of an error is a failed exchange with other ranks."""
    root = _root(error)
    # gloo raises plain RuntimeErrors that begin with the line of its source.
    return isinstance(root, dist.DistError) or (isinstance(root, RuntimeError) and "/gloo/" in str(root))


@contextmanager
def at_step(step: int) -> Iterator[None]:
    """What runs inside belongs to a step.

    Raises:
        LostRank: an exchange with other ranks failed; names the step and the exchange.
    """
    where = f"step {step}"
    position.here().enter(where)
    try:
        yield
    except RuntimeError as error:
        if not is_lost(error):
            raise
        text = str(error).replace(": RuntimeError: ", ": ")  # wrapped on its way
        if not text.startswith(where):
            text = f"{where}: {described(error)}"
        raise LostRank(text) from error


def described(error: BaseException) -> str:
    """A failed exchange in one sentence."""
    said = str(_root(error)).splitlines()[0][:200]
    return f"not all other ranks came to {_exchange(error)}: one is stuck, or gone ({said})"


def _root(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _exchange(error: BaseException) -> str:
    """The collective that failed and the function of ours that needed it, e.g. "all_gather_object of finish_step"; of
    one that ran beside other work only who waited for it is known."""
    ours, collective = "", "an exchange"
    for frame, _ in traceback.walk_tb(_root(error).__traceback__):
        code = frame.f_code
        if code.co_filename.startswith(EXCHANGES) and hasattr(dist, code.co_name):
            collective = code.co_name
            break
        if code.co_filename.startswith(PACKAGE) and code.co_filename != __file__:
            ours = ours if code.co_qualname.startswith("Ranks.") else code.co_qualname
    return f"{collective} of {ours}" if ours else collective
