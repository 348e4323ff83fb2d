"""The two systems: one vLLM API server, and two pools, with the same engine settings."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from twostroke.bench.stacks import Builder, Served, Stack
from twostroke.launch.devices import Devices

KV_BYTES = 512 << 20

FRONT_END = (
    *("--enable-prompt-tokens-details", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    "--enable-scale-out",
)
"""What both front ends are told."""


@dataclass(frozen=True, slots=True)
class Extras:
    """Further arguments."""

    front_end: tuple[str, ...] = ()
    """Of both front ends."""
    one: tuple[str, ...] = ()
    """Of the one engine's server."""
    worker: tuple[str, ...] = ()
    router: tuple[str, ...] = ()


def with_adapters_and_reasoning(adapters: Mapping[str, Path]) -> Extras:
    """Makes both systems serve adapters, and parse reasoning."""
    listed = [f"{name}={folder}" for name, folder in adapters.items()]
    return Extras(
        front_end=("--reasoning-parser", "granite"),
        one=(
            # This parser works on text and cannot tell an engine where reasoning ends. Workers have none, so grammars
            # rule from the first token there, and must here.
            *("--structured-outputs-config", '{"enable_in_reasoning": true}'),
            *("--enable-lora", "--max-loras", "3", "--max-lora-rank", "8", "--lora-modules", *listed),
        ),
        worker=("--max-loras=3", "--max-lora-rank=8"),
        router=(f"--lora={','.join(listed)}", "--lora-updates"),
    )


def one_args(extras: Extras) -> tuple[str, ...]:
    """Further arguments of the one engine's server, which has the model's own generation settings as the router has."""
    return (*FRONT_END, "--generation-config", "auto", *extras.front_end, *extras.one)


def router_args(extras: Extras, *front_end: str) -> tuple[str, ...]:
    """Further flags of the router. front_end: more for its front end alone."""
    return (f"--vllm-args={shlex.join([*FRONT_END, *extras.front_end, *front_end])}", *extras.router)


def systems(
    served: Served, devices: Devices, environment: Mapping[str, str], extras: Extras | None = None
) -> tuple[Stack, Stack]:
    """One engine and two pools, to be started together."""
    extras = extras or Extras()
    builder = Builder(served, devices, environment)
    two = builder.twostroke(extras.worker, router_args(extras))
    # On the core that prefill computes on: the cores of a machine are not all as fast as each other.
    return builder.direct(*one_args(extras), core=0), two
