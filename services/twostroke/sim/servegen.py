"""ServeGen's clients: what a production service's customers send, as rates, burstiness and length histograms."""

from __future__ import annotations

import ast
import csv
import json
import random
from bisect import bisect
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

from twostroke.errors import ConfigError
from twostroke.sim.traffic import Traffic


class _Histogram:
    """Draws lengths as often as they occurred."""

    def __init__(self, text: str) -> None:
        counts: dict[int, float] = ast.literal_eval(text)
        self._sizes = [max(1, int(size)) for size in counts]
        self._ends = list(accumulate(counts.values()))

    def draw(self, source: random.Random) -> int:
        index = bisect(self._ends, source.random() * self._ends[-1])
        return self._sizes[min(index, len(self._sizes) - 1)]


def servegen(folder: Path, seed: int) -> Traffic:
    """A day of all clients in a folder. Raises ConfigError when it holds none."""
    traces = sorted(folder.glob("chunk-*-trace.csv"))
    if not traces:
        raise ConfigError(f"{folder} holds no ServeGen client (chunk-*-trace.csv with chunk-*-dataset.json)")
    source = random.Random(seed)  # noqa: S311
    rows: list[tuple[float, int, int]] = []
    for trace in traces:
        dataset = trace.with_name(trace.name.replace("-trace.csv", "-dataset.json"))
        try:
            rows.extend(_client(trace, dataset, source))
        except (OSError, ValueError, KeyError, SyntaxError) as error:
            raise ConfigError(f"{trace}: {error}") from None
    rows.sort()
    traffic = Traffic(name=folder.name)
    for arrival_s, prompt, output in rows:
        traffic.arrival_s.append(arrival_s - rows[0][0])
        traffic.prompt_tokens.append(prompt)
        traffic.output_tokens.append(output)
    return traffic


def _client(trace: Path, dataset: Path, source: random.Random) -> Iterator[tuple[float, int, int]]:
    lengths = {
        int(start): (_Histogram(each["input_tokens"]), _Histogram(each["output_tokens"]))
        for start, each in json.loads(dataset.read_text()).items()
        if each["input_tokens"] not in ("", "{}")
    }
    starts = sorted(lengths)
    if not starts:
        return
    with trace.open() as lines:
        windows = [(float(row[0]), float(row[1]), float(row[2])) for row in csv.reader(lines) if row]
    width_s = windows[1][0] - windows[0][0] if len(windows) > 1 else 600.0
    for start_s, rate, cv in windows:
        prompts, outputs = lengths[starts[max(0, bisect(starts, start_s) - 1)]]
        at_s = start_s
        while rate > 0:
            at_s += gap_s(source, rate, cv or 1.0)
            if at_s >= start_s + width_s:
                break
            yield at_s, prompts.draw(source), outputs.draw(source)


def gap_s(source: random.Random, rate: float, cv: float) -> float:
    """Time to the next arrival: gamma distributed, with a mean of 1 / rate and a coefficient of variation."""
    if cv == 1:
        return source.expovariate(rate)
    shape = 1 / (cv * cv)
    return source.gammavariate(shape, 1 / (rate * shape))
