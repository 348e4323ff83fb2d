"""Benchmarks: systems side by side in one run, a table, and a record in build/bench."""
