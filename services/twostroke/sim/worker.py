"""A worker as the simulated router knows it."""

from __future__ import annotations

from collections.abc import Sequence as Items
from enum import Enum

from twostroke.policy.snapshot import DEFAULT_SLO, Slo, WorkerSnapshot, tightest
from twostroke.sim.engine import Engine
from twostroke.sim.fleet import Role, WorkerKind
from twostroke.sim.sequence import Sequence


class State(Enum):
    """Where a worker's life stands."""

    STARTING = "starting"
    READY = "ready"
    RESTING = "resting"
    """Up, but sent nothing while it changes its role."""
    DRAINING = "draining"
    GONE = "gone"


class Port:
    """What a worker sends or receives KV through; one transfer at a time."""

    __slots__ = ("free_s",)

    def __init__(self) -> None:
        self.free_s = 0.0


class Worker:
    """One replica, its role and its place in the fleet. since_s: when it was asked for."""

    __slots__ = (
        "_seen",
        "engine",
        "expected",
        "expected_context",
        "flights",
        "gone_s",
        "ingress",
        "kind",
        "name",
        "outgress",
        "paid_s",
        "promised",
        "role",
        "since_s",
        "slo",
        "slos",
        "state",
    )

    def __init__(self, name: str, kind: WorkerKind, role: Role, engine: Engine, ports: tuple[Port, Port]) -> None:
        self.name = name
        self.kind = kind
        self.role = role
        self.engine = engine
        self.outgress, self.ingress = ports
        self.state = State.READY
        self.since_s = 0.0
        self.gone_s = -1.0
        self.paid_s = 0.0
        """Of earlier lives, before failures."""
        self.flights = 0
        """Requests in the air that need it."""
        self.expected = 0
        """Answers placed here whose prompts have no blocks here yet."""
        self.promised = 0
        """Their blocks."""
        self.expected_context = 0
        """Their prompt tokens."""
        self.slo: Slo = DEFAULT_SLO
        """Of requests of which nothing was asked."""
        self.slos: dict[Slo, int] = {}
        """How many of its flights have which class."""
        self._seen: WorkerSnapshot | None = None

    def promise(self, prompt_tokens: int) -> None:
        """An answer will be written here once its prompt is computed elsewhere."""
        self.expected += 1
        self.promised += -(-prompt_tokens // self.kind.limits.block_tokens)
        self.expected_context += prompt_tokens
        self.engine.changed = True

    def unpromise(self, prompt_tokens: int) -> None:
        """The promise is kept or taken back."""
        self.expected -= 1
        self.promised -= -(-prompt_tokens // self.kind.limits.block_tokens)
        self.expected_context -= prompt_tokens
        self.engine.changed = True

    def take(self, slo: Slo | None) -> None:
        """A flight of that class needs it."""
        self.flights += 1
        if slo is not None:
            self.slos[slo] = self.slos.get(slo, 0) + 1

    def leave(self, slo: Slo | None) -> None:
        """It needs it no more."""
        self.flights -= 1
        if slo is not None:
            self.slos[slo] -= 1
            self.engine.changed = True

    def snapshot(self, now_s: float) -> WorkerSnapshot:
        """For placement: as it stood when the composition of its batch or queues last changed."""
        engine = self.engine
        if self._seen is not None and not engine.changed:
            return self._seen
        context_tokens = engine.sync(now_s)
        engine.changed = False
        limits, store, role = self.kind.limits, engine.store, self.role
        self._seen = WorkerSnapshot(
            worker=self.name,
            reads_prompts=role.reads_prompts,
            writes_answers=role.writes_answers,
            pending_prompt_tokens=engine.pending_tokens,
            running_sequences=engine.sequences + self.expected,
            free_blocks=max(0, store.total - store.used - self.promised),
            block_size_tokens=limits.block_tokens,
            pending_prompts=engine.pending_prompts,
            context_tokens=context_tokens + self.expected_context,
            total_blocks=store.total,
            step_budget_tokens=limits.budget_tokens,
            max_sequences=limits.sequences,
            most_step_s=limits.most_step_s,
            spare_share=limits.spare_share,
            computes=engine.busy,
            slo=tightest(self.slos, self.slo) if self.slos else self.slo,
            step_model=limits.model,
            prefill_token_s=limits.prefill_token_s,
        )
        return self._seen


class Flight:
    """A request in the air, with its strokes."""

    __slots__ = (
        "at_decode",
        "computed",
        "decode",
        "delivered",
        "done",
        "done_s",
        "prefill",
        "pulled",
        "reading",
        "request",
        "reserved",
        "slo",
        "writing",
    )

    def __init__(self, request: int, delivered: int, decode: Worker, slo: Slo | None) -> None:
        self.request = request
        self.slo = slo
        self.delivered = delivered
        """Tokens that the client had when this attempt began."""
        self.decode = decode
        self.prefill: Worker | None = None
        self.reading: Sequence | None = None
        """The PREFILL stroke, while its blocks are held."""
        self.writing: Sequence | None = None
        """The WHOLE or DECODE stroke."""
        self.at_decode = False
        """Decode was told."""
        self.reserved = False
        self.done = False
        """The prompt is computed."""
        self.done_s = 0.0
        self.computed = 0
        self.pulled = 0


NO_HASHES: Items[int] = ()
NOBODY: frozenset[str] = frozenset()
