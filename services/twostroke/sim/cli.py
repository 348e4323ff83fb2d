"""The flags of `twostroke sim`, `twostroke plan` and `twostroke profile`, for cli.py."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from twostroke.errors import ConfigError
from twostroke.measures import SloLimits, parse_slo
from twostroke.sim.cli_options import (
    LINKS,
    RUN,
    WORKERS,
    Concurrency,
    Cv,
    Gpu,
    Lengths,
    Model,
    Precision,
    Rate,
    Requests,
    Scale,
    Seconds,
    Seed,
    SloText,
    Trace,
)
from twostroke.sim.command import SimFlags, simulate
from twostroke.sim.fleet import LinkKind
from twostroke.sim.planner.command import PlanFlags
from twostroke.sim.planner.command import plan as plan_command
from twostroke.sim.planner.errors import intervals
from twostroke.sim.planner.space import BUDGETS, SEQUENCES, Space, parse_inventory
from twostroke.sim.profile import Effort
from twostroke.sim.profile import run as profile_run
from twostroke.sim.replica import ReplicaSpec, is_profile
from twostroke.sim.scenario import POLICIES, FleetSpec, TrafficSpec, parse_failure


def sim(
    model: Model,
    gpu: Gpu = "h100",
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallel ranks.", rich_help_panel=WORKERS)] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline stages.", rich_help_panel=WORKERS)] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Expert parallel ranks.", rich_help_panel=WORKERS)] = 1,
    dp: Annotated[int, typer.Option(min=1, help="Attention replicas of a worker.", rich_help_panel=WORKERS)] = 1,
    precision: Precision = "bf16",
    prefill: Annotated[int, typer.Option(min=0, metavar="N", help="Prefill workers.", rich_help_panel=WORKERS)] = 0,
    decode: Annotated[int, typer.Option(min=0, metavar="N", help="Decode workers.", rich_help_panel=WORKERS)] = 0,
    both: Annotated[
        int, typer.Option(min=0, metavar="N", help="Workers that do both: one pool.", rich_help_panel=WORKERS)
    ] = 0,
    prefill_gpu: Annotated[str, typer.Option(help="Where it differs.", rich_help_panel=WORKERS)] = "",
    prefill_tp: Annotated[int, typer.Option(min=0, help="Where it differs.", rich_help_panel=WORKERS)] = 0,
    decode_gpu: Annotated[str, typer.Option(help="Where it differs.", rich_help_panel=WORKERS)] = "",
    decode_tp: Annotated[int, typer.Option(min=0, help="Where it differs.", rich_help_panel=WORKERS)] = 0,
    budget: Annotated[
        int, typer.Option(metavar="TOKENS", min=0, help="Most tokens of a step (chunk size).", rich_help_panel=WORKERS)
    ] = 0,
    max_sequences: Annotated[int, typer.Option(min=0, help="Most of a step.", rich_help_panel=WORKERS)] = 0,
    kv_blocks: Annotated[int, typer.Option(min=0, help="0: what memory leaves.", rich_help_panel=WORKERS)] = 0,
    start_s: Annotated[float, typer.Option(min=0, help="Start-up of a worker.", rich_help_panel=WORKERS)] = 180,
    trace: Trace = None,
    lengths: Lengths = "",
    rate: Rate = "",
    cv: Cv = 1.0,
    seconds: Seconds = 600,
    concurrency: Concurrency = 0,
    requests: Requests = 0,
    scale: Scale = 1.0,
    seed: Seed = 1,
    link_gbps: Annotated[
        float, typer.Option(min=0, help="Of a worker's port, Gbit/s; 0: its sheet's.", rich_help_panel=LINKS)
    ] = 0,
    link_start_ms: Annotated[float, typer.Option(min=0, help="Of a hand-off.", rich_help_panel=LINKS)] = 1.5,
    descriptor_us: Annotated[float, typer.Option(min=0, help="Of a descriptor.", rich_help_panel=LINKS)] = 0,
    descriptors_per_block: Annotated[float, typer.Option(min=0, help="Of a KV block.", rich_help_panel=LINKS)] = 1,
    workers_per_port: Annotated[int, typer.Option(min=1, help="That share one.", rich_help_panel=LINKS)] = 1,
    overlap: Annotated[bool, typer.Option(help="Move KV while prefill runs.", rich_help_panel=LINKS)] = True,
    decode_first_token: Annotated[
        bool, typer.Option(help="Decode chooses the first token, as in vLLM's own P/D.", rich_help_panel=LINKS)
    ] = False,
    fail: Annotated[
        list[str] | None,
        typer.Option(metavar="W@S[+D]", help="Worker W dies at S, is started again after D.", rich_help_panel=LINKS),
    ] = None,
    slo: SloText = "ttft=2s,itl=50ms",
    policy: Annotated[str, typer.Option(help=f"One of {', '.join(POLICIES)}.", rich_help_panel=RUN)] = "all",
    deadline_s: Annotated[float, typer.Option(min=0, help="Of an answer; 0: none.", rich_help_panel=RUN)] = 0,
    cell_workers: Annotated[
        int, typer.Option(min=0, help="Workers that one router sees; 0: all.", rich_help_panel=RUN)
    ] = 0,
    autoscale: Annotated[
        bool, typer.Option(help="Start and drain workers as the load asks for.", rich_help_panel=RUN)
    ] = False,
    flip_roles: Annotated[bool, typer.Option(help="Let workers change their roles.", rich_help_panel=RUN)] = False,
    step_by_step: Annotated[bool, typer.Option(help="The slow reference.", rich_help_panel=RUN)] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Result for programs.", rich_help_panel=RUN)
    ] = None,
) -> None:
    """Simulates a fleet under traffic: TTFT, ITL, TPOT up to p99.9, goodput, cost. Nothing is started.

    Three prefill and one decode worker against four that do both, same GPUs, same requests:

      twostroke sim --model llama-3.1-70b --tp 4 --prefill 3 --decode 1 --lengths 8192/256 --rate 3

      twostroke sim --model llama-3.1-70b --tp 4 --both 4 --budget 2048 --lengths 8192/256 --rate 3

    `twostroke plan` looks for the best fleet. What is modelled and what is not: docs/simulator.md.
    """
    spec = ReplicaSpec(
        model=model, gpu=gpu, tp=tp, pp=pp, ep=ep, dp=dp, precision=precision,
        budget_tokens=budget, sequences=max_sequences, kv_blocks=kv_blocks, start_s=start_s,
    )  # fmt: skip
    fleet = FleetSpec(
        spec=spec,
        prefill=prefill,
        decode=decode,
        both=both,
        prefill_spec=_other(spec, prefill_gpu, prefill_tp),
        decode_spec=_other(spec, decode_gpu, decode_tp),
        link_gbps=link_gbps,
        link=LinkKind(
            start_s=link_start_ms / 1e3,
            descriptor_s=descriptor_us / 1e6,
            descriptors_per_block=descriptors_per_block,
            workers_per_port=workers_per_port,
        ),
        overlap=overlap,
        decode_first_token=decode_first_token,
        cell_workers=cell_workers,
        failures=tuple(parse_failure(text) for text in fail or ()),
    )
    traffic = TrafficSpec(trace, lengths, rate, cv, seconds, concurrency, requests, scale, seed)
    flags = SimFlags(
        fleet, traffic, parse_slo(slo), policy, deadline_s or None, step_by_step, json_file, autoscale, flip_roles
    )
    raise typer.Exit(simulate(flags))


def _other(spec: ReplicaSpec, gpu: str, tp: int) -> ReplicaSpec | None:
    return replace(spec, gpu=gpu or spec.gpu, tp=tp or spec.tp) if gpu or tp else None


def plan(
    model: Model,
    gpus: Annotated[
        str,
        typer.Option(metavar="N[xTYPE],...", help="At hand: 16, or 8xh100,8xl40s.", rich_help_panel=WORKERS),
    ],
    gpu: Gpu = "h100",
    precision: Precision = "bf16",
    tp: Annotated[str, typer.Option(metavar="LIST", help="To choose among.", rich_help_panel=WORKERS)] = "1,2,4,8",
    pp: Annotated[str, typer.Option(metavar="LIST", help="To choose among.", rich_help_panel=WORKERS)] = "1",
    ep: Annotated[str, typer.Option(metavar="LIST", help="To choose among.", rich_help_panel=WORKERS)] = "1",
    budgets: Annotated[
        str, typer.Option(metavar="LIST", help="Step budgets (chunk sizes).", rich_help_panel=WORKERS)
    ] = ",".join(map(str, BUDGETS)),
    sequences: Annotated[str, typer.Option(metavar="LIST", help="Batch caps.", rich_help_panel=WORKERS)] = ",".join(
        map(str, SEQUENCES)
    ),
    all_gpus: Annotated[bool, typer.Option(help="Use all GPUs, not as few as do.", rich_help_panel=WORKERS)] = False,
    dollars_per_gpu_hour: Annotated[
        float, typer.Option(min=0, help="0: each sheet's price.", rich_help_panel=WORKERS)
    ] = 0,
    trace: Trace = None,
    lengths: Lengths = "",
    rate: Rate = "",
    cv: Cv = 1.0,
    seconds: Seconds = 1200,
    scale: Scale = 1.0,
    seed: Seed = 1,
    slo: SloText = "ttft=2s,itl=50ms",
    target: Annotated[
        float, typer.Option(min=0.01, max=1, help="Share of requests that must meet it.", rich_help_panel=RUN)
    ] = 0.95,
    link_gbps: Annotated[
        float, typer.Option(min=0, help="Of a worker's port, Gbit/s; 0: its sheet's.", rich_help_panel=LINKS)
    ] = 0,
    overlap: Annotated[bool, typer.Option(help="Move KV while prefill runs.", rich_help_panel=LINKS)] = True,
    simulated: Annotated[int, typer.Option(min=4, help="Fleets to simulate.", rich_help_panel=RUN)] = 50,
    requests: Annotated[int, typer.Option(min=50, help="Of one simulation, at most.", rich_help_panel=RUN)] = 4000,
    flips: Annotated[bool, typer.Option(help="Look for what changes the answer.", rich_help_panel=RUN)] = True,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="For plan.html and deployment values.", rich_help_panel=RUN),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Result for programs.", rich_help_panel=RUN)
    ] = None,
) -> None:
    """Finds the cheapest fleet for a load within an SLO, and says whether two pools are worth it.

    It may answer "do not disaggregate" or "undecided". Thousands of fleets are screened with formulas, the best are
    simulated, the winner is compared with the best tuned single pool, and the nearest change that would turn the
    answer round is named:

      twostroke plan --model llama-3.1-70b --gpus 16xh100 --lengths 8192/256 --rate 3 --slo ttft=2s,itl=40ms --out plan

    How to read the answer: docs/planner.md.
    """
    base = ReplicaSpec(model=model, gpu=gpu, precision=precision, dollars_per_hour=dollars_per_gpu_hour)
    profiled = is_profile(model)
    space = Space(
        base,
        parse_inventory(gpus, gpu),
        tps=(1,) if profiled else _numbers("--tp", tp),
        pps=(1,) if profiled else _numbers("--pp", pp),
        eps=(1,) if profiled else _numbers("--ep", ep),
        budgets=_numbers("--budgets", budgets),
        sequences=_numbers("--sequences", sequences),
        smaller=not all_gpus,
    )
    limits = parse_slo(slo)
    if limits == SloLimits():
        raise ConfigError("--slo is empty; without a limit every fleet is as good as any")
    prefill, decode = intervals(base)
    flags = PlanFlags(
        space,
        TrafficSpec(trace, lengths, rate, cv, seconds, 0, 0, scale, seed),
        limits,
        FleetSpec(base, link_gbps=link_gbps, overlap=overlap),
        target, prefill, decode, simulated, requests, flips, out, json_file,
        shlex.join(["twostroke", *sys.argv[1:]]),
    )  # fmt: skip
    raise typer.Exit(plan_command(flags))


def profile(
    out: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write it, a .json.")],
    worker: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="gRPC address of the worker; the router is asked when empty.")
    ] = "",
    router: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="gRPC address of the router; `twostroke up`'s when empty.")
    ] = "",
    prompts: Annotated[str, typer.Option(metavar="LIST", help="Prompt lengths.")] = ",".join(
        map(str, Effort().prompts)
    ),
    batches: Annotated[str, typer.Option(metavar="LIST", help="Answers at once.")] = ",".join(
        map(str, Effort().batches)
    ),
    contexts: Annotated[str, typer.Option(metavar="LIST", help="Their prompts.")] = ",".join(
        map(str, Effort().contexts)
    ),
) -> None:
    """Measures the engine steps of a running worker; `sim` and `plan` take the result as --model.

      twostroke up --detach && twostroke profile smollm2.json && twostroke sim --model smollm2.json --both 2 \\
        --lengths 256/64 --rate 1

    The worker must be idle otherwise. It is asked for a few hundred tokens; on a CPU that takes a minute or two.
    """
    from twostroke.config import RouterSettings
    from twostroke.flags import read
    from twostroke.launch.commands import router_address

    if out.suffix != ".json":
        raise ConfigError(f"{out}: name a .json file, by which --model knows it for a profile")
    effort = Effort(_numbers("--prompts", prompts), _numbers("--batches", batches), _numbers("--contexts", contexts))
    target = "" if worker else router_address(router)
    raise typer.Exit(profile_run(worker, target, out, effort, read(RouterSettings, []).rpc, Console()))


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    try:
        found = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        found = ()
    if not found or found[0] < 1:
        raise ConfigError(f"{flag} {text}: write numbers of at least 1, separated by commas")
    return found


def run(name: str, argv: Sequence[str]) -> int:
    """Runs one of the commands; returns its exit code. Raises ConfigError and typer's own errors."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(name, context_settings={"max_content_width": 110})(_COMMANDS[name])
    code = app(args=list(argv) or ["--help"], prog_name=f"twostroke {name}", standalone_mode=False)
    return code if isinstance(code, int) else 0


_COMMANDS: dict[str, Callable[..., None]] = {"sim": sim, "plan": plan, "profile": profile}
