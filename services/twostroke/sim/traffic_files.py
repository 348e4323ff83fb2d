"""Reads traces: the public ones in their own formats, and plain tables of anybody.

| name ends in | recognised by | what it is |
|---|---|---|
| .jsonl | `hash_ids`, or `input_length` | Mooncake: timestamp in ms, prefix hashes of 512 tokens |
| .jsonl | `arrival_s`, `prompt_tokens`, `output_tokens` | plain; `hashes` optional |
| .csv | `TIMESTAMP,ContextTokens,GeneratedTokens` | Azure LLM inference trace |
| .csv | `arrival_s,prompt_tokens,output_tokens` | plain |
| .csv | `input_toks,output_toks,arrival_time_ns` | LLMServingSim workloads |
| .csv | `num_prefill_tokens,num_decode_tokens` | lengths only: needs a rate |
| folder | `chunk-*-trace.csv` and `chunk-*-dataset.json` | ServeGen clients: rates, CVs, length histograms |
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path

from twostroke.errors import ConfigError
from twostroke.sim.servegen import servegen
from twostroke.sim.traffic import Traffic

MOONCAKE_UNIT_TOKENS = 512

_Row = tuple[float, int, int, Sequence[int]]

_LENGTHS = (
    ("prompt_tokens", "output_tokens"),
    ("ContextTokens", "GeneratedTokens"),
    ("input_toks", "output_toks"),
    ("input_length", "output_length"),
    ("num_prefill_tokens", "num_decode_tokens"),
)


def read(path: Path, *, unit_tokens: int = 0, seed: int = 1) -> Traffic:
    """The requests of a trace, in order of arrival, the first at 0.

    unit_tokens: of one prefix hash in a plain file, where it is not 512. Lengths of 0 become 1. Raises ConfigError for
    a file that is not there, empty, or none of the known formats; the message names the line.
    """
    if path.is_dir():
        return servegen(path, seed)
    try:
        with path.open(encoding="utf-8") as lines:
            rows = list(_jsonl(path, lines) if path.suffix == ".jsonl" else _csv(path, lines))
    except FileNotFoundError:
        raise ConfigError(f"there is no trace {path}; see docs/simulator.md for where public ones come from") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"trace {path} cannot be read: {error}") from None
    if not rows:
        raise ConfigError(f"trace {path} has no requests")
    return columns(rows, unit_tokens or MOONCAKE_UNIT_TOKENS, path.stem)


def columns(rows: Iterable[_Row], unit_tokens: int, name: str) -> Traffic:
    """Traffic of rows (arrival_s, prompt_tokens, output_tokens, hashes), in any order."""
    ordered = sorted(rows, key=lambda row: row[0])
    traffic = Traffic(name=name)
    first_s = ordered[0][0] if ordered else 0.0
    hashes: list[Sequence[int]] = []
    for arrival_s, prompt, output, keys in ordered:
        traffic.arrival_s.append(arrival_s - first_s)
        traffic.prompt_tokens.append(max(1, prompt))
        traffic.output_tokens.append(max(1, output))
        # A hash of a unit that the prompt does not fill names no cacheable block.
        hashes.append(tuple(keys[: prompt // unit_tokens]))
    if any(hashes):
        traffic.hashes = hashes
        traffic.unit_tokens = unit_tokens
    return traffic


def _jsonl(path: Path, lines: Iterable[str]) -> Iterator[_Row]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
            if "input_length" in found:
                arrival_s = found["timestamp"] / 1000
                yield arrival_s, int(found["input_length"]), int(found["output_length"]), found.get("hash_ids", ())
            else:
                hashes = found.get("hashes", ())
                yield float(found["arrival_s"]), int(found["prompt_tokens"]), int(found["output_tokens"]), hashes
        except (ValueError, TypeError, KeyError) as error:
            missing = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
            raise ConfigError(f"{path}:{number}: {missing}") from None


def _csv(path: Path, lines: Iterable[str]) -> Iterator[_Row]:
    reader = csv.DictReader(lines)
    names = reader.fieldnames or ()
    pair = next((pair for pair in _LENGTHS if pair[0] in names and pair[1] in names), None)
    if pair is None:
        known = "; ".join(",".join(pair) for pair in _LENGTHS)
        raise ConfigError(f"{path}: the first line names no lengths that are known ({known})")
    for number, row in enumerate(reader, 2):
        try:
            yield _arrival_s(row), int(row[pair[0]]), int(row[pair[1]]), ()
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path}:{number}: {error}") from None


def _arrival_s(row: dict[str, str]) -> float:
    if "TIMESTAMP" in row:
        stamp = row["TIMESTAMP"]
        # The public trace has 100 ns digits, which datetime does not take.
        whole, _, fraction = stamp.partition(".")
        return datetime.fromisoformat(whole).timestamp() + float(f"0.{fraction or 0}")
    if "arrival_time_ns" in row:
        return int(row["arrival_time_ns"]) / 1e9
    return float(row.get("arrival_s") or 0.0)
