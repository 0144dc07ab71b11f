"""Planned versus actual: what a training run's plans predicted, what happened, and why the two differ.

In: metrics.jsonl of a run, and its data.json. Out: a page, a trace, a table on the terminal, and the figures behind
them.
"""
