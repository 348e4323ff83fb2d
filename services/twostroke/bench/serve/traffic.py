"""What is asked, and when: mixes of arrivals, from a file.

`python -m twostroke.bench.serve.traffic FILE` writes the mixes that come with the benchmark again, to the byte.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

from twostroke.bench.load import requests
from twostroke.errors import ConfigError

CHAT, DOCUMENT = "chat", "document"
KINDS = (CHAT, DOCUMENT)

COMMITTED = Path(__file__).with_name("arrivals.jsonl")

SEED = 7
CHATS_PER_S = 0.25
CHAT_JITTER_S = 1.0
CHAT_PROMPT_TOKENS, CHAT_OUTPUT_TOKENS = (24, 64), (120, 180)
FIRST_OUTPUT_TOKENS = (60, 90, 120, 150)
"""Of the chats with which a mix begins, so that as many run from the start as do later."""
DOCUMENT_OUTPUT_TOKENS = 16
STREAM_OUTPUT_TOKENS = 500
"""Of an answer that is written from before a document comes until it is read."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. arrival_s: from the start of its mix; kind: one of KINDS."""

    arrival_s: float
    kind: str
    prompt_tokens: int
    output_tokens: int


Mixes = Mapping[str, Sequence[Arrival]]
"""Arrivals by the name of their mix, in order of time."""


def read(path: Path) -> Mixes:
    """The mixes of a file of JSON lines. Raises ConfigError, which names the line, for one that cannot be read."""
    mixes: dict[str, list[Arrival]] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--arrivals {path} cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        try:
            mix, arrival = _parse(line)
        except (ValueError, TypeError, KeyError) as error:
            missing = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
            raise ConfigError(f"{path}:{number}: {missing}") from None
        mixes.setdefault(mix, []).append(arrival)
    if not mixes:
        raise ConfigError(f"--arrivals {path} has no requests")
    return {mix: sorted(arrivals, key=lambda each: each.arrival_s) for mix, arrivals in mixes.items()}


def _parse(line: str) -> tuple[str, Arrival]:
    found = json.loads(line)
    arrival = Arrival(
        float(found["arrival_s"]), found["kind"], int(found["prompt_tokens"]), int(found["output_tokens"])
    )
    if arrival.kind not in KINDS:
        raise ValueError(f"kind {arrival.kind!r} is none of {', '.join(KINDS)}")
    if arrival.arrival_s < 0 or arrival.prompt_tokens < 1 or arrival.output_tokens < 1:
        raise ValueError("arrival_s must not be negative, and there is a token at least")
    return str(found["mix"]), arrival


def shortened(arrivals: Sequence[Arrival], seconds: float, document_tokens: int) -> list[Arrival]:
    """Those of the first seconds, with documents of at most so many tokens."""
    return [
        replace(each, prompt_tokens=min(each.prompt_tokens, document_tokens)) if each.kind == DOCUMENT else each
        for each in arrivals
        if each.arrival_s < seconds
    ]


def paced(arrivals: Sequence[Arrival], speed: float) -> list[Arrival]:
    """The same, so many times as fast."""
    return [replace(each, arrival_s=each.arrival_s / speed) for each in arrivals]


def bodies(arrivals: Sequence[Arrival], seed: str) -> list[bytes]:
    """A request for each, of random tokens: no two alike, the same ones for the same seed."""
    return [
        next(islice(requests(f"{seed} {index}", each.prompt_tokens, each.output_tokens), 1))
        for index, each in enumerate(arrivals)
    ]


def lines(mixes: Mixes) -> Iterable[str]:
    """The file's lines."""
    for mix, arrivals in mixes.items():
        for each in arrivals:
            yield json.dumps({"mix": mix, **asdict(each)}) + "\n"


def make() -> Mixes:
    """The mixes that come with the benchmark. `long` is for who has the time: a document of 7,000 tokens."""
    source = random.Random(SEED)  # noqa: S311 repeatable, not secret
    return {
        "chat": _chats(source, 20.0),
        "documents": _documents((0.0, 4096), (2.0, 2048), (6.0, 4096)),
        "mixed": _merged(_chats(source, 32.0), _documents((8.0, 4096), (11.0, 2048), (16.0, 4096))),
        "long": _merged(_chats(source, 70.0), _documents((4.0, 7000), (12.0, 4096))),
        "streams": _merged(_streams(source), _documents((4.0, 4096))),
    }


def _chats(source: random.Random, seconds: float) -> list[Arrival]:
    """Steady: as many as run at a time, then one after the other, each a little early or late."""
    first = [
        Arrival(round(0.5 * index, 3), CHAT, source.randint(*CHAT_PROMPT_TOKENS), tokens)
        for index, tokens in enumerate(FIRST_OUTPUT_TOKENS)
    ]
    return first + [
        Arrival(
            round((index + 0.75) / CHATS_PER_S + source.uniform(-CHAT_JITTER_S, CHAT_JITTER_S), 3),
            CHAT,
            source.randint(*CHAT_PROMPT_TOKENS),
            source.randint(*CHAT_OUTPUT_TOKENS),
        )
        for index in range(int(seconds * CHATS_PER_S))
    ]


def _streams(source: random.Random) -> list[Arrival]:
    """As many answers as run at a time elsewhere, for the whole mix."""
    return [
        Arrival(0.5 * index, CHAT, source.randint(*CHAT_PROMPT_TOKENS), STREAM_OUTPUT_TOKENS)
        for index in range(len(FIRST_OUTPUT_TOKENS))
    ]


def _documents(*each: tuple[float, int]) -> list[Arrival]:
    return [Arrival(arrival_s, DOCUMENT, tokens, DOCUMENT_OUTPUT_TOKENS) for arrival_s, tokens in each]


def _merged(*parts: list[Arrival]) -> list[Arrival]:
    return sorted((each for part in parts for each in part), key=lambda each: each.arrival_s)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("".join(lines(make())), encoding="utf-8")
