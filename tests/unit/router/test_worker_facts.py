"""From what workers say to what placement counts with."""

from __future__ import annotations

import pytest

from twostroke.policy.snapshot import WorkerSnapshot
from twostroke.router.worker_facts import kv_bytes_per_token, lenders, report_of, streams_kv, trusted
from twostroke.v1.kv_pb2 import KvEndpoint, KvLayout, KvMemory
from twostroke.v1.worker_pb2 import Cores, GetInfoResponse, WatchLoadResponse


def test_prompts_that_are_being_computed_write_no_answer() -> None:
    load = WatchLoadResponse(
        running_requests=7, waiting_requests=2, pending_prompts=5, pending_prompt_tokens=900, used_blocks=40
    )
    report = report_of(load)
    assert (report.running_sequences, report.pending_prompts) == (4, 5)
    assert (report.pending_prompt_tokens, report.used_blocks) == (900, 40)


@pytest.mark.parametrize(
    ("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("uint64", 8), ("fp8_e4m3", 1), ("secret", 0)]
)
def test_kv_of_a_token_by_the_layout(dtype: str, size: int) -> None:
    layout = KvLayout(dtype=dtype, layers=30, kv_heads=3, head_size=64)
    assert kv_bytes_per_token(GetInfoResponse(layout=layout)) == 2 * 30 * 3 * 64 * size


def test_kv_of_a_token_as_it_lies_in_memory() -> None:
    rank = KvMemory(layer_addresses=range(1, 31), heads=2, content_bytes=256)
    info = GetInfoResponse(kv_endpoint=KvEndpoint(memories=[rank, rank]), layout=KvLayout(dtype="float32", layers=1))
    assert kv_bytes_per_token(info) == 2 * 30 * 2 * 256


def test_cores_are_lent_by_who_owns_them_on_the_same_machine() -> None:
    infos = {
        "p": GetInfoResponse(cores=Cores(machine="a", own=[0], spare=[1, 2])),
        "d": GetInfoResponse(cores=Cores(machine="a", own=[1], spare=[0])),
        "d2": GetInfoResponse(cores=Cores(machine="a", own=[2])),
        "d3": GetInfoResponse(cores=Cores(machine="b", own=[1, 2])),
        "gpu": GetInfoResponse(cores=Cores(machine="a")),
        "old": GetInfoResponse(),
        "somewhere": GetInfoResponse(cores=Cores(own=[0], spare=[1])),
        "elsewhere": GetInfoResponse(cores=Cores(own=[1], spare=[0])),
    }
    assert lenders(infos) == {"p": {"d", "d2"}, "d": {"p"}}


@pytest.mark.parametrize(("connector", "streams"), [("nixl", False), ("twostroke/ucx", True), ("shm", True)])
def test_which_connectors_move_kv_while_prefill_runs(connector: str, streams: bool) -> None:
    assert streams_kv(GetInfoResponse(layout=KvLayout(connector=connector))) is streams


def test_a_worker_that_fails_gets_nothing_while_another_can_do_its_part() -> None:
    """O-85."""
    p0, p1, d0 = WorkerSnapshot("p0", True, False), WorkerSnapshot("p1", True, False), WorkerSnapshot("d0", False, True)
    assert trusted([p0, p1, d0], lambda name: name != "p0") == [p1, d0]
    assert trusted([p0, p1, d0], lambda name: name == "d0") == [p0, p1, d0]
    assert trusted([p0, p1, d0], lambda name: name != "d0") == [p0, p1, d0]
