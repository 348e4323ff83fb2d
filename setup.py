"""Builds the package: generates the protobuf code that the sources import, and compiles the native KV transport and the
modules that decisions and simulations spend their time in."""

from __future__ import annotations

import importlib.resources
import importlib.util
import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
PROTOS = ROOT / "protos"
SOURCES = ROOT / "services"
COMPILED = {
    "policy": ("cost", "placement", "plan", "shortlist", "snapshot", "step_model", "terms"),
    "sim": (
        "batching", "blocks", "clock", "cluster", "decoding", "engine", "fleet", "gaps", "handoffs", "limits", "lives",
        "placer", "recorder", "run", "sequence", "worker",
    ),
}  # fmt: skip
"""Modules of twostroke that mypyc compiles, in one piece, so that they call one another without Python in between."""
NOT_COMPILED = "twostroke: policy and simulator are not compiled, and run about three times as slowly"
UCX = "twostroke.kv._ucx"
BUILDS = {"bdist_wheel", "build", "build_ext", "develop", "editable_wheel", "install"}


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
        UCX,
        sources=[f"{folder}/_ucx.c", *(f"{folder}/_ucx_{part}.c" for part in parts)],
        depends=[f"{folder}/_ucx_{part}.h" for part in ("worker", "library", "digest")],
        include_dirs=ucx_headers(),
        extra_compile_args=["-std=gnu11", "-O3", "-fvisibility=hidden", "-Wall", "-Wno-sign-compare"],
        libraries=["dl"],
        optional=True,
    )


def compiled() -> list[Extension]:
    """The modules of COMPILED as extensions. Optional: without a compiler the same files run as they are.

    TWOSTROKE_MYPYC=0 compiles nothing, and leaves alone what was compiled before.
    """
    # An installer runs this file several times, of which one builds.
    if not BUILDS.intersection(sys.argv) or os.environ.get("TWOSTROKE_MYPYC") == "0":
        return []
    files = [f"services/twostroke/{folder}/{name}.py" for folder, names in COMPILED.items() for name in names]
    # The project's own settings ask for plugins and packages that are not there while it is built.
    settings = ["--config-file=", "--cache-dir=build/mypyc_cache", "--ignore-missing-imports"]
    try:
        from mypyc.build import mypycify

        extensions: list[Extension] = mypycify([*settings, *files], group_name="twostroke", opt_level="3")
    except (ImportError, SystemExit) as error:
        sys.stderr.write(f"{NOT_COMPILED}: {error}\n")
        return []
    for extension in extensions:
        extension.optional = True
    return extensions


class BuildExt(build_ext):
    """build_ext that compiles all modules of COMPILED or none: they are one library, and parts of it do not run."""

    def run(self) -> None:
        names = [each.name for each in self.extensions if each.name != UCX]
        library = [Path(self.get_ext_fullpath(name)) for name in names]
        # An older one must not stand for one that cannot be built.
        for path in [*library, *(Path(self.build_lib, self.get_ext_filename(name)) for name in names)]:
            path.unlink(missing_ok=True)
        super().run()
        if not all(path.exists() for path in library):
            sys.stderr.write(f"{NOT_COMPILED}; the compiler's words are above\n")
            for path in library:
                path.unlink(missing_ok=True)


if sys.argv[1:] == ["proto"]:
    generate()
else:
    setup(cmdclass={"build_py": BuildPy, "build_ext": BuildExt}, ext_modules=[native(), *compiled()])
