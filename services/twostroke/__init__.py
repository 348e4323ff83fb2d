"""Serves an LLM in two strokes, prefill and decode, on two pools of machines."""
