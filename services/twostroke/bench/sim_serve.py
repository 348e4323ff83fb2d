"""Do `twostroke profile` and `twostroke sim` predict what `make bench-serve` measured? `python -m
twostroke.bench.sim_serve`, after it and on the same machine; writes build/bench/sim_serve.json.

Workers are profiled as sim_profiles.py says. Then every system of the record is simulated with the arrivals that it
served, and the medians are compared.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from twostroke import measures
from twostroke.bench.command import command_line, end, finish, make_app, make_console, make_say
from twostroke.bench.record import FOLDER, Record, Value
from twostroke.bench.serve import systems, traffic
from twostroke.bench.serve.traffic import CHAT, KINDS, Arrival
from twostroke.bench.sim_profiles import ALL_CORES, BUSY, ONE_CORE, SPARE, profiled
from twostroke.errors import ConfigError
from twostroke.measures import SloLimits, parse_slo
from twostroke.policy.snapshot import EXPECTED_TOKENS
from twostroke.sim import traffic_files
from twostroke.sim.cluster import Cluster
from twostroke.sim.replica import ReplicaSpec, load_profile
from twostroke.sim.scenario import FleetSpec, make_placer
from twostroke.sim.traffic import Asked, Traffic

app = make_app()

NAME = "sim_serve"
MOST_ERROR = 0.15


@dataclass(frozen=True, slots=True)
class Setup:
    """A system, simulated. policy: a name of scenario.POLICIES."""

    fleet: FleetSpec
    policy: str


def setup(label: str, profiles: Mapping[str, ReplicaSpec], slo: SloLimits) -> Setup:
    """The system of that label in the record of bench-serve; slo: of chats. Raises ConfigError for one that is not
    known.

    Behind a router, whichever it is, a request waits for as long outside of the engine as was measured behind ours.
    """
    whole, half = profiles[ALL_CORES], replace(profiles[ONE_CORE], busy_model=profiles[BUSY].model)
    usual = replace(half, budget_tokens=systems.DEFAULT_CHUNK_TOKENS)
    ours = replace(half, most_step_s=systems.most_step_s(slo), spare_model=profiles[SPARE].model)
    hop_s = load_profile(Path(profiles[BUSY].model)).hop_s
    pair = FleetSpec(ours, prefill=1, decode=1, hop_s=hop_s)
    known = {
        systems.ONE: Setup(
            FleetSpec(replace(whole, budget_tokens=systems.DEFAULT_CHUNK_TOKENS), both=1), "round-robin"
        ),
        systems.ROUND_ROBIN: Setup(FleetSpec(usual, both=2, hop_s=hop_s), "round-robin"),
        systems.VLLM_ROUTER: Setup(
            FleetSpec(usual, prefill=1, decode=1, overlap=False, decode_first_token=True, hop_s=hop_s), "round-robin"
        ),
        systems.STRICT: Setup(pair, "strict"),
        systems.ALL: Setup(pair, "all"),
    }
    if label in known:
        return known[label]
    name, _, size = label.partition("-")
    if name != "chunk" or not size.isdigit():
        raise ConfigError(f"bench-serve has measured {label}, which is not simulated here; update {__name__}")
    return Setup(FleetSpec(replace(whole, budget_tokens=int(size)), both=1), "round-robin")


def traffic_of(arrivals: Sequence[Arrival], slos: Mapping[str, SloLimits]) -> Traffic:
    """The same requests for the simulator, in their classes; they share no prefix."""
    rows = [(each.arrival_s, each.prompt_tokens, each.output_tokens, ()) for each in arrivals]
    made = traffic_files.columns(rows, traffic_files.MOONCAKE_UNIT_TOKENS, "bench-serve")
    made.asked = [
        Asked(systems.aimed(slos.get(each.kind, SloLimits())), min(each.output_tokens, EXPECTED_TOKENS))
        for each in arrivals
    ]
    return made


def predicted(chosen: Setup, arrivals: Sequence[Arrival], slos: Mapping[str, SloLimits]) -> dict[str, dict[str, float]]:
    """By kind of request, the figures of the record that the simulator has: TTFT p50 of each kind, and ITL p50 of chats
    or, where there are none, of documents: a mix's other gaps are few. slos: by kind."""
    asked = traffic_of(arrivals, slos)
    fleet = chosen.fleet.make(asked)
    cluster = Cluster(fleet, asked, make_placer(chosen.policy, fleet, asked, SloLimits()))
    if not cluster.run():
        raise KeyboardInterrupt
    records = cluster.records
    ttft_s = np.asarray(records.first_s) - np.asarray(records.arrival_s)
    kinds = np.array([each.kind for each in arrivals])
    found = {kind: {"ttft_p50_s": measures.percentile(ttft_s[kinds == kind], 0.5)} for kind in KINDS if kind in kinds}
    sizes, counts = records.gaps.bins()
    main_kind = CHAT if CHAT in found else next(iter(found))
    found[main_kind]["itl_p50_ms"] = measures.weighted_percentile(sizes, counts, 0.5) * 1e3
    return found


