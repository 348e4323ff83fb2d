"""What a row of the parity table is, and the short ways to write one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

Json = dict[str, Any]
Shows = Callable[[Json], object]

MODEL = "bench"
END_OF_TEXT = 2
BLOCK_TOKENS = 128

FRANCE = "The capital of France is"
COUNT = "Count: 1, 2, 3, 4,"

_WORDS = """
the river runs past an old mill where two brothers grind wheat for bread and sell it every morning at the market near a
stone bridge while children count boats and dogs sleep in the warm dust of the road to town
""".split()  # noqa: SIM905


@dataclass(frozen=True, slots=True)
class Row:
    """One request. It is asked of both systems after the rows before it, so that their caches stand alike."""

    name: str
    path: str
    body: Mapping[str, Any]
    shows: Shows = bool
    """True of an answer in which the feature can be seen at work; a row that shows nothing compares nothing."""
    seeded: bool = False
    """Sampled with a seed; else greedy."""
    refused: str = ""
    """What two pools say, in a 400, where they do not do what one engine does."""

    @property
    def streams(self) -> bool:
        """Whether the answer comes as events."""
        return bool(self.body.get("stream"))


def story(tokens: int, seed: int) -> Json:
    """A prompt of so many tokens that differs from other seeds' from its first word on."""
    text = " ".join(_WORDS[(i * (seed + 3) + seed) % len(_WORDS)] for i in range(tokens + 8))
    # From the left, so that a longer prompt of the same seed begins with the shorter one.
    return {"prompt": text, "truncate_prompt_tokens": tokens, "truncation_side": "right"}


def completion(name: str, prompt: str | Json, shows: Shows = bool, /, **body: Any) -> Row:
    """A greedy row of /v1/completions with token ids and two log probabilities, unless the body says otherwise."""
    asked = prompt if isinstance(prompt, dict) else {"prompt": prompt}
    common = {"model": MODEL, "temperature": 0, "max_tokens": 8, "logprobs": 2, "return_token_ids": True}
    return Row(name, "/v1/completions", common | asked | body, shows)


def chat(name: str, text: str, shows: Shows = bool, /, **body: Any) -> Row:
    """The same of /v1/chat/completions."""
    common = {"model": MODEL, "temperature": 0, "max_tokens": 16, "logprobs": True, "top_logprobs": 2}
    asked = {"messages": [{"role": "user", "content": text}], "return_token_ids": True}
    return Row(name, "/v1/chat/completions", common | asked | body, shows)


def seeded(row: Row) -> Row:
    """The row, sampled."""
    return replace(
        row,
        name=f"{row.name}, seeded",
        seeded=True,
        body={"temperature": 0.9, "seed": 7} | {**row.body, "temperature": 0.9},
    )


def streamed(row: Row) -> Row:
    """The row, streamed, with usage at the end."""
    extra = {"stream": True, "stream_options": {"include_usage": True}}
    return replace(row, name=f"{row.name}, streamed", body={**row.body, **extra})


def choice(answer: Json, index: int = 0) -> Json:
    """One of the answer's choices."""
    found: Json = answer["choices"][index]
    return found


def text_of(answer: Json) -> str:
    """The text of the first choice, of either route."""
    first = choice(answer)
    return str(first["text"] if "text" in first else first["message"].get("content") or "")


def tokens_of(answer: Json) -> list[int]:
    """The token ids of the first choice."""
    return list(choice(answer)["token_ids"])


def ends(answer: Json, reason: str, stop: object = None) -> bool:
    """Whether the first choice ended so."""
    first = choice(answer)
    return (first["finish_reason"], first["stop_reason"]) == (reason, stop)


def cached(answer: Json) -> int:
    """Prompt tokens that were found in a prefix cache."""
    details = answer["usage"]["prompt_tokens_details"] or {}
    return int(details.get("cached_tokens") or 0)
