"""From names to a simulated replica: a model's shape on hardware sheets, or the profile of a real worker."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from twostroke.errors import ConfigError
from twostroke.policy.step_model import LinearStepModel, StepModel
from twostroke.sim.fleet import WorkerKind
from twostroke.sim.limits import Limits
from twostroke.sim.perf import catalogue, fitted, hardware
from twostroke.sim.perf.roofline import Parallel, RooflineStepModel, precision

PROFILE_FORMAT = "twostroke-profile-1"
_MOST_STEPS = 100_000


@dataclass(slots=True)
class Remembering(StepModel):
    """A step model that computes each decode step's terms once, and the prefill of equal batches."""

    model: StepModel
    _terms: dict[int, tuple[float, float]] = field(default_factory=dict)
    _steps: dict[tuple[int, int, float, int], float] = field(default_factory=dict)

    def decode_terms(self, sequences: int) -> tuple[float, float]:
        """See StepModel."""
        found = self._terms.get(sequences)
        if found is None:
            found = self._terms[sequences] = self.model.decode_terms(sequences)
        return found

    def batch_s(self, sequences: int, context_tokens: int, new_tokens: int, pairs: float, chunks: int = 1, /) -> float:
        """See StepModel. A step is affine in its context, with prefill or without."""
        slope_s = self.decode_terms(max(1, sequences))[1] * context_tokens
        key = (sequences, new_tokens, pairs, chunks)
        found = self._steps.get(key)
        if found is None:
            if len(self._steps) >= _MOST_STEPS:
                self._steps.clear()
            whole_s = self.model.batch_s(sequences, context_tokens, new_tokens, pairs, chunks)
            found = self._steps[key] = whole_s - slope_s
        return found + slope_s


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """One replica as a user names it.

    model: a catalogue name, a folder with a config.json, or a profile (.json) of `twostroke profile`, for which the
    hardware fields do not count. kv_blocks: 0 takes what the memory leaves.
    """

    model: str
    gpu: str = "h100"
    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1
    precision: str = "bf16"
    engine: str = "vllm"
    """Whose efficiency is taken: vllm, trtllm or sglang."""
    budget_tokens: int = 0
    """Most tokens of a step; 0 is the engine's usual: 8192 for a model on sheets, the worker's own for a profile."""
    most_step_s: float = 0.0
    """How long a step with prompts is to take at most; 0 is no bound."""
    spare_model: str = ""
    """Profile by which steps with long prompts run while no other worker computes, on whose cores they then do too."""
    busy_model: str = ""
    """Profile by which steps run while another worker computes, where that is of the same machine."""
    sequences: int = 0
    block_tokens: int = 16
    unit_tokens: int = 0
    kv_blocks: int = 0
    start_s: float = 180.0
    dollars_per_hour: float = 0.0
    """Of one GPU; 0 takes the sheet's."""


@dataclass(frozen=True, slots=True)
class Replica:
    """A kind of worker and the KV that one of its tokens sends over a link."""

    kind: WorkerKind
    kv_bytes_per_token: float
    network_bytes_per_s: float
    """Of all its GPUs together."""
    hop_s: float = 0.001
    """What a message takes to it: as its profile has it, or a millisecond."""


@dataclass(frozen=True, slots=True)
class Profile:
    """What `twostroke profile` measured of a worker. residual_s: standard deviation of single steps around the fit."""

    model: str
    engine: str
    step_model: LinearStepModel
    total_blocks: int
    block_size_tokens: int
    step_budget_tokens: int
    max_sequences: int
    kv_bytes_per_token: float
    samples: int
    residual_s: float
    median_error: float
    """Of single steps, as a share of their time."""
    link_bytes_per_s: float = 1e9
    link_start_s: float = 0.002
    hop_s: float = 0.001
    """What a prompt takes more than its steps, from whom the worker serves and back."""

    def save(self, path: Path) -> None:
        """Writes it as JSON."""
        path.write_text(json.dumps({"format": PROFILE_FORMAT, **asdict(self)}, indent=2) + "\n")


