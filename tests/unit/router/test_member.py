"""One worker as the router sees it: whose life it is, and that what was said to it arrives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from twostroke.config import RpcSettings, WorkerSettings
from twostroke.engine.base import EngineInfo, Stroke
from twostroke.engine.reference import ReferenceEngine
from twostroke.free_port import free_port
from twostroke.policy.ledger import Life
from twostroke.router import member as module
from twostroke.router.member import Member, MemberState
from twostroke.v1.engine_pb2 import EngineRequest
from twostroke.worker.assembly import Worker


class Rig:
    """A member, and the worker at its address, which may go and come back."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port("127.0.0.1")
        self.settings = WorkerSettings(engine="reference", port=self.port, reference_blocks=64, drain_s=0)
        self.engine = ReferenceEngine(self.settings, epoch="e", worker_id="w", folder=folder)
        self.ended: list[Life] = []
        self.changed = asyncio.Event()
        self.info: EngineInfo | None = None
        self.following: asyncio.Task[None]
        self.member = Member(
            f"127.0.0.1:{self.port}",
            "router",
            RpcSettings(reconnect_min_s=0.05, reconnect_max_s=0.1),
            timeout_s=5,
            accept=lambda _: None,
            changed=self.changed.set,
            load_changed=self.changed.set,
            kv_changed=lambda _: False,
            step_done=lambda: None,
            ended=self._end,
        )

    def _end(self, life: Life) -> None:
        self.ended.append(life)
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(15):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    @asynccontextmanager
    async def worker(self, epoch: str = "e") -> AsyncIterator[Worker]:
        assert self.info is not None
        worker, stop = Worker(self.settings, self.engine, self.info, "w", epoch), asyncio.Event()
        running = asyncio.create_task(worker.run(stop))
        try:
            await self.until(lambda: self.member.state is MemberState.READY)
            yield worker
        finally:
            stop.set()
            await running
        await self.until(lambda: self.member.state is not MemberState.READY)


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[Rig], Awaitable[None]]], Awaitable[None]]:
    async def run(test: Callable[[Rig], Awaitable[None]]) -> None:
        rig = Rig(tmp_path)
        rig.info = await rig.engine.start()
        rig.following = asyncio.create_task(rig.member.run())
        try:
            await test(rig)
        finally:
            rig.following.cancel()
            await asyncio.gather(rig.following, return_exceptions=True)
            await rig.engine.close()

    return run


async def test_a_new_epoch_ends_the_life_before(run) -> None:
    async def test(rig: Rig) -> None:
        async with rig.worker("e1"):
            assert rig.member.life.epoch == "e1"
        async with rig.worker("e1"):
            assert rig.ended == [], "the same worker, after a gap"
        async with rig.worker("e2"):
            assert [(life.worker_id, life.epoch) for life in rig.ended] == [("w", "e1")]
            assert rig.member.life.epoch == "e2"

    await run(test)


async def test_a_worker_that_nobody_reaches_for_long_is_taken_for_dead_once(run, monkeypatch) -> None:
    monkeypatch.setattr(module, "LOST_AFTER_S", 0.3)

    async def test(rig: Rig) -> None:
        async with rig.worker("e1"):
            pass
        await rig.until(lambda: bool(rig.ended))
        async with rig.worker("e1"):
            rig.member.end_life()
            rig.member.end_life()
        assert [life.epoch for life in rig.ended] == ["e1", "e1"], "one that comes back is met as a new one"

    await run(test)


async def test_a_release_reaches_a_worker_that_was_away(run) -> None:
    """O-25: no lease has to end for it."""

    async def test(rig: Rig) -> None:
        async with rig.worker() as worker:
            await rig.engine.admit(EngineRequest(request_id="r", prompt_token_ids=range(40)), Stroke.PREFILL)
            await rig.until(lambda: worker.host.load.held_handoffs == 1)
        rig.member.release("r")
        rig.member.release("unknown")
        async with rig.worker():
            await rig.until(lambda: rig.member.load is not None and not rig.member.load.held_handoffs)
            assert rig.member.load.held_blocks == rig.member.load.used_blocks == 0

    await run(test)


async def test_a_release_is_said_before_the_router_leaves(run) -> None:
    async def test(rig: Rig) -> None:
        async with rig.worker():
            await rig.engine.admit(EngineRequest(request_id="r", prompt_token_ids=range(40)), Stroke.PREFILL)
            await rig.until(lambda: rig.member.load is not None and rig.member.load.held_handoffs == 1)
            rig.member.release("r")
            rig.following.cancel()
            await asyncio.gather(rig.following, return_exceptions=True)
            assert await rig.engine.release(["r"]) == 0
            rig.member.state = MemberState.UNREACHABLE

    await run(test)


async def test_a_release_for_a_life_that_is_over_is_not_sent(run) -> None:
    async def test(rig: Rig) -> None:
        async with rig.worker("e1") as worker:
            await rig.engine.admit(EngineRequest(request_id="r", prompt_token_ids=range(40)), Stroke.PREFILL)
            await rig.until(lambda: worker.host.load.held_handoffs == 1)
        rig.member.release("r")
        async with rig.worker("e2") as worker:
            rig.member.release("s")
            await asyncio.sleep(4 * module.RELEASE_WINDOW_S)
            assert await worker.host.release(["r"]) == 1, "the new life's request of that name is its own"

    await run(test)