def measured(path: Path) -> list[dict[str, Value]]:
    """The rows of bench-serve's record. Raises ConfigError: there is none, or its arrivals are not the usual ones."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise ConfigError(f"there is no {path}; run `make bench-serve` first") from None
    if any(flag in found["command"].split() for flag in ("--quick", "--arrivals")):
        raise ConfigError(f"{path} was measured with other arrivals ({found['command']}); run `make bench-serve` again")
    rows: list[dict[str, Value]] = found["rows"]
    return rows


def comparisons(
    rows: Sequence[dict[str, Value]], mixes: traffic.Mixes, profiles: Mapping[str, ReplicaSpec]
) -> Iterator[dict[str, Value]]:
    """Measured and predicted, for each system, mix, kind and figure. error: |predicted - measured| / measured."""
    slos = {str(row["of"]): parse_slo(str(row["slo"])) for row in rows if row["of"] in KINDS}
    speed = next((found for row in rows if isinstance(found := row.get("speed"), int | float)), 1.0)
    for mix in dict.fromkeys(str(row["mix"]) for row in rows):
        arrivals = traffic.paced(mixes[mix], speed)
        for system in dict.fromkeys(str(row["system"]) for row in rows if row["mix"] == mix):
            figures = predicted(setup(system, profiles, slos.get(CHAT, SloLimits())), arrivals, slos)
            own = {str(row["of"]): row for row in rows if row["mix"] == mix and row["system"] == system}
            for kind, values in figures.items():
                for figure, value in values.items():
                    was = own.get(kind, {}).get(figure)
                    if isinstance(was, int | float) and was > 0 and math.isfinite(value):
                        yield {
                            "mix": mix, "system": system, "of": kind, "figure": figure,
                            "measured": float(was), "predicted": value, "error": abs(value - was) / was,
                        }  # fmt: skip


def report(record: Record, compared: Sequence[dict[str, Value]]) -> None:
    """Rows, and one check for every system: the worst of its medians."""
    for row in compared:
        record.row(**row)
    if not compared:
        record.check("medians of bench-serve that could be compared", None, "", "some", ok=False)
    for system in dict.fromkeys(str(row["system"]) for row in compared):
        own = [row for row in compared if row["system"] == system]
        errors = [row["error"] for row in own]
        worst = max(each for each in errors if isinstance(each, float))
        row = own[errors.index(worst)]
        name = f"profile and sim predict bench-serve's medians: {system}, worst of {len(own)}"
        which = f"{row['figure']} of {row['of']} in {row['mix']}"
        record.check(f"{name} ({which})", worst * 100, "%", f"<= {MOST_ERROR:.0%}", worst <= MOST_ERROR)


@app.command(help=__doc__)
def main(
    serve: Annotated[Path, typer.Option(metavar="FILE", help="Record of bench-serve.")] = FOLDER / "serve.json",
    profiles: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Profiles; those that are missing are measured.")
    ] = FOLDER / "profiles",
) -> None:
    """See the module."""

    async def work() -> None:
        rows = measured(serve)
        console = make_console()
        say = make_say(console)
        record = Record(NAME, command_line(NAME))
        found = await profiled(profiles, say)
        report(record, list(comparisons(rows, traffic.read(traffic.COMMITTED), found)))
        finish(record, console)

    profiles.mkdir(parents=True, exist_ok=True)
    end(NAME, work())


if __name__ == "__main__":
    app()
