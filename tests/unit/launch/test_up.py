from __future__ import annotations

import asyncio
import io
import os
import re
import signal
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from twostroke.launch import ask
from twostroke.launch.down import down
from twostroke.launch.plan import Plan
from twostroke.launch.state import RunDir
from twostroke.launch.up import Manner, run
from unit.launch.rig import FAILING, PARENT, STUBBORN, alive, eventually, plan, printed


class Up:
    """A running `up` and what it printed."""

    def __init__(
        self, made: Plan, path: Path, question: bool = True, detach: bool = False, timeout_s: float = 30
    ) -> None:
        self.run_dir = RunDir(path / "run")
        self.run_dir.create()
        self.output = io.StringIO()
        request = ask.chat("What?", 8) if question else None
        manner = Manner(request, "What?", detach, ready_timeout_s=timeout_s, grace_s=5)
        console = Console(file=self.output, width=80)
        self.task = asyncio.create_task(run(made, self.run_dir, manner, console))

    @property
    def text(self) -> str:
        return self.output.getvalue()

    def pid(self, name: str) -> int:
        state = self.run_dir.load()
        assert state is not None
        return next(record.process.pid for record in state.processes if record.name == name)

    async def sees(self, text: str) -> None:
        await eventually(lambda: text in self.text or self.task.done(), f"{text!r} in the output")
        assert text in self.text, self.text

    async def ends(self) -> int:
        async with asyncio.timeout(30):
            return await self.task


