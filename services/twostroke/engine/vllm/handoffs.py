"""What the engine's owner needs of a KV connector, whichever it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from twostroke.config import WorkerSettings
from twostroke.engine.base import EngineLoad, LinkReport
from twostroke.errors import TwostrokeError
from twostroke.v1.kv_pb2 import Handoff, KvEndpoint


@dataclass(frozen=True, slots=True)
class Source:
    """Who offers: what a Handoff says of every hand-off of this worker."""

    worker_id: str
    epoch: str
    lease_ms: int
    block_tokens: int
    block_bytes: int

    def handoff(self, handoff_id: str, tokens: int) -> Handoff:
        """One without its transport."""
        blocks = -(-tokens // self.block_tokens)
        return Handoff(
            handoff_id=handoff_id,
            source_worker_id=self.worker_id,
            source_epoch=self.epoch,
            tokens=tokens,
            blocks=blocks,
            bytes=blocks * self.block_bytes,
            lease_ms=self.lease_ms,
        )


@dataclass(frozen=True, slots=True)
class Started:
    """The first step of a prompt is about to begin; its KV can be read while it is computed."""

    request_id: str
    params: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Failed:
    """A request cannot get its KV, and is over."""

    request_id: str
    error: TwostrokeError


@dataclass(frozen=True, slots=True)
class Recomputed:
    """A request computes prompt tokens that it should have got."""

    request_id: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Received:
    """A request's KV is here; it came in so many chunks."""

    request_id: str
    chunks: int


News = Started | Failed | Recomputed | Received


class Handoffs(Protocol):
    """A connector, seen from the process that serves. All methods are called from its event loop."""

    transport: str
    """Which transport of Handoff it uses."""

    def connector(self, settings: WorkerSettings) -> str:
        """What KvLayout calls it."""
        ...

    def arguments(self, settings: WorkerSettings, engine_id: str) -> dict[str, Any]:
        """vLLM's arguments for it."""
        ...

    def adjust(self, config: Any) -> None:
        """Changes vLLM's finished configuration where arguments cannot."""
        ...

    async def attach(self, client: Any, hear: Callable[[News], None]) -> KvEndpoint:
        """The engine has started. Returns where its KV can be read; from now on `hear` is told what happens."""
        ...

    def offer(self) -> dict[str, Any]:
        """Parameters of a request whose KV is to be held."""
        ...

    def fetch(self, handoff: Handoff, *, token_known: bool) -> dict[str, Any]:
        """Parameters of a request that is to fetch its KV. token_known: the caller gives the first token."""
        ...

    def describe(self, source: Source, request_id: str, tokens: int, params: dict[str, Any]) -> Handoff:
        """The hand-off of a held request, from what vLLM or `Started` said of it."""
        ...

    async def release(self, request_ids: Sequence[str]) -> int:
        """Frees held KV; returns how many of the ids held any."""
        ...

    async def probe(self, worker_id: str, epoch: str, endpoint: KvEndpoint) -> LinkReport:
        """See Engine.probe."""
        ...

    def drop_peer(self, worker_id: str, epoch: str) -> None:
        """See Engine.drop_peer."""
        ...

    def count(self, load: EngineLoad, stats: Any) -> EngineLoad:
        """The load with this connector's numbers. stats: vLLM's scheduler stats of a step."""
        ...

    def close(self) -> None:
        """The engine is down."""
        ...


class NixlHandoffs:
    """vLLM's stock NIXL connector: KV moves when prefill is done."""

    transport = "nixl"

    def __init__(self) -> None:
        self._held: set[str] = set()
        self._client: Any = None

    def connector(self, settings: WorkerSettings) -> str:
        return self.transport

    def arguments(self, settings: WorkerSettings, engine_id: str) -> dict[str, Any]:
        from vllm.config import KVTransferConfig

        config = KVTransferConfig(
            kv_connector="NixlConnector",
            kv_connector_module_path="twostroke.engine.vllm.nixl",
            kv_role="kv_both",
            engine_id=engine_id,
            # A prompt that could not be fetched is placed again by the router, never computed here unseen.
            kv_load_failure_policy="fail",
            kv_connector_extra_config={
                "kv_lease_duration": settings.kv_lease_s,
                # One UCX worker; more would need threads of their own to make progress.
                "num_threads": 0,
            },
        )
        return {"kv_transfer_config": config}

    def adjust(self, config: Any) -> None:
        """Puts our scheduler in the place of vLLM's."""
        scheduler = config.scheduler_config
        kind = "AsyncSharingScheduler" if scheduler.async_scheduling else "SharingScheduler"
        scheduler.scheduler_cls = f"twostroke.engine.vllm.scheduling.{kind}"

    async def attach(self, client: Any, hear: Callable[[News], None]) -> KvEndpoint:
        self._client = client
        return KvEndpoint()

    def offer(self) -> dict[str, Any]:
        from twostroke.engine.vllm.nixl import request_params

        return request_params()

    def fetch(self, handoff: Handoff, *, token_known: bool) -> dict[str, Any]:
        from twostroke.engine.vllm.nixl import from_wire

        return from_wire(handoff.nixl)

    def describe(self, source: Source, request_id: str, tokens: int, params: dict[str, Any]) -> Handoff:
        from twostroke.engine.vllm.nixl import to_wire

        self._held.add(request_id)
        handoff = source.handoff(request_id, tokens)
        handoff.nixl.CopyFrom(to_wire(params))
        return handoff

    async def release(self, request_ids: Sequence[str]) -> int:
        held = [request_id for request_id in request_ids if request_id in self._held]
        if not held:
            return 0
        self._held.difference_update(held)
        return int(max(await self._client.collective_rpc_async("twostroke_release", args=(held,))))

    async def probe(self, worker_id: str, epoch: str, endpoint: KvEndpoint) -> LinkReport:
        """Says nothing: NIXL's agents meet when the first hand-off makes them."""
        return LinkReport()

    def drop_peer(self, worker_id: str, epoch: str) -> None:
        """NIXL notices by itself."""

    def count(self, load: EngineLoad, stats: Any) -> EngineLoad:
        if not stats.kv_cache_usage:
            # A lease that ended, or a decode worker that read, frees held KV without telling this process.
            self._held.clear()
        received = list((stats.kv_connector_stats or {}).get("bytes_transferred", ()))
        return replace(
            load,
            held_handoffs=len(self._held),
            kv_received_bytes=load.kv_received_bytes + int(sum(received)),
            kv_received_handoffs=load.kv_received_handoffs + len(received),
        )

    def close(self) -> None:
        """vLLM closes it."""
