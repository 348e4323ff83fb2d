"""Who decides where a request goes: the router's own policy, or a simple rule to compare it with."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import NamedTuple, Protocol

from twostroke.errors import NoWorkerError
from twostroke.policy.placement import DEFAULT_LIMITS, place
from twostroke.policy.plan import ALL_WAYS, Options
from twostroke.policy.plan import Limits as PolicyLimits
from twostroke.policy.snapshot import DEFAULT_SLO, ClusterSnapshot, LinkSnapshot, PlacementRequest, Slo
from twostroke.policy.spare import Lenders, share_cores
from twostroke.sim.fleet import Fleet
from twostroke.sim.traffic import Asked
from twostroke.sim.worker import State, Worker


class Placed(NamedTuple):
    """prefill: None when decode computes the prompt itself. decode: None when the request is refused.

    chunk_tokens: most prompt tokens in a step where the prompt is computed; 0 leaves it to the worker.
    """

    prefill: Worker | None
    decode: Worker | None
    chunk_tokens: int = 0


class Placer(Protocol):
    """Decides, and hears which workers there are.

    shortest_first: whether prompts take turns on its workers as on ours (policy/turns.py), or the oldest goes first.
    """

    shortest_first: bool

    def added(self, worker: Worker) -> None:
        """A worker is there; it may be starting still."""
        ...

    def left(self, worker: Worker) -> None:
        """A worker takes no more requests."""
        ...

    def place(
        self, prompt_tokens: int, hashes: Items[int], avoid: frozenset[str], now_s: float, asked: Asked | None
    ) -> Placed:
        """Raises NoWorkerError."""
        ...


class Cells:
    """Workers by the router that sees them. A fleet of up to cell_workers has one cell."""

    def __init__(self, fleet: Fleet) -> None:
        total = sum(group.count for group in fleet.groups)
        self._cells: list[dict[str, Worker]] = [
            {} for _ in range(-(-total // fleet.cell_workers) if fleet.cell_workers else 1)
        ]
        self._next = 0
        self._added: dict[str, int] = {}
        self._turn = 0
        self._home: dict[str, int] = {}

    def add(self, worker: Worker) -> None:
        """Gives a ready worker to a cell, so that every cell has all roles."""
        if worker.state is not State.READY:
            return
        home = self._home.get(worker.name)
        if home is None:
            count = self._added.get(worker.role.name, 0)
            self._added[worker.role.name] = count + 1
            home = self._home[worker.name] = count % len(self._cells)
        self._cells[home][worker.name] = worker

    def remove(self, worker: Worker) -> None:
        """Takes a worker out."""
        home = self._home.get(worker.name)
        if home is not None:
            self._cells[home].pop(worker.name, None)

    def next(self) -> dict[str, Worker]:
        """The cell of the next arrival."""
        self._turn = (self._turn + 1) % len(self._cells)
        return self._cells[self._turn]


class PolicyPlacer:
    """The router's policy (policy/placement.py), fed with the simulated workers' loads and true prefix caches.

    expected_output_tokens: what the router takes an answer's length to be. deadline_s: of a whole answer, None for
    none. slo: of every request. What was asked of a request goes before both.
    """

    shortest_first: bool = True

    def __init__(
        self,
        fleet: Fleet,
        options: Options = ALL_WAYS,
        *,
        slo: Slo = DEFAULT_SLO,
        expected_output_tokens: int = 128,
        deadline_s: float | None = None,
        limits: PolicyLimits = DEFAULT_LIMITS,
    ) -> None:
        self._limits = limits
        self._cells = Cells(fleet)
        self._options = options
        self._slo = slo
        self._expected = expected_output_tokens
        self._deadline_s = deadline_s
        self._kv_bytes_per_token = int(fleet.kv_bytes_per_token)
        self._streams = fleet.overlap
        self._lends = any(group.kind.limits.spare_model is not None for group in fleet.groups)
        link = fleet.link
        block_tokens = max((group.kind.limits.block_tokens for group in fleet.groups), default=1)
        descriptor_s = link.descriptors_per_block * link.descriptor_s / block_tokens
        token_s = fleet.kv_bytes_per_token / link.bytes_per_s + descriptor_s
        self._link = LinkSnapshot(
            bytes_per_s=fleet.kv_bytes_per_token / token_s if token_s else link.bytes_per_s,
            latency_s=link.start_s + 2 * fleet.hop_s,
        )

    def added(self, worker: Worker) -> None:
        """See Placer."""
        worker.slo = self._slo
        self._cells.add(worker)

    def left(self, worker: Worker) -> None:
        """See Placer."""
        self._cells.remove(worker)

    def place(
        self, prompt_tokens: int, hashes: Items[int], avoid: frozenset[str], now_s: float, asked: Asked | None
    ) -> Placed:
        """See Placer."""
        workers = self._cells.next()
        cached: dict[str, int] = {}
        snapshots = []
        for name, worker in workers.items():
            if hashes and (hits := worker.engine.hits(hashes, now_s)):
                cached[name] = hits * worker.kind.limits.unit_tokens
            snapshots.append(worker.snapshot(now_s))
        plan = place(
            PlacementRequest(
                prompt_tokens,
                avoid,
                expected_output_tokens=asked.expected_output_tokens if asked else self._expected,
                cached_tokens=cached,
                slo=asked.slo if asked else self._slo,
                deadline_s=self._deadline_s,
            ),
            ClusterSnapshot(
                share_cores(snapshots, _lenders(workers)) if self._lends else snapshots,
                default_link=self._link,
                kv_bytes_per_token=self._kv_bytes_per_token,
                streams_kv=self._streams,
            ),
            self._options,
            limits=self._limits,
            explain=False,
        )
        if not plan.decode:
            return Placed(None, None)
        return Placed(workers[plan.prefill] if plan.prefill else None, workers[plan.decode], plan.chunk_tokens or 0)


def _lenders(workers: Mapping[str, Worker]) -> Lenders:
    """On the one machine of a fleet that has spare cores everybody lends to everybody."""
    names = frozenset(workers)
    return {name: names - {name} for name, worker in workers.items() if worker.kind.limits.spare_model is not None}


class TurnsPlacer:
    """Round robin: prefill workers in turn, decode workers in turn; workers of both roles serve whole requests."""

    shortest_first: bool = False

    def __init__(self, fleet: Fleet) -> None:
        self._workers: dict[str, Worker] = {}
        self._turns = [0, 0]
        del fleet

    def added(self, worker: Worker) -> None:
        """See Placer."""
        if worker.state is State.READY:
            self._workers[worker.name] = worker

    def left(self, worker: Worker) -> None:
        """See Placer."""
        self._workers.pop(worker.name, None)

    def place(
        self, prompt_tokens: int, hashes: Items[int], avoid: frozenset[str], now_s: float, asked: Asked | None
    ) -> Placed:
        """See Placer."""
        readers = [worker for worker in self._workers.values() if not worker.role.writes_answers]
        writers = [worker for worker in self._workers.values() if worker.role.writes_answers]
        if not writers:
            raise NoWorkerError("no decode worker is ready")
        prefill = self.reader(readers, hashes, now_s) if readers else None
        if prefill is None:
            return Placed(None, self.reader(writers, hashes, now_s))
        return Placed(prefill, self._in_turn(1, writers))

    def reader(self, readers: list[Worker], hashes: Items[int], now_s: float) -> Worker:
        """Who computes the prompt."""
        return self._in_turn(0, readers)

    def _in_turn(self, which: int, workers: list[Worker]) -> Worker:
        self._turns[which] += 1
        return workers[self._turns[which] % len(workers)]


class PrefixPlacer(TurnsPlacer):
    """Prefix only: who has most of the prompt in its cache computes it, in turns where nobody has half of it."""

    def reader(self, readers: list[Worker], hashes: Items[int], now_s: float) -> Worker:
        """See TurnsPlacer."""
        hits = [worker.engine.hits(hashes, now_s) for worker in readers]
        most = max(hits)
        return readers[hits.index(most)] if 2 * most > len(hashes) else self._in_turn(0, readers)
