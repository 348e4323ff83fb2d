"""How fast and how right is the simulator, and what do policy and controllers reach on it? `python -m
twostroke.bench.sim`; writes build/bench/sim.json.

Times are CPU times of this process and its children, so that a shared machine does not count.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import psutil
import typer

from twostroke.bench import sim_accuracy
from twostroke.bench import sim_setups as setups
from twostroke.bench.command import command_line, finish, make_app, make_console, make_say
from twostroke.bench.record import FOLDER, Record
from twostroke.errors import ConfigError, TwostrokeError
from twostroke.measures import SloLimits
from twostroke.sim import clock, traffic_files
from twostroke.sim.planner.screen import Load, Screener, best
from twostroke.sim.planner.search import Lab, Question, Trial
from twostroke.sim.planner.space import Config, Space, parse_inventory
from twostroke.sim.replica import ReplicaSpec
from twostroke.sim.scenario import FleetSpec
from twostroke.sim.traffic import Traffic
from twostroke.sim.traffic_made import Lengths, rescaled, steady

app = make_app()
Say = Callable[[str], None]

CONVERSATION = "mooncake_conversation_trace.jsonl"
_SOURCE = "FAST25-release/traces/conversation_trace.jsonl of kvcache-ai/Mooncake on GitHub, under that name"
_CONFIGURATIONS = 10_000
_TOP = 50
_TOP_REQUESTS = 4_000
_COMPARED = 3_000
"""Requests of the trace that are also simulated step by step."""
_HOURS = 2.0
_LARGE = (1_000, 1_000_000)


@contextmanager
def cpu(into: list[float]) -> Iterator[None]:
    """Appends the CPU seconds of a block, its ended children included."""
    gc.collect()
    before_s = _cpu_s()
    yield
    into.append(_cpu_s() - before_s)


def _cpu_s() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def conversation(data: Path) -> Traffic:
    """The public trace. Raises ConfigError, saying where it comes from, when it is not in the folder."""
    path = data / CONVERSATION
    if not path.is_file():
        raise ConfigError(f"--data {data}: there is no {CONVERSATION}; it is public: {_SOURCE}")
    return traffic_files.read(path)


def speed(record: Record, data: Path, say: Say) -> None:
    """Requests per CPU second on the trace, and whether both modes agree."""
    compiled = not str(clock.__file__).endswith(".py")
    say(f"policy and simulator are {'compiled' if compiled else 'not compiled, see docs/simulator.md'}")
    traffic = conversation(data)
    two_pools, one_pool = (4, 4, 0), (0, 0, 8)
    shapes = (
        ("round-robin", one_pool), ("round-robin", two_pools), ("one-pool", one_pool), ("strict", two_pools),
        ("all", two_pools),
    )  # fmt: skip
    first = setups.short(traffic, _COMPARED)
    for policy, shape in shapes:
        fleet = setups.fleet(*shape, unit_tokens=traffic.unit_tokens)
        times: list[float] = []
        with cpu(times):
            _, whole = setups.run(fleet, traffic, policy)
        rate = len(traffic) / times[0]
        _, fast = setups.run(fleet, first, policy)
        with cpu(times):
            _, slow = setups.run(fleet, first, policy, step_by_step=True)
        slow_rate = len(first) / times[1]
        name = "one pool" if shape[2] else "4 prefill, 4 decode"
        record.row(
            part="speed", what=f"{name}, {policy}", requests_per_cpu_s=rate, step_by_step_per_cpu_s=slow_rate,
            ttft_p50_s=whole.ttft.p50, ttft_p99_s=whole.ttft.p99, itl_p99_ms=whole.itl.p99 * 1e3, compiled=compiled,
        )  # fmt: skip
        say(f"{name}, {policy}: {rate:,.0f} requests per CPU second, step by step {slow_rate:,.0f}")
        placement = "round robin placement" if policy == "round-robin" else f"the router's policy, {policy}"
        title = f"requests per CPU second, full Mooncake conversation trace, 8 instances ({name}), {placement}"
        record.check(title, rate, "requests/CPU-s", ">= 10,000", rate >= 10_000)
        same = fast == slow
        title = f"percentiles of its first {_COMPARED:,} requests equal step by step: {name}, {policy}"
        record.check(title, float(same), "", "1", same)


def planner(record: Record, data: Path, say: Say) -> None:
    """Screening and simulating candidates."""
    traffic = conversation(data)
    slo = SloLimits(ttft_s=10.0, tpot_s=0.05)
    base = ReplicaSpec("llama-3.1-70b")
    times: list[float] = []
    space = Space(base, parse_inventory("32xh100,16xh200", "h100"))
    with cpu(times):
        screener = Screener(Load.of(traffic), slo)
        configs: list[Config] = []
        screened = []
        for config in space.configs():
            configs.append(config)
            screened.append(screener.screen(config))
            if len(configs) >= _CONFIGURATIONS:
                break
    say(f"{len(configs):,} configurations screened in {times[0]:.2f} CPU s")
    record.row(part="planner", what=f"{len(configs)} configurations screened", cpu_s=times[0])
    enough = len(configs) >= _CONFIGURATIONS and times[0] < 5
    record.check("10,000 configurations screened", times[0], "CPU s", "< 5", enough)
    chosen = [each.config for each in best(screened, 0.95, _TOP, _TOP // 3)]
    lab = Lab(Question(traffic, slo, FleetSpec(base), 0.95), processes=2)
    started_s = time.monotonic()
    with cpu(times), lab.open():
        found = lab.run([Trial(config, slo, most=_TOP_REQUESTS) for config in chosen])
    wall_s = time.monotonic() - started_s
    share_s = times[1] / 2
    requests = min(each.requests for each in found)
    say(f"top {len(found)}: {times[1]:.1f} CPU s, {wall_s:.1f} s on the clock")
    record.row(part="planner", what=f"top {len(found)}, {requests} requests each", cpu_s=times[1], wall_s=wall_s)
    name = f"top {_TOP} simulated to p99.9 ({_TOP_REQUESTS:,} requests each) on 2 cores: CPU time of a core"
    record.check(name, share_s, "s", "< 60", len(found) >= _TOP and share_s < 60)


def large(record: Record, data: Path, say: Say) -> None:
    """1,000 workers, a million requests, on one core."""
    del data
    workers, requests = _LARGE
    rate = 0.9 * workers
    traffic = steady(Lengths(1500, 150, 0.7), rate, 2 * requests / rate, most=requests)
    fleet = setups.fleet(workers // 4, workers - workers // 4, 0, 0, cell_workers=8)
    times: list[float] = []
    with cpu(times):
        _, found = setups.run(fleet, traffic, "strict")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    now = psutil.Process().memory_info().rss
    say(f"{workers:,} workers, {requests:,} requests: {times[0]:.0f} CPU s, {peak / 2**30:.2f} GiB at most")
    record.row(
        part="large", what=f"{workers} workers, {found.finished} requests", cpu_s=times[0],
        requests_per_cpu_s=requests / times[0], peak_gib=peak / 2**30, rss_gib=now / 2**30, ttft_p99_s=found.ttft.p99,
    )  # fmt: skip
    complete = found.finished == requests
    name = f"{workers:,} workers, {requests:,} requests on one core"
    record.check(f"{name}: CPU time", times[0] / 60, "min", "< 10", complete and times[0] < 600)
    record.check(f"{name}: peak memory", peak / 2**30, "GiB", "< 2", complete and peak < 2 * 2**30)


def policies(record: Record, data: Path, say: Say) -> None:
    """The router's policy against two simple ones."""
    traffic = conversation(data)
    for workers in (8, 64):
        load = _repeated(traffic, workers // 8)
        fleet = setups.fleet(workers // 2, workers // 2, 0, traffic.unit_tokens)
        goodput = {}
        for policy in ("round-robin", "prefix-only", "strict", "all"):
            _, found = setups.run(fleet, load, policy)
            goodput[policy] = found.goodput
            record.row(
                part="policy", what=f"{workers} workers, {policy}", goodput_per_s=found.goodput,
                attainment=found.attainment, ttft_p50_s=found.ttft.p50, ttft_p99_s=found.ttft.p99,
                tpot_p99_ms=found.tpot.p99 * 1e3, cached_share=found.cached_share,
            )  # fmt: skip
            say(f"{workers} workers, {policy}: goodput {found.goodput:.3g}/s, SLO met by {found.attainment:.1%}")
        ours = max(goodput["strict"], goodput["all"])
        for other in ("round-robin", "prefix-only"):
            times = ours / goodput[other] if goodput[other] else None
            name = f"goodput, Mooncake conversation trace, {workers} workers, router's policy / {other} P/D"
            record.check(name, times, "", ">= 1.2", times is not None and times >= 1.2)


def _repeated(traffic: Traffic, times: int) -> Traffic:
    """So many of the trace at once, each a little later than the one before and with prefixes of its own."""
    if times == 1:
        return traffic
    shifts = range(times)
    rows = [
        (traffic.arrival_s[i] + 7.0 * shift, traffic.prompt_tokens[i], traffic.output_tokens[i],
         tuple(key * times + shift for key in traffic.hashes[i]))
        for shift in shifts for i in range(len(traffic))
    ]  # fmt: skip
    made = traffic_files.columns(rows, traffic.unit_tokens, f"{times} x {traffic.name}")
    return rescaled(made, 1.0)


def scaling(record: Record, data: Path, say: Say) -> None:
    """Replica counts and roles in the loop."""
    del data
    found = {}
    for clairvoyant in (True, False):
        name = "clairvoyant" if clairvoyant else "ours"
        controllers, summary = setups.swing(_HOURS, clairvoyant=clairvoyant)
        found[name] = summary
        record.row(
            part="scaling", what=f"1 to 24 requests/s, {name}", attainment=summary.attainment,
            gpu_hours=summary.gpu_hours, ttft_p99_s=summary.ttft.p99, changes=len(controllers.changes),
        )  # fmt: skip
        say(f"1 to 24 requests/s, {name}: SLO met by {summary.attainment:.1%}, {summary.gpu_hours:.1f} GPU hours")
    ours, theirs = found["ours"], found["clairvoyant"]
    swing = f"1 to 24 requests/s in 900 s, 8000/1000, start-up 180 s, {_HOURS:g} h from cold"
    record.check(f"goodput share, {swing}", ours.attainment, "", ">= 0.9", ours.attainment >= 0.9)
    times = ours.gpu_hours / theirs.gpu_hours
    record.check(f"GPU hours over a clairvoyant plan's, {swing}", times, "", "<= 1.15", times <= 1.15)
    lost = ours.failed + ours.unfinished + ours.refused
    record.check(f"requests dropped while scaling, {swing}", lost, "", "0", lost == 0)
    for what in ("replicas", "roles"):
        controllers, summary = setups.constant_day(what)
        turns = setups.direction_changes(controllers)
        record.row(
            part="scaling", what=f"constant load for 24 h, {what}", attainment=summary.attainment,
            gpu_hours=summary.gpu_hours, changes=len(controllers.changes),
        )  # fmt: skip
        say(f"constant load, {what}: {len(controllers.changes)} changes, {turns} of direction")
        record.check(f"direction changes of {what}, constant load for 24 simulated hours", turns, "", "0", turns == 0)


def accuracy(record: Record, data: Path, say: Say) -> None:
    """Predictions against measurements of others, and of ourselves once there are any."""
    say("predictions of runs that were not fitted on")
    try:
        sim_accuracy.accuracy(record, data, left_out=False)
    except ConfigError as error:
        record.check(f"accuracy against measured runs ({error.message})", None, "", "measured", ok=False)
    _against_ourselves(record)


def _against_ourselves(record: Record) -> None:
    """What `python -m twostroke.bench.sim_serve` found, which needs engines and hence runs on its own."""
    path = FOLDER / "sim_serve.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        name = "profile and sim predict bench-serve's medians (run `make bench-serve`, then bench.sim_serve)"
        record.check(name, None, "%", "<= 15%", ok=False)
        return
    for each in found["checks"]:
        record.check(f"{each['name']}, {found['started']}", each["value"], each["unit"], each["goal"], each["ok"])


def unseen(record: Record, data: Path, say: Say) -> None:
    """The same for model families and systems that are left out of the fit altogether."""
    say("fits that never saw a family, or a system (minutes)")
    sim_accuracy.unseen(record, data)


PARTS: dict[str, Callable[[Record, Path, Say], None]] = {
    "speed": speed,
    "planner": planner,
    "policies": policies,
    "scaling": scaling,
    "accuracy": accuracy,
    "large": large,
    "unseen": unseen,
}


@app.command()
def main(
    data: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Public traces and measurements; see docs/benchmarks.md.")
    ] = Path("traces"),
    only: Annotated[str, typer.Option(metavar="LIST", help=f"Some of {', '.join(PARTS)}.")] = ",".join(PARTS),
) -> None:
    """Measures the simulator, the planner and the controllers; writes build/bench/sim.json."""
    console = make_console()
    say = make_say(console)
    record = Record("sim", command_line("sim"))
    try:
        chosen = [name.strip() for name in only.split(",")]
        if unknown := [name for name in chosen if name not in PARTS]:
            raise ConfigError(f"--only {unknown[0]}: choose among {', '.join(PARTS)}")
        if {"speed", "planner", "policies"} & set(chosen):
            conversation(data)
        for name in chosen:
            PARTS[name](record, data, say)
            # What was measured stays, whatever ends the next part.
            record.write()
    except KeyboardInterrupt:
        say("interrupted; what was measured so far:")
        record.print(console)
        sys.exit(130)
    except TwostrokeError as error:
        sys.stderr.write(f"twostroke.bench.sim: {error.message}\n")
        sys.exit(1)
    finish(record, console)


if __name__ == "__main__":
    app()
