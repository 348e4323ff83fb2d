"""The ways from prefill workers to decode workers: probed before use, watched in use, set aside when they fail.

A link joins one life of a prefill worker and one life of a decode worker. What fails on it is held against the pair,
never against one of the two.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum

from twostroke.errors import TwostrokeError
from twostroke.policy.breaker import Breakers, BreakerSettings, BreakerState
from twostroke.policy.snapshot import DEFAULT_LINK, LinkSnapshot
from twostroke.router.member import Member
from twostroke.v1.worker_pb2 import ProbeLinkResponse

log = logging.getLogger(__name__)

Pair = tuple[str, str]
"""Addresses of the prefill and the decode worker."""

RETRY_S = 0.5
BREAKER = BreakerSettings(failures=3, open_s=RETRY_S, most_open_s=30.0)


class LinkState(Enum):
    """How a link stands."""

    PROBING = "is being probed"
    READY = "is ready"
    QUARANTINED = "failed"


class Link:
    """One link. `changed` is called when it begins or ceases to take traffic, and when a probe fails."""

    def __init__(self, source: Member, reader: Member, breakers: Breakers[Pair], changed: Callable[[], None]) -> None:
        assert source.info is not None
        self.pair = (source.address, reader.address)
        self.lives = (source.life, reader.life)
        self.state = LinkState.PROBING
        self.detail = ""
        self.report = ProbeLinkResponse()
        """What the last probe found."""
        self.failures = 0
        self._source = source.info
        self._reader = reader
        self._breakers = breakers
        self._changed = changed
        self._broken = asyncio.Event()
        if not source.info.kv_endpoint.addresses:
            self.state = LinkState.READY

    @property
    def name(self) -> str:
        """As logs and readiness name it."""
        return f"{self.lives[0].worker_id} -> {self.lives[1].worker_id}"

    async def run(self) -> None:
        """Probes until the link works, and again after it failed; returns only by cancellation."""
        while True:
            if self.state is LinkState.READY:
                self._broken.clear()
                await self._broken.wait()
            elif self.state is LinkState.QUARANTINED:
                await asyncio.sleep(RETRY_S)
            if self._breakers.state(self.pair, time.monotonic()) is not BreakerState.OPEN:
                await self._probe()

    async def _probe(self) -> None:
        """A probe that succeeds lets traffic through; the breaker stays half-open until a transfer succeeds, too."""
        if self._source.kv_endpoint.addresses:
            try:
                found = await self._reader.probe_link(self._source)
            except TwostrokeError as error:
                self.failures += 1
                self._breakers.failed(self.pair, time.monotonic())
                self._set(LinkState.QUARANTINED, error.message)
                return
            if self.report.lanes != found.lanes:
                log.info(
                    "link %s uses %s%s: %.2f GB/s, %.3f ms",
                    *(self.name, ", ".join(found.lanes) or "transports that it does not name"),
                    *("" if found.rdma else " (no RDMA)", found.bytes_per_s / 1e9, found.latency_ms),
                )
            self.report = found
        self._set(LinkState.READY, "")

    def failed(self, error: TwostrokeError) -> None:
        """A transfer failed."""
        self.failures += 1
        if self._breakers.failed(self.pair, time.monotonic()) and self.state is LinkState.READY:
            self._set(LinkState.QUARANTINED, f"transfers in a row failed, the last one: {error.message}")
            self._broken.set()

    def succeeded(self) -> None:
        """A transfer came through."""
        self._breakers.succeeded(self.pair, time.monotonic())

    def _set(self, state: LinkState, detail: str) -> None:
        if (state, detail) == (self.state, self.detail):
            return
        if state is LinkState.QUARANTINED:
            log.error("link %s takes no traffic: %s", self.name, detail)
        elif self.state is LinkState.QUARANTINED:
            log.info("link %s works again", self.name)
        self.state, self.detail = state, detail
        self._changed()


class Links:
    """The links between all ready workers that can exchange KV. `changed`: see Link."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._links: dict[Pair, Link] = {}
        self._tasks: dict[Pair, asyncio.Task[None]] = {}
        self._snapshots: dict[Pair, LinkSnapshot] = {}
        self._breakers: Breakers[Pair] = Breakers(BREAKER)

    def follow(self, group: asyncio.TaskGroup, pairs: Iterable[tuple[Member, Member]]) -> None:
        """Keeps a link for each of these pairs and for no other. group: owns the links' tasks."""
        wanted = {(source.address, reader.address): (source, reader) for source, reader in pairs}
        for pair, link in list(self._links.items()):
            if pair not in wanted or link.lives != (wanted[pair][0].life, wanted[pair][1].life):
                del self._links[pair]
                self._breakers.forget(pair)
                self._tasks.pop(pair).cancel()
        for pair in wanted.keys() - self._links.keys():
            link = self._links[pair] = Link(*wanted[pair], self._breakers, self._on_change)
            self._tasks[pair] = group.create_task(link.run(), name=f"link {link.name}")
        self._remember()

    def _on_change(self) -> None:
        self._remember()
        self._changed()

    def _remember(self) -> None:
        self._snapshots = {
            pair: LinkSnapshot(
                bytes_per_s=link.report.bytes_per_s or DEFAULT_LINK.bytes_per_s,
                latency_s=DEFAULT_LINK.latency_s + link.report.latency_ms / 1000,
                healthy=link.state is LinkState.READY,
            )
            for pair, link in self._links.items()
        }

    def __iter__(self) -> Iterator[Link]:
        return iter(sorted(self._links.values(), key=lambda link: link.name))

    def usable(self, pair: Pair) -> bool:
        """Whether a link takes traffic."""
        link = self._links.get(pair)
        return link is not None and link.state is LinkState.READY

    def snapshots(self) -> Mapping[Pair, LinkSnapshot]:
        """For placement."""
        return self._snapshots

    def waiting_for(self, pairs: Sequence[Pair]) -> str:
        """Why none of these pairs takes traffic."""
        found = [self._links[pair] for pair in pairs if pair in self._links]
        probing = [link for link in found if link.state is LinkState.PROBING]
        if probing:
            return f"the link {probing[0].name}, which {LinkState.PROBING.value}"
        failed = "; ".join(f"the link {link.name}, which {link.state.value}: {link.detail}" for link in found)
        return failed or "a link"

    def report(self, pair: Pair) -> ProbeLinkResponse | None:
        """What the last probe of a link found."""
        link = self._links.get(pair)
        return link.report if link is not None else None

    def failed(self, pair: Pair, error: TwostrokeError) -> None:
        """A transfer over a link failed."""
        if link := self._links.get(pair):
            link.failed(error)

    def succeeded(self, pair: Pair) -> None:
        """A transfer over a link came through."""
        if link := self._links.get(pair):
            link.succeeded()
