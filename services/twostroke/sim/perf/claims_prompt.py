"""The claims about two pools that a single prompt decides."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

from twostroke.policy.step_model import StepBatch, StepModel, chunk_pairs
from twostroke.sim.perf import catalogue, fitted, hardware
from twostroke.sim.perf.roofline import Parallel, RooflineStepModel, precision
from twostroke.sim.perf.transfer import TransferModel

UNTUNED = 8192
"""Step budget of an engine as it comes, tokens."""
LINK_BYTES_PER_S = 50e9  # 400 Gb/s


@dataclass(frozen=True, slots=True)
class Claim:
    """One line. untuned, tuned, two_pools: the same figure for each; NaN where it has no meaning."""

    words: str
    setup: str
    untuned: float
    tuned: float
    two_pools: float
    unit: str
    verdict: str
    smallest: str


def _model(model: str, gpu: str, tp: int, quantised: str) -> RooflineStepModel:
    shape, sheet = catalogue.find(model), hardware.find(gpu)
    how = precision(quantised, shape, sheet)
    known = fitted.fitted_efficiencies(shape, sheet, how)
    return RooflineStepModel(shape, sheet, how, Parallel(tp=tp), known)


def prefill_s(model: StepModel, tokens: int, chunk_tokens: int = 0, decodes: int = 0, context: int = 2048) -> float:
    """Seconds of a prompt that is computed alone; in chunks of that many tokens, with decodes beside, where given."""
    chunk = chunk_tokens or tokens
    sizes = [min(chunk, tokens - start) for start in range(0, tokens, chunk)]
    starts = [0, *itertools.accumulate(sizes)]
    return sum(
        model.step_s(StepBatch(decodes, decodes * context, size, chunk_pairs(start, size), 1))
        for start, size in zip(starts, sizes, strict=False)
    )


def long_prompt() -> Claim:
    tokens, wanted_s = 65536, 1.5
    model = _model("llama-3.1-70b", "h100", 8, "bf16")
    whole_s = prefill_s(model, tokens)
    beside_s = prefill_s(model, tokens, 512, 32)
    large_s = prefill_s(model, tokens, UNTUNED, 32)
    link = TransferModel(links=8, link_bytes_per_s=LINK_BYTES_PER_S)
    chunks = tokens // UNTUNED
    size = model.shape.kv_bytes_per_token(2) * UNTUNED
    ready = list(itertools.accumulate([whole_s / chunks] * chunks))
    apart_s = whole_s + link.exposed_s([size] * chunks, ready)
    reached = [
        (tp, gpu, how)
        for how, tp, gpu in itertools.product(
            ("bf16", "fp8", "nvfp4"), (1, 2, 4, 8), ("h100", "h200", "b200", "b300", "gb300")
        )
        if _model("llama-3.1-70b", gpu, tp, how).kv_capacity_tokens() >= tokens
        and prefill_s(_model("llama-3.1-70b", gpu, tp, how), tokens) <= wanted_s
    ]
    smallest = min(reached, default=None)
    holds = "holds" if apart_s <= wanted_s else "does not hold with equal GPUs"
    return Claim(
        "TTFT of 64k tokens 3.8 to 1.5 s",
        "70B BF16, 8 x H100, no queue, 32 answers beside, budgets 8192 and 512",
        large_s,
        beside_s,
        apart_s,
        "s",
        f"{holds}: only what decodes and small chunks add is saved ({beside_s - apart_s:.1f} s of {beside_s:.1f})",
        f"{smallest[0]} x {smallest[1].upper()} {smallest[2]}" if smallest else "none of H100 to GB300, up to 8",
    )


def kv_of_50k() -> Claim:
    tokens, wanted_s = 50_000, 4e-3
    shape = catalogue.find("llama-3.1-70b")
    size = shape.kv_bytes_per_token(2) * tokens
    link = TransferModel(base_s=0.0, efficiency=1.0, link_bytes_per_s=LINK_BYTES_PER_S)
    layer_s = link.transfer_s(size / shape.layers)
    links = math.ceil(size / (wanted_s * LINK_BYTES_PER_S))
    return Claim(
        "KV of 50k tokens in 4 ms at 400 Gb/s",
        "70B BF16, at the full stated rate; two pools: one layer, what is left when layers go while prefill runs",
        link.transfer_s(size) * 1e3,
        replace(link, links=8).transfer_s(size) * 1e3,
        layer_s * 1e3,
        "ms",
        "refuted as a total (one and eight links shown); about true of the last layer"
        if layer_s < 1.1 * wanted_s
        else "refuted",
        f"{links} links of 400 Gb/s",
    )
