"""Dependencies point one way, and each outside world is touched in one place."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "services" / "twostroke"

# Package -> packages of ours that it may import, besides itself, errors, config and the generated wire code.
ALLOWED = {
    "policy": set(),
    "telemetry": set(),
    "rpc": set(),
    "kv": set(),
    "engine": {"kv", "policy"},
    "client": {"rpc"},
    "worker": {"engine", "kv", "policy", "rpc", "telemetry", "flags"},
    "router": {"engine", "kv", "policy", "rpc", "telemetry", "flags"},
    "prefill": {"worker"},
    "decode": {"worker"},
    "launch": {"rpc", "client", "flags"},
    "measures": set(),
    "sim": {"measures", "policy", "rpc", "launch", "flags"},
    "bench": {"measures", "sim", "rpc", "client", "launch", "telemetry", "policy", "engine", "kv"},
    "flags": set(),
    "reference": {"flags"},
    "errors": set(),
    "config": set(),
    "model_path": set(),
    "huge_pages": set(),
    "free_port": set(),
    "cli_ask": {"launch"},
    "cli": {"cli_ask", "launch", "router", "worker", "bench", "sim"},
    "__main__": {"cli"},
}
COMMON = {"errors", "config", "model_path", "huge_pages", "free_port", "v1"}

# Library -> where it may be imported.
OUTSIDE = {
    "vllm": ("engine/vllm/", "router/vllm/"),
    "torch": ("engine/vllm/", "router/vllm/", "launch/convert.py"),
    "transformers": ("launch/convert.py",),
    "nixl": ("engine/vllm/",),
}


def modules() -> list[Path]:
    return [path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] != "v1"]


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def package(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[0] if len(parts) > 1 else path.stem


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", modules(), ids=name)
def test_imports_point_down(path: Path) -> None:
    own = package(path)
    if own == "__init__":
        return
    for imported in imports(path):
        parts = imported.split(".")
        if parts[0] == "twostroke" and len(parts) > 1:
            assert parts[1] in ALLOWED[own] | COMMON | {own}, f"{name(path)} imports {imported}"


@pytest.mark.parametrize("path", modules(), ids=name)
def test_libraries_stay_in_their_place(path: Path) -> None:
    for imported in imports(path):
        places = OUTSIDE.get(imported.split(".")[0])
        if places is not None:
            assert name(path).startswith(places), f"{name(path)} imports {imported}"


def test_policy_is_pure() -> None:
    for path in (ROOT / "policy").glob("*.py"):
        for imported in imports(path):
            assert imported.split(".")[0] not in {"grpc", "asyncio", "time", "vllm", "threading"}, f"{path}: {imported}"


def test_only_config_reads_the_environment() -> None:
    readers = {name(path) for path in modules() if "os.environ" in path.read_text() or "getenv" in path.read_text()}
    assert readers == {"config.py"}


def test_only_rpc_builds_servers_and_channels() -> None:
    builders = ("aio.server(", "grpc.server(", "insecure_channel(", "secure_channel(")
    found = {package(path) for path in modules() if any(builder in path.read_text() for builder in builders)}
    assert found == {"rpc"}


def test_files_are_rooms_not_halls() -> None:
    long = {name(path): lines for path in modules() if (lines := len(path.read_text().splitlines())) > 320}
    assert not long


def test_nothing_is_unpickled() -> None:
    """O-93: what comes over a socket is protobuf, or it is refused. Hashes may pickle what they hash."""
    readers = ("pickle.load", "Unpickler", "marshal.load", "shelve.open", "cloudpickle")
    assert not {name(path) for path in modules() if any(reader in path.read_text() for reader in readers)}
