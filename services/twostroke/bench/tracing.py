"""`python -m twostroke.bench.tracing`: what full tracing costs the router; a part of `make bench-router`, too.

Two routers with vLLM's front end, one that traces every request and one that traces none, over the same workers, which
run the reference engine: nothing else differs, and no engine disturbs. On a machine that others use, the difference of
two routers drowns in noise; so the spans of requests are made and sent here as well, with nothing around them, and set
against what a request costs the router. Alone it writes build/bench/tracing.json.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import typer

from twostroke.bench.command import command_line, end, finish, log_folder, make_app, make_console, make_say
from twostroke.bench.load import MODEL, drive, requests
from twostroke.bench.meter import Meter
from twostroke.bench.record import Record
from twostroke.bench.running import Running, Say, running
from twostroke.bench.stacks import Stack
from twostroke.config import child_environment
from twostroke.free_port import free_port
from twostroke.launch.model import obtain
from twostroke.launch.processes import ProcessSpec
from twostroke.telemetry.spans import HANDOFF, PLACE, REQUEST, Attribute, SpanType
from twostroke.telemetry.tracing import NO_HEADERS, Value, open_tracer

app = make_app()

GOAL_PERCENT = 2.0
_HOST = "127.0.0.1"
_OFF, _ON = "off", "on"
_STREAMS, _PROMPT_TOKENS, _MAX_TOKENS = 32, 100, 64
_STEP_MS = 20
_WARM_UP_S = 2.0
_SPANS_OF = 500
"""Requests whose spans are made at once: what the exporter's queue holds."""


@dataclass(frozen=True, slots=True)
class _Round:
    """CPU time of each router per token, in microseconds."""

    off_us: float
    on_us: float

    @property
    def added_percent(self) -> float:
        return (self.on_us / self.off_us - 1) * 100


async def measure(record: Record, rounds: int, seconds: float, say: Say) -> None:
    """Adds the comparison to a record. Raises UnavailableError when something does not come up."""
    say("starting two routers over reference workers, to compare tracing on and off")
    stacks = _stacks(obtain("", say), child_environment())
    async with running(stacks, log_folder("tracing"), say) as started:
        routers = {each.stack.name: each for each, _ in started}
        for each in routers.values():
            await _drive(each, "warm-up", _WARM_UP_S)
        measured = [await _round(routers, number, seconds, say) for number in range(rounds)]
        receiver = next(each.address for stack in stacks for each in stack.processes if each.name == "sink")
        spans_us = [_spans_us(receiver) for _ in range(rounds)]
    _record(record, measured, statistics.median(spans_us))


def _spans_us(receiver: str) -> float:
    """CPU time of making, encoding and sending the spans of one request, in microseconds, all threads."""
    tracer = open_tracer(f"http://{receiver}", 1.0, "twostroke-router", "bench")
    assert tracer is not None
    begun_s = time.process_time()
    for _ in range(_SPANS_OF):
        now_s = time.monotonic()
        request = tracer.begin(REQUEST, now_s, NO_HEADERS)
        assert request is not None
        for span in (PLACE, HANDOFF):
            tracer.record(span, now_s, now_s + 1, request.headers, _attributes(span))
        request.end("text_completion bench", now_s + 1, _attributes(REQUEST))
    tracer.close()
    return (time.process_time() - begun_s) / _SPANS_OF * 1e6


def _attributes(span: SpanType) -> dict[Attribute, Value]:
    return {attribute: f"{number}-of-such-a-length" for number, attribute in enumerate(span.attributes)}


async def _round(routers: Mapping[str, Running], number: int, seconds: float, say: Say) -> _Round:
    # Both are watched all the time: spans go out some seconds after their requests.
    meter = Meter({name: each.groups()["router"] for name, each in routers.items()})
    tokens: dict[str, int] = {}
    for name in (_OFF, _ON) if number % 2 else (_ON, _OFF):
        tokens[name] = await _drive(routers[name], str(number), seconds)
    used_us = {name: used_s / tokens[name] * 1e6 for name, used_s in meter.used_s().items()}
    made = _Round(used_us[_OFF], used_us[_ON])
    say(f"round {number + 1}: off {made.off_us:.1f}, on {made.on_us:.1f} us a token ({made.added_percent:+.1f} %)")
    return made


