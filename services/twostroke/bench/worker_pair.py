"""A prefill and a decode worker, started and driven as a router drives them, without one.

What a hand-off costs is then not mixed with what a router does meanwhile.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio

from twostroke.bench.running import Say
from twostroke.config import RpcSettings, child_environment
from twostroke.errors import EngineError, UnavailableError
from twostroke.free_port import free_port
from twostroke.launch import devices
from twostroke.launch.processes import ProcessSpec, Watched, describe_exit, last_lines, start, take_down
from twostroke.rpc.channel import connect
from twostroke.rpc.status import from_failure, to_error
from twostroke.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    engine_pb2,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

START_TIMEOUT_S = 600.0
CALL_TIMEOUT_S = 600.0
_HOST = "127.0.0.1"
_GRACE_S = 15.0


@dataclass(slots=True)
class Answer:
    """One request through both workers. Moments are monotonic seconds."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    first_token_s: float = 0.0
    second_token_s: float = 0.0
    prompt: engine_pb2.PromptStats | None = None


class _Slot:
    """What comes back of one admission."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def tokens(self, token_ids: Sequence[int]) -> None:
        if not self.answer.second_token_s:
            self.answer.second_token_s = time.monotonic()
        self.answer.token_ids.extend(token_ids)


class WorkerPair:
    """Two workers with one connector. Make it with `worker_pair`."""

    def __init__(
        self, connector: str, prefill: Watched, decode: Watched, addresses: dict[str, str], logs: Path
    ) -> None:
        self.connector = connector
        self.processes = {"prefill": prefill, "decode": decode}
        self.step_logs = {role: logs / f"{connector}-{role}.steps.jsonl" for role in self.processes}
        self._channels = {role: connect(address, RpcSettings()) for role, address in addresses.items()}
        self.workers = {role: worker_pb2_grpc.WorkerServiceStub(channel) for role, channel in self._channels.items()}
        self._prefill = prefill_pb2_grpc.PrefillServiceStub(self._channels["prefill"])
        self.info: dict[str, worker_pb2.GetInfoResponse] = {}
        self._outbox: asyncio.Queue[decode_pb2.SessionRequest] = asyncio.Queue()
        self._slots: dict[int, _Slot] = {}
        self._numbers = itertools.count(1)
        self._reader: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Waits for both workers, tries their link, opens a session. Raises UnavailableError when one has ended."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while len(self.info) < len(self.workers):
            for role in self.workers.keys() - self.info.keys():
                process = self.processes[role]
                if process.ended.done():
                    raise UnavailableError(f"the {role} worker {describe_exit(process.ended.result())}")
                with suppress(grpc.aio.AioRpcError):
                    self.info[role] = await self.workers[role].GetInfo(worker_pb2.GetInfoRequest(), timeout=5.0)
            if time.monotonic() > deadline_s:
                raise UnavailableError(f"no worker after {START_TIMEOUT_S:.0f} s")
            await asyncio.sleep(0.2)
        opened = asyncio.Event()
        self._reader = asyncio.create_task(self._read(opened), name=f"session {self.connector}")
        await opened.wait()

    async def probe(self) -> worker_pb2.ProbeLinkResponse:
        """Tries the link from prefill to decode."""
        source = self.info["prefill"]
        request = worker_pb2.ProbeLinkRequest(
            source_worker_id=source.worker_id, source_epoch=source.epoch, endpoint=source.kv_endpoint
        )
        found: worker_pb2.ProbeLinkResponse = await self.workers["decode"].ProbeLink(request, timeout=CALL_TIMEOUT_S)
        return found

    async def close(self) -> None:
        """Ends the session and the connections."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        for channel in self._channels.values():
            await channel.close()

    async def _read(self, opened: asyncio.Event) -> None:
        stub = decode_pb2_grpc.DecodeServiceStub(self._channels["decode"])
        epoch = self.info["decode"].epoch
        first = decode_pb2.SessionRequest(open=decode_pb2.SessionOpen(router_id="bench", worker_epoch=epoch))

        async def requests() -> AsyncIterator[decode_pb2.SessionRequest]:
            yield first
            while True:
                yield await self._outbox.get()

        async for response in stub.Session(requests()):
            if response.HasField("opened"):
                opened.set()
            else:
                self._route(response.step)

    def _route(self, step: decode_pb2.DecodeStep) -> None:
        at = 0
        for row, number in enumerate(step.slots):
            count = step.token_counts[row] if step.token_counts else 1
            if slot := self._slots.get(number):
                slot.tokens(step.token_ids[at : at + count])
            at += count
        for prompt in step.prompts:
            if slot := self._slots.get(prompt.slot):
                slot.answer.prompt = prompt.stats
        for finish in step.finishes:
            if (slot := self._slots.get(finish.slot)) and not slot.over.done():
                slot.over.set_result(None)
        for failure in step.failures:
            if (slot := self._slots.get(failure.slot)) and not slot.over.done():
                slot.over.set_exception(from_failure(failure.failure))

    async def ask(self, request_id: str, prompt: Sequence[int], max_tokens: int) -> Answer:
        """One request, greedy, of exactly max_tokens tokens. Cancellation ends it on both workers."""
        answer = Answer(request_id)
        request = engine_pb2.EngineRequest(request_id=request_id, prompt_token_ids=prompt)
        request.sampling.temperature = 0.0
        request.sampling.max_tokens = max_tokens
        request.sampling.ignore_eos = True
        number = next(self._numbers)
        slot = self._slots[number] = _Slot(answer)
        try:
            await self._run_prefill(request, answer, number)
            await slot.over
        except grpc.aio.AioRpcError as error:
            raise to_error(error) from error
        finally:
            del self._slots[number]
            self._outbox.put_nowait(decode_pb2.SessionRequest(cancel=decode_pb2.Cancel(slots=[number])))
            release = prefill_pb2.ReleaseRequest(request_ids=[request_id])
            # A worker that is gone holds nothing.
            with suppress(grpc.aio.AioRpcError):
                await asyncio.shield(self._prefill.Release(release, timeout=CALL_TIMEOUT_S))
        return answer

    async def ask_decode_alone(self, request_id: str, prompt: Sequence[int], max_tokens: int) -> Answer:
        """The same on the decode worker alone, which uses nothing that it has cached of other requests."""
        answer = Answer(request_id)
        request = engine_pb2.EngineRequest(request_id=request_id, prompt_token_ids=prompt, cache_salt=request_id)
        request.sampling.temperature = 0.0
        request.sampling.max_tokens = max_tokens
        request.sampling.ignore_eos = True
        number = next(self._numbers)
        slot = self._slots[number] = _Slot(answer)
        admit = decode_pb2.Admit(slot=number, request=request, timeout_ms=int(CALL_TIMEOUT_S * 1000))
        self._outbox.put_nowait(decode_pb2.SessionRequest(admit=admit))
        try:
            await slot.over
        finally:
            del self._slots[number]
        return answer

    async def _run_prefill(self, request: engine_pb2.EngineRequest, answer: Answer, number: int) -> None:
        epoch = self.info["prefill"].epoch
        call = self._prefill.Prefill(
            prefill_pb2.PrefillRequest(request=request, worker_epoch=epoch), timeout=CALL_TIMEOUT_S
        )
        admitted = False
        async for response in call:
            kind = response.WhichOneof("event")
            if kind == "started" and response.started.HasField("handoff"):
                self._admit(number, request, response.started.handoff)
                admitted = True
            elif kind == "first_token":
                answer.first_token_s = time.monotonic()
                answer.token_ids.insert(0, response.first_token.token_id)
            elif kind == "finished" and not admitted:
                request.output_token_ids.append(answer.token_ids[0])
                self._admit(number, request, response.finished.handoff)
        if not answer.token_ids:
            raise EngineError("prefill ended without a token")

    def _admit(self, number: int, request: engine_pb2.EngineRequest, handoff: Any) -> None:
        admit = decode_pb2.Admit(slot=number, request=request, handoff=handoff, timeout_ms=int(CALL_TIMEOUT_S * 1000))
        self._outbox.put_nowait(decode_pb2.SessionRequest(admit=admit))

    async def load(self, role: str) -> worker_pb2.WatchLoadResponse:
        """A worker's load now."""
        call = self.workers[role].WatchLoad(worker_pb2.WatchLoadRequest())
        try:
            async for load in call:
                return load
        finally:
            call.cancel()
        raise UnavailableError(f"the {role} worker reports no load")

    def exposed(self, request_id: str) -> tuple[float, float]:
        """Milliseconds from the end of prefill's last step, and from the end of its forward pass, to the beginning of
        decode's first step. Both workers' clocks are this machine's."""
        last = [step for step in self._steps("prefill") if request_id in step["requests"]][-1]
        first = next(step for step in self._steps("decode") if request_id in step["requests"])
        return (first["begin_s"] - last["end_s"]) * 1e3, (first["begin_s"] - last["forward_end_s"]) * 1e3

    def _steps(self, role: str) -> list[dict[str, Any]]:
        steps = [json.loads(line) for line in self.step_logs[role].read_text().splitlines()]
        # Decode numbers its admissions.
        return [{**step, "requests": [name.partition("~")[0] for name in step["requests"]]} for step in steps]


