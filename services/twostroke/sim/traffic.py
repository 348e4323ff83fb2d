"""What arrives: when, how long its prompt and its answer are, and which prefixes it shares with others."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from twostroke.policy.snapshot import Slo


class Asked(NamedTuple):
    """What a router knows of a request besides its prompt: its class, and a guess at the length of its answer."""

    slo: Slo
    expected_output_tokens: int


@dataclass(slots=True)
class Traffic:
    """Requests in order of arrival, as columns.

    arrival_s: from the start of the trace; of no meaning in a closed loop. prompt_tokens, output_tokens: at least 1.
    hashes: of each request's full prefix units of unit_tokens tokens; empty where the trace has none.
    concurrency: of a closed loop, in which a request arrives when an earlier one is complete; 0 for an open one.
    asked: of each request; empty where the placer takes all for alike.
    """

    arrival_s: array[float] = field(default_factory=lambda: array("d"))
    prompt_tokens: array[int] = field(default_factory=lambda: array("q"))
    output_tokens: array[int] = field(default_factory=lambda: array("q"))
    hashes: Sequence[Sequence[int]] = ()
    unit_tokens: int = 0
    concurrency: int = 0
    asked: Sequence[Asked] = ()
    name: str = ""

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    @property
    def span_s(self) -> float:
        """From the first arrival to the last."""
        return self.arrival_s[-1] - self.arrival_s[0] if self.arrival_s else 0.0
