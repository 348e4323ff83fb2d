"""What holds for all tests."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
PROCESSES = ("cluster", "compose", "edge", "engine", "rpc", "telemetry", "unit/kv", "unit/launch", "unit/worker")
"""Folders whose tests share the cores with processes that they start, and measure them by the clock."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One such test in some thousand runs fails by what else the machine did: it is run once more, and both are said.

    All others fail at once."""
    for item in items:
        if item.path.relative_to(HERE).as_posix().startswith(PROCESSES):
            item.add_marker(pytest.mark.flaky(reruns=1))
