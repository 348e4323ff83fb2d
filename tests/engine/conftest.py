"""The real engine, once per test run: a plain one for the truth, then two pools through `twostroke up`."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster.reference_cluster import free_ports

WORDS = """
the river runs past an old mill where two brothers grind wheat for bread and sell it every morning at the market near a
stone bridge while children count boats and dogs sleep in the warm dust of the road to town
""".split()

LENGTHS = (1, 2, 3, 5, 8, 16, 31, 63, 100, 127, 128, 129, 200, 255, 256, 257, 300, 511, 512, 513, 900, 1500, 3000)


def story(seed: int) -> str:
    """Text that differs from its first word on; about one token a word."""
    return " ".join(f"{WORDS[(i * (seed + 3) + seed) % len(WORDS)]}" for i in range(4000))


def cases() -> dict[str, dict[str, Any]]:
    greedy: dict[str, dict[str, Any]] = {
        f"{length} tokens": {"prompt": story(length), "tokens": length, "max_tokens": 16} for length in LENGTHS
    }
    greedy["penalties"] = {
        "prompt": story(7),
        "tokens": 90,
        "max_tokens": 24,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
    }
    greedy["min tokens"] = {"prompt": "The capital of France is", "max_tokens": 40, "min_tokens": 30}
    greedy["stop"] = {"prompt": "Count: 1, 2, 3, 4,", "max_tokens": 40, "stop": ["9, 10"]}
    return greedy


@pytest.fixture(scope="session")
def model() -> str:
    """Folder of the bundled model, converted if need be."""
    command = [sys.executable, "-m", "twostroke", "model", "fetch"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]


@pytest.fixture(scope="session")
def truth(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The answers of one plain engine to `cases()`."""
    path = tmp_path_factory.mktemp("truth") / "answers.json"
    script = Path(__file__).parent / "single_engine.py"
    done = subprocess.run(
        [sys.executable, str(script), model, str(path)],
        input=json.dumps(cases()),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers: dict[str, Any] = json.loads(path.read_text())
    return answers


@dataclass(frozen=True)
class TwoPools:
    """A running cluster."""

    model: str
    http: str
    grpc: str


@pytest.fixture(scope="session")
def two_pools(model: str, truth: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoPools]:
    """One router, one prefill worker, one decode worker, each worker on its own core.

    Needs `truth` first: the machine has no memory and no cores for both at once.
    """
    http, grpc = free_ports(2)
    run_dir = tmp_path_factory.mktemp("run")
    environment = {**os.environ, "TWOSTROKE_RUN_DIR": str(run_dir)}
    command = [sys.executable, "-m", "twostroke"]
    up = subprocess.run(
        [
            *command,
            "up",
            "--detach",
            "--no-ask",
            "--dtype",
            "float32",
            "--http-port",
            str(http),
            "--grpc-port",
            str(grpc),
        ],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert up.returncode == 0, up.stdout + up.stderr
    try:
        yield TwoPools("SmolLM2-135M-Instruct", f"http://127.0.0.1:{http}", f"127.0.0.1:{grpc}")
    finally:
        down = subprocess.run([*command, "down"], env=environment, capture_output=True, text=True, check=False)
        assert down.returncode == 0, down.stdout + down.stderr
    for log in run_dir.glob("*.log"):
        assert "Traceback" not in log.read_text(), f"{log.name}:\n{log.read_text()[-5000:]}"
