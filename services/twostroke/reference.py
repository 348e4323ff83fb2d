"""The tables of docs/operations.md and docs/errors.md, made from the settings and the errors themselves.

`python -m twostroke.reference DOCS` writes them between the marks in those files.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel, SecretStr

from twostroke.config import ClientSettings, RouterSettings, RpcSettings, WorkerSettings
from twostroke.errors import HTTP_STATUS, ConfigError, TwostrokeError
from twostroke.flags import Flag, flags_of

_REMEDIES = {
    "INTERNAL": "the router's log",
    "CONFIG": "change the named flag; it is printed by the command, which ends with code 2",
    "INVALID_REQUEST": "change what the message names",
    "UNSUPPORTED_FIELD": "leave the named field out",
    "PROMPT_TOO_LONG": "shorten it; both lengths are named",
    "UNKNOWN_MODEL": "use a name of ListModels or /v1/models",
    "UNAUTHENTICATED": "send a key of the router's --api-keys-file",
    "PERMISSION_DENIED": "send the admin key",
    "OVERLOADED": "retry after the given delay",
    "RATE_LIMITED": "retry after the given delay, or raise --rate-per-s",
    "UNAVAILABLE": "retry after the given delay",
    "NO_WORKER": "start the missing worker, which the message and `twostroke status` name",
    "WORKER_LOST": "retry",
    "ANSWER_LOST": "retry, with a seed; or `--unseeded-loss continue`",
    "STALE_EPOCH": "none; the router places again",
    "LAYOUT_MISMATCH": "start them alike",
    "KV_LOST": "none; the router places again",
    "KV_CORRUPT": "none; the router places again; look at the link",
    "DEADLINE": "a longer deadline, or --request-timeout-s",
    "ENGINE_FAILED": "the worker's log",
}


def errors() -> str:
    """Every error as a row."""
    return _table(("reason", "gRPC status", "HTTP", "meaning", "what to do"), map(_error, _tree(TwostrokeError)))


def _tree(root: type[TwostrokeError]) -> Iterator[type[TwostrokeError]]:
    if root is not TwostrokeError:
        yield root
    for child in root.__subclasses__():
        yield from _tree(child)
    if root is TwostrokeError:
        yield root


def _error(kind: type[TwostrokeError]) -> Sequence[str]:
    meaning = "Anything else." if kind is TwostrokeError else (inspect.getdoc(kind) or "").partition("\n")[0]
    remedy = _REMEDIES.get(kind.reason, "see the message")
    if kind is ConfigError:
        return (kind.reason, "-", "-", meaning, remedy)
    return (kind.reason, kind.code.name, str(HTTP_STATUS.get(kind.code, 500)), meaning, remedy)


def settings(kind: type[BaseModel]) -> str:
    """Every setting of a class as a row; groups have tables of their own."""
    flags = [flag for flag in flags_of(kind) if len(flag.path) == 1]
    secrets = [Flag((name,), info) for name, info in kind.model_fields.items() if info.annotation is SecretStr]
    return _table(("flag", "variable", "default", "what it is"), map(_setting, [*flags, *secrets]))


def _setting(flag: Flag) -> Sequence[str]:
    default = flag.info.default
    secret = flag.info.annotation is SecretStr
    shown = (
        "-"
        if secret or default in ("", None)
        else f"`{str(default).lower() if isinstance(default, bool) else default}`"
    )
    text = flag.info.description or f"{flag.path[-1].removesuffix('_s').replace('_', ' ').capitalize()}."
    return ("-" if secret else f"`{flag.option}`", f"`{flag.variable}`", shown, text)


def rpc() -> str:
    """The group of settings that routers, workers and commands have in common."""
    flags = [Flag(("rpc", name), info) for name, info in RpcSettings.model_fields.items()]
    rows = ((f"`{flag.option}`", f'`{{"{flag.path[1]}": ...}}`', *_setting(flag)[2:]) for flag in flags)
    return _table(("flag", "in `TWOSTROKE_RPC`", "default", "what it is"), rows)


def _table(head: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def tables() -> dict[tuple[str, str], str]:
    """All of them, by file and mark."""
    return {
        ("errors.md", "errors"): errors(),
        ("operations.md", "router"): settings(RouterSettings),
        ("operations.md", "worker"): settings(WorkerSettings),
        ("operations.md", "client"): settings(ClientSettings),
        ("operations.md", "rpc"): rpc(),
    }


def insert(text: str, mark: str, table: str) -> str:
    """A document with the table between its marks. Raises ConfigError for a document without them."""
    begin, end = f"<!-- begin {mark} -->\n", f"<!-- end {mark} -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ConfigError(f"the document has no {begin.strip()} and {end}")
    return f"{before}{begin}{table}\n{end}{after}"


def main() -> None:
    """Entry point."""
    folder = Path(sys.argv[1])
    for (name, mark), table in tables().items():
        path = folder / name
        path.write_text(insert(path.read_text(), mark, table))


if __name__ == "__main__":
    main()