@asynccontextmanager
async def worker_pair(
    connector: str, model: str, logs: Path, say: Say, arguments: Sequence[str] = ()
) -> AsyncIterator[WorkerPair]:
    """Starts prefill on the first core of this machine and decode on the second. Both are gone afterwards."""
    inherited = child_environment()
    found = devices.detect(inherited)
    environment = {"TORCHDYNAMO_DISABLE": "1", **found.tuned(inherited)}
    addresses: dict[str, str] = {}
    processes: dict[str, Watched] = {}
    began_s = time.monotonic()
    try:
        for index, role in enumerate(("prefill", "decode")):
            port = free_port(_HOST)
            step_log = (logs / f"{connector}-{role}.steps.jsonl").absolute()
            step_log.unlink(missing_ok=True)
            addresses[role] = f"{_HOST}:{port}"
            command = [sys.executable, "-m", "twostroke.worker", "--engine=vllm", f"--model={model}", f"--role={role}"]
            command += [f"--worker-id={connector}-{role}", f"--port={port}", f"--kv-connector={connector}"]
            command += [f"--step-log={step_log}", "--log-level=WARNING", "--drain-s=1"]
            if not found.gpus:
                command.append(f"--cores={found.cores[index % len(found.cores)]}")
            spec = ProcessSpec(
                f"{connector}-{role}", (*command, *arguments), addresses[role], child_environment(**environment)
            )
            processes[role] = start(spec, logs / f"{connector}-{role}.log")
        pair = WorkerPair(connector, processes["prefill"], processes["decode"], addresses, logs)
        try:
            await pair.open()
        except UnavailableError as error:
            lines = [line for role in processes for line in last_lines(logs / f"{connector}-{role}.log", 8)]
            raise UnavailableError("\n  | ".join([f"{error.message}; logs in {logs}", *lines])) from error
        say(f"{connector}: both workers serve after {time.monotonic() - began_s:.0f} s")
        try:
            yield pair
        finally:
            await pair.close()
    finally:
        await take_down(list(processes.values()), _GRACE_S)
