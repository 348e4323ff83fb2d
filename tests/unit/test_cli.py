from __future__ import annotations

import socket
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from twostroke import cli
from twostroke.launch import devices

SERVICES = Path(__file__).parents[2] / "services"


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("TWOSTROKE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(devices, "has_vllm", lambda: True)


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        made.listen(1)
        yield made.getsockname()[1]


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as raised:
        cli.main(argv)
    assert isinstance(raised.value.code, int)
    return raised.value.code


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    text = capsys.readouterr().out
    for command in (
        "up",
        "down",
        "status",
        "top",
        "drain",
        "role",
        "certs",
        "logs",
        "model",
        "generate",
        "explain",
        "router",
        "worker",
    ):
        assert f" {command} " in text
    assert run() == 0
    assert capsys.readouterr().out == text


def test_help_imports_neither_settings_nor_grpc() -> None:
    program = (
        "import sys\nfrom twostroke.cli import main\ntry: main(['--help'])\n"
        "finally: print(sorted({'pydantic', 'grpc', 'numpy', 'torch', 'psutil'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={"PYTHONPATH": str(SERVICES)}
    )
    assert done.stderr == "[]\n"


@pytest.mark.parametrize(
    ("argv", "message", "code"),
    [
        (("up", "--foo"), "twostroke up: no such option: --foo; see twostroke up --help", 2),
        (("up", "--prefill", "x"), "twostroke up: invalid value for '--prefill'", 2),
        (("up", "--prefill", "0", "--engine", "reference"), "twostroke up: --prefill and --decode must be at least", 2),
        (("up", "--http-port", "99999"), "twostroke up: --http-port: input should be less than or equal to 65535", 2),
        (("up", "--engine", "tgi"), "twostroke up: --engine: input should be 'vllm' or 'reference' (got 'tgi')", 2),
        (("up", "--worker-args", "'"), "twostroke up: --worker-args: no closing quotation in", 2),
        (
            ("up", "--worker-args", "--prot 1"),
            "twostroke up: --worker-args: --prot: no such flag; did you mean --port?",
            2,
        ),
        (("up", "--grpc-port=0", "--http-port=0", "--model", "/nowhere"), "twostroke up: --model /nowhere: no such", 2),
        (("serve",), "twostroke: no such command 'serve'", 2),
        (("status", "--router", "x"), "twostroke status: --router x: write host:port", 2),
        (
            ("status", "--router", "127.0.0.1:1"),
            "twostroke status: no router answers at 127.0.0.1:1; `twostroke up`",
            1,
        ),
        (("generate", "hi", "--router", "127.0.0.1:1"), "twostroke generate: no router answers at 127.0.0.1:1", 1),
        (("generate", "a,b", "--tokens"), "twostroke generate: --tokens wants numbers separated by commas", 2),
        (("logs",), "twostroke logs: no logs in", 2),
        (("worker", "--prot", "1"), "twostroke worker: --prot: no such flag; did you mean --port?", 2),
    ],
)
def test_mistakes_are_one_line(
    argv: tuple[str, ...], message: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*argv) == code
    captured = capsys.readouterr()
    assert captured.err.startswith(message)
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_up_on_a_busy_port_names_port_and_flag(busy_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("up", "--engine", "reference", "--grpc-port", str(busy_port)) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"twostroke up: port {busy_port} is taken by ")
    assert error.endswith("; choose another with --grpc-port\n")


def test_up_without_vllm_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(devices, "has_vllm", lambda: False)
    assert run("up", "--grpc-port", "0", "--http-port", "0") == 2
    assert capsys.readouterr().err == (
        "twostroke up: vLLM is not installed: install twostroke[cpu] or twostroke[gpu], or --engine reference\n"
    )


def test_down_with_nothing_running_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("down") == 0
    assert capsys.readouterr().out == f"Nothing runs from {tmp_path / 'run'}.\n"


@pytest.mark.parametrize(
    ("command", "module", "preset"),
    [
        ("router", "twostroke.router.__main__", []),
        ("worker", "twostroke.worker.__main__", []),
        ("prefill", "twostroke.worker.__main__", ["--role", "prefill"]),
        ("decode", "twostroke.worker.__main__", ["--role", "decode"]),
    ],
)
def test_process_commands_pass_their_flags_on(
    command: str, module: str, preset: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[list[str]] = []
    fake = types.ModuleType(module)
    fake.main = lambda argv: received.append(argv) or 7  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module, fake)
    assert run(command, "--port", "1", "--help") == 7
    assert received == [[*preset, "--port", "1", "--help"]]


def test_model_fetch_prints_only_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    assert run("model", "fetch", "--model", str(tmp_path / "m")) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'm'}\n"


@pytest.mark.parametrize("argv", [(), ("a prompt", "--length", "5")])
def test_explain_wants_a_prompt_or_a_length(argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explain", *argv) == 2
    assert capsys.readouterr().err == "twostroke explain: give a prompt, or --length N for one of N tokens\n"
