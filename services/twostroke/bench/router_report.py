"""Rows and checks of `make bench-router`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from twostroke.bench.record import Record
from twostroke.bench.stacks import DIRECT, TWOSTROKE, VLLM_ROUTER
from twostroke.bench.stats import Cell, added

IDLE_GOAL_PERCENT = 15.0
"""Of one core, for each system; more would disturb whichever system is measured."""


def rows(record: Record, model: str, made: Sequence[Cell]) -> None:
    """One row per cell, differences to the direct system included."""
    for each in made:
        difference = added(made, each.system, each.streams)
        shown = difference if each.system != DIRECT else None
        record.row(
            model=model,
            streams=each.streams,
            system=each.system,
            ttft_ms=each.ttft_ms,
            ttft_ms_low=each.ttft_ms_low,
            ttft_ms_high=each.ttft_ms_high,
            added_ttft_ms=shown.ttft_ms if shown else None,
            tokens_per_s=each.tokens_per_s,
            router_us=each.router_us,
            front_us=each.front_us,
            added_front_us=shown.front_us if shown else None,
            engine_us=each.engine_us,
            client_us=each.client_us,
            tokens_per_event=each.tokens_per_event,
            answers=each.answers,
        )


def checks(record: Record, model: str, made: Sequence[Cell], streams: Sequence[int], install: str) -> None:
    """Added time to first token and CPU per streamed token against vllm-router's, at each number of streams.

    install: how vllm-router is installed, for a run that had to do without it.
    """
    for count in streams:
        ours, theirs = added(made, TWOSTROKE, count), added(made, VLLM_ROUTER, count)
        at = f"{model} model, {_streams(count)}"
        record.check(
            f"added time to first token over calling one vLLM API server directly ({at})",
            ours.ttft_ms if ours else None,
            "ms",
            f"<= {theirs.ttft_ms:.2f} ms, which vllm-router adds" if theirs else f"vllm-router to compare: {install}",
            bool(ours and theirs and ours.ttft_ms <= theirs.ttft_ms),
        )
        own, other = _front_us(made, TWOSTROKE, count), _front_us(made, VLLM_ROUTER, count)
        record.check(
            f"CPU per streamed token, router and workers without engines ({at})",
            own,
            "us",
            f"<= {other:.0f} us of vllm-router and its API servers" if other else f"vllm-router to compare: {install}",
            bool(own and other and own <= other),
        )


def validity(record: Record, model: str, texts: Mapping[str, str], idle_percent: Mapping[str, float]) -> None:
    """What the comparison rests on: the same answers, and systems that rest while they are not asked."""
    expected = texts.get(DIRECT)
    record.check(
        f"systems whose greedy answer equals that of the API server called directly ({model} model)",
        sum(text == expected for name, text in texts.items() if name != DIRECT),
        "",
        f"{len(texts) - 1} of {len(texts) - 1}",
        len(texts) > 1 and all(text == expected for text in texts.values()),
    )
    for name, percent in idle_percent.items():
        record.check(
            f"CPU of {name} at rest ({model} model)",
            percent,
            "% of a core",
            f"<= {IDLE_GOAL_PERCENT:.0f} %",
            percent <= IDLE_GOAL_PERCENT,
        )


def _front_us(made: Sequence[Cell], system: str, streams: int) -> float | None:
    return next((each.front_us for each in made if (each.system, each.streams) == (system, streams)), None)


def _streams(count: int) -> str:
    return "1 stream" if count == 1 else f"{count} streams"
