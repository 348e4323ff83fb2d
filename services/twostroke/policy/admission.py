"""The queue in front of placement: who is next, who is refused at once, and when to come back.

Across tenants: the more urgent priority first, else the tenant that had least of the cluster so far. Within a tenant:
earlier arrivals, shorter prompts, nearer deadlines and more urgent priorities first, all as seconds on one scale, so
that everything that waits is passed only for so long.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from twostroke.errors import DeadlineError, OverloadedError
from twostroke.policy.snapshot import PlacementRequest

FEW_TENANTS = 512


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """How the queue behaves.

    most_queued: entries per priority; one more is refused.
    most_in_flight: started and not ended requests per tenant; 0 is no bound.
    weights: share of a tenant relative to others; 1 for those not named.
    priority_step_s: a request that waited so long is as urgent as a fresh one of the next priority.
    shortness: a prompt of x seconds is let wait for what arrives in the shortness * x seconds after it.
    patience_s: after waiting so long for room, a request is no longer passed by smaller ones.
    tries: requests that are asked for in vain before the queue waits for a change.
    refuse_margin: share of the deadline by which the predicted end must be late for a refusal: predictions err.
    """

    most_queued: int = 1024
    most_in_flight: int = 0
    weights: Mapping[str, float] = field(default_factory=dict)
    priority_step_s: float = 10.0
    shortness: float = 2.0
    patience_s: float = 5.0
    tries: int = 8
    refuse_margin: float = 0.1


@dataclass(frozen=True, slots=True)
class Entry:
    """A request in the queue.

    arrived_s: a moment of the monotonic clock. prefill_s, answer_s: predicted seconds of the two strokes.
    """

    request_id: str
    request: PlacementRequest
    arrived_s: float
    prefill_s: float
    answer_s: float = 0.0

    @property
    def due_s(self) -> float:
        """The moment by which the answer must be complete."""
        deadline_s = self.request.deadline_s
        return math.inf if deadline_s is None else self.arrived_s + deadline_s


@dataclass(frozen=True, slots=True)
class Servers:
    """Who works the queue off. count: workers that compute prompts. busy_s: until the first of them is free."""

    count: int
    busy_s: float = 0.0


@dataclass(slots=True)
class _Tenant:
    name: str
    weight: float
    heap: list[tuple[float, int, Entry]] = field(default_factory=list)
    had_s: float = 0.0
    """Predicted seconds of prefill it was given, by weight; raised to the others' when it comes back."""
    started_s: float = -math.inf
    queued: int = 0
    in_flight: int = 0


