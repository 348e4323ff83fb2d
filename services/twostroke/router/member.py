"""One worker as the router sees it: connection, description, load, session, and what this router has on it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from enum import Enum
from typing import Any

import grpc
import grpc.aio

from twostroke.config import RpcSettings
from twostroke.errors import TwostrokeError, WorkerLostError
from twostroke.policy.ledger import Life
from twostroke.policy.placement import WorkerSnapshot
from twostroke.router.kv_watch import watch_kv
from twostroke.router.session import DecodeSession
from twostroke.rpc.call import answer, quiet
from twostroke.rpc.channel import connect
from twostroke.rpc.status import to_error
from twostroke.v1 import prefill_pb2, prefill_pb2_grpc, worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 5.0
PROBE_TIMEOUT_S = 10.0
LAST_WORD_S = 1.0
RETRY_S = 0.25
# A worker that cannot be reached for so long is taken for dead; one that comes back is met as a new one.
LOST_AFTER_S = 10.0
LOAD_INTERVAL_MS = 250
# A worker that has not reported for so long gets nothing new.
QUIET_AFTER_S = 1.0
# Releases of one worker are sent together; a request is not worth an RPC of its own.
RELEASE_WINDOW_S = 0.02


class MemberState(Enum):
    """How a worker stands."""

    UNREACHABLE = "unreachable"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    QUIET = "quiet"
    REFUSED = "refused"


class Member:
    """Keeps one worker connected.

    `changed` is called on every change of state, `load_changed` on every load report, `kv_changed` with what happens to
    the worker's KV blocks (it returns whether something was missed), `ended` when a life of the worker is over: another
    one answers at the address, or nobody did for LOST_AFTER_S.
    """

    def __init__(
        self,
        address: str,
        router_id: str,
        rpc: RpcSettings,
        *,
        timeout_s: float,
        accept: Callable[[worker_pb2.GetInfoResponse], str | None],
        changed: Callable[[], None],
        load_changed: Callable[[], None],
        kv_changed: Callable[[worker_pb2.WatchKvEventsResponse], bool],
        step_done: Callable[[], None],
        ended: Callable[[Life], None],
    ) -> None:
        self.address = address
        self.state = MemberState.UNREACHABLE
        self.detail = "not tried yet"
        self.info: worker_pb2.GetInfoResponse | None = None
        self.load: worker_pb2.WatchLoadResponse | None = None
        self.session: DecodeSession | None = None
        self.router_id = router_id
        self.prefills: set[Callable[[str], None]] = set()
        """Called with the reason when the worker is lost, by whoever has a call open that would not notice."""
        self._timeout_s = timeout_s
        self._accept = accept
        self._changed = changed
        self._load_changed = load_changed
        self._kv_changed = kv_changed
        self._step_done = step_done
        self._ended = ended
        self._living: Life | None = None
        self._left_s = 0.0
        self._channel = connect(address, rpc)
        self.prefill = prefill_pb2_grpc.PrefillServiceStub(self._channel)
        self._worker = worker_pb2_grpc.WorkerServiceStub(self._channel)
        self._to_release: list[str] = []
        self._release_task: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()

    @property
    def worker_id(self) -> str:
        """The worker's own name, or its address until it told."""
        return self.info.worker_id if self.info else self.address

    @property
    def life(self) -> Life:
        """The worker's present life. Needs `info`."""
        assert self.info is not None
        return Life(self.address, self.info.worker_id, self.info.epoch)

    async def run(self) -> None:
        """Connects and reconnects; returns only by cancellation, which closes the connection."""
        try:
            while True:
                try:
                    await self._connected()
                except grpc.aio.AioRpcError as error:
                    self._leave(to_error(error).message)
                except TwostrokeError as error:
                    self._leave(error.message)
                if self._living is not None and time.monotonic() - self._left_s >= LOST_AFTER_S:
                    self.end_life()
                await asyncio.sleep(RETRY_S)
        finally:
            for task in self._background:
                task.cancel()
            if self._to_release and self.session is not None:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await self._release(LAST_WORD_S)
            await self._channel.close()

    def _set(self, state: MemberState, detail: str) -> None:
        if (state, detail) != (self.state, self.detail):
            log.info("worker %s at %s is %s%s", self.worker_id, self.address, state.value, f": {detail}" * bool(detail))
            self.state, self.detail = state, detail
            self._changed()

    def end_life(self) -> None:
        """Takes the worker's present life for over."""
        if self._living is not None:
            living, self._living = self._living, None
            self._ended(living)

    def _leave(self, detail: str) -> None:
        if self.state is not MemberState.UNREACHABLE:
            self._left_s = time.monotonic()
        self.session = None
        self.load = None
        for abandon in list(self.prefills):
            abandon(f"worker {self.worker_id} is lost: {detail}")
        self._set(MemberState.UNREACHABLE, detail)

    async def _connected(self) -> None:
        info = await answer(self._worker.GetInfo(worker_pb2.GetInfoRequest(), timeout=CALL_TIMEOUT_S))
        if self.info is not None and self.info.epoch != info.epoch:
            self._to_release.clear()
            self.end_life()
        self.info = info
        self._living = self.life
        if refusal := self._accept(info):
            self._set(MemberState.REFUSED, refusal)
            await self._watch_load()
            return
        self._set(MemberState.STARTING, "opening its session")
        session = DecodeSession(self._channel, self.router_id, info.worker_id, info.epoch, self._step_done)

        def opened() -> None:
            self.session = session
            self._set(MemberState.READY, "")

        # Not a TaskGroup: where one of the two breaks in the moment of a cancellation, that hides the cancellation.
        parts = [
            asyncio.create_task(session.run(opened), name=f"session {self.address}"),
            asyncio.create_task(self._watch_load(), name=f"load {self.address}"),
        ]
        if info.HasField("block_hashing"):
            watch = watch_kv(self._worker, info.worker_id, self._kv_changed)
            parts.append(asyncio.create_task(watch, name=f"KV of {self.address}"))
        try:
            ended, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)
        ended.pop().result()

    async def _watch_load(self) -> None:
        call = self._worker.WatchLoad(worker_pb2.WatchLoadRequest(interval_ms=LOAD_INTERVAL_MS))
        try:
            while True:
                load = await self._next_load(call)
                if load.stalled:
                    raise WorkerLostError("its engine makes no step")
                self._take_load(load)
        finally:
            call.cancel()

    async def _next_load(self, call: Any) -> worker_pb2.WatchLoadResponse:
        """The next report. Raises WorkerLostError when there is none for too long: a process that is stopped has a
        kernel that keeps its connections."""
        reading = quiet(call.read())
        try:
            if not (await asyncio.wait({reading}, timeout=QUIET_AFTER_S))[0] and self.state is MemberState.READY:
                self._set(MemberState.QUIET, f"has not reported for {QUIET_AFTER_S:g} s")
            if not (await asyncio.wait({reading}, timeout=max(0.0, self._timeout_s - QUIET_AFTER_S)))[0]:
                raise WorkerLostError(f"it has not reported for {self._timeout_s:g} s (--worker-timeout-s)")
        finally:
            if not reading.done():
                reading.cancel()
        load = await reading
        if load is grpc.aio.EOF:
            raise WorkerLostError("it ended its reports")
        found: worker_pb2.WatchLoadResponse = load
        return found

    def _take_load(self, load: worker_pb2.WatchLoadResponse) -> None:
        new_role = self.load is not None and self.load.role != load.role
        self.load = load
        self._load_changed()
        # They have been learned from, and are many.
        load.ClearField("step_samples")
        if load.draining and self.state in (MemberState.READY, MemberState.QUIET):
            self._set(MemberState.DRAINING, "takes no new requests, and finishes what it has")
        elif self.state is MemberState.QUIET:
            self._set(MemberState.READY, "")
        elif new_role:
            self._changed()

    @property
    def role(self) -> worker_pb2.Role.ValueType:
        """What it wants to be sent now. Needs `info`."""
        assert self.info is not None
        return self.load.role if self.load else self.info.role

    def facts(self) -> WorkerSnapshot:
        """For placement: what does not depend on load. Needs `info`."""
        assert self.info is not None
        role = self.role
        return WorkerSnapshot(
            worker=self.address,
            reads_prompts=role in (worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_BOTH),
            writes_answers=role in (worker_pb2.ROLE_DECODE, worker_pb2.ROLE_BOTH),
            free_blocks=self.info.total_blocks - (self.load.used_blocks if self.load else 0),
            block_size_tokens=self.info.layout.block_size_tokens,
            total_blocks=self.info.total_blocks,
            step_budget_tokens=self.info.step_budget_tokens,
            max_sequences=self.info.max_sequences,
            most_step_s=self.info.most_step_s,
        )

    def release(self, request_id: str) -> None:
        """Tells the worker, soon, that nobody needs this KV any more; again until it hears or its life is over."""
        self._to_release.append(request_id)
        if self._release_task is None:
            self._release_task = self._in_background(self._send_releases())

    async def _send_releases(self) -> None:
        pause_s = RELEASE_WINDOW_S
        while self._to_release:
            await asyncio.sleep(pause_s)
            if self.session is None:
                # Whether it is the same life that comes back is not known yet.
                pause_s = RETRY_S
                continue
            try:
                await self._release(CALL_TIMEOUT_S)
                pause_s = RELEASE_WINDOW_S
            except grpc.aio.AioRpcError as error:
                log.warning("worker %s did not take a release: %s", self.worker_id, error.details())
                pause_s = RETRY_S
        self._release_task = None

    async def _release(self, timeout_s: float) -> None:
        sent = frozenset(self._to_release)
        await self.prefill.Release(prefill_pb2.ReleaseRequest(request_ids=sent), timeout=timeout_s)
        self._to_release = [each for each in self._to_release if each not in sent]

    def drop_peer(self, worker_id: str, epoch: str) -> None:
        """Tells the worker that another one's life is over. One that cannot be told finds out by its own deadlines."""
        self._in_background(self._send_drop_peer(worker_pb2.DropPeerRequest(worker_id=worker_id, epoch=epoch)))

    async def _send_drop_peer(self, request: worker_pb2.DropPeerRequest) -> None:
        try:
            await self._worker.DropPeer(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            log.warning("worker %s was not told that %s is over: %s", self.worker_id, request.epoch, error.details())

    async def probe_link(self, source: worker_pb2.GetInfoResponse) -> worker_pb2.ProbeLinkResponse:
        """Lets the worker read from another one's memory. Raises the TwostrokeError that says why it cannot."""
        request = worker_pb2.ProbeLinkRequest(
            source_worker_id=source.worker_id, source_epoch=source.epoch, endpoint=source.kv_endpoint
        )
        try:
            return await answer(self._worker.ProbeLink(request, timeout=PROBE_TIMEOUT_S))
        except grpc.aio.AioRpcError as error:
            raise to_error(error) from error

    async def drain(self) -> int:
        """Lets the worker leave. Returns how many requests run there. Raises TwostrokeError."""
        try:
            drained = await self._worker.Drain(worker_pb2.DrainRequest(), timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise to_error(error) from error
        return int(drained.requests)

    async def set_role(self, role: worker_pb2.Role.ValueType) -> worker_pb2.Role.ValueType:
        """Changes what the worker is sent, by all routers. Returns what it was. Raises TwostrokeError."""
        try:
            changed = await self._worker.SetRole(worker_pb2.SetRoleRequest(role=role), timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise to_error(error) from error
        return changed.previous_role

    def _in_background(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task
