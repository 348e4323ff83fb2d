"""The systems that are compared, on two cores each and with equal KV memory in all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from twostroke.bench.serve.traffic import CHAT
from twostroke.bench.stacks import VLLM_ROUTER_INSTALL, Builder, Served, Stack, vllm_router_installed
from twostroke.errors import ConfigError
from twostroke.launch.devices import Devices
from twostroke.measures import SloLimits
from twostroke.policy.snapshot import Slo

ONE, CHUNKED, ROUND_ROBIN, VLLM_ROUTER, STRICT, ALL = "one", "chunked", "round-robin", "vllm-router", "strict", "all"
NAMES = (ONE, CHUNKED, ROUND_ROBIN, VLLM_ROUTER, STRICT, ALL)
OURS = (STRICT, ALL)
"""twostroke, with P then D only and with all options."""

DEFAULT_CHUNK_TOKENS = 2048
"""vLLM's own on such a machine."""
OUR_CHUNK_TOKENS = 512
"""Our workers' own."""
AIM = 0.65
"""Of the limit for the time between tokens."""
KV_BYTES = 1 << 30
MAX_MODEL_LEN_TOKENS = 8192


def router_args(system: str, slos: Mapping[str, SloLimits]) -> tuple[str, ...]:
    """What our router is told. slos: by kind of request."""
    classes = ",".join(f"{kind}={_class(slo)}" for kind, slo in slos.items())
    return {STRICT: ("--placement=strict",), ALL: ("--placement=all",)}[system] + (f"--slo={classes}",)


def worker_args(slos: Mapping[str, SloLimits]) -> tuple[str, ...]:
    """What our workers are told."""
    return (f"--most-step-s={most_step_s(slos.get(CHAT, SloLimits())):.3g}",)


def most_step_s(chats: SloLimits) -> float:
    """A chat that waits for a step has a third of its limit left for its own; 0 where they have none."""
    return chats.ttft_s / 1.5


def aimed(slo: SloLimits) -> Slo:
    """As our router has it: one limit for the time between tokens, where 0 is none here and 1000 s there.

    Routers aim lower than what is promised: what they predict is the middle of what comes.
    """
    between_s = AIM * min(slo.itl_s or math.inf, slo.tpot_s or math.inf)
    return Slo(min(slo.ttft_s or math.inf, 1e3), min(between_s, 1e3))


def _class(slo: SloLimits) -> str:
    found = aimed(slo)
    return f"{found.ttft_s * 1e3:g}/{found.itl_s * 1e3:g}"


@dataclass(frozen=True, slots=True)
class System:
    """One system. label: its name in tables, one for each chunk size of CHUNKED."""

    name: str
    chunk_tokens: int

    @property
    def label(self) -> str:
        """As in tables."""
        return f"chunk-{self.chunk_tokens}" if self.name == CHUNKED else self.name


def chosen(names: Sequence[str], chunks: Sequence[int]) -> list[System]:
    """The systems of these names, CHUNKED once for each chunk size. Raises ConfigError for a name that is none."""
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise ConfigError(f"--systems {','.join(unknown)}: choose among {','.join(NAMES)}")
    if {ROUND_ROBIN, VLLM_ROUTER} & set(names) and not vllm_router_installed():
        raise ConfigError(f"vllm-router is not installed; {VLLM_ROUTER_INSTALL}, or choose others with --systems")
    sizes = {CHUNKED: tuple(chunks), STRICT: (OUR_CHUNK_TOKENS,), ALL: (OUR_CHUNK_TOKENS,)}
    return [System(name, size) for name in dict.fromkeys(names) for size in sizes.get(name, (DEFAULT_CHUNK_TOKENS,))]


def stack(
    system: System, model: str, devices: Devices, environment: Mapping[str, str], slos: Mapping[str, SloLimits]
) -> Stack:
    """Its processes, on free ports. model: folder; slos: by kind. Raises ConfigError for flags that are none."""
    engines = 1 if system.name in (ONE, CHUNKED) else 2
    served = Served(model, KV_BYTES * 2 // engines, MAX_MODEL_LEN_TOKENS, system.chunk_tokens)
    builder = Builder(served, devices, environment)
    if system.name in OURS:
        made = builder.twostroke(worker_args(slos), router_args(system.name, slos))
    else:
        make = {ROUND_ROBIN: builder.round_robin, VLLM_ROUTER: builder.vllm_router}
        made = make.get(system.name, builder.one)()
    return replace(made, name=system.label)
