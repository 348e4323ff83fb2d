"""The fitted efficiencies that come with the package, and how far a prediction with them may be off."""

from __future__ import annotations

import importlib.resources
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from twostroke.errors import ConfigError
from twostroke.sim.perf.fit import Fitted
from twostroke.sim.perf.hardware import Hardware
from twostroke.sim.perf.levels import LEVELS, Setting, efficiencies, groups
from twostroke.sim.perf.model_shape import ModelShape
from twostroke.sim.perf.roofline import EFFICIENCY_NAMES, Efficiencies, Precision

FORMAT = "twostroke-efficiencies-1"
_FILE = "efficiencies.json"
_CELL = len(LEVELS) - 2
_MODEL = [names for names, _ in LEVELS].index(("model",))
DEPTHS = ("cell", "model", "new")
"""What was fitted on: the same model, system, engine and precision; the same model elsewhere; neither."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Factors within which nine of ten measurements lie of a prediction: prediction / factor to prediction * factor."""

    ttft: float
    tpot: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """A fit with what was found out about its errors. spreads: by depth of knowledge, see depth()."""

    fitted: Fitted
    spreads: Mapping[str, Spread]
    runs: tuple[str, ...]
    """Ids of the measurements that were fitted on."""

    def depth(self, setting: Setting) -> str:
        """How closely the setting is known, one of DEPTHS."""
        keys = groups(setting)
        return DEPTHS[0] if keys[_CELL] in self.fitted.added else DEPTHS[1 if keys[_MODEL] in self.fitted.added else 2]

    def spread(self, setting: Setting) -> Spread:
        """Of a prediction for the setting."""
        own = f"{self.depth(setting)};{setting.source}"
        return self.spreads.get(own, self.spreads[self.depth(setting)])

    def to_json(self) -> str:
        """For the package's data file."""
        added = {key: [round(float(v), 3) for v in values] for key, values in sorted(self.fitted.added.items())}
        content = {
            "format": FORMAT,
            "efficiencies": EFFICIENCY_NAMES,
            "spreads": {key: [round(s.ttft, 4), round(s.tpot, 4)] for key, s in sorted(self.spreads.items())},
            "runs": self.runs,
            "added": added,
        }
        return json.dumps(content, separators=(",", ":")) + "\n"


def from_json(text: str) -> Calibration:
    """Raises ConfigError when it is of another format, or of other efficiencies than this version's."""
    found = json.loads(text)
    if found.get("format") != FORMAT or tuple(found["efficiencies"]) != EFFICIENCY_NAMES:
        raise ConfigError("the efficiencies are of another version; run twostroke.sim.perf.calibration again")
    return Calibration(
        Fitted({key: np.array(values) for key, values in found["added"].items()}),
        {key: Spread(*values) for key, values in found["spreads"].items()},
        tuple(found["runs"]),
    )


@cache
def shipped() -> Calibration:
    """The calibration that comes with the package."""
    return from_json(importlib.resources.files(__package__).joinpath(_FILE).read_text())


def setting(shape: ModelShape, hardware: Hardware, precision: Precision, engine: str = "vllm") -> Setting:
    """The setting of a server of one's own. shape.name: a catalogue key where the model is one that is known."""
    return Setting(engine, shape.name, shape.family, hardware.name, hardware.generation, precision.name)


def fitted_efficiencies(
    shape: ModelShape, hardware: Hardware, precision: Precision, engine: str = "vllm"
) -> Efficiencies:
    """What to expect of such a server. engine: "vllm", "trtllm" or "sglang"; an unknown one gets what all share."""
    return efficiencies(shipped().fitted.scaled(setting(shape, hardware, precision, engine)))


def interval(
    value_s: float,
    shape: ModelShape,
    hardware: Hardware,
    precision: Precision,
    engine: str = "vllm",
    ttft: bool = False,
) -> tuple[float, float]:
    """The range in which nine of ten measurements would lie, of a predicted time between tokens or to the first."""
    spread = shipped().spread(setting(shape, hardware, precision, engine))
    factor = spread.ttft if ttft else spread.tpot
    return value_s / factor, value_s * factor


def factor_of(log_errors: np.ndarray, share: float = 0.9) -> float:
    """The factor within which that share of errors lies, with the finite-sample correction of conformal prediction."""
    sizes = np.sort(np.abs(log_errors))
    rank = min(math.ceil((len(sizes) + 1) * share), len(sizes))
    return float(np.exp(sizes[rank - 1]))
