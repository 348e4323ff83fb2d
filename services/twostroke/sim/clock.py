"""Virtual time.

Times and durations are floats that are multiples of one quantum, 2**-36 s (15 ps), and stay below 2**17 s. Sums of such
numbers, and products with whole numbers, are exact in a double. So a run of k engine steps costs one formula and ends
at bit for bit the same time as k single steps do.
"""

from __future__ import annotations

from twostroke.errors import ConfigError

QUANTUM_S = 2.0**-36
HORIZON_S = 2.0**17
_PER_SECOND = 2.0**36


def exact(seconds: float) -> float:
    """The nearest multiple of the quantum, at least one quantum. Raises ConfigError beyond the horizon of 36 hours."""
    if not 0 <= seconds < HORIZON_S:
        raise ConfigError(
            f"a time of {seconds:.0f} s is outside of the simulator's {HORIZON_S:.0f} s (36 h); split the traffic"
        )
    return (round(seconds * _PER_SECOND) or 1) * QUANTUM_S
