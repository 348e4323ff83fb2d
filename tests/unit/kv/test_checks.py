"""Each thing that a host can forbid has its sentence, and a fall-back or a refusal."""

import resource
from dataclasses import replace

import pytest

from twostroke.errors import ConfigError
from twostroke.kv.checks import (
    Action,
    Finding,
    Host,
    check_host,
    cross_process_reads,
    locked_memory,
    read_host,
    reads_itself,
    shared_memory,
    transport_options,
)

GIB = 1 << 30
GOOD = Host(
    locked_memory_limit_bytes=None,
    rdma_devices=("mlx5_0",),
    shm_free_bytes=GIB,
    ptrace_scope=0,
    capabilities=0,
    reads_processes=True,
)
SYS_PTRACE, IPC_LOCK = 1 << 19, 1 << 14


def test_a_good_host_passes_all_and_needs_no_options() -> None:
    findings = check_host(GOOD, 4 * GIB)
    assert [finding.action for finding in findings] == [Action.NONE] * 3
    assert transport_options(findings) == {}


def test_a_low_locked_memory_limit_refuses_by_name() -> None:
    """O-76."""
    finding = locked_memory(replace(GOOD, locked_memory_limit_bytes=64 << 10), 256 << 20)
    assert finding.action is Action.REFUSE
    for word in ("64 KiB", "256 MiB", "mlx5_0", "ulimit -l", "UCX_TLS"):
        assert word in finding.message
    with pytest.raises(ConfigError, match="locked-memory limit is 64 KiB"):
        transport_options([finding])


@pytest.mark.parametrize(
    "host",
    [
        replace(GOOD, locked_memory_limit_bytes=64 << 10, rdma_devices=()),
        replace(GOOD, locked_memory_limit_bytes=GIB),
        replace(GOOD, locked_memory_limit_bytes=64 << 10, capabilities=IPC_LOCK),
    ],
)
def test_locked_memory_is_no_matter_where_it_suffices(host: Host) -> None:
    assert locked_memory(host, GIB).action is Action.NONE


@pytest.mark.parametrize(("free", "text"), [(1 << 20, "has 1 MiB free"), (0, "has 0 bytes free"), (None, "is missing")])
def test_small_shared_memory_falls_back_by_name(free: int | None, text: str) -> None:
    """O-75."""
    finding = shared_memory(replace(GOOD, shm_free_bytes=free))
    assert (finding.action, finding.without) == (Action.FALL_BACK, ("posix",))
    assert text in finding.message
    assert "--shm-size" in finding.message


def test_sixty_four_mib_of_shared_memory_suffice() -> None:
    assert shared_memory(replace(GOOD, shm_free_bytes=64 << 20)).action is Action.NONE


@pytest.mark.parametrize(
    ("scope", "capabilities", "action"),
    [
        (None, 0, Action.NONE),
        (0, 0, Action.NONE),
        (1, 0, Action.FALL_BACK),
        (1, SYS_PTRACE, Action.NONE),
        (2, 0, Action.FALL_BACK),
        (2, SYS_PTRACE, Action.NONE),
        (3, SYS_PTRACE, Action.FALL_BACK),
    ],
)
def test_ptrace_rules(scope: int | None, capabilities: int, action: Action) -> None:
    """O-74."""
    finding = cross_process_reads(replace(GOOD, ptrace_scope=scope, capabilities=capabilities))
    assert finding.action is action
    if action is Action.FALL_BACK:
        assert finding.without == ("cma",)
        assert f"ptrace_scope is {scope}" in finding.message


def test_seccomp_falls_back_to_tcp_and_both_fall_backs_add_up() -> None:
    host = replace(GOOD, reads_processes=False, shm_free_bytes=0)
    findings = check_host(host, GIB)
    assert "seccomp" in findings[2].message
    assert transport_options(findings) == {"TLS": "^posix,cma"}
    assert transport_options(findings, tls="tcp") == {}


def test_the_host_is_read() -> None:
    texts = {"/proc/self/status": "Name:\tx\nCapEff:\t0000000000080000\n", "/proc/sys/kernel/yama/ptrace_scope": "1\n"}
    host = read_host(
        read_text=texts.__getitem__,
        list_folder=lambda path: ["mlx5_1", "mlx5_0"],
        free_bytes=lambda path: 5,
        locked_memory_limit=lambda: 65536,
        try_reading=lambda: False,
    )
    assert host == Host(65536, ("mlx5_0", "mlx5_1"), 5, 1, SYS_PTRACE, False)


def test_what_the_kernel_does_not_say_is_none() -> None:
    def nothing(path: str) -> str:
        raise FileNotFoundError(path)

    host = read_host(
        read_text=nothing,
        list_folder=nothing,
        free_bytes=lambda path: int(nothing(path)),
        locked_memory_limit=lambda: resource.RLIM_INFINITY,
        try_reading=lambda: True,
    )
    assert host == Host(None, (), None, None, 0, True)


def test_this_host_is_read_without_an_error() -> None:
    findings = check_host(read_host(), 1 << 20)
    assert all(isinstance(finding, Finding) and finding.message for finding in findings)
    assert reads_itself() in (True, False)
