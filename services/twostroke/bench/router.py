"""`python -m twostroke.bench.router`: what a router adds to calling one vLLM API server directly.

Three systems serve the same model with the same engines and are measured in turns within one run: an API server called
directly, vllm-router in its P/D mode over two API servers, twostroke. Writes build/bench/router.json. Exit code 0 when
all was measured, whatever came out; 1 when something could not be.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import psutil
import typer

from twostroke.bench import router_report as report
from twostroke.bench import tiny_model, tracing
from twostroke.bench.command import command_line, end, finish, log_folder, make_app, make_console, make_say
from twostroke.bench.load import Load, drive, requests
from twostroke.bench.meter import Meter
from twostroke.bench.record import FOLDER, Record
from twostroke.bench.running import Running, Say, running
from twostroke.bench.stacks import VLLM_ROUTER_INSTALL, Builder, Served, Stack, cpu_devices, vllm_router_installed
from twostroke.bench.stats import Sample, cells
from twostroke.config import child_environment
from twostroke.errors import ConfigError, UnavailableError
from twostroke.launch.model import obtain

app = make_app()

_TINY = "tiny"
_TINY_KV_BYTES = 64 << 20
_KV_BYTES = 512 << 20
_MAX_MODEL_LEN_TOKENS = 2048
_ENGINES = 5
_ENGINE_BYTES = 2 << 30
"""Of an API server or worker with its engine, without weights and KV."""
_IDLE_S = 2.0
# vLLM's workers go on spinning for a second after their last step; nobody else's measurement shall pay for that.
_SETTLE_S = 1.5
_WARM_UP_S = 1.0


@dataclass(frozen=True, slots=True)
class Options:
    """How to measure."""

    rounds: int
    streams: tuple[int, ...]
    seconds: float
    prompt_tokens: int
    max_tokens: int


@dataclass(slots=True)
class Results:
    """What came out for one model."""

    samples: list[Sample] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    idle_percent: dict[str, float] = field(default_factory=dict)
    """CPU that each system takes at rest, in percent of a core."""


async def measure_model(stacks: Sequence[Stack], options: Options, together: bool, logs: Path, say: Say) -> Results:
    """Measures all stacks, in turns when they may run together, else one after the other."""
    results = Results()
    for batch in [stacks] if together else [[stack] for stack in stacks]:
        say(f"starting {', '.join(stack.name for stack in batch)} (logs in {logs})")
        async with running(batch, logs, say) as started:
            results.texts |= {each.stack.name: answer.text() for each, answer in started}
            await _measure_batch([each for each, _ in started], options, results, say)
    return results


async def _measure_batch(batch: Sequence[Running], options: Options, results: Results, say: Say) -> None:
    say("warming up")
    for each in batch:
        warm = requests(f"warm-up {each.stack.name}", options.prompt_tokens, options.max_tokens)
        await _drive(each, warm, max(options.streams), _WARM_UP_S, Meter({}), options)
    await asyncio.sleep(_SETTLE_S)
    idle = await _idle_percent(batch)
    results.idle_percent |= idle
    say("at rest: " + ", ".join(f"{name} {percent:.1f} % of a core" for name, percent in idle.items()))
    for number in range(options.rounds):
        for streams in options.streams:
            turn = number % len(batch)
            for each in [*batch[turn:], *batch[:turn]]:
                sample = await _measure(each, number, streams, options)
                results.samples.append(sample)
                say(_line(sample, options))
                await asyncio.sleep(_SETTLE_S)


async def _idle_percent(batch: Sequence[Running]) -> dict[str, float]:
    meter = Meter({each.stack.name: [pid for pids in each.groups().values() for pid in pids] for each in batch})
    started_s = time.monotonic()
    await asyncio.sleep(_IDLE_S)
    took_s = time.monotonic() - started_s
    return {name: used_s / took_s * 100 for name, used_s in meter.used_s().items()}


async def _measure(running_stack: Running, number: int, streams: int, options: Options) -> Sample:
    running_stack.check_alive()
    meter = Meter({**running_stack.groups(), "client": [psutil.Process().pid]})
    # The same requests for every system.
    bodies = requests(f"{number} {streams}", options.prompt_tokens, options.max_tokens)
    load, used_s = await _drive(running_stack, bodies, streams, options.seconds, meter, options)
    return Sample(
        system=running_stack.stack.name,
        streams=streams,
        round=number,
        ttfts_s=tuple(answer.ttft_s for answer in load.answers),
        tokens=options.max_tokens * len(load.answers),
        events=sum(bool(event["choices"]) for answer in load.answers for event in answer.events()),
        duration_s=load.duration_s,
        cpu_s=used_s,
    )


async def _drive(
    running_stack: Running, bodies: Iterator[bytes], streams: int, seconds: float, meter: Meter, options: Options
) -> tuple[Load, dict[str, float]]:
    """The load and the CPU time that it took. Raises UnavailableError, naming the system, unless all was answered."""
    name = running_stack.stack.name
    try:
        load = await drive(running_stack.stack.address, bodies, streams, seconds, meter.start)
        used_s = meter.used_s()
        short = [answer for answer in load.answers if answer.tokens() != options.max_tokens]
    except UnavailableError as error:
        raise UnavailableError(f"{name}, {streams} streams: {error.message}") from error
    if short:
        raise UnavailableError(f"{name}, {streams} streams: an answer has not {options.max_tokens} tokens")
    return load, used_s


def _line(sample: Sample, options: Options) -> str:
    ttft_ms = statistics.median(sample.ttfts_s) * 1e3
    return (
        f"round {sample.round + 1}/{options.rounds}  {sample.streams:>3} streams  {sample.system:<12}"
        f"first token {ttft_ms:7.1f} ms  {sample.tokens / sample.duration_s:7.0f} tok/s"
        f"  front {sample.front_us:6.0f} us/token"
    )


def _served(name: str, say: Say) -> Served:
    bundled = obtain("" if name == _TINY else name, say)
    if not Path(bundled).is_dir():
        raise ConfigError(f"--model {name}: give tiny, smollm2 or a folder")
    if name == _TINY:
        made = tiny_model.make(FOLDER / "tiny-model", Path(bundled))
        return Served(str(made.resolve()), _TINY_KV_BYTES, _MAX_MODEL_LEN_TOKENS)
    return Served(bundled, _KV_BYTES, _MAX_MODEL_LEN_TOKENS)


def _fit(served: Served) -> bool:
    """Whether there is memory for the engines of all systems at once; bfloat16 files become float32."""
    weights_bytes = 2 * sum(path.stat().st_size for path in Path(served.model).glob("*.safetensors"))
    return psutil.virtual_memory().available > _ENGINES * (_ENGINE_BYTES + weights_bytes + served.kv_bytes)


async def compare(models: Sequence[str], options: Options) -> None:
    """The whole benchmark. Cancellation takes everything down and writes nothing."""
    console = make_console()
    say = make_say(console)
    environment = child_environment()
    found = cpu_devices(environment)
    record = Record("router", command_line("router"))
    with_theirs = vllm_router_installed()
    if not with_theirs:
        say(f"vllm-router is not installed, its checks will fail; install it with: {VLLM_ROUTER_INSTALL}")
    for name in models:
        served = _served(name, say)
        together = _fit(served)
        say(f"{name} model: systems {'in turns' if together else 'one after the other, for want of memory'}")
        builder = Builder(served, found, environment)
        ours = builder.twostroke()
        stacks = [builder.direct(), *([builder.vllm_router()] if with_theirs else []), ours]
        results = await measure_model(stacks, options, together, log_folder(f"router-{Path(name).name}"), say)
        made = cells(results.samples)
        report.rows(record, Path(name).name, made)
        report.checks(record, Path(name).name, made, options.streams, VLLM_ROUTER_INSTALL)
        report.validity(record, Path(name).name, results.texts, results.idle_percent)
    await tracing.measure(record, options.rounds * 2, options.seconds, say)
    finish(record, console)


def _streams(text: str) -> tuple[int, ...]:
    try:
        streams = tuple(int(part) for part in text.split(","))
    except ValueError:
        streams = ()
    if not streams or min(streams) < 1:
        raise typer.BadParameter("write numbers of at least 1, separated by commas")
    return streams


@app.command()
def main(
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Measurements of each system and stream count.")] = 5,
    streams: Annotated[str, typer.Option(metavar="LIST", help="Concurrent streams.")] = "1,8,32",
    seconds: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Of one measurement.")] = 2.0,
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A further model besides the tiny one: smollm2 or a folder; repeatable."),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Length of a prompt.")] = 100,
    max_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Length of an answer.")] = 64,
) -> None:
    """Measures what a router adds to a request; writes build/bench/router.json."""
    options = Options(rounds, _streams(streams), seconds, prompt_tokens, max_tokens)
    end("router", compare(list(dict.fromkeys([_TINY, *(model or [])])), options))


if __name__ == "__main__":
    app()
