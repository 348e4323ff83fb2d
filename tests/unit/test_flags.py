from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import SecretStr

from twostroke.config import RouterSettings, RpcSettings, WorkerSettings
from twostroke.errors import ConfigError
from twostroke.flags import Flag, flags_of, parse, parser, read

SERVICES = Path(__file__).parents[2] / "services"
BOTH = pytest.mark.parametrize("kind", [WorkerSettings, RouterSettings])


def other_value(flag: Flag) -> Any:
    """A valid value that is not the default, for flags that have one."""
    annotation, default = flag.info.annotation, flag.info.default
    if get_origin(annotation) is Literal:
        return next((choice for choice in get_args(annotation) if choice != default), default)
    if annotation is float:
        return default / 2 or 0.5
    if annotation is int:
        return default + 1
    if annotation in (bool, bool | None):
        return True
    assert annotation is str
    return "localhost:7"


def value_at(settings: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        settings = getattr(settings, name)
    return settings


@BOTH
def test_every_field_is_a_flag(kind: type[Any]) -> None:
    names = {flag.path[0] for flag in flags_of(kind)}
    secrets = {name for name, info in kind.model_fields.items() if info.annotation is SecretStr}
    assert names == set(kind.model_fields) - secrets
    assert secrets == ({"api_keys", "admin_key"} if kind is RouterSettings else set())
    assert {flag.path[1] for flag in flags_of(kind) if flag.path[0] == "rpc"} == set(RpcSettings.model_fields)


@BOTH
def test_every_flag_sets_its_field(kind: type[Any]) -> None:
    for flag in flags_of(kind):
        value = other_value(flag)
        argv = [flag.option] if value is True else [flag.option, str(value)]
        assert value_at(read(kind, argv), flag.path) == value, flag.option


@BOTH
def test_every_variable_sets_its_field(kind: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for flag in flags_of(kind):
        value = other_value(flag)
        text = json.dumps({flag.path[1]: value}) if len(flag.path) > 1 else str(value)
        with monkeypatch.context() as patch:
            patch.setenv(flag.variable, text)
            assert value_at(read(kind, []), flag.path) == value, flag.variable


@BOTH
def test_help_shows_flag_default_and_variable_of_every_field(kind: type[Any]) -> None:
    text = " ".join(parser(kind, "twostroke x", "").format_help().split())
    for flag in flags_of(kind):
        default = "none" if flag.info.default in ("", None) else str(flag.info.default)
        assert re.search(rf"{flag.option}\b.*\[default: {re.escape(default)}; env: {flag.variable}\b", text), (
            flag.option
        )


def test_flag_wins_over_variable_and_variable_over_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(WorkerSettings, []).port == 50061
    monkeypatch.setenv("TWOSTROKE_PORT", "7001")
    assert read(WorkerSettings, []).port == 7001
    assert read(WorkerSettings, ["--port", "7002"]).port == 7002


def test_a_flag_of_a_group_keeps_the_rest_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_RPC", '{"keepalive_s": 4, "ping_timeout_s": 2}')
    rpc = read(RouterSettings, ["--rpc-ping-timeout-s", "3"]).rpc
    assert (rpc.keepalive_s, rpc.ping_timeout_s) == (4.0, 3.0)


def test_the_last_of_a_repeated_flag_counts() -> None:
    assert read(WorkerSettings, ["--role", "prefill", "--role", "decode"]).role == "decode"


def test_booleans_can_be_negated() -> None:
    assert read(WorkerSettings, []).eager is None
    assert read(WorkerSettings, ["--eager"]).eager is True
    assert read(WorkerSettings, ["--no-eager"]).eager is False


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--port", "x"], "--port: input should be a valid integer.*\\(got 'x'\\)"),
        (["--port", "65536"], "--port: input should be less than or equal to 65535"),
        (["--role", "both2"], "--role: input should be 'prefill', 'decode' or 'both' \\(got 'both2'\\)"),
        (["--rpc-keepalive-s", "0"], "--rpc-keepalive-s: input should be greater than 0"),
        (["--prot", "1"], "--prot: no such flag; did you mean --port\\?"),
        (["--zzz=1"], "--zzz: no such flag; see twostroke --help"),
        (["prefill"], "prefill: flags begin with --"),
        (["--port"], "--port: expected one argument; see twostroke --help"),
    ],
)
def test_mistakes_name_the_flag(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}") as raised:
        read(WorkerSettings, argv)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("TWOSTROKE_PORT", "x", "TWOSTROKE_PORT: input should be a valid integer"),
        ("TWOSTROKE_RPC", "{", "TWOSTROKE_RPC: not valid JSON"),
    ],
)
def test_mistakes_in_the_environment_name_the_variable(
    variable: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=f"^{message}"):
        read(WorkerSettings, [])


def test_a_process_ends_with_one_line_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        parse(WorkerSettings, ["--port", "x", "--max-sequences", "0"], "twostroke worker", "A worker.")
    assert raised.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("twostroke worker: --port: ")
    assert "; --max-sequences: input should be greater than 0" in error
    assert error.count("\n") == 1


def test_help_ends_with_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        parse(WorkerSettings, ["--help"], "twostroke worker", "A worker.")
    assert raised.value.code == 0
    assert "A worker." in capsys.readouterr().out


def test_imports_no_command_line_library() -> None:
    program = "import sys, twostroke.flags; print(sorted({'typer', 'rich', 'grpc', 'torch'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={"PYTHONPATH": str(SERVICES)}
    )
    assert done.stdout == "[]\n"
