"""The errors that end a run with one sentence: every message names the value, the limit and the way out."""

from __future__ import annotations


class InputError(ValueError):
    """Raised for input that the user can correct (lengths, configs, tables, topologies, data files).

    The command line prints its message without a traceback and exits with status 2.
    """


class CheckFailed(RuntimeError):
    """A run's own check of its results failed, e.g. policies that must train alike did not. One sentence."""
