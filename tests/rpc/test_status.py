"""What gRPC's own failures become."""

import pytest

from twostroke.rpc.status import _CONNECT


@pytest.mark.parametrize(
    ("details", "address", "why"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:7101: "
            "Failed to connect to remote host: Connection refused",
            "127.0.0.1:7101",
            "Connection refused",
        ),
        (
            "failed to connect to all addresses; last error: UNAVAILABLE: ipv6:%5B::1%5D:7101: "
            "Failed to connect to remote host: Connection refused",
            "%5B::1%5D:7101",
            "Connection refused",
        ),
        (
            "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:10.0.0.1:80: "
            "connection attempt timed out",
            "10.0.0.1:80",
            "connection attempt timed out",
        ),
    ],
)
def test_a_refused_connection_is_told_in_words(details: str, address: str, why: str) -> None:
    found = _CONNECT.search(details)
    assert found is not None
    assert found.groups() == (address, why)
