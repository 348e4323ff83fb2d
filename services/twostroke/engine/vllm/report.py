"""What our scheduler tells with each step besides vLLM's own numbers. It travels in a field of vLLM's stats that takes
any dict, so everything here is made of numbers, texts, lists and dicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

from twostroke.engine.base import StepSample
from twostroke.policy.kv_events import Change, Cleared, Removed, Stored
from twostroke.policy.prefix_index import key
from twostroke.policy.step_model import StepBatch

CHUNK_ARG = "twostroke_chunk_tokens"
"""Of a request's extra_args: most tokens of its prompt that one step computes."""
APPEND_ARG = "twostroke_append_brought"
"""Of a request's extra_args: the first token comes with its KV, and is to end its prompt."""
REPORT = "twostroke"
"""The key under which a Report travels."""


class Report(TypedDict):
    """Of one step. steps: see sample_row. progress: tokens computed of the prompts that have begun and are not done, by
    vLLM's ids. blocks: see change_row."""

    steps: list[list[float]]
    progress: dict[str, int]
    blocks: list[list[Any]]


def take_report(stats: Any) -> Report:
    """Takes the report out of vLLM's stats of a step, if they have one."""
    found: Report | None = (stats.kv_connector_stats or {}).pop(REPORT, None) if stats is not None else None
    return found or Report(steps=[], progress={}, blocks=[])


def sample_row(sample: StepSample) -> list[float]:
    """A sample as it travels."""
    return [*sample.batch, sample.duration_s, sample.spared_s]


def to_sample(row: Sequence[Any]) -> StepSample:
    """What sample_row made a row of."""
    *batch, duration_s, spared_s = row
    return StepSample(StepBatch(*batch), duration_s, spared_s)


def change_row(change: Change) -> list[Any]:
    """A change as it travels."""
    match change:
        case Stored(block_hashes, parent):
            return ["stored", list(map(key, block_hashes)), None if parent is None else key(parent)]
        case Removed(block_hashes):
            return ["removed", list(map(key, block_hashes))]
        case Cleared():
            return ["cleared"]


def to_change(row: Sequence[Any]) -> Change:
    """What change_row made a row of."""
    kind, *rest = row
    kinds: dict[str, type[Change]] = {"stored": Stored, "removed": Removed, "cleared": Cleared}
    return kinds[kind](*rest)
