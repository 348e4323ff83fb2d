"""What a worker's steps are expected to take before any was seen: the model's size over the hardware's rates.

Only a beginning, which the first steps scale (see perf_model.py): what counts is how the terms stand to each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from twostroke.policy.step_model import LinearStepModel


@dataclass(frozen=True, slots=True)
class Device:
    """What an engine reaches on its hardware, all of a worker's devices together: dense FLOP/s, bytes/s of memory, and
    what every step costs besides."""

    flops_per_s: float
    bytes_per_s: float
    step_s: float


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """What a model computes and reads.

    weight_bytes: of all weights. token_flops: of a prompt token in the layers, without attention. head_flops: of a
    chosen token in the output head. pair_flops: of an attention pair, all layers. kv_bytes: that a token adds.
    """

    weight_bytes: float
    token_flops: float
    head_flops: float
    pair_flops: float
    kv_bytes: float


CPU_CORE = Device(flops_per_s=50e9, bytes_per_s=9e9, step_s=2e-3)
"""Measured with vLLM in float32 on a server's core with AVX2."""

SHEETS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "H200": (989e12, 4.8e12),
        "H100": (989e12, 3.35e12),
        "A100": (312e12, 2.039e12),
        "L40S": (362e12, 0.864e12),
        "B200": (2250e12, 8.0e12),
        "MI300X": (1307e12, 5.3e12),
    }
)
"""Datasheets: dense bfloat16 FLOP/s and bytes/s of memory, by what the device's name holds."""
UNKNOWN = "L40S"
"""Stands for accelerators that are not listed."""
COMPUTE, MEMORY = 0.5, 0.7
"""Shares of the datasheet that engines reach."""
ACCELERATOR_STEP_S = 3e-3


def accelerators(name: str, count: int) -> Device:
    """So many accelerators that share each layer. name: as the driver has it."""
    flops, bytes_per_s = next((sheet for key, sheet in SHEETS.items() if key in name.upper()), SHEETS[UNKNOWN])
    return Device(count * flops * COMPUTE, count * bytes_per_s * MEMORY, ACCELERATOR_STEP_S)


def cpu(cores: int) -> Device:
    """So many cores of a CPU."""
    return Device(cores * CPU_CORE.flops_per_s, cores * CPU_CORE.bytes_per_s, CPU_CORE.step_s)


def prior(costs: ModelCosts, device: Device) -> LinearStepModel:
    """Every step reads the weights; each row computes; a context is read."""
    head_s = costs.head_flops / device.flops_per_s
    token_s = costs.token_flops / device.flops_per_s
    return LinearStepModel(
        const_s=device.step_s + costs.weight_bytes / device.bytes_per_s,
        per_sequence_s=token_s + head_s,
        per_context_token_s=costs.kv_bytes / device.bytes_per_s,
        per_prefill_token_s=token_s,
        per_prefill_pair_s=costs.pair_flops / device.flops_per_s,
        per_prefill_chunk_s=head_s,
    )
