"""Planning: pure Python and numpy. Which rank runs what, in which order, with which attention budgets."""
