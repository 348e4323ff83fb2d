"""Engines: what computes. `base` is the seam, `reference` and `vllm` stand behind it."""
