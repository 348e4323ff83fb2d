"""Command lines of the processes: one flag per setting, made from the settings themselves.

Plain argparse, because five processes that start together would each pay for a richer library's import. The flag wins
over the environment variable, which wins over the default.
"""

from __future__ import annotations

import argparse
import difflib
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from twostroke.config import RouterSettings, WorkerSettings, load
from twostroke.errors import ConfigError

S = TypeVar("S", RouterSettings, WorkerSettings)

_UNITS = {"s": "SECONDS", "ms": "MS", "us": "US", "bytes": "BYTES", "tokens": "TOKENS", "port": "PORT"}


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting as a flag."""

    path: tuple[str, ...]
    """Where it sits in the settings: ("port",) or ("rpc", "keepalive_s")."""
    info: FieldInfo

    @property
    def option(self) -> str:
        """As it is written on a command line."""
        return "--" + "-".join(self.path).replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable that sets it; a group of settings is one variable that holds JSON."""
        return f"TWOSTROKE_{self.path[0].upper()}"

    @property
    def help(self) -> str:
        """What it does, its default and its variable."""
        text = self.info.description or self.path[-1].removesuffix("_s").replace("_", " ").capitalize() + "."
        default = "none" if self.info.default in ("", None) else self.info.default
        variable = self.variable if len(self.path) == 1 else f"{self.variable}='{{\"{self.path[-1]}\": ...}}'"
        return f"{text} [default: {default}; env: {variable}]".replace("%", "%%")


def flags_of(kind: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[Flag]:
    """The flags of a settings class, in its order; groups within it are flattened.

    Secrets have none, because everybody on a machine sees its command lines.
    """
    for name, info in kind.model_fields.items():
        if info.annotation is SecretStr:
            continue
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from flags_of(info.annotation, (*path, name))
        else:
            yield Flag((*path, name), info)


def parser(kind: type[BaseModel], prog: str, description: str) -> argparse.ArgumentParser:
    """The parser of a settings class. Values stay text: the settings class is what checks them."""
    made = _Parser(
        prog=prog,
        usage="%(prog)s [flags]",
        description=description,
        epilog="A flag wins over its environment variable, which wins over the default.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for flag in flags_of(kind):
        target: argparse._ActionsContainer = made
        if len(flag.path) > 1:
            group = flag.path[0]
            if group not in groups:
                groups[group] = made.add_argument_group(f"{group} settings")
            target = groups[group]
        destination = ".".join(flag.path)
        if bool in _members(flag.info.annotation):
            action = argparse.BooleanOptionalAction
            target.add_argument(flag.option, action=action, dest=destination, help=flag.help)
        else:
            target.add_argument(flag.option, dest=destination, help=flag.help, metavar=_metavar(flag))
    return made


def read(kind: type[S], argv: Sequence[str], prog: str = "twostroke", description: str = "") -> S:
    """The settings of a command line. Raises ConfigError with one line that names the flag or variable to change."""
    given = vars(parser(kind, prog, description).parse_args(list(argv)))
    values: dict[str, Any] = {}
    for destination, value in given.items():
        *groups, name = destination.split(".")
        inner = values
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[name] = value
    try:
        return load(kind, **values)
    except ConfigError as error:
        if isinstance(error.__cause__, ValidationError):
            raise ConfigError(_explain(error.__cause__, set(given))) from error
        raise


def parse(kind: type[S], argv: Sequence[str], prog: str, description: str) -> S:
    """As `read`, for a process's own command line: a wrong one ends the process with one line and exit code 2."""
    try:
        return read(kind, argv, prog, description)
    except ConfigError as error:
        fail(prog, error.message)


def fail(prog: str, message: str, code: int = 2) -> NoReturn:
    """Ends the process with one line on stderr."""
    sys.stderr.write(f"{prog}: {message}\n")
    raise SystemExit(code)


class _Parser(argparse.ArgumentParser):
    """argparse, with its mistakes as ConfigError in one line."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("argument "):
            message = message.removeprefix("argument ")
        raise ConfigError(f"{message}; see {self.prog} --help")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse, with unknown arguments compared to the known ones."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].partition("=")[0]
            near = difflib.get_close_matches(name, self._option_string_actions, n=1)
            hint = f"did you mean {near[0]}?" if near else f"see {self.prog} --help"
            what = "no such flag" if name.startswith("-") else "flags begin with --"
            raise ConfigError(f"{name}: {what}; {hint}")
        return found


def _explain(error: ValidationError, given: set[str]) -> str:
    lines = []
    for problem in error.errors():
        path = tuple(str(part) for part in problem["loc"])
        flag = Flag(path, FieldInfo())
        name = flag.option if ".".join(path) in given else flag.variable
        message = problem["msg"].removeprefix("Value error, ")
        lines.append(f"{name}: {message[:1].lower()}{message[1:]} (got {problem.get('input')!r})")
    return "; ".join(lines)


def _members(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def _metavar(flag: Flag) -> str:
    for member in _members(flag.info.annotation):
        if get_origin(member) is Literal:
            return "{" + ",".join(str(choice) for choice in get_args(member)) + "}"
        if member in (int, float):
            return _UNITS.get(flag.path[-1].rsplit("_", 1)[-1], "N" if member is int else "X")
    return "TEXT"
