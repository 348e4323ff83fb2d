"""What is simulated: kinds of workers, how many of each in which role, links, and what goes wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from twostroke.sim.limits import Limits


@dataclass(frozen=True)
class Role:
    """What the router sends to a worker in the ordinary course."""

    name: str
    reads_prompts: bool
    writes_answers: bool


PREFILL = Role("prefill", True, False)
DECODE = Role("decode", False, True)
BOTH = Role("both", True, True)
ROLES = {role.name: role for role in (PREFILL, DECODE, BOTH)}


@dataclass(frozen=True)
class WorkerKind:
    """One kind of replica. start_s: from the decision to start one until it takes requests."""

    limits: Limits
    gpus: int = 1
    dollars_per_hour: float = 0.0
    """Of the whole replica."""
    start_s: float = 0.0
    label: str = ""


@dataclass(frozen=True)
class Group:
    """Workers of one kind and role that are ready when the simulation starts."""

    kind: WorkerKind
    role: Role
    count: int


@dataclass(frozen=True)
class LinkKind:
    """The way of KV between two workers. Each worker sends and receives at bytes_per_s; transfers take turns.

    start_s: of every hand-off, once. descriptor_s: of every descriptor; a KV block has descriptors_per_block.
    workers_per_port: workers of consecutive numbers that share one port.
    """

    bytes_per_s: float = 50e9
    start_s: float = 0.0015
    descriptor_s: float = 0.0
    descriptors_per_block: float = 1.0
    workers_per_port: int = 1


@dataclass(frozen=True)
class Failure:
    """A worker dies at a time, and is started again after down_s; never when that is negative."""

    at_s: float
    worker: int
    down_s: float = -1.0


@dataclass(frozen=True)
class Fleet:
    """Everything but the traffic and the policy.

    kv_bytes_per_token: that cross a link. overlap: KV moves chunk by chunk while prefill runs. hop_s: from one process
    to the next, router or worker. decode_first_token: the first token comes from decode's first step, not from prefill.
    handoff_timeout_s: time in which decode must have room for a prompt; then the request is placed again.
    cell_workers: workers that one router sees, for large fleets; 0 for all. Arrivals go to the routers in turn.
    """

    groups: Sequence[Group]
    link: LinkKind = field(default_factory=LinkKind)
    kv_bytes_per_token: float = 0.0
    overlap: bool = True
    hop_s: float = 0.001
    decode_first_token: bool = False
    handoff_timeout_s: float = 30.0
    cell_workers: int = 0
    failures: Sequence[Failure] = ()

    @property
    def gpus(self) -> int:
        """Of all workers at the start."""
        return sum(group.kind.gpus * group.count for group in self.groups)

    @property
    def dollars_per_hour(self) -> float:
        """Of all workers at the start."""
        return sum(group.kind.dollars_per_hour * group.count for group in self.groups)
