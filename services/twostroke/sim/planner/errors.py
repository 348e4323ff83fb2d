"""How wrong predicted step times may be, and what a decision is worth under that."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from twostroke.policy.step_model import StepModel
from twostroke.sim.perf import catalogue, fitted, hardware
from twostroke.sim.perf.roofline import precision
from twostroke.sim.replica import ReplicaSpec, is_profile, load_profile


@dataclass(frozen=True, slots=True)
class Interval:
    """Where 90 % of true times lie, as factors of the predicted one."""

    low: float
    high: float


def intervals(spec: ReplicaSpec) -> tuple[Interval, Interval]:
    """(of prefill, of decode) step times of a replica: nine of ten measured ones lie there."""
    if is_profile(spec.model):
        profile = load_profile(Path(spec.model))
        # Two standard deviations of a mean step, and what a day on the same machine may differ.
        wide = min(0.5, 0.05 + 2 * profile.median_error)
        return Interval(1 - wide, 1 + wide), Interval(1 - wide, 1 + wide)
    shape, sheet = catalogue.find(spec.model), hardware.find(spec.gpu)
    quantised = precision(spec.precision, shape, sheet)
    ttft, tpot = (fitted.interval(1.0, shape, sheet, quantised, spec.engine, ttft=first) for first in (True, False))
    return Interval(*ttft), Interval(*tpot)


@dataclass(frozen=True, slots=True)
class Scaled(StepModel):
    """A step model whose prefill and decode parts are so many times as slow as another's."""

    model: StepModel
    prefill: float
    decode: float

    def decode_terms(self, sequences: int) -> tuple[float, float]:
        """See StepModel."""
        base_s, slope_s = self.model.decode_terms(sequences)
        return base_s * self.decode, slope_s * self.decode

    def batch_s(self, sequences: int, context_tokens: int, new_tokens: int, pairs: float, chunks: int = 1, /) -> float:
        """See StepModel."""
        whole_s = self.model.batch_s(sequences, context_tokens, new_tokens, pairs, chunks)
        if not sequences:
            return whole_s * self.prefill
        base_s, slope_s = self.model.decode_terms(sequences)
        decode_s = min(whole_s, base_s + slope_s * context_tokens)
        return decode_s * self.decode + (whole_s - decode_s) * self.prefill
