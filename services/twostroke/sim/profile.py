"""`twostroke profile`: measures the steps of a real worker and writes what `sim` and `plan` take for a model on sheets.

The worker is asked over its own gRPC API, whole requests on one decode session, so that nothing but its engine is in
the way: single prompts of several lengths for prefill, batches of several sizes and contexts for decode.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import grpc.aio
from rich.console import Console

from twostroke.config import RpcSettings
from twostroke.errors import UnavailableError
from twostroke.policy.step_model import chunk_pairs
from twostroke.rpc.channel import connect
from twostroke.rpc.status import from_failure, to_error
from twostroke.sim.fit import Sample, fit
from twostroke.sim.replica import Profile
from twostroke.sim.show import line
from twostroke.v1 import cluster_pb2, cluster_pb2_grpc, decode_pb2_grpc, worker_pb2_grpc
from twostroke.v1 import decode_pb2 as pb
from twostroke.v1.engine_pb2 import EngineRequest, PromptStats, SamplingParams
from twostroke.v1.worker_pb2 import ROLE_PREFILL, GetInfoRequest, GetInfoResponse

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
_WAIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to measure. prompts: lengths in tokens; batches: sequences at once; contexts: of their prompts; pause_s:
    before each prompt, for a worker that had nothing to do when one comes. Batches whose contexts are more than
    most_context_tokens together are left out."""

    prompts: Sequence[int] = (16, 64, 256, 512, 1024, 2048)
    batches: Sequence[int] = (1, 2, 4, 8, 16)
    contexts: Sequence[int] = (32, 256, 2048)
    steps: int = 24
    repeats: int = 2
    pause_s: float = 0.0
    most_context_tokens: int = 4096


@dataclass(frozen=True, slots=True)
class Measured:
    """Steps of a worker. hops_s: what single prompts took more than their steps."""

    info: GetInfoResponse
    samples: Sequence[Sample]
    hops_s: Sequence[float]


async def find_worker(router: str, settings: RpcSettings) -> str:
    """Address of a ready worker, one that writes answers where there is one, by its router. Raises UnavailableError."""
    channel = connect(router, settings)
    try:
        view = await anext(
            aiter(cluster_pb2_grpc.ClusterServiceStub(channel).Watch(cluster_pb2.WatchRequest(), timeout=10))
        )
    except grpc.aio.AioRpcError as error:
        raise to_error(error) from error
    finally:
        await channel.close()
    ready = [each for each in view.workers if each.state == cluster_pb2.WORKER_STATE_READY]
    if not ready:
        raise UnavailableError(f"router {router} has no worker that is ready; see `twostroke status`")
    return str(min(ready, key=lambda each: (each.info.role == ROLE_PREFILL, each.load.running_requests)).address)


async def measure(address: str, effort: Effort, say: Callable[[str], None], settings: RpcSettings) -> Measured:
    """Measures a worker, which must be otherwise idle. Raises UnavailableError, EngineError, ConfigError.

    Cancellation ends what runs on the worker.
    """
    channel = connect(address, settings)
    try:
        info = await worker_pb2_grpc.WorkerServiceStub(channel).GetInfo(GetInfoRequest(), timeout=10)
        async with _session(channel, info) as session:
            return await _measure(session, info, effort, say)
    except grpc.aio.AioRpcError as error:
        raise to_error(error) from error
    finally:
        await channel.close()


def profile(measured: Sequence[Measured]) -> Profile:
    """What a worker is, measured once or several times with time in between. Raises ConfigError for too few steps."""
    samples = [sample for each in measured for sample in each.samples]
    info, found = measured[0].info, fit(samples)
    layout = info.layout
    kv_bytes = 2 * layout.layers * layout.kv_heads * layout.head_size * _DTYPE_BYTES.get(layout.dtype, 2)
    return Profile(
        model=info.model,
        engine=f"{info.engine} {info.engine_version}".strip(),
        step_model=found.model,
        total_blocks=info.total_blocks,
        block_size_tokens=layout.block_size_tokens,
        step_budget_tokens=info.step_budget_tokens,
        max_sequences=info.max_sequences,
        kv_bytes_per_token=float(kv_bytes * max(1, layout.tensor_parallel)),
        samples=len(samples),
        residual_s=found.residual_s,
        median_error=found.median_error,
        hop_s=max(0.0, statistics.median(hop_s for each in measured for hop_s in each.hops_s)),
    )


