"""`twostroke sim`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from twostroke.measures import SloLimits
from twostroke.policy.ratio import Mode, RatioSettings
from twostroke.policy.replicas import ReplicaSettings
from twostroke.sim import show
from twostroke.sim.autoscale import Autoscaler, Scaling
from twostroke.sim.cluster import Cluster
from twostroke.sim.scenario import FleetSpec, TrafficSpec, make_placer
from twostroke.sim.summary import Summary, summarise

_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class SimFlags:
    """What to simulate. step_by_step: the slow reference. json_file: where to write the result for programs."""

    fleet: FleetSpec
    traffic: TrafficSpec
    slo: SloLimits
    policy: str = "all"
    deadline_s: float | None = None
    step_by_step: bool = False
    json_file: Path | None = None
    autoscale: bool = False
    flip_roles: bool = False


def simulate(flags: SimFlags, console: Console | None = None) -> int:
    """Runs one simulation and prints what came out. Ctrl-C prints what there is so far. Raises ConfigError."""
    console = console or Console()
    traffic = flags.traffic.make()
    fleet = flags.fleet.make(traffic)
    placer = make_placer(flags.policy, fleet, traffic, flags.slo, flags.deadline_s)
    cluster = Cluster(fleet, traffic, placer, gap_limit_s=flags.slo.itl_s, step_by_step=flags.step_by_step)
    controllers = None
    if flags.autoscale or flags.flip_roles:
        scaling = Scaling(
            ReplicaSettings(start_s=flags.fleet.spec.start_s) if flags.autoscale else None,
            RatioSettings(mode=Mode.ON) if flags.flip_roles else None,
        )
        controllers = Autoscaler(cluster, scaling, flags.slo)
        controllers.attach()
    complete = cluster.run(show.progress(console, len(traffic)))
    found = summarise(cluster, flags.slo)
    groups = ", ".join(f"{group.count} {group.role.name} ({group.kind.label})" for group in fleet.groups)
    show.line(console, f"{groups}; {len(traffic):,} requests ({traffic.name}); SLO {flags.slo.text()}", "bold")
    if not complete:
        show.line(console, f"Interrupted at {cluster.now_s:,.0f} s of virtual time; so far:", "yellow")
    show.summary_tables(console, found)
    if controllers is not None:
        changes = controllers.changes
        started, drained, flipped = (sum(change == kind for _, _, change in changes) for kind in (1, -1, 0))
        show.line(console, f"controllers    {started} workers started, {drained} drained, {flipped} roles changed")
    if flags.json_file is not None:
        show.write_json(flags.json_file, content(flags, found, complete))
        show.line(console, f"Written to {flags.json_file}")
    return 0 if complete else _INTERRUPTED


def content(flags: SimFlags, found: Summary, complete: bool) -> dict[str, object]:
    """The result for programs; keys of measures.py, times in seconds."""
    traffic = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(flags.traffic).items()}
    return {
        "complete": complete,
        "policy": flags.policy,
        "slo": asdict(flags.slo),
        "traffic": traffic,
        "fleet": asdict(flags.fleet),
        "result": found.plain(),
    }
