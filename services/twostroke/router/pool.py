"""All workers that the router knows, and whether they can serve."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from twostroke.config import RouterSettings
from twostroke.kv.layout import difference
from twostroke.policy.inflight import InFlight, Report
from twostroke.policy.ledger import Life
from twostroke.policy.placement import ClusterSnapshot, place
from twostroke.policy.plan import STRICT, Limits, Plan
from twostroke.policy.snapshot import PlacementRequest
from twostroke.router.discovery import resolve
from twostroke.router.handoffs import Handoffs
from twostroke.router.links import Links
from twostroke.router.member import Member, MemberState
from twostroke.v1.worker_pb2 import ROLE_DECODE, ROLE_PREFILL, GetInfoResponse

log = logging.getLogger(__name__)

_IN_USE = (MemberState.READY, MemberState.QUIET, MemberState.DRAINING)

REPORT_S = 0.25
OPTIONS = replace(STRICT, wait=True)


class WorkerPool:
    """Keeps a Member per address of the configured targets.

    step_done: called after every decode step with all its rows delivered.
    """

    def __init__(
        self,
        settings: RouterSettings,
        router_id: str,
        *,
        step_done: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._router_id = router_id
        self._targets = settings.worker_targets()
        self._max_model_len_tokens = 0
        self._step_done = step_done
        self._members: dict[str, Member] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._failures: tuple[str, ...] = ()
        self._changed = asyncio.Event()
        self._state_changed = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        self.refused_pairs: dict[tuple[str, str], str] = {}
        self.inflight = InFlight()
        """What this router has placed and the workers have not reported yet."""
        self._limits = Limits(prefill_window_tokens=settings.prefill_queue_tokens)
        self._served_s = -math.inf
        """When the cluster could last serve; now, while it can."""
        self.links = Links(self._announce)
        self.handoffs = Handoffs(self.member)

    @property
    def members(self) -> Sequence[Member]:
        """Every worker known, in order of address."""
        return [self._members[address] for address in sorted(self._members)]

    def member(self, address: str) -> Member | None:
        """The worker at an address, if it is still known."""
        return self._members.get(address)

    async def run(self, max_model_len_tokens: int = 0) -> None:
        """Follows the targets; returns only by cancellation, which closes every connection.

        max_model_len_tokens: what the front end promises its clients; a worker with less is refused. 0 promises what
        the workers have.
        """
        self._max_model_len_tokens = max_model_len_tokens
        try:
            async with asyncio.TaskGroup() as self._group:
                while True:
                    found = await resolve(self._targets)
                    if found.failures != self._failures:
                        self._failures = found.failures
                        for failure in found.failures:
                            log.warning("%s", failure)
                        self._on_change()
                    self._follow(self._group, found.addresses, keep=bool(found.failures))
                    await asyncio.sleep(self._settings.resolve_interval_s)
        finally:
            self._members.clear()
            self._tasks.clear()

    def _follow(self, group: asyncio.TaskGroup, addresses: frozenset[str], *, keep: bool) -> None:
        for address in addresses - self._members.keys():
            member = Member(
                address,
                self._router_id,
                self._settings.rpc,
                timeout_s=self._settings.worker_timeout_s,
                accept=self._accept,
                changed=self._on_change,
                load_changed=partial(self._on_report, address),
                step_done=self._step_done,
                ended=self._on_end,
            )
            self._members[address] = member
            self._tasks[address] = group.create_task(member.run(), name=f"worker {address}")
        for address in self._members.keys() - addresses:
            # A resolver that fails says nothing about the workers that it named before. Who has requests is first found
            # lost, which tells them, or ends by itself.
            if not keep and self._members[address].state not in _IN_USE:
                log.info("worker %s is no longer named by %s", address, ",".join(self._targets))
                self._members.pop(address).end_life()
                self._tasks.pop(address).cancel()
                self._on_change()

    def _accept(self, info: GetInfoResponse) -> str | None:
        if info.max_model_len_tokens < self._max_model_len_tokens:
            return (
                f"the router serves sequences of {self._max_model_len_tokens} tokens, the worker only "
                f"{info.max_model_len_tokens}; set --max-model-len-tokens alike on both"
            )
        return None

    def _on_end(self, life: Life) -> None:
        self.inflight.forget(life.worker)
        self.handoffs.ended(life)

    def _on_report(self, address: str) -> None:
        if (member := self._members.get(address)) and (load := member.load):
            report = Report(
                pending_prompt_tokens=load.pending_prompt_tokens,
                pending_prompts=load.waiting_requests,
                used_blocks=load.used_blocks,
                running_sequences=load.running_requests,
            )
            self.inflight.reported(address, report, time.monotonic())
        self._on_load()

    def _on_change(self) -> None:
        for member in self.ready_members():
            self.inflight.describe(member.snapshot())
        self._compare()
        if self._group is not None:
            self.links.follow(self._group, self._pairs())
        self._announce()

    def _announce(self) -> None:
        if self._served_s == math.inf:
            self._served_s = time.monotonic()
        if not self.waiting_for():
            self._served_s = math.inf
        self._state_changed.set()
        self._state_changed = asyncio.Event()
        self._on_load()

    def _on_load(self) -> None:
        # Many times a second: nothing that loads alone cannot change is looked at.
        self._changed.set()
        self._changed = asyncio.Event()

    def _compare(self) -> None:
        described = [(member, member.info) for member in self.members if member.info is not None]
        refused = {
            (prefill.address, decode.address): why
            for prefill, prefill_info in described
            if prefill_info.role != ROLE_DECODE
            for decode, decode_info in described
            if decode_info.role != ROLE_PREFILL and prefill is not decode
            if (why := difference(prefill_info.layout, decode_info.layout))
        }
        for pair, why in refused.items():
            if pair not in self.refused_pairs:
                log.error("%s and %s cannot exchange KV: %s", *pair, why)
        self.refused_pairs = refused

    def _pairs(self) -> list[tuple[Member, Member]]:
        # A worker that takes nothing new for a while keeps its links, and what is known of them.
        states = (MemberState.READY, MemberState.QUIET, MemberState.DRAINING)
        known = [(member, member.snapshot()) for member in self.members if member.state in states]
        return [
            (source, reader)
            for source, source_now in known
            if source_now.reads_prompts
            for reader, reader_now in known
            if reader_now.writes_answers and source is not reader
            if (source.address, reader.address) not in self.refused_pairs
        ]

    async def wait_changed(self) -> None:
        """Returns at the next change of any worker, its load included."""
        await self._changed.wait()

    async def wait_report(self) -> None:
        """Returns at the next change of any worker, its load included, or after REPORT_S."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REPORT_S):
                await self._changed.wait()

    async def wait_state_changed(self) -> None:
        """Returns at the next change of which workers there are and how they stand."""
        await self._state_changed.wait()

    def ready_members(self) -> list[Member]:
        """The workers that take requests."""
        return [member for member in self.members if member.state is MemberState.READY]

    def snapshot(self) -> ClusterSnapshot:
        """For placement."""
        return ClusterSnapshot(
            self.inflight.snapshots([member.address for member in self.ready_members()]),
            frozenset(self.refused_pairs.keys()),
            self.links.snapshots(),
        )

    def place(self, request: PlacementRequest, snapshot: ClusterSnapshot | None = None, *, waits: bool = True) -> Plan:
        """A plan; where there is no room, to WAIT until `wait_changed`, or else to use a full worker.

        snapshot: instead of the present one. Raises NoWorkerError when nothing can serve the request now.
        """
        return place(request, snapshot or self.snapshot(), OPTIONS if waits else STRICT, limits=self._limits)

    def away_s(self) -> float:
        """How long the cluster has not been able to serve; infinite when it never was."""
        return max(0.0, time.monotonic() - self._served_s)

    def max_model_len_tokens(self) -> int:
        """The longest sequence that every ready worker takes; 0 when none is ready."""
        lengths = [member.info.max_model_len_tokens for member in self.ready_members() if member.info]
        return self._max_model_len_tokens or min(lengths, default=0)

    def waiting_for(self) -> str:
        """What keeps the router from serving; empty when nothing does."""
        workers = self.snapshot().workers
        readers = [worker.worker for worker in workers if worker.reads_prompts]
        writers = [worker.worker for worker in workers if worker.writes_answers]
        pairs = [(p, d) for p in readers for d in writers if (p, d) not in self.refused_pairs]
        if any(p == d or self.links.usable((p, d)) for p, d in pairs):
            return ""
        if pairs:
            return self.links.waiting_for(pairs)
        missing = [f"a {role} worker" for role, found in (("prefill", readers), ("decode", writers)) if not found]
        if not missing:
            return "a pair that can exchange KV: " + "; ".join(sorted(set(self.refused_pairs.values())))
        known = [
            f"{member.address} is {member.state.value}{f': {member.detail}' * bool(member.detail)}"
            for member in self.members
            if member.state is not MemberState.READY
        ]
        return " and ".join(missing) + " (" + ("; ".join([*known, *self._failures]) or "none configured") + ")"