async def _measure(session: _Session, info: GetInfoResponse, effort: Effort, say: Callable[[str], None]) -> Measured:
    budget = info.step_budget_tokens
    most = info.max_model_len_tokens - effort.steps - 8
    blocks_tokens = info.total_blocks * info.layout.block_size_tokens
    lengths = sorted({min(length, most) for length in effort.prompts if length <= most} or {max(1, most)})
    # The first step of a size takes memory that later ones find: without this 1,024 tokens took half as long again.
    await session.run(1, lengths[-1], 8)
    samples: list[Sample] = []
    hops_s: list[float] = []
    for prompt in lengths:
        for _ in range(effort.repeats):
            await asyncio.sleep(effort.pause_s)
            sent_s = time.perf_counter()
            ran = await session.run(1, prompt, 2)
            chunks = -(-prompt // budget)
            seconds = ran.stats[0].run_ms / 1e3
            hops_s.append(ran.steps[0][0] - sent_s - seconds)
            samples.append(
                Sample(
                    seconds,
                    chunks,
                    prefill_tokens=prompt,
                    prefill_pairs=chunk_pairs(0, prompt),
                    prefill_chunks=chunks,
                )
            )
        say(f"prompt of {prompt:,} tokens: {samples[-1].seconds * 1e3:.1f} ms")
    for batch in effort.batches:
        for context in effort.contexts:
            length = min(context, most)
            held = batch * (length + effort.steps + 16) <= blocks_tokens
            if batch > info.max_sequences or not held or batch * length > effort.most_context_tokens:
                continue
            ran = await session.run(batch, length, effort.steps)
            gaps = ran.full_steps_s(batch)
            if not gaps:
                continue
            seconds = statistics.median(gaps)
            middle = length + effort.steps // 2
            samples.append(Sample(seconds, 1, sequences=batch, context_tokens=batch * middle))
            say(f"{batch} answers at {middle:,} tokens: {seconds * 1e3:.2f} ms a step")
    return Measured(info, samples, hops_s)


@dataclass(slots=True)
class _Ran:
    """What a batch of requests brought. steps: (time, rows, whether a prompt became ready) of every step."""

    stats: list[PromptStats] = field(default_factory=list)
    steps: list[tuple[float, int, bool]] = field(default_factory=list)

    def full_steps_s(self, batch: int) -> list[float]:
        """Times of the steps in which all answers went on and nothing else happened."""
        return [
            after[0] - before[0]
            for before, after in pairwise(self.steps)
            if before[1] == after[1] == batch and not before[2] and not after[2]
        ]


class _Session:
    """Requests on a worker's decode session, computed there as a whole."""

    def __init__(self, channel: grpc.aio.Channel, info: GetInfoResponse) -> None:
        self._info = info
        self._outbox: asyncio.Queue[pb.SessionRequest] = asyncio.Queue()
        self._slots = itertools.count(1)
        self._random = random.Random()  # noqa: S311
        self._name = f"profile-{self._random.getrandbits(32):08x}"
        opened = pb.SessionRequest(open=pb.SessionOpen(router_id=self._name, worker_epoch=info.epoch))
        self._outbox.put_nowait(opened)
        self._call = decode_pb2_grpc.DecodeServiceStub(channel).Session(self._requests())

    async def _requests(self) -> AsyncIterator[pb.SessionRequest]:
        while True:
            yield await self._outbox.get()

    def close(self) -> None:
        """Frees what runs on the worker."""
        self._call.cancel()

    async def run(self, batch: int, prompt_tokens: int, output_tokens: int) -> _Ran:
        """So many requests at once, of random tokens, to their ends."""
        open_slots = set()
        for _ in range(batch):
            slot = next(self._slots)
            prompt = [self._random.randrange(self._info.vocab_size) for _ in range(prompt_tokens)]
            request = EngineRequest(
                request_id=f"{self._name}-{slot}",
                prompt_token_ids=prompt,
                sampling=SamplingParams(temperature=0, max_tokens=output_tokens, min_tokens=output_tokens),
            )
            admit = pb.Admit(slot=slot, request=request, timeout_ms=int(_WAIT_S * 1000))
            self._outbox.put_nowait(pb.SessionRequest(admit=admit))
            open_slots.add(slot)
        ran = _Ran()
        while open_slots:
            response = await self._call.read()
            if not isinstance(response, pb.SessionResponse):
                raise UnavailableError("the worker ended the session")
            if response.WhichOneof("message") != "step":
                continue
            step = response.step
            ran.steps.append((time.perf_counter(), len(step.slots), bool(step.prompts)))
            ran.stats.extend(each.stats for each in step.prompts)
            for failure in step.failures:
                raise from_failure(failure.failure)
            open_slots.difference_update(each.slot for each in step.finishes)
        return ran


@asynccontextmanager
async def _session(channel: grpc.aio.Channel, info: GetInfoResponse) -> AsyncIterator[_Session]:
    session = _Session(channel, info)
    try:
        yield session
    finally:
        session.close()


def run(address: str, router: str, out: Path, effort: Effort, settings: RpcSettings, console: Console) -> int:
    """The command. address: of a worker; empty to ask the router for one."""

    async def work() -> Profile:
        target = address or await find_worker(router, settings)
        line(console, f"worker {target}; nothing else should run on it", "dim")
        return profile([await measure(target, effort, lambda text: line(console, text), settings)])

    found = asyncio.run(work())
    found.save(out)
    model = found.step_model
    line(
        console,
        f"a step takes {model.const_s * 1e3:.2f} ms + {model.per_sequence_s * 1e6:.1f} us per answer + "
        f"{model.per_context_token_s * 1e9:.1f} ns per token of context; a prompt token "
        f"{model.per_prefill_token_s * 1e6:.1f} us; median error {found.median_error:.1%} of {found.samples} samples",
    )
    line(console, f"Written to {out}; use it as `twostroke sim --model {out}` or `twostroke plan --model {out}`")
    return 0
