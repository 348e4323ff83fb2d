"""The configurations that a planner chooses among."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from twostroke.errors import ConfigError
from twostroke.sim.replica import Replica, ReplicaSpec, label, replica
from twostroke.sim.scenario import FleetSpec

BUDGETS = (512, 1024, 2048, 4096, 8192)
SEQUENCES = (32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Inventory:
    """GPUs at hand: (type, how many)."""

    gpus: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int:
        """All of them."""
        return sum(count for _, count in self.gpus)


def parse_inventory(text: str, gpu: str) -> Inventory:
    """From "16", "16xh100" or "8xh100,8xl40s". Raises ConfigError."""
    found = []
    for part in text.replace(" ", "").split(","):
        match = re.fullmatch(r"(\d+)(?:x(.+))?", part)
        if not match or int(match[1]) < 1:
            raise ConfigError(f"--gpus {text}: write a number, or numbers with types such as 8xh100,8xl40s")
        found.append((match[2] or gpu, int(match[1])))
    return Inventory(tuple(found))


@dataclass(frozen=True, slots=True)
class Config:
    """A candidate fleet. One pool: `both` replicas of decode_spec. Two: prefill and decode."""

    prefill: int
    decode: int
    both: int
    prefill_spec: ReplicaSpec
    decode_spec: ReplicaSpec
    policy: str = "strict"

    @property
    def two_pools(self) -> bool:
        """Whether prefill and decode are apart."""
        return self.prefill > 0

    @property
    def gpus(self) -> int:
        """GPUs in use."""
        return self.prefill * _size(self.prefill_spec) + (self.decode + self.both) * _size(self.decode_spec)

    @property
    def dollars_per_hour(self) -> float:
        """Of all of them."""
        first = kind(self.prefill_spec)
        second = kind(self.decode_spec)
        total = self.prefill * first.kind.dollars_per_hour if first and self.prefill else 0.0
        return total + ((self.decode + self.both) * second.kind.dollars_per_hour if second else 0.0)

    def fleet(self, link: FleetSpec) -> FleetSpec:
        """To simulate it. link: whose links and hops to take."""
        return replace(
            link,
            spec=self.decode_spec,
            prefill=self.prefill,
            decode=self.decode,
            both=self.both,
            prefill_spec=self.prefill_spec if self.prefill else None,
            decode_spec=None,
        )

    def text(self) -> str:
        """In a few words."""
        own = self.decode_spec
        if not self.two_pools:
            return (
                f"one pool: {self.both} x {label(own)}, steps of {own.budget_tokens} tokens, {own.sequences} sequences"
            )
        return (
            f"two pools: {self.prefill} x {label(self.prefill_spec)} prefill (steps of "
            f"{self.prefill_spec.budget_tokens}), {self.decode} x {label(own)} decode ({own.sequences} sequences)"
        )


def _size(spec: ReplicaSpec) -> int:
    return spec.tp * spec.pp * spec.dp


@cache
def kind(spec: ReplicaSpec) -> Replica | None:
    """The replica, or None where the model does not fit it."""
    try:
        return replica(spec)
    except ConfigError:
        return None


@dataclass(frozen=True, slots=True)
class Space:
    """What may be varied. base: all else. fixed: a profile, whose parallelism and hardware are what they are."""

    base: ReplicaSpec
    inventory: Inventory
    tps: Sequence[int] = (1, 2, 4, 8)
    pps: Sequence[int] = (1,)
    eps: Sequence[int] = (1,)
    budgets: Sequence[int] = BUDGETS
    sequences: Sequence[int] = SEQUENCES
    smaller: bool = True
    """Whether fewer GPUs than the inventory has are an answer."""
    _specs: dict[str, list[ReplicaSpec]] = field(default_factory=dict)

    def configs(self) -> Iterator[Config]:
        """All candidates that the model fits and the inventory holds."""
        for gpu, count in self.inventory.gpus:
            yield from self._one_pool(gpu, count)
        for first, first_count in self.inventory.gpus:
            for second, second_count in self.inventory.gpus:
                yield from self._two_pools(first, first_count, second, second_count)

    def _one_pool(self, gpu: str, count: int) -> Iterator[Config]:
        for spec in self._replicas(gpu):
            for replicas in self._counts(count // _size(spec)):
                for budget in self.budgets:
                    for sequences in self.sequences:
                        own = replace(spec, budget_tokens=budget, sequences=sequences)
                        yield Config(0, 0, replicas, own, own, "one-pool")

    def _two_pools(self, first: str, first_count: int, second: str, second_count: int) -> Iterator[Config]:
        shared = first == second
        for reader in self._replicas(first):
            for writer in self._replicas(second):
                for prefill in range(1, first_count // _size(reader) + 1):
                    left = first_count - prefill * _size(reader) if shared else second_count
                    for decode in self._counts(left // _size(writer)):
                        for budget in (self.budgets[-1], self.budgets[-3] if len(self.budgets) > 2 else 0):
                            if budget:
                                yield from self._caps(prefill, decode, reader, writer, budget)

    def _caps(
        self, prefill: int, decode: int, reader: ReplicaSpec, writer: ReplicaSpec, budget: int
    ) -> Iterator[Config]:
        reads = replace(reader, budget_tokens=budget, sequences=self.sequences[-1])
        for sequences in self.sequences:
            writes = replace(writer, budget_tokens=max(budget, sequences), sequences=sequences)
            yield Config(prefill, decode, 0, reads, writes)

    def _counts(self, most: int) -> Sequence[int]:
        return range(1, most + 1) if self.smaller else range(max(most, 1), most + 1)

    def _replicas(self, gpu: str) -> list[ReplicaSpec]:
        if gpu not in self._specs:
            specs = [
                replace(self.base, gpu=gpu, tp=tp, pp=pp, ep=ep)
                for tp in self.tps
                for pp in self.pps
                for ep in self.eps
                if ep <= tp
            ]
            self._specs[gpu] = [spec for spec in specs if kind(spec) is not None]
        return self._specs[gpu]
