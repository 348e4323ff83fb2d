"""Small processes that stand in for a router and workers."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from twostroke.launch.plan import Plan
from twostroke.launch.ports import pick_free
from twostroke.launch.processes import ProcessSpec

FAKE_ROUTER = Path(__file__).with_name("fake_router.py")
SERVICES = Path(__file__).parents[3] / "services"

OBEDIENT = "import signal, sys; signal.signal(15, lambda *_: sys.exit(0)); print('up', flush=True); signal.pause()"
STUBBORN = "import signal; signal.signal(15, signal.SIG_IGN); print('up', flush=True)\nwhile True: signal.pause()"
FAILING = "print('loading'); raise SystemExit('no such model')"
# A worker whose own child neither hears SIGTERM nor ends with it.
PARENT = (
    "import signal, subprocess, sys\n"
    f"child = subprocess.Popen([sys.executable, '-c', {STUBBORN!r}], stdout=subprocess.PIPE)\n"
    "child.stdout.readline()\n"
    "signal.signal(15, lambda *_: sys.exit(0)); print(child.pid, flush=True); signal.pause()"
)


def python(name: str, program: str, address: str = "127.0.0.1:1", **environment: str) -> ProcessSpec:
    """A process that runs a program text."""
    return ProcessSpec(name, (sys.executable, "-c", program), address, {**os.environ, **environment})


def plan(worker: str = OBEDIENT, **environment: str) -> Plan:
    """A fake router with one prefill and one decode worker that both run `worker`."""
    ports = pick_free("127.0.0.1", 3)
    router, *workers = (f"127.0.0.1:{port}" for port in ports)
    command = (sys.executable, str(FAKE_ROUTER), str(ports[0]), *workers)
    # The package may not be installed where the tests run from the sources.
    path = {"PYTHONPATH": str(SERVICES)}
    return Plan(
        router=ProcessSpec("router", command, router, {**os.environ, **path, **environment}),
        workers=tuple(python(f"{role}-0", worker, at) for role, at in zip(("prefill", "decode"), workers, strict=True)),
        grpc=router,
        http="http://127.0.0.1:8000/v1",
        model="fake",
    )


async def eventually(check: Callable[[], object], what: str, timeout_s: float = 20.0) -> None:
    """Returns once `check` is true; for what no event tells, such as another process's output."""
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s} s"
        await asyncio.sleep(0.01)


async def printed(log: Path) -> str:
    """What a process wrote first, once it wrote a whole line."""
    await eventually(lambda: "\n" in content(log), f"a line in {log.name}")
    return content(log)


def content(path: Path) -> str:
    """What a file holds so far; nothing when it is not there."""
    return path.read_text() if path.exists() else ""


def alive(pid: int) -> bool:
    """Whether a thread of the process runs: its first one may have ended before the others."""
    try:
        states = [path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):
        return any(Path(f"/proc/{pid}/task").glob("*"))
    return any(state not in "ZX" for state in states)
