"""Reporting: terminal tables, HTML pages, traces."""
