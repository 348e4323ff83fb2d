"""Processes and transports that end with their test."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from twostroke.bench.kv_rank import Shape
from twostroke.bench.kv_ranks import ReaderRank, SourceRank
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


@pytest.fixture
def start_rank() -> Iterator[Callable[..., SourceRank]]:
    """Starts source ranks."""
    started: list[SourceRank] = []

    def start(name: str = "p/1/0", shape: Shape | None = None, **options: Any) -> SourceRank:
        started.append(SourceRank(name, shape or Shape(), **options))
        return started[-1]

    yield start
    for rank in started:
        rank.end()


@pytest.fixture
def start_reader() -> Iterator[Callable[..., ReaderRank]]:
    """Opens reading ranks."""
    opened: list[ReaderRank] = []

    def start(name: str = "d/1/0", shape: Shape | None = None, **options: Any) -> ReaderRank:
        opened.append(ReaderRank(name, shape or Shape(), **options))
        return opened[-1]

    yield start
    for rank in opened:
        rank.close()
        assert not rank.fatal
