"""Traces as tests look at them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twostroke.free_port import free_port

WAIT_S = 20.0


@dataclass
class Span:
    name: str
    trace: str
    id: str
    parent: str
    kind: int
    begin_ns: int
    end_ns: int
    error: str
    links: list[str]
    attributes: dict[str, Any]
    resource: dict[str, Any] = field(repr=False, default_factory=dict)

    @property
    def duration_ms(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e6


class Receiver:
    """A receiver that runs. address: host:port."""

    def __init__(self, address: str, file: Path) -> None:
        self.address = address
        self._file = file

    def spans(self) -> list[Span]:
        return [Span(**json.loads(line)) for line in self._file.read_text().splitlines()]

    def _wait_written(self) -> None:
        size = self._file.stat().st_size
        for _ in range(20):
            time.sleep(0.02)
            if self._file.stat().st_size != size:
                return

    async def until(self, condition: Callable[[Sequence[Span]], bool]) -> list[Span]:
        """What has come once the condition holds."""
        try:
            async with asyncio.timeout(WAIT_S):
                while not condition(found := self.spans()):
                    await asyncio.to_thread(self._wait_written)
                return found
        except TimeoutError:
            raise AssertionError("only these came:\n" + "\n".join(map(str, self.spans()))) from None


@contextmanager
def receiver(folder: Path) -> Iterator[Receiver]:
    """A receiver that is ready."""
    file, port = folder / "spans.jsonl", free_port("127.0.0.1")
    script = Path(__file__).with_name("otlp_receiver.py")
    process = subprocess.Popen([sys.executable, str(script), str(port), str(file)])
    try:
        while not file.exists():
            if process.poll() is not None:
                raise AssertionError("the receiver did not start")
        yield Receiver(f"127.0.0.1:{port}", file)
    finally:
        process.kill()
        process.wait()
