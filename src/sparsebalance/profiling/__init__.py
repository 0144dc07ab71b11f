"""Measures the running machine and writes latency tables."""