def load_profile(path: Path) -> Profile:
    """Reads a profile. Raises ConfigError."""
    try:
        found = json.loads(path.read_text())
        if found.pop("format", None) != PROFILE_FORMAT:
            raise ConfigError(f"{path} is no profile of `twostroke profile` (format {PROFILE_FORMAT})")
        return Profile(**{**found, "step_model": LinearStepModel(**found["step_model"])})
    except FileNotFoundError:
        raise ConfigError(f"there is no profile {path}; make one with `twostroke profile`") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} is no profile: {error}") from None


def is_profile(model: str) -> bool:
    """Whether a model is named by a profile."""
    return model.endswith(".json") and Path(model).name != "config.json"


def replica(spec: ReplicaSpec) -> Replica:
    """Raises ConfigError: an unknown name, weights that do not fit, a parallelism that the model cannot have."""
    if is_profile(spec.model):
        return _profiled(spec, load_profile(Path(spec.model)))
    shape = catalogue.find(spec.model)
    sheet = hardware.find(spec.gpu)
    parallel = Parallel(tp=spec.tp, pp=spec.pp, dp=spec.dp, ep=spec.ep)
    if shape.heads % spec.tp:
        raise ConfigError(f"{shape.heads} attention heads of {spec.model} cannot be split {spec.tp} ways; choose --tp")
    quantised = precision(spec.precision, shape, sheet)
    known = fitted.fitted_efficiencies(shape, sheet, quantised, spec.engine)
    roofline = RooflineStepModel(shape, sheet, quantised, parallel, known)
    tokens = roofline.kv_capacity_tokens()
    blocks = spec.kv_blocks or tokens // spec.block_tokens
    if blocks < 1:
        raise ConfigError(
            f"{spec.model} in {spec.precision} needs {roofline.weight_bytes() / 1e9:.0f} GB of weights on each of "
            f"{parallel.gpus} {sheet.name}, which has {sheet.memory_bytes / 1e9:.0f} GB; raise tp or pp, or quantise"
        )
    price = spec.dollars_per_hour or sheet.dollars_per_hour
    kind = WorkerKind(
        _limits(spec, roofline, blocks, spec.budget_tokens or 8192, spec.sequences or 256),
        gpus=parallel.gpus,
        dollars_per_hour=price * parallel.gpus,
        start_s=spec.start_s,
        label=label(spec),
    )
    kv_bytes = shape.kv_bytes_per_token(roofline.precision.kv_bytes)
    return Replica(kind, kv_bytes, sheet.network_bytes_per_s * parallel.gpus)


def label(spec: ReplicaSpec) -> str:
    """How a kind of replica is called in tables."""
    parts = [spec.gpu, f"TP{spec.tp}"]
    parts += [f"{name}{value}" for name, value in (("PP", spec.pp), ("EP", spec.ep), ("DP", spec.dp)) if value > 1]
    return " ".join(parts)


def _profiled(spec: ReplicaSpec, profile: Profile) -> Replica:
    kind = WorkerKind(
        Limits(
            profile.step_model,
            blocks=spec.kv_blocks or profile.total_blocks,
            block_tokens=profile.block_size_tokens,
            budget_tokens=spec.budget_tokens or profile.step_budget_tokens,
            sequences=spec.sequences or profile.max_sequences,
            unit_tokens=_whole_unit(spec.unit_tokens, profile.block_size_tokens),
            most_step_s=spec.most_step_s,
            spare_model=_step_model(spec.spare_model),
            busy_model=_step_model(spec.busy_model),
        ),
        dollars_per_hour=spec.dollars_per_hour,
        start_s=spec.start_s,
        label=f"profile of {profile.model}",
    )
    return Replica(kind, profile.kv_bytes_per_token, profile.link_bytes_per_s, profile.hop_s)


def _step_model(profile: str) -> StepModel | None:
    return load_profile(Path(profile)).step_model if profile else None


def _limits(spec: ReplicaSpec, model: StepModel, blocks: int, budget_tokens: int, sequences: int) -> Limits:
    return Limits(
        Remembering(model),
        blocks=blocks,
        block_tokens=spec.block_tokens,
        budget_tokens=budget_tokens,
        sequences=sequences,
        unit_tokens=_whole_unit(spec.unit_tokens, spec.block_tokens),
        most_step_s=spec.most_step_s,
    )


def _whole_unit(unit_tokens: int, block_tokens: int) -> int:
    """Prefix units are whole blocks; others are not cached."""
    return unit_tokens if unit_tokens % block_tokens == 0 else 0
