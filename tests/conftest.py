"""What holds for all tests."""

from pathlib import Path

import pytest

import twostroke

HERE = Path(__file__).parent
PROCESSES = ("cluster", "compose", "edge", "engine", "rpc", "telemetry", "unit/kv", "unit/launch", "unit/worker")
"""Folders whose tests share the cores with processes that they start, and measure them by the clock."""

RERUNS = 2


def pytest_configure() -> None:
    """Python takes a compiled module before its source: tests of one that is older would test something else."""
    for folder in ("policy", "sim"):
        for library in Path(twostroke.__path__[0], folder).glob("*.so"):
            source = library.with_name(library.name.partition(".")[0] + ".py")
            if source.stat().st_mtime > library.stat().st_mtime:
                raise pytest.UsageError(f"{source} changed since it was compiled: `make install` compiles it again")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One such test in some thousand runs fails by what else the machine did: it is run again, and each try is said.

    All others fail at once, and these too with `-p no:rerunfailures`."""
    for item in items:
        if not item.config.pluginmanager.hasplugin("rerunfailures"):
            return
        if item.path.relative_to(HERE).as_posix().startswith(PROCESSES):
            item.add_marker(pytest.mark.flaky(reruns=RERUNS))
