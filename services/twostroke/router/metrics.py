"""A router's metrics: counted when a request is over, and read from the router's own books when they are asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from twostroke.policy.ledger import HandoffState
from twostroke.router.edge import PROVIDER
from twostroke.router.links import LinkState
from twostroke.router.output import Trail
from twostroke.router.pool import WorkerPool
from twostroke.router.roles import RoleDriver
from twostroke.router.waiting import WaitingRoom
from twostroke.router.ways import SERVED
from twostroke.telemetry import metrics
from twostroke.telemetry.metrics import Collector, Family, Registry, family

KV_SOURCES = ("transferred", "recomputed", "local", "none")
_LIVE = (HandoffState.OFFERED, HandoffState.RECEIVING, HandoffState.RECEIVED)
_OVER = (HandoffState.RELEASED, HandoffState.LOST)


class RequestMetrics:
    """What is counted once per request."""

    def __init__(self, registry: Registry) -> None:
        self._duration = registry.histogram(metrics.DURATION)
        self._ttft = registry.histogram(metrics.TTFT)
        self._tpot = registry.histogram(metrics.TPOT)
        self._queue = registry.histogram(metrics.QUEUE_TIME)
        self._prefill = registry.histogram(metrics.PREFILL_TIME)
        self._exposed = registry.histogram(metrics.EXPOSED)
        self._requests = registry.counter(metrics.REQUESTS)
        self._refusals = registry.counter(metrics.REFUSALS)
        self._tokens = registry.counter(metrics.TOKENS)
        self._placements = registry.counter(metrics.PLACEMENTS)
        self._retries = registry.counter(metrics.RETRIES)
        self._prompts = registry.counter(metrics.PROMPTS)
        self._bytes = registry.counter(metrics.HANDOFF_BYTES)
        # A rate that rises from nothing is not seen: what alert rules look at is there from the beginning.
        for option in SERVED:
            self._placements.labels(option.value)
        for kv in KV_SOURCES:
            self._prompts.labels(kv)
        for finish in ("stop", "length", "error", "abort"):
            self._requests.labels(finish)

    def refused(self, reason: str) -> None:
        """A request was not taken."""
        self._refusals.labels(reason).inc()

    def over(self, trail: Trail, operation: str, model: str, *, recomputed: bool) -> None:
        """A request is over."""
        labels = (operation, PROVIDER, model)
        finished_s = trail.finished_s or trail.received_s
        self._requests.labels(trail.ended_by).inc()
        self._duration.labels(*labels, trail.error_type).observe(finished_s - trail.received_s)
        for kind, tokens in (
            ("input", trail.prompt_tokens),
            ("cached_input", trail.cached_tokens),
            ("output", trail.completion_tokens),
        ):
            self._tokens.labels(kind).inc(tokens)
        if trail.first_token_s is not None:
            self._ttft.labels(*labels).observe(trail.first_token_s - trail.received_s)
            if trail.completion_tokens > 1:
                per_token_s = (finished_s - trail.first_token_s) / (trail.completion_tokens - 1)
                self._tpot.labels(*labels).observe(per_token_s)
            self._queue.observe(trail.prefill_queue_ms / 1000)
            self._prefill.observe(trail.prefill_run_ms / 1000)
        self._attempts(trail)
        self._prompts.labels(_kv_of(trail, recomputed=recomputed)).inc()
        self._bytes.inc(trail.transferred_bytes)
        if trail.exposed_s is not None:
            self._exposed.observe(trail.exposed_s)

    def _attempts(self, trail: Trail) -> None:
        for failed in trail.failed_attempts:
            if failed.option:
                self._placements.labels(failed.option).inc()
        if trail.attempts > len(trail.failed_attempts) and trail.option:
            self._placements.labels(trail.option).inc()
        retried = trail.failed_attempts[: max(0, trail.attempts - 1)]
        for failed in retried:
            self._retries.labels(failed.error_type).inc()


def _kv_of(trail: Trail, *, recomputed: bool) -> str:
    if recomputed:
        return "recomputed"
    if trail.transferred_tokens:
        return "transferred"
    return "local" if trail.decode_started_s is not None else "none"


class _Active(Protocol):
    room: WaitingRoom
    recomputed_prompts: int
    roles: RoleDriver

    @property
    def active_requests(self) -> int: ...

    def waiting_for(self) -> str: ...


class ClusterMetrics(Collector):
    """What the router's books say now."""

    def __init__(self, pool: WorkerPool, active: _Active) -> None:
        self._pool = pool
        self._active = active

    def collect(self) -> Iterable[Family]:
        """See Collector."""
        counts = self._pool.handoffs.counts()
        yield family(metrics.ACTIVE, {(): self._active.active_requests})
        yield family(metrics.QUEUED, {(): len(self._active.room)})
        yield family(metrics.READY, {(): float(not self._active.waiting_for())})
        yield family(metrics.RECOMPUTED, {(): self._active.recomputed_prompts})
        yield family(metrics.HANDOFFS, {(state.value,): counts.get(state, 0) for state in _LIVE})
        yield family(metrics.HANDOFFS_OVER, {(state.value,): counts.get(state, 0) for state in _OVER})
        states = Counter(member.state.value for member in self._pool.members)
        yield family(metrics.WORKERS, {(state,): count for state, count in states.items()})
        yield family(metrics.KNOWN_BLOCKS, {(): self._pool.prefixes.blocks})
        yield family(metrics.STEP_ERROR, dict(self._step_errors()))
        roles = self._active.roles
        advised: dict[tuple[str, ...], float] = {}
        if roles.latest.role is not None:
            advised[roles.latest.worker, roles.latest.role.value] = 1.0
        yield family(metrics.ROLE_ADVICE, advised)
        yield family(metrics.ROLE_CHANGES, {(): roles.changes})
        yield from self._links()

    def _step_errors(self) -> Iterable[tuple[tuple[str, ...], float]]:
        names = {member.address: member.worker_id for member in self._pool.members}
        for address, model in self._pool.step_models.all().items():
            if address in names and model.error is not None:
                yield (names[address],), model.error

    def _links(self) -> Iterable[Family]:
        links = {(link.lives[0].worker_id, link.lives[1].worker_id): link for link in self._pool.links}
        yield family(
            metrics.LINK_STATE,
            {
                (*ends, state.name.lower()): float(link.state is state)
                for ends, link in links.items()
                for state in LinkState
            },
        )
        yield family(metrics.LINK_RATE, {ends: link.report.bytes_per_s for ends, link in links.items()})
        yield family(metrics.LINK_LATENCY, {ends: link.report.latency_ms / 1000 for ends, link in links.items()})
        yield family(metrics.LINK_FAILURES, {ends: link.failures for ends, link in links.items()})
        lanes: dict[tuple[str, ...], float] = {
            (*ends, "+".join(link.report.lanes), str(link.report.rdma).lower()): 1.0
            for ends, link in links.items()
            if link.report.lanes
        }
        yield family(metrics.LINK_LANES, lanes)
