"""DecodeService over an engine: many requests on one stream per router, one message per engine step."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from twostroke.engine.base import EngineOutput, Stroke
from twostroke.errors import DeadlineError, InvalidRequestError, OverloadedError, TwostrokeError
from twostroke.rpc.status import to_failure
from twostroke.v1 import decode_pb2 as pb
from twostroke.v1 import decode_pb2_grpc
from twostroke.worker.host import EngineHost

log = logging.getLogger(__name__)

# A router that has not read this many steps is as good as gone; at 10 ms a step this is 40 s.
BACKLOG_STEPS = 4096


class StepBuilder:
    """Collects the outputs of one engine step into the columns of a DecodeStep."""

    def __init__(self) -> None:
        self._step = pb.DecodeStep()
        self._counts: list[int] = []
        self.empty = True

    def add(self, slot: int, output: EngineOutput) -> None:
        """Appends one output."""
        self.empty = False
        step = self._step
        if output.token_ids:
            step.slots.append(slot)
            step.token_ids.extend(output.token_ids)
            self._counts.append(len(output.token_ids))
            if output.logprobs is not None:
                step.logprobs.add(slot=slot, logprobs=output.logprobs)
        if output.prompt is not None:
            step.prompts.add(slot=slot, stats=output.prompt, prompt_logprobs=output.prompt_logprobs)
        if output.finish is not None:
            step.finishes.add(slot=slot, finish=output.finish)
        if output.failure is not None:
            step.failures.add(slot=slot, failure=to_failure(output.failure))

    def build(self) -> pb.DecodeStep:
        """The finished message."""
        if any(count != 1 for count in self._counts):
            self._step.token_counts.extend(self._counts)
        return self._step


class _Session:
    """The requests of one router on this worker; owner of them all."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._slots: dict[str, int] = {}
        self._ids: dict[int, str] = {}
        self._deadlines: dict[str, asyncio.TimerHandle] = {}
        self._builder = StepBuilder()
        self._outbox: asyncio.Queue[pb.SessionResponse | TwostrokeError] = asyncio.Queue()
        self._background: set[asyncio.Task[None]] = set()

    def deliver(self, output: EngineOutput) -> None:
        slot = self._slots.get(output.request_id)
        if slot is None:
            return
        self._builder.add(slot, output)
        if output.done:
            self._forget(output.request_id)

    def flush(self) -> None:
        if self._builder.empty:
            return
        step, self._builder = self._builder.build(), StepBuilder()
        if self._outbox.qsize() >= BACKLOG_STEPS:
            self.lost(OverloadedError(f"the router left {BACKLOG_STEPS} steps unread; its session ends"))
            return
        self._outbox.put_nowait(pb.SessionResponse(step=step))

    def lost(self, error: TwostrokeError) -> None:
        self._outbox.put_nowait(error)

    def _forget(self, request_id: str) -> None:
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            del self._ids[slot]
        if timer := self._deadlines.pop(request_id, None):
            timer.cancel()

    async def responses(self) -> AsyncIterator[pb.SessionResponse]:
        """What to send; raises when the session cannot go on."""
        while True:
            item = await self._outbox.get()
            if isinstance(item, TwostrokeError):
                raise item
            yield item

    async def read(self, requests: AsyncIterator[pb.SessionRequest]) -> None:
        """Obeys the router until it closes its side."""
        try:
            async for message in requests:
                kind = message.WhichOneof("message")
                if kind == "admit":
                    await self._admit(message.admit)
                elif kind == "cancel":
                    await self._cancel(message.cancel)
                else:
                    raise InvalidRequestError(f"a session takes admit and cancel after open, not {kind}")
            self.lost(TwostrokeError("the router closed the session"))
        except TwostrokeError as error:
            self.lost(error)

    async def _admit(self, admit: pb.Admit) -> None:
        request_id = admit.request.request_id
        if admit.slot in self._ids:
            raise InvalidRequestError(f"slot {admit.slot} is in use")
        self._slots[request_id] = admit.slot
        self._ids[admit.slot] = request_id
        handoff = admit.handoff if admit.HasField("handoff") else None
        stroke = Stroke.WHOLE if handoff is None else Stroke.DECODE
        try:
            await self._host.admit(admit.request, stroke, self, handoff, admit.chunk_tokens)
        except TwostrokeError as error:
            self._fail(request_id, error)
            return
        if admit.HasField("timeout_ms"):
            loop = asyncio.get_running_loop()
            self._deadlines[request_id] = loop.call_later(admit.timeout_ms / 1000, self._expire, request_id)

    def _fail(self, request_id: str, error: TwostrokeError) -> None:
        self.deliver(EngineOutput(request_id, failure=error, done=True))
        self.flush()

    def _expire(self, request_id: str) -> None:
        if request_id in self._slots:
            self._fail(request_id, DeadlineError("the client's deadline passed while the answer was being written"))
            task = asyncio.get_running_loop().create_task(self._host.cancel([request_id]))
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    async def _cancel(self, cancel: pb.Cancel) -> None:
        ids = [self._ids[slot] for slot in cancel.slots if slot in self._ids]
        for request_id in ids:
            self._forget(request_id)
        await self._host.cancel(ids)

    async def close(self) -> None:
        """Frees everything that the session holds."""
        ids = list(self._slots)
        for request_id in ids:
            self._forget(request_id)
        await self._host.cancel(ids)
        await asyncio.gather(*self._background)


class DecodeService(decode_pb2_grpc.DecodeServiceServicer):
    """Writes answers on the host's engine."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host

    async def Session(
        self, requests: AsyncIterator[pb.SessionRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.SessionResponse]:
        """One router's stream. Cancellation, or the router's end, frees all that it holds."""
        first = await anext(requests, None)
        if first is None or first.WhichOneof("message") != "open":
            raise InvalidRequestError("the first message of a session must be open")
        self._host.check_epoch(first.open.worker_epoch)
        self._host.check_steps()
        router_id = first.open.router_id
        session = _Session(self._host)
        reader = asyncio.create_task(session.read(requests), name=f"session {router_id}")
        log.info("session of router %s begins", router_id)
        self._host.enter(router_id)
        try:
            yield pb.SessionResponse(opened=pb.SessionOpened(worker_epoch=self._host.epoch))
            async for response in session.responses():
                yield response
        finally:
            reader.cancel()
            await session.close()
            await self._host.leave(router_id)
            log.info("session of router %s is over", router_id)