def listening(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


async def test_starts_answers_serves_and_takes_all_down(tmp_path: Path) -> None:
    made = plan()
    up = Up(made, tmp_path)
    await up.sees("Serving.")
    state = up.run_dir.load()
    assert state is not None
    assert [record.name for record in state.alive()] == ["router", "prefill-0", "decode-0"]
    assert state.supervisor is not None
    assert state.supervisor.pid == os.getpid()
    pids = [record.process.pid for record in state.processes]

    os.kill(os.getpid(), signal.SIGINT)
    assert await up.ends() == 0
    assert [alive(pid) for pid in pids] == [False, False, False]
    assert up.run_dir.load() is None
    assert not listening(made.grpc)
    assert re.search(r"Ready after \d+\.\d s:\n  router  .*answered after \d+\.\d\n  prefill-0 .* load 1\.5\n", up.text)
    assert "\n> What?\nThe capital is Paris.\n" in up.text
    assert "first token after 30.0 ms; 5 tokens, then 100.0 tokens/s; 70.0 ms in all" in up.text
    assert f"gRPC  {made.grpc}\n" in up.text
    assert "curl -N http://127.0.0.1:8000/v1/chat/completions" in up.text


async def test_an_early_exit_ends_up_with_the_last_log_lines(tmp_path: Path) -> None:
    up = Up(plan(worker=FAILING), tmp_path)
    assert await up.ends() == 1
    log = up.run_dir.log_path("prefill-0")
    # Which of the two equal workers ends first is open.
    assert re.search(r"twostroke up: (prefill|decode)-0 exited with code 1 before it was ready; log: ", up.text)
    assert "\n  | loading\n  | no such model\n" in up.text
    assert log.read_text() == "loading\nno such model\n"
    assert up.run_dir.load() is None


async def test_logs_of_an_earlier_run_are_gone(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(0o700)
    (tmp_path / "run" / "decode-7.log").write_text("old")
    up = Up(plan(worker=FAILING), tmp_path)
    assert await up.ends() == 1
    assert sorted(path.name for path in up.run_dir.path.glob("*.log")) == [
        "decode-0.log",
        "prefill-0.log",
        "router.log",
    ]


async def test_what_is_missing_at_the_deadline_is_named(tmp_path: Path) -> None:
    up = Up(plan(FAKE_WAITING_FOR="a decode worker"), tmp_path, timeout_s=3)
    assert await up.ends() == 1
    assert "not ready after 3 s (--ready-timeout-s); router: waits for a decode worker; prefill-0: starting" in up.text
    assert up.run_dir.load() is None


async def test_interrupted_while_starting(tmp_path: Path) -> None:
    up = Up(plan(FAKE_WAITING_FOR="a decode worker"), tmp_path)
    await up.sees("router: waits for a decode worker")
    pid = up.pid("router")
    os.kill(os.getpid(), signal.SIGTERM)
    assert await up.ends() == 130
    assert not alive(pid)
    assert up.run_dir.load() is None


async def test_a_second_signal_kills_at_once(tmp_path: Path) -> None:
    made = plan(worker=STUBBORN)
    up = Up(made, tmp_path)
    await up.sees("Serving.")
    for name in ("prefill-0", "decode-0"):
        await printed(up.run_dir.log_path(name))
    router = up.pid("router")
    os.kill(os.getpid(), signal.SIGINT)
    await eventually(lambda: not alive(router), "the end of the router")
    os.kill(os.getpid(), signal.SIGINT)
    async with asyncio.timeout(4):  # less than the grace
        assert await up.task == 0
    assert "Had to kill prefill-0, decode-0." in up.text


async def test_a_death_while_serving_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    up = Up(plan(worker=PARENT), tmp_path)
    await up.sees("Serving.")
    grandchild = int(await printed(up.run_dir.log_path("decode-0")))
    os.kill(up.pid("decode-0"), signal.SIGKILL)
    await up.sees("decode-0 was killed by SIGKILL; the others go on; log: ")
    state = up.run_dir.load()
    assert state is not None
    assert {record.name: record.exit for record in state.processes} == {
        "router": "",
        "prefill-0": "",
        "decode-0": "was killed by SIGKILL",
    }
    await eventually(lambda: not alive(grandchild), "the end of the dead worker's child")
    assert alive(up.pid("router"))
    assert alive(up.pid("prefill-0"))
    os.kill(os.getpid(), signal.SIGHUP)
    assert await up.ends() == 0


async def test_ends_when_nothing_is_left(tmp_path: Path) -> None:
    up = Up(plan(), tmp_path, question=False)
    await up.sees("Serving.")
    assert "> What?" not in up.text
    for name in ("router", "prefill-0", "decode-0"):
        os.kill(up.pid(name), signal.SIGKILL)
    assert await up.ends() == 1
    assert "nothing is left" in up.text
    assert "all processes have ended" in up.text


async def test_a_program_that_is_not_there_takes_the_started_down(tmp_path: Path) -> None:
    made = plan()
    missing = replace(made.workers[1], command=("/nonexistent",))
    up = Up(replace(made, workers=(made.workers[0], missing)), tmp_path)
    assert await up.ends() == 1
    assert "decode-0: cannot start /nonexistent: No such file or directory" in up.text
    assert up.run_dir.load() is None


async def test_cancelling_takes_all_down(tmp_path: Path) -> None:
    up = Up(plan(), tmp_path)
    await up.sees("Serving.")
    pids = [up.pid(name) for name in ("router", "prefill-0", "decode-0")]
    up.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await up.ends()
    assert not any(alive(pid) for pid in pids)


async def test_detached_stays_until_down(tmp_path: Path) -> None:
    up = Up(plan(worker=PARENT), tmp_path, detach=True)
    assert await up.ends() == 0
    assert "Runs in the background" in up.text
    state = up.run_dir.load()
    assert state is not None
    assert state.supervisor is None
    pids = [record.process.pid for record in state.alive()]
    assert len(pids) == 3
    grandchild = int(await printed(up.run_dir.log_path("prefill-0")))
    with pytest.raises(Exception, match="already runs: router"), up.run_dir.claim():
        pass

    async with asyncio.timeout(30):
        names, killed = await down(up.run_dir, grace_s=10)
    assert (names, killed) == (["router", "prefill-0", "decode-0"], [])
    assert not any(alive(pid) for pid in (*pids, grandchild))
    assert up.run_dir.load() is None


async def test_down_finds_what_a_killed_up_left(tmp_path: Path) -> None:
    up = Up(plan(worker=STUBBORN), tmp_path, detach=True)
    assert await up.ends() == 0
    await printed(up.run_dir.log_path("decode-0"))
    async with asyncio.timeout(30):
        names, killed = await down(up.run_dir, grace_s=0.2)
    assert names == ["router", "prefill-0", "decode-0"]
    assert killed[-2:] == ["prefill-0", "decode-0"]


async def test_down_spares_a_process_that_took_over_the_pid(tmp_path: Path) -> None:
    up = Up(plan(), tmp_path, detach=True)
    assert await up.ends() == 0
    state = up.run_dir.load()
    assert state is not None
    (*others, decode) = state.processes
    bystander = await asyncio.create_subprocess_exec("sleep", "60", start_new_session=True)
    reused = replace(decode, process=replace(decode.process, pid=bystander.pid))
    up.run_dir.save(replace(state, processes=(*others, reused)))
    try:
        async with asyncio.timeout(30):
            names, _ = await down(up.run_dir, grace_s=10)
        assert names == ["router", "prefill-0"]
        assert bystander.returncode is None
    finally:
        bystander.kill()
        await bystander.wait()
        os.kill(decode.process.pid, signal.SIGKILL)
