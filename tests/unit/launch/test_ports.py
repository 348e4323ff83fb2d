from __future__ import annotations

import os
import socket

import pytest

from twostroke.errors import ConfigError
from twostroke.launch.ports import pick_free, require_free


@pytest.fixture
def listener() -> socket.socket:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        made.listen(1)
        yield made


def test_a_busy_port_is_named_with_its_holder_and_flag(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    with pytest.raises(ConfigError) as raised:
        require_free("127.0.0.1", [("--http-port", port), ("--grpc-port", 0)])
    assert str(raised.value).startswith(f"port {port} is taken by ")
    assert f"(pid {os.getpid()})" in str(raised.value)
    assert str(raised.value).endswith("; choose another with --http-port")


def test_every_busy_port_is_named(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    with socket.socket() as second:
        second.bind(("127.0.0.1", 0))
        second.listen(1)
        other = second.getsockname()[1]
        with pytest.raises(ConfigError) as raised:
            require_free("127.0.0.1", [("--http-port", port), ("--grpc-port", other)])
    assert f"port {port} is taken" in str(raised.value)
    assert f"port {other} is taken" in str(raised.value)
    assert "--grpc-port" in str(raised.value)


def test_a_free_port_passes_and_stays_free() -> None:
    (port,) = pick_free("127.0.0.1", 1)
    require_free("127.0.0.1", [("--http-port", port)])
    require_free("127.0.0.1", [("--http-port", port)])


def test_the_same_port_twice_is_refused() -> None:
    (port,) = pick_free("127.0.0.1", 1)
    with pytest.raises(ConfigError, match=f"--http-port and --grpc-port are both {port}"):
        require_free("127.0.0.1", [("--http-port", port), ("--grpc-port", port)])


def test_a_foreign_address_names_the_host_flag() -> None:
    with pytest.raises(ConfigError, match=r"--host 192\.0\.2\.1: not an address of this machine"):
        require_free("192.0.2.1", [("--http-port", 8000)])
    with pytest.raises(ConfigError, match=r"--host 192\.0\.2\.1"):
        pick_free("192.0.2.1", 1)


def test_picked_ports_differ_and_avoid_the_taken() -> None:
    first = pick_free("127.0.0.1", 3)
    second = pick_free("127.0.0.1", 3, first)
    assert len({*first, *second}) == 6
