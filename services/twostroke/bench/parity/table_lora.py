"""Rows of LoRA adapters; asked of systems that serve the model, "a" and "b"."""

from __future__ import annotations

from dataclasses import replace

from twostroke.bench.parity.row import MODEL, Row, Shows, cached, completion, seeded, story, streamed

ADAPTERS = ("a", "b")


def lora_rows() -> list[Row]:
    """One prompt with each adapter and with none, cold and again: the caches of one are not those of another."""

    def ask(model: str, hit: int) -> Row:
        again = " again" if hit else ""
        return completion(f"{_name(model)}{again}", story(300, 30), _hits(hit), model=model, max_tokens=8)

    rows = [ask(model, hit) for hit in (0, 256) for model in (MODEL, *ADAPTERS)]
    return [
        *rows,
        streamed(replace(rows[1], name="adapter a, cache hit", shows=bool)),
        replace(seeded(rows[2]), shows=bool),
    ]


def _name(model: str) -> str:
    return "model alone" if model == MODEL else f"adapter {model}"


def _hits(count: int) -> Shows:
    return lambda answer: cached(answer) == count
