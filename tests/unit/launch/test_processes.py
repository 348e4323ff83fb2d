from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from twostroke.errors import ConfigError
from twostroke.launch.processes import ProcessSpec, Watched, describe_exit, last_lines, start, take_down
from unit.launch.rig import FAILING, OBEDIENT, PARENT, STUBBORN, alive, printed, python


async def test_reports_exit_code_and_keeps_output(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    process = start(python("worker", FAILING), log)
    async with asyncio.timeout(20):
        assert await process.ended == 1
        await process.gone()
    assert last_lines(log, 5) == ["loading", "no such model"]
    assert last_lines(log, 1) == ["no such model"]


async def test_reports_the_signal(tmp_path: Path) -> None:
    process = start(python("worker", OBEDIENT), tmp_path / "log")
    await printed(tmp_path / "log")
    os.kill(process.pid, signal.SIGKILL)
    async with asyncio.timeout(20):
        code = await process.ended
        await process.gone()
    assert describe_exit(code) == "was killed by SIGKILL"


def test_describes_exits() -> None:
    assert describe_exit(3) == "exited with code 3"
    assert describe_exit(None) == "ended"
    assert describe_exit(-99) == "was killed by signal 99"


async def test_takes_down_at_once_what_obeys(tmp_path: Path) -> None:
    processes = [start(python(f"p{i}", OBEDIENT), tmp_path / f"p{i}") for i in range(2)]
    for i in range(2):
        await printed(tmp_path / f"p{i}")
    async with asyncio.timeout(20):
        assert await take_down(processes, grace_s=60) == []
    assert [process.ended.result() for process in processes] == [0, 0]


async def test_kills_what_does_not_obey(tmp_path: Path) -> None:
    process = start(python("stubborn", STUBBORN), tmp_path / "log")
    await printed(tmp_path / "log")
    async with asyncio.timeout(20):
        assert await take_down([process], grace_s=0.2) == ["stubborn"]
    assert process.ended.result() == -signal.SIGKILL
    assert not alive(process.pid)


async def test_hurry_cuts_the_grace_short(tmp_path: Path) -> None:
    process = start(python("stubborn", STUBBORN), tmp_path / "log")
    await printed(tmp_path / "log")
    hurry = asyncio.Event()
    hurry.set()
    async with asyncio.timeout(20):
        assert await take_down([process], grace_s=3600, hurry=hurry) == ["stubborn"]


async def test_leaves_no_grandchild(tmp_path: Path) -> None:
    process = start(python("worker", PARENT), tmp_path / "log")
    grandchild = int(await printed(tmp_path / "log"))
    assert alive(grandchild)
    async with asyncio.timeout(20):
        assert await take_down([process], grace_s=60) == []
    assert not alive(grandchild)


async def test_a_crash_takes_the_grandchildren_with_it(tmp_path: Path) -> None:
    process = start(python("worker", PARENT), tmp_path / "log")
    grandchild = int(await printed(tmp_path / "log"))
    os.kill(process.pid, signal.SIGKILL)
    async with asyncio.timeout(20):
        await process.gone()
    assert not alive(grandchild)


async def test_leads_a_group_of_its_own_in_our_session(tmp_path: Path) -> None:
    """Ctrl-C is for us alone; and Linux shares the cores among sessions first, so one each would starve the small."""
    process = start(python("worker", OBEDIENT), tmp_path / "log")
    await printed(tmp_path / "log")
    assert os.getpgid(process.pid) == process.pid
    assert os.getsid(process.pid) == os.getsid(0)
    await take_down([process], grace_s=60)


async def test_a_program_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    spec = ProcessSpec("router", ("/nonexistent/python",), "127.0.0.1:1", {})
    with pytest.raises(ConfigError, match="router: cannot start /nonexistent/python: No such file or directory"):
        start(spec, tmp_path / "log")


async def test_watches_a_process_that_is_already_gone(tmp_path: Path) -> None:
    process = start(python("worker", FAILING), tmp_path / "log")
    async with asyncio.timeout(20):
        await process.gone()
        late = Watched("late", process.pid)
        assert await late.ended is None
        assert await take_down([late], grace_s=60) == []


async def test_taking_nothing_down_returns() -> None:
    assert await take_down([], grace_s=60) == []


def test_no_log_has_no_lines(tmp_path: Path) -> None:
    assert last_lines(tmp_path / "none", 3) == []