class AdmissionQueue:
    """One per router. Not safe for several threads."""

    def __init__(self, settings: QueueSettings | None = None) -> None:
        self._settings = settings or QueueSettings()
        self._tenants: dict[str, _Tenant] = {}
        self._queued: dict[str, Entry] = {}
        self._by_priority: dict[int, int] = {}
        self._started: dict[str, _Tenant] = {}
        self._floor_s = 0.0
        self._count = 0
        self._remembered = FEW_TENANTS

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._queued)

    @property
    def prefill_s(self) -> float:
        """Predicted seconds of prefill that wait."""
        return sum(entry.prefill_s for entry in self._queued.values())

    def offer(self, entry: Entry, servers: Servers) -> None:
        """Queues a request.

        Raises OverloadedError when its priority's queue is full, or when its deadline is predicted to pass, with the
        seconds in which the queue will have drained far enough; DeadlineError when that would not help.
        """
        priority = entry.request.priority
        queued = self._by_priority.get(priority, 0)
        if queued >= self._settings.most_queued:
            drain_s = self._drain_s(priority, math.inf, servers)
            raise OverloadedError(
                f"{queued} requests of priority {priority} wait already; come back later or raise the queue's bound",
                retry_after_s=max(1.0, drain_s / 2),
            )
        self._refuse_hopeless(entry, servers)
        tenant = self._tenant(entry.request.tenant)
        if not tenant.queued:
            tenant.had_s = max(tenant.had_s, self._floor_s)
        self._count += 1
        heapq.heappush(tenant.heap, (self._key_s(entry), self._count, entry))
        tenant.queued += 1
        self._queued[entry.request_id] = entry
        self._by_priority[priority] = queued + 1

    def _refuse_hopeless(self, entry: Entry, servers: Servers) -> None:
        deadline_s = entry.request.deadline_s
        if deadline_s is None:
            return
        wait_s = self.wait_s(entry, servers)
        late_s = wait_s + entry.prefill_s + entry.answer_s - deadline_s * (1 + self._settings.refuse_margin)
        if late_s <= 0:
            return
        message = (
            f"the answer is predicted {late_s:.1f} s after its deadline: {wait_s:.1f} s of queue, "
            f"{entry.prefill_s:.1f} s of prompt, {entry.answer_s:.1f} s of answer"
        )
        if late_s > wait_s:
            raise DeadlineError(message)
        raise OverloadedError(message, retry_after_s=max(1.0, late_s))

    def wait_s(self, entry: Entry, servers: Servers) -> float:
        """Predicted wait of a request that would come now: what is ahead of it, by the order within a tenant."""
        return self._drain_s(entry.request.priority, self._key_s(entry), servers)

    def _drain_s(self, priority: int, key_s: float, servers: Servers) -> float:
        ahead_s = sum(
            each.prefill_s
            for each in self._queued.values()
            if each.request.priority < priority or (each.request.priority == priority and self._key_s(each) <= key_s)
        )
        return servers.busy_s + ahead_s / max(1, servers.count)

    def start(self, now_s: float, try_start: Callable[[Entry], bool]) -> list[Entry]:
        """Starts what can start now, in order. try_start places a request and carries the plan out; it returns whether
        there was room. One that finds none is passed by others, until it has waited for settings.patience_s; one that
        it cancels is gone."""
        started: list[Entry] = []
        tries = self._settings.tries
        passed: set[str] = set()
        while tries and (entry := self._next(now_s, passed)):
            if try_start(entry):
                self._take(entry, now_s)
                started.append(entry)
                continue
            tries -= 1
            if entry.request_id not in self._queued:
                continue
            passed.add(entry.request_id)
            if now_s - entry.arrived_s > self._settings.patience_s:
                break
        return started

    def _next(self, now_s: float, passed: set[str]) -> Entry | None:
        best: tuple[tuple[object, ...], Entry] | None = None
        most = self._settings.most_in_flight
        for tenant in self._tenants.values():
            if most and tenant.in_flight >= most:
                continue
            head = next(self._heads(tenant, passed), None)
            if head is None:
                continue
            key_s, count, entry = head
            waited_s = now_s - max(tenant.started_s, entry.arrived_s)
            urgency = entry.request.priority - int(waited_s // self._settings.priority_step_s)
            rank = (urgency, tenant.had_s, key_s, count)
            if best is None or rank < best[0]:
                best = rank, entry
        return best[1] if best else None

    def _heads(self, tenant: _Tenant, passed: set[str]) -> Iterator[tuple[float, int, Entry]]:
        """A tenant's entries in order, those that are over or passed left out; the former for good."""
        heap = tenant.heap
        while heap and self._queued.get(heap[0][2].request_id) is not heap[0][2]:
            heapq.heappop(heap)
        if heap and heap[0][2].request_id not in passed:
            yield heap[0]
        elif heap:
            for item in heapq.nsmallest(len(passed) + 1, self._live(heap)):
                if item[2].request_id not in passed:
                    yield item

    def _live(self, heap: list[tuple[float, int, Entry]]) -> Iterator[tuple[float, int, Entry]]:
        return (item for item in heap if self._queued.get(item[2].request_id) is item[2])

    def _take(self, entry: Entry, now_s: float) -> None:
        self.cancel(entry.request_id)
        tenant = self._tenant(entry.request.tenant)
        self._floor_s = max(self._floor_s, tenant.had_s)
        tenant.had_s += entry.prefill_s / tenant.weight
        if not self._queued:
            # Nobody waits: what a tenant had while nobody else wanted it is not held against it.
            self._floor_s = max(self._floor_s, tenant.had_s)
        tenant.started_s = now_s
        tenant.in_flight += 1
        self._started[entry.request_id] = tenant

    def cancel(self, request_id: str) -> None:
        """Takes a request out of the queue; ids that do not wait are ignored."""
        if entry := self._queued.pop(request_id, None):
            self._by_priority[entry.request.priority] -= 1
            self._tenant(entry.request.tenant).queued -= 1

    def ended(self, request_id: str) -> None:
        """A started request is over; others are ignored."""
        if tenant := self._started.pop(request_id, None):
            tenant.in_flight -= 1

    def overdue(self, now_s: float) -> list[Entry]:
        """Takes out those whose deadline has passed."""
        late = [entry for entry in self._queued.values() if entry.due_s <= now_s]
        for entry in late:
            self.cancel(entry.request_id)
        return late

    def _tenant(self, name: str) -> _Tenant:
        found = self._tenants.get(name)
        if found is None:
            if len(self._tenants) > 2 * self._remembered:
                self._forget_idle()
            found = self._tenants[name] = _Tenant(name, max(1e-3, self._settings.weights.get(name, 1.0)))
        return found

    def _forget_idle(self) -> None:
        """Tenants with nothing here that had no more than the others would begin anew just as they stand."""
        self._tenants = {
            name: tenant
            for name, tenant in self._tenants.items()
            if tenant.queued or tenant.in_flight or tenant.had_s > self._floor_s
        }
        self._remembered = max(FEW_TENANTS, len(self._tenants))

    def _key_s(self, entry: Entry) -> float:
        """The moment by which, within a tenant, it would be fair to start a request."""
        settings = self._settings
        fair_s = entry.arrived_s + settings.shortness * entry.prefill_s
        fair_s += settings.priority_step_s * entry.request.priority
        return min(fair_s, entry.due_s - entry.answer_s - 2 * entry.prefill_s)
