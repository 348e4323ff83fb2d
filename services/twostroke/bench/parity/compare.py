"""Where two answers to one request differ."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Names, times and numbers of the call itself.
VOLATILE = frozenset(
    {"id", "created", "created_at", "completed_at", "request_id", "item_id", "system_fingerprint", "call_id"}
)

LOGPROB_TOLERANCE = 2e-3
"""Natural logarithms. The same sums in another order: a prompt's last token is computed alone on decode."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One value that is not the same. place: as in choices.0.logprobs."""

    place: str
    one: Any
    two: Any

    def __str__(self) -> str:
        return f"{self.place}: {self.one!r} on one engine, {self.two!r} on two pools"


def differences(one: Any, two: Any, place: str = "") -> Iterator[Difference]:
    """All differences between two values at the same place."""
    if isinstance(one, dict) and isinstance(two, dict):
        for name in [*one, *(name for name in two if name not in one)]:
            if name not in VOLATILE:
                inner = f"{place}.{name}".lstrip(".")
                yield from differences(one.get(name, _MISSING), two.get(name, _MISSING), inner)
    elif isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        for index, (left, right) in enumerate(zip(one, two, strict=True)):
            yield from differences(left, right, f"{place}.{index}".lstrip("."))
    elif not _same(one, two):
        yield Difference(place, one, two)


def largest_gap(one: Any, two: Any) -> float:
    """The largest difference between two floats at the same place; 0 without floats."""
    if isinstance(one, dict) and isinstance(two, dict):
        return max((largest_gap(one[name], two[name]) for name in one.keys() & two.keys() - VOLATILE), default=0.0)
    if isinstance(one, list) and isinstance(two, list):
        return max((largest_gap(left, right) for left, right in zip(one, two, strict=False)), default=0.0)
    if isinstance(one, float) and isinstance(two, float):
        return abs(one - two)
    return 0.0


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, float) and isinstance(two, float):
        return math.isclose(one, two, rel_tol=0, abs_tol=LOGPROB_TOLERANCE)
    return bool(one == two)


class _Missing:
    def __repr__(self) -> str:
        return "nothing"


_MISSING = _Missing()
