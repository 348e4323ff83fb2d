"""Hand-offs whose other end dies, stops or is cut off in the middle, over the real transport; handoff_faults.py says
how a round goes. Each round runs in a process of its own."""

from collections.abc import Callable

import pytest

from twostroke.bench.handoff_faults import ALLOWED_S, RELEASE_S, Round, run_round
from twostroke.bench.kv_ranks import SourceRank
from twostroke.bench.network_path import NetworkPath
from twostroke.errors import UnavailableError

DEADLINE_S = 2.0


def check(result: Round) -> None:
    """What holds of every fault of a source."""
    assert result.failure
    assert result.error_s is not None
    assert result.error_s <= DEADLINE_S + ALLOWED_S
    assert result.landed_percent is not None
    assert 0 < result.landed_percent < 100
    assert result.late_bytes == 0
    assert result.beside_right == result.beside >= 1


@pytest.mark.parametrize("lanes", ["cma", "tcp"])
def test_a_killed_source_costs_its_handoff_only(lanes: str) -> None:
    """O-78, O-41: within the deadline, nothing lands late, and the other source is read all the while."""
    result = run_round("kill", lanes, DEADLINE_S)
    check(result)
    assert "reset" in str(result.failure)


@pytest.mark.parametrize("lanes", ["cma", "tcp"])
def test_a_stopped_source_costs_the_deadline_and_is_itself_again_afterwards(lanes: str) -> None:
    """O-04, O-33, O-80: what it sends when it goes on is dropped; its holds can be released; it serves again."""
    result = run_round("stop", lanes, DEADLINE_S)
    check(result)
    assert result.error_s is not None
    assert result.error_s >= DEADLINE_S / 2
    assert "has not answered for 2 s" in str(result.failure)
    assert result.released_s is not None
    assert result.released_s <= RELEASE_S
    assert result.serves_again


def test_a_cut_network_path_costs_the_deadline_and_can_be_healed() -> None:
    """O-04, O-39, O-80: no packet passes, and nobody is told."""
    try:
        NetworkPath().remove()
    except UnavailableError as error:
        pytest.skip(f"no network namespaces here: {error}")
    result = run_round("cut", "tcp", DEADLINE_S)
    check(result)
    assert "has not answered for 2 s" in str(result.failure)
    assert result.released_s is not None
    assert result.released_s <= RELEASE_S
    assert result.serves_again


def test_a_killed_reader_costs_its_source_nothing() -> None:
    """O-43, O-78: the source lives, can give the blocks back, and serves the next reader."""
    result = run_round("kill reader", "tcp", DEADLINE_S)
    assert result.released_s is not None
    assert result.released_s <= RELEASE_S
    assert result.serves_again


def test_a_replaced_interface_is_said_and_ends_no_process(start_rank: Callable[..., SourceRank]) -> None:
    """UCX knows the routes of its start only, and dies of a peer that connects over a new interface."""
    try:
        path = NetworkPath()
    except UnavailableError as error:
        pytest.skip(f"no network namespaces here: {error}")
    try:
        source = start_rank("p/1/0", options={"TLS": "tcp"}, prefix=path.inside)
        reader = start_rank("d/1/0", options={"TLS": "tcp"})
        slot, generation = source.offer("h")
        memory = source.memory.SerializeToString().hex()
        reader.tell(f"read h {source.name} {source.address.hex()} {memory} {slot} {generation} 1")
        source.serve("h", [0])
        source.event("done", "h")
        path.replace()
        for rank in (source, reader):
            assert "was replaced" in rank.event("fatal")["id"]
            assert rank.alive()
    finally:
        path.remove()
