"""What the host must allow before KV moves, checked once at the start, each with a plain sentence.

A finding that falls back names UCX transports to leave out; the transfer works without them, slower. One that refuses
would fail later, in the middle of serving, so the worker does not start.
"""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TypeVar

from twostroke.errors import ConfigError

T = TypeVar("T")

SHM_NEEDED_BYTES = 8 << 20
"""What UCX's posix transport takes from /dev/shm per process (4.2 MiB, measured), with room. Some versions end with
SIGBUS where it is missing, and we have no use for that transport where cma or RDMA is."""

_SHM = "/dev/shm"  # noqa: S108
_CAP_SYS_PTRACE = 1 << 19
_CAP_IPC_LOCK = 1 << 14


class Action(Enum):
    """What follows from a finding."""

    NONE = "none"
    FALL_BACK = "fall back"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check. without: UCX transports to leave out, when action is FALL_BACK."""

    check: str
    action: Action
    message: str
    without: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Host:
    """What the checks look at. None where the kernel does not say."""

    locked_memory_limit_bytes: int | None
    """RLIMIT_MEMLOCK; None is unlimited."""
    rdma_devices: tuple[str, ...]
    shm_free_bytes: int | None
    """Free space in /dev/shm; None when it is not there."""
    ptrace_scope: int | None
    """kernel.yama.ptrace_scope; None without Yama."""
    capabilities: int
    """The effective ones, as bits."""
    reads_processes: bool
    """Whether process_vm_readv is allowed at all, tried on this process."""


def locked_memory(host: Host, registered_bytes: int) -> Finding:
    """RDMA pins what is registered. Without an RDMA device nothing is pinned."""
    name, limit = "locked memory", host.locked_memory_limit_bytes
    if not host.rdma_devices:
        return Finding(name, Action.NONE, "no RDMA device, so no memory is locked")
    devices = ", ".join(host.rdma_devices)
    if limit is None or limit >= registered_bytes or host.capabilities & _CAP_IPC_LOCK:
        return Finding(name, Action.NONE, f"{_size(registered_bytes)} of KV can be locked for {devices}")
    return Finding(
        name,
        Action.REFUSE,
        f"the locked-memory limit is {_size(limit)} and {_size(registered_bytes)} of KV must be locked for {devices}; "
        "raise it (ulimit -l unlimited, LimitMEMLOCK=infinity in systemd, --ulimit memlock=-1 in Docker, IPC_LOCK in "
        "Kubernetes) or leave RDMA out with UCX_TLS=tcp,cma",
    )


def shared_memory(host: Host, needed_bytes: int = SHM_NEEDED_BYTES) -> Finding:
    """UCX's posix transport lives in /dev/shm."""
    name, free = "shared memory", host.shm_free_bytes
    if free is not None and free >= needed_bytes:
        return Finding(name, Action.NONE, f"{_SHM} has {_size(free)} free")
    found = "is missing" if free is None else f"has {_size(free)} free, and UCX needs {_size(needed_bytes)}"
    return Finding(
        name,
        Action.FALL_BACK,
        f"{_SHM} {found}; KV moves without it, over cma or tcp. Enlarge it with --shm-size=1g in Docker, or an "
        f"emptyDir with medium: Memory at {_SHM} in Kubernetes",
        ("posix",),
    )


def cross_process_reads(host: Host) -> Finding:
    """cma copies with process_vm_readv, which the kernel guards like ptrace."""
    name, fallback = "cross-process reads", "KV between processes of this host moves over tcp"
    capable = bool(host.capabilities & _CAP_SYS_PTRACE)
    if not host.reads_processes:
        return Finding(
            name,
            Action.FALL_BACK,
            f"process_vm_readv is not permitted here, mostly by a container's seccomp profile; {fallback}. Allow it "
            "with --cap-add=SYS_PTRACE, or a profile that permits process_vm_readv",
            ("cma",),
        )
    scope = host.ptrace_scope or 0
    if scope == 3 or (scope in (1, 2) and not capable):
        return Finding(
            name,
            Action.FALL_BACK,
            f"kernel.yama.ptrace_scope is {scope}, which forbids reading another worker's memory; {fallback}. Set it "
            "to 0 (sysctl kernel.yama.ptrace_scope=0)" + ("" if scope == 3 else " or give the worker CAP_SYS_PTRACE"),
            ("cma",),
        )
    return Finding(name, Action.NONE, "processes of this user may read each other's memory")


def check_host(host: Host, registered_bytes: int) -> tuple[Finding, ...]:
    """All checks. registered_bytes: size of the KV memory."""
    return locked_memory(host, registered_bytes), shared_memory(host), cross_process_reads(host)


def transport_options(findings: Sequence[Finding], tls: str = "") -> dict[str, str]:
    """UCX options that leave out what the findings rule out. tls: UCX_TLS as the user set it, which is left alone.

    Raises ConfigError with the message of the first finding that refuses.
    """
    for finding in findings:
        if finding.action is Action.REFUSE:
            raise ConfigError(finding.message)
    without = [transport for finding in findings for transport in finding.without]
    return {"TLS": "^" + ",".join(without)} if without and not tls else {}


def read_host(
    read_text: Callable[[str], str] = lambda path: Path(path).read_text(),
    list_folder: Callable[[str], Sequence[str]] = os.listdir,
    free_bytes: Callable[[str], int] = lambda path: os.statvfs(path).f_bavail * os.statvfs(path).f_frsize,
    locked_memory_limit: Callable[[], int] = lambda: resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
    try_reading: Callable[[], bool] | None = None,
) -> Host:
    """This host. The arguments stand in for the kernel in tests; those that read files raise OSError for what is not
    there."""
    limit = locked_memory_limit()
    status = _or_none(lambda: read_text("/proc/self/status")) or ""
    scope = _or_none(lambda: int(read_text("/proc/sys/kernel/yama/ptrace_scope")))
    capabilities = [line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")]
    return Host(
        locked_memory_limit_bytes=None if limit == resource.RLIM_INFINITY else limit,
        rdma_devices=tuple(sorted(_or_none(lambda: list_folder("/sys/class/infiniband")) or ())),
        shm_free_bytes=_or_none(lambda: free_bytes(_SHM)),
        ptrace_scope=scope,
        capabilities=int(capabilities[0], 16) if capabilities else 0,
        reads_processes=(try_reading or reads_itself)(),
    )


def reads_itself() -> bool:
    """Whether process_vm_readv works on this process, which seccomp forbids and ptrace rules do not."""

    class Piece(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))

    origin, copy = ctypes.create_string_buffer(b"twostroke"), ctypes.create_string_buffer(10)
    here = Piece(ctypes.addressof(copy), 10)
    there = Piece(ctypes.addressof(origin), 10)
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "process_vm_readv"):
        return False
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    pieces = ctypes.c_ulong(1)
    got = libc.process_vm_readv(os.getpid(), ctypes.byref(here), pieces, ctypes.byref(there), pieces, ctypes.c_ulong(0))
    return got == 10 and copy.value == b"twostroke"


def _or_none(read: Callable[[], T]) -> T | None:
    try:
        return read()
    except OSError:
        return None


def _size(nbytes: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.4g} {unit}"
    return f"{nbytes} bytes"
