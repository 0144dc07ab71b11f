"""The errors that end a run with one sentence: every message names the value, the limit and the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Raised for input that the user can correct (lengths, configs, tables, topologies, data files).

    The command line prints its message without a traceback and exits with status 2.
    """


class CheckFailed(RuntimeError):
    """A run's own check of its results failed, e.g. policies that must train alike did not. One sentence."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint for an error message, with a space before it: the known name most like `name`; empty without one."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
