"""`twostroke logs`: what the processes wrote."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from twostroke.errors import ConfigError
from twostroke.launch.processes import last_lines
from twostroke.launch.state import RunDir

_POLL_S = 0.2


def choose(run_dir: RunDir, name: str) -> dict[str, Path]:
    """The logs by process name: one, or all for an empty name. Raises ConfigError naming what there is."""
    found = {path.stem: path for path in sorted(run_dir.path.glob("*.log"))}
    if not found:
        raise ConfigError(f"no logs in {run_dir.path}; `twostroke up` writes them")
    if not name:
        return found
    if name not in found:
        raise ConfigError(f"no log of {name!r}; there are {', '.join(found)}")
    return {name: found[name]}


def recent(logs: dict[str, Path], count: int) -> Iterator[str]:
    """The last lines of each log, marked with the name when there are several."""
    for name, path in logs.items():
        for line in last_lines(path, count):
            yield _marked(name, line, logs)


def follow(
    logs: dict[str, Path], count: int, show: Callable[[str], None], wait: Callable[[float], None] = time.sleep
) -> None:
    """Shows the last lines and then new ones, until interrupted. A log that begins anew is read from its start."""
    tails = {name: _Tail(path, path.stat().st_size if path.exists() else 0) for name, path in logs.items()}
    for line in recent(logs, count):
        show(line)
    while True:
        for name, tail in tails.items():
            for line in tail.new_lines():
                show(_marked(name, line, logs))
        wait(_POLL_S)


def _marked(name: str, line: str, logs: Sequence[str] | dict[str, Path]) -> str:
    return f"{name} | {line}" if len(logs) > 1 else line


@dataclass(slots=True)
class _Tail:
    path: Path
    offset: int
    rest: bytes = field(default=b"")

    def new_lines(self) -> list[str]:
        try:
            with self.path.open("rb") as log:
                if self.path.stat().st_size < self.offset:
                    self.offset, self.rest = 0, b""
                log.seek(self.offset)
                data = log.read()
        except FileNotFoundError:
            return []
        self.offset += len(data)
        *lines, self.rest = (self.rest + data).split(b"\n")
        return [line.decode(errors="replace") for line in lines]
