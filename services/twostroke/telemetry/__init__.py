"""Logs, metrics and traces: set up the same in every process."""
