"""Asks the whole table of both systems and judges every row."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twostroke.bench.parity.ask import ask
from twostroke.bench.parity.compare import differences, largest_gap
from twostroke.bench.parity.row import Json, Row

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one row."""

    row: Row
    one: Json
    two: Json

    @property
    def problems(self) -> list[str]:
        """What is wrong, a line each; empty when the row is equal, or refused as it should be."""
        if self.row.refused:
            return self._not_refused()
        found = [str(difference) for difference in differences(self.one, self.two)]
        if not found and self.one["http_status"] != 200:
            found.append(f"both answer {self.one['http_status']}: {_message(self.one)}")
        if not found and not self._shown():
            found.append("equal, but the answer does not show the feature at work")
        return found

    def _not_refused(self) -> list[str]:
        status, message = self.two["http_status"], _message(self.two)
        if status == 400 and self.row.refused in message:
            return []
        return [f"two pools should answer 400 naming {self.row.refused!r}, they answer {status} {message!r}"]

    def _shown(self) -> bool:
        try:
            return bool(self.row.shows(self.two))
        except (LookupError, TypeError, ValueError):
            return False

    @property
    def result(self) -> str:
        """equal, refused or DIFFERENT."""
        if self.problems:
            return "DIFFERENT"
        return "refused" if self.row.refused else "equal"

    @property
    def logprob_gap(self) -> float:
        """The largest difference between two log probabilities."""
        return largest_gap(self.one, self.two)

    @property
    def tokens(self) -> int:
        """Completion tokens of two pools' answer."""
        usage = self.two.get("usage") or {}
        return int(usage.get("completion_tokens") or usage.get("output_tokens") or 0)


def _message(answer: Json) -> str:
    error = answer.get("error") or {}
    return str(error.get("message", error) if isinstance(error, dict) else error)


async def ask_all(rows: Sequence[Row], one: Address, two: Address, say: Callable[[str], None]) -> list[Outcome]:
    """Every row of one engine, then every row of two pools: an engine that has just computed spins for a second, and
    would take the other's time."""
    answers: list[list[Json]] = []
    for name, address in (("one engine", one), ("two pools", two)):
        say(f"asking {name} {len(rows)} rows")
        answers.append([await ask(address, row) for row in rows])
    return [Outcome(*each) for each in zip(rows, *answers, strict=True)]


def vocabulary(model: Path) -> dict[str, int]:
    """Tokens and ids of a model folder's byte-level vocabulary."""
    found: dict[str, int] = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    return found


def details(outcome: Outcome) -> dict[str, Any]:
    """For a record of what went wrong."""
    return {"row": outcome.row.name, "problems": outcome.problems, "one": outcome.one, "two": outcome.two}
