"""SparseBalance: load-balanced long-context LLM training with dynamic sparse attention.

`sparsebalance.planning` is pure Python and numpy: importing it never imports torch.
"""

__version__ = "0.1.0"
