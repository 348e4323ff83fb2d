"""What runs: the file that `up` keeps so that `status`, `logs`, `down` and the next `up` find its processes."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from twostroke.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process, told apart from a later one with the same pid."""

    pid: int
    started_ticks: int
    """When it started, in clock ticks since the machine did: unlike a date it never shifts when a clock is set."""

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """The process that has this pid now; one that is already gone never counts as alive."""
        found = _stat(pid)
        return cls(pid, found[1] if found is not None else -1)

    def alive(self) -> bool:
        """Whether it still runs; a zombie does not."""
        found = _stat(self.pid)
        return found is not None and found[0] not in ("Z", "X") and found[1] == self.started_ticks


def _stat(pid: int) -> tuple[str, int] | None:
    """State and start of a process."""
    try:
        # The name before the last bracket may hold anything, brackets too.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0], int(fields[19])


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """One started process."""

    name: str
    """Such as "router" or "prefill-0"."""
    process: ProcessId
    address: str
    """host:port of its gRPC server."""
    command: tuple[str, ...]
    log: str
    """Path of its output."""
    exit: str = ""
    """How it ended, once `up` saw it end."""


@dataclass(frozen=True, slots=True)
class RunState:
    """A started cluster."""

    grpc: str
    """host:port of the router's gRPC server."""
    http: str
    """Base URL of the router's OpenAI API; empty when it serves none."""
    model: str
    """Name by which clients ask for the model."""
    supervisor: ProcessId | None
    """The `up` that watches over it; None once it is detached."""
    processes: tuple[ProcessRecord, ...] = ()

    def alive(self) -> tuple[ProcessRecord, ...]:
        """The processes that still run."""
        return tuple(record for record in self.processes if record.process.alive())

    def with_exit(self, name: str, how: str) -> RunState:
        """The same with one process's end noted."""
        processes = tuple(replace(record, exit=how) if record.name == name else record for record in self.processes)
        return replace(self, processes=processes)


class RunDir:
    """The folder that holds the state file, the lock and the logs."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def state_path(self) -> Path:
        """The state file; it exists while something runs."""
        return self.path / "state.json"

    def log_path(self, name: str) -> Path:
        """Where a process's output goes."""
        return self.path / f"{name}.log"

    def clear_logs(self) -> None:
        """Removes the logs of an earlier run."""
        for path in self.path.glob("*.log"):
            path.unlink(missing_ok=True)

    def create(self) -> None:
        """Makes the folder, for this user only. Raises ConfigError when it cannot be used."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            owner = self.path.stat().st_uid
        except OSError as error:
            raise ConfigError(f"TWOSTROKE_RUN_DIR={self.path}: {error.strerror}; choose another folder") from error
        if owner != os.getuid():
            raise ConfigError(f"TWOSTROKE_RUN_DIR={self.path} belongs to another user; choose another folder")

    def save(self, state: RunState) -> None:
        """Writes the state file; a reader sees the old or the new one, never a part."""
        temporary = self.path / f".state.{os.getpid()}"
        temporary.write_bytes(TypeAdapter(RunState).dump_json(state, indent=1))
        temporary.replace(self.state_path)

    def load(self) -> RunState | None:
        """What `up` started, or None. Raises ConfigError for a file that cannot be read."""
        try:
            return TypeAdapter(RunState).validate_json(self.state_path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            why = str(error).partition("\n")[0]
            raise ConfigError(f"{self.state_path} cannot be read ({why}); end its processes and delete it") from error

    def clear(self) -> None:
        """Removes the state file; the logs stay."""
        self.state_path.unlink(missing_ok=True)

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Makes this process the only `up` of the folder for as long as the context lasts.

        Raises ConfigError when another one is at work or has left processes running. A state file whose processes are
        all gone is removed.
        """
        self.create()
        with (self.path / "up.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(self._occupied("a twostroke already runs")) from error
            state = self.load()
            if state is not None:
                alive = state.alive()
                if alive:
                    names = ", ".join(f"{record.name} (pid {record.process.pid})" for record in alive)
                    raise ConfigError(self._occupied(f"a twostroke already runs: {names}"))
                self.clear()
            yield

    def _occupied(self, what: str) -> str:
        return f"{what}; `twostroke down` stops it, TWOSTROKE_RUN_DIR (now {self.path}) makes room for a second one"
