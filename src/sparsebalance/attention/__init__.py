"""Block-sparse attention: layout and interface, naive reference, MoBA router, CPU kernel, coverage probe."""
