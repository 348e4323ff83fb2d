"""`twostroke up` as its users run it: in a process of its own, with the reference engine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from twostroke.launch.state import RunDir
from unit.launch.rig import SERVICES, alive

# Ten processes start here one after another: seconds on an idle machine, not on a busy one.
pytestmark = pytest.mark.timeout(240)

TIMEOUT_S = 60.0


class Cli:
    """Runs the command with folders of its own."""

    def __init__(self, path: Path) -> None:
        self.run_dir = RunDir(path / "run")
        self.environment = {**os.environ, "PYTHONPATH": str(SERVICES), "TWOSTROKE_RUN_DIR": str(self.run_dir.path)}

    def start(self, *argv: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "twostroke", *argv],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "twostroke", *argv],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    def pids(self) -> list[int]:
        state = self.run_dir.load()
        return [record.process.pid for record in state.processes] if state is not None else []


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    made = Cli(tmp_path)
    yield made
    made.run("down", "--grace-s", "0")


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """The output up to the line that has the text."""
    assert process.stdout is not None
    watchdog = threading.Timer(TIMEOUT_S, process.kill)
    watchdog.start()
    seen = ""
    for line in process.stdout:
        seen += line
        if text in line:
            watchdog.cancel()
            return seen
    watchdog.cancel()
    raise AssertionError(f"no {text!r} in {seen}")


def test_serves_until_down(cli: Cli) -> None:
    up = cli.start("up", "--engine", "reference", "--grpc-port", "0")
    shown = read_until(up, "Serving.")
    pids = cli.pids()
    assert len(pids) == 3
    assert re.search(r"\n> the token ids 1 to 32 .*\n(\d+ ){48}\n", shown)
    assert re.search(r"\n  prompt 32 tokens; .* of KV moved for 32 tokens\n", shown)

    status = json.loads(cli.run("status", "--json").stdout)
    assert status["ready"] is True
    assert sorted(worker["info"]["worker_id"] for worker in status["workers"]) == ["decode-0", "prefill-0"]
    assert [process["alive"] for process in status["processes"]] == [True, True, True]

    answer = cli.run("generate", "1,2,3", "--tokens", "--max-tokens", "4")
    assert re.fullmatch(r"(\d+ ){4}\n", answer.stdout)

    second = cli.run("up", "--engine", "reference", "--grpc-port", "0")
    assert second.returncode == 2
    assert "a twostroke already runs; `twostroke down` stops it" in second.stderr

    assert cli.run("down").stdout == "Ended router, prefill-0, decode-0.\n"
    assert up.wait(TIMEOUT_S) == 0
    assert up.stdout is not None
    up.stdout.close()
    assert not any(alive(pid) for pid in pids)
    assert cli.run("down").stdout == f"Nothing runs from {cli.run_dir.path}.\n"


def test_a_killed_up_leaves_a_cluster_that_down_ends(cli: Cli) -> None:
    up = cli.start("up", "--engine", "reference", "--grpc-port", "0", "--no-ask")
    read_until(up, "Serving.")
    pids = cli.pids()
    up.send_signal(signal.SIGKILL)
    assert up.wait(TIMEOUT_S) == -signal.SIGKILL
    assert up.stdout is not None
    up.stdout.close()
    assert [alive(pid) for pid in pids] == [True, True, True]
    again = cli.run("up", "--engine", "reference", "--grpc-port", "0")
    assert again.returncode == 2
    assert "already runs: router (pid" in again.stderr
    assert cli.run("down").stdout == "Ended router, prefill-0, decode-0.\n"
    assert not any(alive(pid) for pid in pids)


def test_a_reader_that_leaves_takes_all_down(cli: Cli) -> None:
    up = cli.start("up", "--engine", "reference", "--grpc-port", "0")
    read_until(up, "starting")
    assert up.stdout is not None
    up.stdout.close()
    assert up.wait(TIMEOUT_S) != 0
    assert cli.run_dir.load() is None
    assert cli.run("logs", "router").returncode == 0