async def _drive(router: Running, seed: str, seconds: float) -> int:
    """Returns how many tokens came."""
    router.check_alive()
    bodies = requests(seed, _PROMPT_TOKENS, _MAX_TOKENS)
    load = await drive(router.stack.address, bodies, _STREAMS, seconds, lambda: None)
    return len(load.answers) * _MAX_TOKENS


def _record(record: Record, rounds: list[_Round], spans_us: float) -> None:
    off_us = statistics.median(each.off_us for each in rounds)
    on_us = statistics.median(each.on_us for each in rounds)
    added = sorted(each.added_percent for each in rounds)
    middle = statistics.median(added)
    record.row(system="tracing off", streams=_STREAMS, router_us=off_us)
    record.row(
        system="tracing on", streams=_STREAMS, router_us=on_us, added_percent_low=added[0], added_percent_high=added[-1]
    )
    alone = spans_us / (off_us * _MAX_TOKENS) * 100
    record.row(system="spans of a request", request_us=spans_us)
    for name, percent in (
        ("CPU that tracing every request adds to the router", middle),
        ("CPU of a request's spans, made and sent alone, over the router's of a request", alone),
    ):
        record.check(name, percent, "% of router CPU", f"< {GOAL_PERCENT:g} %", percent < GOAL_PERCENT)


def _stacks(model: str, environment: Mapping[str, str]) -> list[Stack]:
    ports: list[int] = []
    while len(ports) < 7:
        ports.append(free_port(_HOST, ports))
    sink, prefill, decode, *routers = ports
    workers = f"{_HOST}:{prefill},{_HOST}:{decode}"
    below = tuple(
        _process(name, port, environment, "twostroke.worker", "--engine=reference", f"--role={name}", f"--port={port}",
                 f"--worker-id={name}", f"--reference-step-ms={_STEP_MS}")
        for name, port in (("prefill", prefill), ("decode", decode))
    )  # fmt: skip
    receiver = _process("sink", sink, environment, "twostroke.bench.trace_sink", str(sink))
    off, on = (
        _process(f"router-{name}", grpc_port, environment,
                 "twostroke.router", f"--model={model}", f"--served-model-name={MODEL}", f"--workers={workers}",
                 f"--http-port={http_port}", f"--grpc-port={grpc_port}", "--log-level=WARNING", "--drain-s=1", *flags)
        for name, http_port, grpc_port, flags in (
            (_OFF, routers[0], routers[1], ()),
            (_ON, routers[2], routers[3], (f"--otlp-endpoint={_HOST}:{sink}",)),
        )
    )  # fmt: skip
    return [
        Stack(_OFF, ((*below, off),), (_HOST, routers[0]), (off.name,), ()),
        Stack(_ON, ((receiver, on),), (_HOST, routers[2]), (on.name,), ()),
    ]


def _process(name: str, port: int, environment: Mapping[str, str], module: str, *flags: str) -> ProcessSpec:
    return ProcessSpec(name, (sys.executable, "-m", module, *flags), f"{_HOST}:{port}", environment)


async def _alone(rounds: int, seconds: float) -> None:
    console = make_console()
    record = Record("tracing", command_line("tracing"))
    await measure(record, rounds, seconds, make_say(console))
    finish(record, console)


@app.command()
def main(
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Pairs of measurements.")] = 10,
    seconds: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Of one measurement.")] = 3.0,
) -> None:
    """Compares a router that traces every request with one that traces none."""
    end("tracing", _alone(rounds, seconds))


if __name__ == "__main__":
    app()
