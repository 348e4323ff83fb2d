"""All workers that the router knows, and whether they can serve."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from twostroke.config import RouterSettings
from twostroke.policy.breaker import Breakers
from twostroke.policy.inflight import InFlight
from twostroke.policy.ledger import Life
from twostroke.policy.placement import ClusterSnapshot, place
from twostroke.policy.plan import STRICT, Limits, Option, Plan
from twostroke.policy.snapshot import LinkSnapshot, PlacementRequest, WorkerSnapshot
from twostroke.policy.spare import NO_LENDERS, share_cores
from twostroke.router.discovery import resolve
from twostroke.router.handoffs import Handoffs
from twostroke.router.links import Links, Pair
from twostroke.router.member import Member, MemberState
from twostroke.router.pairs import link_pairs, refused_pairs
from twostroke.router.prefixes import Prefixes
from twostroke.router.step_models import StepModels
from twostroke.router.ways import DEFAULT_CLASS, SloClasses, options_of
from twostroke.router.worker_facts import kv_bytes_per_token, lenders, report_of, streams_kv, trusted
from twostroke.v1.worker_pb2 import GetInfoResponse, WatchKvEventsResponse

log = logging.getLogger(__name__)

_IN_USE = (MemberState.READY, MemberState.QUIET, MemberState.DRAINING)

REPORT_S = 0.25
# Another decode worker for KV that is there already.
ANSWER = replace(STRICT, wait=True)
# What was not probed takes no traffic.
NO_LINK = LinkSnapshot(healthy=False)


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
        self.refused_pairs: Mapping[Pair, str] = {}
        self.options = options_of(settings)
        """The ways that are open."""
        self.slo_classes = SloClasses(settings.slo)
        self.inflight = InFlight(slo=self.slo_classes.of(DEFAULT_CLASS))
        """What this router has placed and the workers have not reported yet."""
        self.step_models = StepModels()
        self.prefixes = Prefixes()
        self.resting: frozenset[str] = frozenset()
        """Addresses of workers that are to get nothing new because their role is about to change."""
        self._ready: list[str] = []
        self._breakers: Breakers[str] = Breakers()
        self._kv_bytes_per_token = 0
        self._streams_kv = False
        self._lenders = NO_LENDERS
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
                kv_changed=partial(self._on_kv, address),
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
                self.step_models.forget(address)
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
        self._breakers.forget(life.worker)
        self.prefixes.forget(life.worker)
        self.handoffs.ended(life)

    def _on_report(self, address: str) -> None:
        if (member := self._members.get(address)) and (load := member.load):
            now_s = time.monotonic()
            self.inflight.reported(address, report_of(load), now_s)
            for changed in self.step_models.learn(address, load, now_s):
                self._describe(self._members[changed])
        self._on_load()

    def _on_kv(self, address: str, events: WatchKvEventsResponse) -> bool:
        member = self._members.get(address)
        if member is None or member.info is None:
            return False
        return self.prefixes.apply(address, member.info.block_hashing, events)

    def _on_change(self) -> None:
        for member in self.ready_members():
            assert member.info is not None
            self.step_models.meet(member.address, member.info)
            self._describe(member)
            self._kv_bytes_per_token, self._streams_kv = kv_bytes_per_token(member.info), streams_kv(member.info)
        self._lenders = lenders({member.address: member.info for member in self.members if member.info})
        self.choose_from()
        self._compare()
        if self._group is not None:
            self.links.follow(self._group, self._link_pairs())
        self._announce()

    def _describe(self, member: Member) -> None:
        if member.state is MemberState.READY:
            self.inflight.describe(self.step_models.put_into(member.facts()))

    def choose_from(self, resting: frozenset[str] | None = None) -> None:
        """From now on requests go to the workers that are ready and not resting. resting: as before when None."""
        self.resting = self.resting if resting is None else resting
        self._ready = [member.address for member in self.ready_members() if member.address not in self.resting]

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
        refused = refused_pairs(self.members, self.options)
        for pair, why in refused.items():
            if pair not in self.refused_pairs:
                log.error("%s and %s cannot exchange KV: %s", *pair, why)
        self.refused_pairs = refused

    def _link_pairs(self) -> list[tuple[Member, Member]]:
        # A worker that takes nothing new for a while keeps its links, and what is known of them.
        known = [member for member in self.members if member.state in _IN_USE]
        return link_pairs(known, self.options, self.refused_pairs)

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
        workers = share_cores(self.inflight.snapshots(self._ready), self._lenders)
        if len(self._breakers):
            workers = trusted(workers, partial(self._breakers.ready, now_s=time.monotonic()))
        return ClusterSnapshot(
            workers,
            frozenset(self.refused_pairs.keys()),
            self.links.snapshots(),
            NO_LINK,
            self._kv_bytes_per_token,
            self._streams_kv,
        )

    def used(self, address: str) -> None:
        """A worker is sent a request."""
        self._breakers.sent(address, time.monotonic())

    def worked(self, address: str, *, well: bool) -> None:
        """A worker did its part of a request, or failed at it."""
        if well:
            self._breakers.succeeded(address, time.monotonic())
        elif self._breakers.failed(address, time.monotonic()):
            log.warning("worker %s failed several requests in a row and gets few for a while", address)

    def place(self, request: PlacementRequest, *, waits: bool = True, refuses: bool = True) -> Plan:
        """A plan. Where there is no room, to WAIT until `wait_changed`, or else to use a full worker; where no deadline
        can be met, to REFUSE, unless that is predicted of workers that were not seen to work yet.

        Raises NoWorkerError when nothing can serve the request now.
        """
        options = replace(self.options, wait=waits, refuse=self.options.refuse and refuses)
        plan = place(request, self.snapshot(), options, limits=self._limits)
        if plan.option is Option.REFUSE and not all(
            self.step_models.sure(each.prefill) and self.step_models.sure(each.decode) for each in plan.why
        ):
            return place(request, self.snapshot(), replace(options, refuse=False), limits=self._limits)
        return plan

    def place_answer(self, request: PlacementRequest, snapshot: ClusterSnapshot, *, waits: bool = True) -> Plan:
        """Where the answer of a prompt is written that was computed already. snapshot: with one worker that reads.
        Raises NoWorkerError."""
        return place(request, snapshot, ANSWER if waits else STRICT, limits=self._limits)

    def may_read(self, worker: WorkerSnapshot) -> bool:
        """Whether prompts may be computed on a worker."""
        options = self.options
        return worker.reads_prompts or options.d_alone or options.lent_decoder

    def away_s(self) -> float:
        """How long the cluster has not been able to serve; infinite when it never was."""
        return max(0.0, time.monotonic() - self._served_s)

    def max_model_len_tokens(self) -> int:
        """The longest sequence that every ready worker takes; 0 when none is ready."""
        lengths = [member.info.max_model_len_tokens for member in self.ready_members() if member.info]
        return self._max_model_len_tokens or min(lengths, default=0)

    def waiting_for(self) -> str:
        """What keeps the router from serving; empty when nothing does."""
        workers, options = self.snapshot().workers, self.options
        readers = [worker.worker for worker in workers if worker.reads_prompts]
        writers = [worker.worker for worker in workers if worker.writes_answers]
        if (writers and (options.d_alone or options.lent_decoder)) or (readers and options.p_alone):
            return ""
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
