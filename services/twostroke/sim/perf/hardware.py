"""What accelerators can do: datasheet figures, prices that a user overrides, and links.

Dense rates (no sparsity), in the units a datasheet uses turned into FLOP/s and bytes/s. How much of them an engine
reaches is not said here but fitted; see fit.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path

from twostroke.errors import ConfigError

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Hardware:
    """One accelerator.

    *_flops: dense FLOP/s by operand type; 0 where the type has no tensor unit of its own, and wider types serve.
    memory_bytes_per_s, memory_bytes: of its main memory.
    link_bytes_per_s: to the other accelerators of its node, one direction, all links together.
    network_bytes_per_s: to other nodes, per accelerator, one direction.
    node_size: accelerators that the fast link joins.
    dollars_per_hour: of one accelerator, a round list price; for comparisons only.
    """

    name: str
    bf16_flops: float
    fp8_flops: float
    fp4_flops: float
    memory_bytes_per_s: float
    memory_bytes: float
    link_bytes_per_s: float
    network_bytes_per_s: float
    node_size: int
    dollars_per_hour: float
    generation: str = "other"

    def flops(self, operand: str) -> float:
        """FLOP/s for operands of "bf16", "fp8" or "fp4"; the next wider type where the hardware lacks one."""
        ladder = {"fp4": (self.fp4_flops, self.fp8_flops), "fp8": (self.fp8_flops,), "bf16": ()}[operand]
        return next((rate for rate in ladder if rate), self.bf16_flops)


def _sheet(
    name: str,
    generation: str,
    tflops: tuple[float, float, float],
    memory: tuple[float, float],
    gb_per_s: tuple[float, float],
    node_size: int,
    dollars_per_hour: float,
) -> Hardware:
    bf16, fp8, fp4 = (each * 1e12 for each in tflops)
    tb_per_s, gib = memory
    link, network = (each * 1e9 for each in gb_per_s)
    return Hardware(
        name, bf16, fp8, fp4, tb_per_s * 1e12, gib * GIB, link, network, node_size, dollars_per_hour, generation
    )


# name, generation, TFLOP/s (bf16, fp8, fp4), (TB/s, GiB), GB/s (link, network), per node, $/h
_SHEETS = (
    _sheet("h100_sxm", "hopper", (989, 1979, 0), (3.35, 79.6), (450, 50), 8, 2.5),
    _sheet("h200_sxm", "hopper", (989, 1979, 0), (4.8, 139.8), (450, 50), 8, 3.0),
    _sheet("h800_sxm", "hopper", (989, 1979, 0), (3.35, 79.6), (200, 50), 8, 2.3),
    _sheet("h20_sxm", "hopper", (148, 296, 0), (4.0, 95.6), (450, 50), 8, 1.8),
    _sheet("gh200", "hopper", (989, 1979, 0), (4.0, 94.5), (450, 50), 32, 3.0),
    _sheet("b200_sxm", "blackwell", (2250, 4500, 9000), (8.0, 179), (900, 50), 8, 5.0),
    _sheet("gb200", "blackwell", (2500, 5000, 10000), (8.0, 184), (900, 50), 72, 5.5),
    _sheet("b300_sxm", "blackwell", (2250, 4500, 13500), (8.0, 268), (900, 100), 8, 6.5),
    _sheet("gb300", "blackwell", (2500, 5000, 15000), (8.0, 277), (900, 100), 72, 7.0),
    _sheet("a100_sxm", "ampere", (312, 0, 0), (2.039, 79.2), (300, 25), 8, 1.5),
    _sheet("a10", "ampere", (125, 0, 0), (0.6, 22.5), (32, 3), 4, 0.6),
    _sheet("l40s", "ada", (362, 733, 0), (0.864, 44.7), (32, 25), 8, 1.0),
    _sheet("rtx4090", "ada", (165, 330, 0), (1.008, 23.6), (32, 3), 4, 0.5),
    _sheet("rtxpro6000", "blackwell-pcie", (504, 1007, 2015), (1.792, 94.9), (64, 25), 8, 1.8),
    _sheet("mi300x", "cdna3", (1307, 2615, 0), (5.3, 191.5), (448, 50), 8, 2.5),
    _sheet("cpu", "cpu", (3, 0, 0), (0.2, 256), (20, 3), 1, 0.5),
)

_ALIASES = {
    "h100": "h100_sxm",
    "h200": "h200_sxm",
    "h800": "h800_sxm",
    "h20": "h20_sxm",
    "b200": "b200_sxm",
    "b300": "b300_sxm",
    "a100": "a100_sxm",
    "a100-80gb": "a100_sxm",
    "h100-80gb": "h100_sxm",
}


def names() -> tuple[str, ...]:
    """Hardware that is built in."""
    return tuple(sheet.name for sheet in _SHEETS)


def find(name: str) -> Hardware:
    """A built-in sheet by name (case and "-" do not matter), or the sheet in a JSON file when the name ends in .json.

    A file holds the fields of Hardware; with "base": NAME it needs only those that differ. Raises ConfigError.
    """
    if name.endswith(".json"):
        return _from_file(Path(name))
    key = name.lower()
    key = _ALIASES.get(key, key).replace("-", "").replace(" ", "")
    for sheet in _SHEETS:
        if sheet.name == key:
            return sheet
    raise ConfigError(f"no hardware sheet named {name}; built in are {', '.join(names())}, or give a .json file")


def _from_file(path: Path) -> Hardware:
    try:
        found = json.loads(path.read_text())
        base = find(found.pop("base")) if "base" in found else None
        known = {each.name for each in fields(Hardware)}
        unknown = sorted(set(found) - known)
        if unknown:
            raise ConfigError(f"{path}: unknown field {unknown[0]}; known are {', '.join(sorted(known))}")
        return replace(base, **found) if base else Hardware(**found)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} holds no hardware sheet: {error}") from error
