"""ClusterService: what this router sees of its cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc.aio

from twostroke.errors import InvalidRequestError
from twostroke.policy.explain import summary
from twostroke.policy.ledger import HandoffState
from twostroke.policy.ratio import Mode
from twostroke.policy.step_model import StepBatch, chunk_pairs
from twostroke.router.dispatch import Dispatcher
from twostroke.router.explanation import dry_run
from twostroke.router.front_end import Tokenize, no_tokenizer
from twostroke.router.links import Link, LinkState
from twostroke.router.member import Member, MemberState
from twostroke.router.output import Trail
from twostroke.router.roles import WIRE, RoleDriver
from twostroke.router.step_models import StepModels
from twostroke.router.ways import open_ways
from twostroke.v1 import cluster_pb2 as pb
from twostroke.v1 import cluster_pb2_grpc
from twostroke.v1.worker_pb2 import ROLE_UNSPECIFIED

MIN_INTERVAL_S = 0.1
DEFAULT_REQUESTS = 100

_STATES = {
    MemberState.UNREACHABLE: pb.WORKER_STATE_UNREACHABLE,
    MemberState.STARTING: pb.WORKER_STATE_STARTING,
    MemberState.READY: pb.WORKER_STATE_READY,
    MemberState.REFUSED: pb.WORKER_STATE_REFUSED,
    MemberState.DRAINING: pb.WORKER_STATE_DRAINING,
    MemberState.QUIET: pb.WORKER_STATE_QUIET,
}
_LINK_STATES = {
    LinkState.PROBING: pb.LINK_STATE_PROBING,
    LinkState.READY: pb.LINK_STATE_READY,
    LinkState.QUARANTINED: pb.LINK_STATE_QUARANTINED,
}


class ClusterService(cluster_pb2_grpc.ClusterServiceServicer):
    """Describes a dispatcher's pool."""

    def __init__(self, dispatcher: Dispatcher, router_id: str) -> None:
        self._dispatcher = dispatcher
        self._router_id = router_id
        self.tokenize: Tokenize = no_tokenizer
        """The front end's, once it is there."""

    async def Watch(
        self, request: pb.WatchRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.WatchResponse]:
        """The cluster now and at every change, at most ten times a second."""
        while True:
            yield self.view()
            if request.once:
                return
            await self._dispatcher.pool.wait_changed()
            await asyncio.sleep(MIN_INTERVAL_S)

    async def ListRequests(
        self, request: pb.ListRequestsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ListRequestsResponse:
        """The requests of late."""
        return self.requests(request.limit or DEFAULT_REQUESTS)

    async def Drain(
        self, request: pb.ClusterServiceDrainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ClusterServiceDrainResponse:
        """Lets a worker leave."""
        return pb.ClusterServiceDrainResponse(requests=await self._member(request.worker_id).drain())

    async def SetRole(
        self, request: pb.ClusterServiceSetRoleRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ClusterServiceSetRoleResponse:
        """Changes what a worker is sent."""
        previous = await self._member(request.worker_id).set_role(request.role)
        return pb.ClusterServiceSetRoleResponse(previous_role=previous)

    async def Explain(
        self, request: pb.ExplainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ExplainResponse:
        """Where a request would go now, and why."""
        kind, prompt = request.WhichOneof("prompt"), list(request.tokens.token_ids)
        if kind == "text":
            prompt = await self.tokenize(request.text)
        return dry_run(self._dispatcher, request, prompt)

    def _member(self, name: str) -> Member:
        found = [each for each in self._dispatcher.pool.members if name in (each.worker_id, each.address)]
        if len(found) != 1:
            known = ", ".join(each.worker_id for each in self._dispatcher.pool.members) or "none"
            kind = "several workers have" if found else "no worker has"
            raise InvalidRequestError(f"{kind} the id or address {name!r}; known are {known}")
        return found[0]

    def requests(self, limit: int) -> pb.ListRequestsResponse:
        """The same, for callers in this process."""
        now_s = time.monotonic()
        recent = self._dispatcher.recent(limit)
        return pb.ListRequestsResponse(requests=[_request(public_id, trail, now_s) for public_id, trail in recent])

    def view(self) -> pb.WatchResponse:
        """The cluster now."""
        pool = self._dispatcher.pool
        names = {member.address: member.worker_id for member in pool.members}
        waiting_for = self._dispatcher.waiting_for()
        return pb.WatchResponse(
            router_id=self._router_id,
            ready=not waiting_for,
            waiting_for=waiting_for,
            workers=[_worker(member, pool.step_models) for member in pool.members],
            refused_pairs=[
                pb.RefusedPair(prefill_worker_id=names[prefill], decode_worker_id=names[decode], reason=why)
                for (prefill, decode), why in pool.refused_pairs.items()
            ],
            requests=self._dispatcher.active_requests,
            recomputed_prompts=self._dispatcher.recomputed_prompts,
            links=[_link(link) for link in pool.links],
            handoffs=_handoffs(pool.handoffs.counts()),
            ways=open_ways(pool.options),
            known_blocks=pool.prefixes.blocks,
            role_advice=_advice(self._dispatcher.roles),
        )


def _worker(member: Member, models: StepModels) -> pb.WorkerView:
    return pb.WorkerView(
        address=member.address,
        state=_STATES[member.state],
        detail=member.detail,
        info=member.info,
        load=member.load,
        router_requests=member.session.active if member.session else 0,
        steps=_steps(member.address, models),
    )


def _steps(address: str, models: StepModels) -> pb.StepPrediction | None:
    learned, predicted = models.all().get(address), models.predicted(address)
    if learned is None or predicted is None:
        return None
    return pb.StepPrediction(
        error=learned.error,
        observed=learned.steps,
        set_aside=learned.set_aside,
        decode_ms=predicted.step_s(StepBatch(1, 1000, 0, 0)) * 1000,
        prefill_token_us=predicted.step_s(StepBatch(0, 0, 512, chunk_pairs(0, 512), 1)) / 512 * 1e6,
    )


def _advice(roles: RoleDriver) -> pb.RoleAdvice | None:
    if roles.mode is Mode.OFF:
        return None
    latest = roles.latest
    return pb.RoleAdvice(
        why=latest.why,
        worker_id=latest.worker,
        role=WIRE[latest.role] if latest.role else ROLE_UNSPECIFIED,
        acts=roles.mode is Mode.ON,
        changes=roles.changes,
    )


def _request(public_id: str, trail: Trail, now_s: float) -> pb.RequestView:
    if not trail.over:
        state = pb.REQUEST_STATE_RUNNING
    elif trail.failure:
        state = pb.REQUEST_STATE_FAILED
    else:
        state = pb.REQUEST_STATE_FINISHED if trail.answered else pb.REQUEST_STATE_CANCELLED
    return pb.RequestView(
        request_id=public_id,
        state=state,
        age_ms=(now_s - trail.received_s) * 1000,
        timeline=trail.timeline(),
        prompt_tokens=trail.prompt_tokens,
        completion_tokens=trail.completion_tokens,
        failure=trail.failure,
        trace_id=trail.trace_id,
        option=trail.option,
        why=summary(trail.plan) if trail.plan else "",
        failed_attempts=[
            pb.FailedAttempt(
                placed_ms=0.0 if attempt.placed_s is None else (attempt.placed_s - trail.received_s) * 1000,
                failed_ms=(attempt.failed_s - trail.received_s) * 1000,
                prefill_worker_id=attempt.prefill_worker_id,
                reason=attempt.reason,
                decode_worker_id=attempt.decode_worker_id,
            )
            for attempt in trail.failed_attempts
        ],
    )


def _link(link: Link) -> pb.LinkView:
    source, reader = link.lives
    return pb.LinkView(
        prefill_worker_id=source.worker_id,
        decode_worker_id=reader.worker_id,
        state=_LINK_STATES[link.state],
        detail=link.detail,
        lanes=link.report.lanes,
        rdma=link.report.rdma,
        bytes_per_s=link.report.bytes_per_s,
        latency_ms=link.report.latency_ms,
        failures=link.failures,
    )


def _handoffs(counts: Mapping[HandoffState, int]) -> pb.HandoffCounts:
    return pb.HandoffCounts(**{state.value: counts.get(state, 0) for state in HandoffState})
