"""A steady load of streams on a cluster that is broken on purpose, by clients that know every answer beforehand.

They do what a client has to: an answer that its router does not finish goes on at another one, from the tokens that are
there; a router that says UNAVAILABLE before it has begun is left for another one. Whatever else is said is a failure.
"""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio

from twostroke.bench.fault_cluster import FaultCluster
from twostroke.bench.fault_plan import HELD_UP_S
from twostroke.engine.reference_model import expected_tokens
from twostroke.rpc.status import to_error
from twostroke.v1.engine_pb2 import SamplingParams, TokenSequence
from twostroke.v1.inference_pb2 import GenerateRequest

VOCABULARY = 40_000
FIRST_TOKEN_S = 1.0
"""A wait for the first token that no prompt explains."""
REQUEST_TIMEOUT_S = 60.0
ASK_AGAIN_S = 0.05


@dataclass(slots=True)
class Tally:
    """What came of all requests."""

    sent: int = 0
    complete: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    moved: int = 0
    """Times that an answer went on at another router, or began there, since the one asked was gone."""
    refused: int = 0
    """Times that a router said UNAVAILABLE and another one was asked."""
    moments: array[float] = field(default_factory=lambda: array("d"))
    """Of every token, in order."""
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """Begin and end of every wait that a healthy cluster does not explain, across routers."""

    def waited(self, since_s: float, now_s: float, *, first: bool) -> None:
        """A token has come."""
        if now_s - since_s > (FIRST_TOKEN_S if first else HELD_UP_S):
            self.gaps.append((since_s, now_s))


class Clients:
    """A steady number of streams, each asking again when its answer is complete."""

    def __init__(self, cluster: FaultCluster, streams: int, seed: int) -> None:
        self._cluster = cluster
        self._streams = streams
        self._random = random.Random(seed)  # noqa: S311 not a secret
        self._go = asyncio.Event()
        self._go.set()
        self._asking = 0
        self._quiet = asyncio.Event()
        self.tally = Tally()
        self.over = asyncio.Event()

    async def run(self) -> None:
        """Until `over` is set and the last answers are complete."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._streams):
                group.create_task(self._client())

    async def pause(self) -> None:
        """Returns when all answers are complete; none is asked for until `resume`."""
        self._go.clear()
        while self._asking:
            self._quiet.clear()
            await self._quiet.wait()

    def resume(self) -> None:
        """Ends a pause."""
        self._go.set()

    async def _client(self) -> None:
        while True:
            await self._go.wait()
            if self.over.is_set():
                return
            self._asking += 1
            try:
                await self._ask()
            finally:
                self._asking -= 1
                self._quiet.set()

    async def _ask(self) -> None:
        tally = self.tally
        prompt = self._random.choices(range(VOCABULARY), k=self._random.randint(20, 1200))
        count = self._random.randint(20, 120)
        tally.sent += 1
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                tokens = await self._answer(prompt, count)
        except TimeoutError:
            tally.failed["no answer in time"] += 1
        except grpc.aio.AioRpcError as error:
            tally.failed[to_error(error).message[:100]] += 1
        else:
            tally.complete += 1
            tally.wrong += tokens != expected_tokens(prompt, SamplingParams(temperature=0), count)

    async def _answer(self, prompt: Sequence[int], count: int) -> list[int]:
        """One answer. Raises what a living router said."""
        routers = self._random.sample(self._cluster.routers, len(self._cluster.routers))
        tokens: list[int] = []
        since_s = time.monotonic()
        while True:
            had = len(tokens)
            request = GenerateRequest(
                tokens=TokenSequence(token_ids=[*prompt, *tokens]),
                sampling=SamplingParams(temperature=0, max_tokens=count - had),
            )
            routers.append(routers.pop(0))
            try:
                async for piece in self._cluster.generate(routers[-1], request, REQUEST_TIMEOUT_S):
                    if not piece.token_ids:
                        continue
                    now_s = time.monotonic()
                    self.tally.waited(since_s, now_s, first=not tokens)
                    since_s = now_s
                    tokens.extend(piece.token_ids)
                    self.tally.moments.extend([now_s] * len(piece.token_ids))
                return tokens
            except grpc.aio.AioRpcError as error:
                if not self._may_go_on(error, begun=len(tokens) > had):
                    raise
                if len(tokens) == count:
                    return tokens
            await asyncio.sleep(ASK_AGAIN_S)

    def _may_go_on(self, error: grpc.aio.AioRpcError, *, begun: bool) -> bool:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            return False
        # Only a router that lives says why.
        if any(key == "grpc-status-details-bin" for key, _ in error.trailing_metadata() or ()):
            self.tally.refused += not begun
            return not begun
        self.tally.moved += 1
        return True
