"""Builds the package: generates the protobuf code that the sources import, and compiles the native KV transport."""

from __future__ import annotations

import importlib.resources
import importlib.util
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
PROTOS = ROOT / "protos"
SOURCES = ROOT / "services"


def generate() -> None:
    """Writes twostroke/v1/*_pb2*.py(i) beside the sources, so that proto path and import path are the same."""
    from grpc_tools import protoc

    target = SOURCES / "twostroke" / "v1"
    target.mkdir(exist_ok=True)
    files = sorted(str(p.relative_to(PROTOS)) for p in (PROTOS / "twostroke" / "v1").glob("*.proto"))
    include = importlib.resources.files("grpc_tools") / "_proto"
    scripts = Path(sys.executable).parent
    plugins = [
        f"--plugin={name}={path}"
        for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")
        if (path := scripts / name).exists()
    ]
    arguments = ["protoc", f"-I{PROTOS}", f"-I{include}", *plugins]
    arguments += [f"--{kind}_out={SOURCES}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    if protoc.main([*arguments, *files]) != 0:
        raise SystemExit("protoc failed; its message is above")
    (target / "__init__.py").write_text('"""Generated from protos/twostroke/v1; see `make proto`."""\n')


class BuildPy(build_py):
    """build_py that generates first."""

    def run(self) -> None:
        generate()
        # Packages were looked for before there was this one, where the tree is clean.
        if "twostroke.v1" not in self.packages:
            self.packages.append("twostroke.v1")
        super().run()


def ucx_headers() -> list[str]:
    """Folder of the headers in the libucx wheel; the compiler's own folders serve where it is not installed."""
    package = importlib.util.find_spec("libucx")
    return [str(Path(folder) / "include") for folder in package.submodule_search_locations or []] if package else []


def native() -> Extension:
    """The UCX binding. Optional: without a compiler the package installs all the same, and kv/ucx.py says why not."""
    folder = "services/twostroke/kv"
    parts = ("worker", "peer", "transfer", "serve", "network", "library", "digest")
    return Extension(
        "twostroke.kv._ucx",
        sources=[f"{folder}/_ucx.c", *(f"{folder}/_ucx_{part}.c" for part in parts)],
        depends=[f"{folder}/_ucx_{part}.h" for part in ("worker", "library", "digest")],
        include_dirs=ucx_headers(),
        extra_compile_args=["-std=gnu11", "-O3", "-fvisibility=hidden", "-Wall", "-Wno-sign-compare"],
        libraries=["dl"],
        optional=True,
    )


if sys.argv[1:] == ["proto"]:
    generate()
else:
    setup(cmdclass={"build_py": BuildPy}, ext_modules=[native()])
