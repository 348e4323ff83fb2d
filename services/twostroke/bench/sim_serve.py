"""Do `twostroke profile` and `twostroke sim` predict what `make bench-serve` measured? `python -m
twostroke.bench.sim_serve`, after it and on the same machine; writes build/bench/sim_serve.json.

Workers are profiled on a single core, there also while another one writes answers for clients, on all cores, and on
another's spare core. Then every system of the record is simulated with the arrivals that it served, and the medians are
compared.
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from twostroke import measures
from twostroke.bench.command import command_line, end, finish, log_folder, make_app, make_console, make_say
from twostroke.bench.load import Connection, requests
from twostroke.bench.record import FOLDER, Record, Value
from twostroke.bench.running import Say, running
from twostroke.bench.serve import systems, traffic
from twostroke.bench.serve.play import play
from twostroke.bench.serve.traffic import CHAT, KINDS, Arrival
from twostroke.bench.stacks import Builder, Served, Stack
from twostroke.config import RpcSettings, child_environment
from twostroke.errors import ConfigError, UnavailableError
from twostroke.launch import devices
from twostroke.launch.model import obtain
from twostroke.measures import SloLimits, parse_slo
from twostroke.policy.step_model import StepModel, chunk_pairs
from twostroke.router.progress import EXPECTED_TOKENS
from twostroke.sim import traffic_files
from twostroke.sim.cluster import Cluster
from twostroke.sim.profile import Effort, profile
from twostroke.sim.replica import ReplicaSpec, load_profile
from twostroke.sim.scenario import FleetSpec, make_placer
from twostroke.sim.traffic import Asked, Traffic

app = make_app()

NAME = "sim_serve"
ONE_CORE, BUSY, SPARE, ALL_CORES = "one-core", "one-core-busy", "spare-core", "all-cores"
MOST_ERROR = 0.15
_KV_BYTES = 1 << 30
_MAX_MODEL_LEN_TOKENS = 8192
_EFFORT = Effort(prompts=(16, 64, 256, 512, 1024, 2048, 4096))
_COMPANY, _COMPANY_TOKENS = 4, 400
"""Clients of a busy worker, and the length of their answers."""
_CHAT_TOKENS, _CHATS, _CHAT_EVERY_S = 44, 15, 0.4
"""Of a chat's prompt, as in the middle of the arrivals, and how many are asked for the time outside the engine."""


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


async def profiled(folder: Path, say: Say) -> dict[str, ReplicaSpec]:
    """Profiles workers, one after the other, where the folder, which exists, has none yet. Cancellation takes all
    down."""
    made = {name: folder / f"{name}.json" for name in (ONE_CORE, BUSY, SPARE, ALL_CORES)}
    for name, path in made.items():
        if path.exists():
            say(f"{path} is there already; remove it to measure again")
            continue
        stack = _stack(name, say)
        async with running([stack], log_folder(f"{NAME}/{name}"), say) as ((served, _),):
            # Prefill, whose steps depend on what others do; of the lone worker there is only one.
            worker = _address(stack, stack.front_ends[-1 if name == ONE_CORE else 0])
            if name == BUSY:
                async with _company(stack.address):
                    found = await profile(worker, replace(_EFFORT, pause_s=0.25), say, RpcSettings())
                    found = replace(found, hop_s=await _hop_s(stack.address, found.step_model))
            else:
                found = await profile(worker, _EFFORT, say, RpcSettings())
            served.check_alive()
        found.save(path)
        say(f"written to {path}: median error {found.median_error:.1%} of {found.samples} samples")
    return {name: ReplicaSpec(str(path)) for name, path in made.items()}


@asynccontextmanager
async def _company(address: tuple[str, int]) -> AsyncIterator[None]:
    """Clients that read answers all the time. Raises UnavailableError when one fails. Cancellation ends them."""
    asked = requests("company", _CHAT_TOKENS, _COMPANY_TOKENS)

    async def read_on() -> None:
        connection = await Connection.open(*address)
        try:
            while True:
                await connection.ask(next(asked))
        finally:
            connection.close()

    clients = [asyncio.create_task(read_on()) for _ in range(_COMPANY)]
    try:
        yield
    finally:
        for client in clients:
            client.cancel()
        await asyncio.wait(clients)
    for client in clients:
        if not client.cancelled():
            client.result()


async def _hop_s(address: tuple[str, int], model: StepModel) -> float:
    """What a chat's first token takes more than its step. Raises UnavailableError."""
    chats = [Arrival(index * _CHAT_EVERY_S, CHAT, _CHAT_TOKENS, 2) for index in range(_CHATS)]
    seen = await play(address, chats, traffic.bodies(chats, "hop"), lambda: None)
    if broken := [each.error for each in seen if each.error]:
        raise UnavailableError(f"the time outside the engine could not be measured: {broken[0]}")
    step_s = model.batch_s(0, 0, _CHAT_TOKENS, chunk_pairs(0, _CHAT_TOKENS), 1)
    return max(0.0, statistics.median(each.ttft_s for each in seen) - step_s)


def _stack(name: str, say: Say) -> Stack:
    """Two of our workers on a core each, or one on all cores."""
    environment = child_environment()
    found = devices.detect(environment)
    chunk = systems.DEFAULT_CHUNK_TOKENS if name == ALL_CORES else systems.chosen([systems.STRICT], ())[0].chunk_tokens
    served = Served(obtain("", say), _KV_BYTES, _MAX_MODEL_LEN_TOKENS, chunk)
    flags = ("--most-step-s=0",) if name == SPARE else ("--most-step-s=0", "--spare-cores=")
    pair = Builder(served, found, environment).twostroke(
        flags, systems.router_args(systems.STRICT, {CHAT: SloLimits()})
    )
    return alone(pair, found.cores) if name == ALL_CORES else pair


def alone(pair: Stack, cores: Sequence[int]) -> Stack:
    """The decode worker of a pair as the only worker, for both strokes, on these cores."""
    ((router, *workers),) = pair.stages
    worker = workers[-1]
    flags = {"--role": "both", "--cores": ",".join(map(str, cores)), "--spare-cores": ""}
    command = tuple(_with(argument, flags) for argument in worker.command)
    only = {"--workers": worker.address}
    router = replace(router, command=tuple(_with(argument, only) for argument in router.command))
    return replace(pair, stages=((router, replace(worker, command=command)),), front_ends=(worker.name,))


def _with(argument: str, flags: Mapping[str, str]) -> str:
    name, equals, _ = argument.partition("=")
    return f"{name}={flags[name]}" if equals and name in flags else argument


def _address(stack: Stack, name: str) -> str:
    return next(spec.address for spec in stack.processes if spec.name == name)


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
