"""WorkerService: what a worker tells about itself."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from typing import Any

import grpc.aio

from twostroke.engine.base import EngineLoad, StepSample
from twostroke.errors import InvalidRequestError
from twostroke.v1 import worker_pb2 as pb
from twostroke.v1 import worker_pb2_grpc
from twostroke.worker.host import EngineHost
from twostroke.worker.kv_feed import to_wire

log = logging.getLogger(__name__)

DEFAULT_INTERVAL_S = 0.5

ROLES = {"prefill": pb.ROLE_PREFILL, "decode": pb.ROLE_DECODE, "both": pb.ROLE_BOTH}


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """Describes the host's engine and its load."""

    def __init__(self, host: EngineHost, role: pb.Role.ValueType) -> None:
        self._host = host
        self._role = role

    @property
    def role(self) -> str:
        """The role now, as settings name it."""
        return next(name for name, role in ROLES.items() if role == self._role)

    async def GetInfo(
        self, request: pb.GetInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetInfoResponse:
        """What this worker is."""
        info = self._host.info
        return pb.GetInfoResponse(
            worker_id=self._host.worker_id,
            epoch=self._host.epoch,
            role=self._role,
            engine=info.engine,
            engine_version=info.engine_version,
            model=info.model,
            max_model_len_tokens=info.max_model_len_tokens,
            vocab_size=info.vocab_size,
            total_blocks=info.total_blocks,
            step_budget_tokens=info.step_budget_tokens,
            most_step_s=info.most_step_s,
            max_sequences=info.max_sequences,
            cores=pb.Cores(**asdict(info.cores)),
            layout=info.layout,
            start_phases=[pb.StartPhase(name=name, duration_ms=ms) for name, ms in info.start_phases],
            kv_endpoint=info.kv_endpoint,
            prior_costs=pb.StepCosts(**asdict(info.prior)),
            block_hashing=pb.BlockHashing(**asdict(info.block_hashing)) if info.block_hashing else None,
        )

    async def WatchLoad(
        self, request: pb.WatchLoadRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.WatchLoadResponse]:
        """The load, on change and at least every interval."""
        interval_s = request.interval_ms / 1000 or DEFAULT_INTERVAL_S
        told = 0
        async for load in self._host.loads(interval_s):
            told, samples = self._host.samples.since(told)
            yield self._report(load, samples)

    async def WatchKvEvents(
        self, request: pb.WatchKvEventsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.WatchKvEventsResponse]:
        """A snapshot of the engine's blocks, and then what happens to them."""
        async for events in self._host.kv.watch():
            yield to_wire(events)

    async def ProbeLink(
        self, request: pb.ProbeLinkRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ProbeLinkResponse:
        """Reads a pattern out of another worker's memory. Cancellation gives up."""
        found = await self._host.probe(request.source_worker_id, request.source_epoch, request.endpoint)
        return pb.ProbeLinkResponse(
            lanes=found.lanes, rdma=found.rdma, bytes_per_s=found.bytes_per_s, latency_ms=found.latency_ms
        )

    async def DropPeer(
        self, request: pb.DropPeerRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.DropPeerResponse:
        """Forgets an epoch of another worker."""
        await self._host.drop_peer(request.worker_id, request.epoch)
        return pb.DropPeerResponse()

    async def SetRole(
        self, request: pb.SetRoleRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.SetRoleResponse:
        """Tells routers, with the next load report, what to send."""
        if request.role not in ROLES.values():
            raise InvalidRequestError(f"a role is one of {', '.join(ROLES)}")
        previous, self._role = self._role, request.role
        log.info("the role is %s, it was %s", pb.Role.Name(request.role), pb.Role.Name(previous))
        await self._host.tell()
        return pb.SetRoleResponse(previous_role=previous)

    async def Drain(self, request: pb.DrainRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.DrainResponse:
        """Begins to drain; the process ends afterwards."""
        return pb.DrainResponse(requests=await self._host.begin_drain())

    def _report(self, load: EngineLoad, samples: Sequence[StepSample]) -> pb.WatchLoadResponse:
        return pb.WatchLoadResponse(
            epoch=self._host.epoch,
            role=self._role,
            waiting_requests=load.waiting_requests,
            running_requests=load.running_requests,
            pending_prompt_tokens=load.pending_prompt_tokens,
            pending_prompts=load.pending_prompts,
            used_blocks=load.used_blocks,
            held_handoffs=load.held_handoffs,
            held_blocks=load.held_blocks,
            kv_received_bytes=load.kv_received_bytes,
            kv_received_handoffs=load.kv_received_handoffs,
            computed_prompt_tokens=load.computed_prompt_tokens,
            generated_tokens=load.generated_tokens,
            steps=load.steps,
            draining=self._host.draining.is_set(),
            stalled=bool(self._host.stalled),
            step_samples=[
                pb.StepSample(
                    **sample.batch._asdict(), duration_ms=sample.duration_s * 1000, spared_ms=sample.spared_s * 1000
                )
                for sample in samples
            ],
        )
