"""What efficiencies depend on, from the general to the particular.

The efficiencies of a setting are a prior plus what each of its levels adds: what all engines share, what this engine
adds, this generation of hardware, this family of models, down to one version of one engine on one model and system.
A level about which nothing was measured adds nothing. So a known setting is described closely, and an unknown one by
whatever is known about its like.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twostroke.sim.perf.roofline import EFFICIENCY_NAMES, RATIOS, Efficiencies

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Setting:
    """What runs where. source, version: of a measurement; empty for a prediction about one's own servers."""

    engine: str
    model: str
    family: str
    system: str
    generation: str
    precision: str
    source: str = "published"
    version: str = ""


LEVELS: tuple[tuple[tuple[str, ...], float], ...] = (
    ((), 2),
    (("engine",), 0.8125),
    (("engine", "source"), 0.8125),
    (("generation",), 0.625),
    (("engine", "generation"), 0.5),
    (("system",), 0.3125),
    (("precision",), 0.625),
    (("precision", "generation", "engine"), 0.375),
    (("family",), 0.5),
    (("family", "engine"), 0.375),
    (("model",), 0.5),
    (("model", "engine"), 0.375),
    (("model", "system", "engine", "precision"), 0.375),
    (("model", "system", "engine", "precision", "version", "source"), 0.3125),
)
"""(fields that tell a level's groups apart, standard deviation of what a group adds, on the fit's scale)."""

_SPREADS = {
    "weights": 0.5,
    "expert_weights": 0.7,
    "expert_variety": 0.7,
    "compute": 0.7,
    "second_shot_s": 2.0,
    "sequence_s": 2.0,
    "token_s": 1.5,
    "prefill_layer_s": 3.0,
    "first_token_s": 2.5,
    "first_token_per_token_s": 2.0,
}
SPREADS = np.array([_SPREADS.get(name, 1.0) for name in EFFICIENCY_NAMES])
"""By how much each efficiency varies within a level, against the level's own standard deviation."""

_IS_RATIO = np.array([name in RATIOS for name in EFFICIENCY_NAMES])
_TYPICAL = np.array([getattr(Efficiencies(), name) for name in EFFICIENCY_NAMES])
PRIOR = np.where(_IS_RATIO, np.log(_TYPICAL / (1 - np.minimum(_TYPICAL, 0.999))), np.log(_TYPICAL))
"""The typical efficiencies on the fit's scale: log-odds of shares, logarithms of times."""


def groups(setting: Setting) -> list[str]:
    """The setting's group on each level, as a key."""
    return [";".join(f"{name}={getattr(setting, name)}" for name in names) or "all" for names, _ in LEVELS]


def efficiencies(scaled: Floats) -> Efficiencies:
    """From the fit's scale; the last dimension is the efficiencies', others stay (as the first of two)."""
    times = np.exp(np.clip(scaled, -30, 5))
    values = np.where(_IS_RATIO, 1 / (1 + np.exp(-scaled)), times)
    if values.ndim == 1:
        return Efficiencies(*values.tolist())
    columns: Any = [values[:, [index]] for index in range(values.shape[-1])]
    return Efficiencies(*columns)
