"""Processes and transports that end with their test."""

from collections.abc import Callable, Iterator

import pytest

from twostroke.kv.backends import open_transport
from twostroke.kv.transport import Transport
from unit.kv.kv_process import SourceProcess


@pytest.fixture
def start_source() -> Iterator[Callable[..., SourceProcess]]:
    """Starts sources."""
    started: list[SourceProcess] = []

    def start(*arguments: int, **options: object) -> SourceProcess:
        started.append(SourceProcess(*arguments, **options))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for process in started:
        process.end()


@pytest.fixture
def start_transport() -> Iterator[Callable[..., Transport]]:
    """Opens transports."""
    opened: list[Transport] = []

    def start(name: str = "reader", backend: str = "ucx", **options: str) -> Transport:
        opened.append(open_transport(backend, name, options=options))
        return opened[-1]

    yield start
    for one in opened:
        one.close()
