from __future__ import annotations

import io
import json
import os

from rich.console import Console

from twostroke.launch.state import ProcessId, ProcessRecord, RunState
from twostroke.launch.status import as_json, show
from twostroke.v1 import cluster_pb2 as pb
from twostroke.v1.worker_pb2 import ROLE_DECODE, ROLE_PREFILL, GetInfoResponse, WatchLoadResponse

VIEW = pb.WatchResponse(
    router_id="router-1",
    ready=False,
    waiting_for="a decode worker",
    requests=3,
    recomputed_prompts=2,
    workers=[
        pb.WorkerView(
            address="127.0.0.1:1",
            state=pb.WORKER_STATE_READY,
            info=GetInfoResponse(
                worker_id="prefill-0",
                epoch="0123456789abcdef",
                role=ROLE_PREFILL,
                engine="vllm",
                engine_version="0.32.0",
                model="/cache/SmolLM2",
                total_blocks=100,
            ),
            load=WatchLoadResponse(
                role=ROLE_PREFILL,
                running_requests=2,
                waiting_requests=5,
                used_blocks=40,
                held_handoffs=6,
                held_blocks=30,
                kv_received_bytes=3 << 20,
                kv_received_handoffs=4,
                computed_prompt_tokens=1000,
                generated_tokens=70,
            ),
            router_requests=8,
            steps=pb.StepPrediction(error=0.034, observed=512, set_aside=3, decode_ms=9.876, prefill_token_us=42.25),
        ),
        pb.WorkerView(address="127.0.0.1:2", state=pb.WORKER_STATE_REFUSED, detail="it restarted"),
    ],
    links=[
        pb.LinkView(
            prefill_worker_id="prefill-0",
            decode_worker_id="decode-0",
            state=pb.LINK_STATE_READY,
            lanes=["rc_mlx5/mlx5_0:1", "tcp/eth0"],
            rdma=True,
            bytes_per_s=12.345e9,
            latency_ms=0.0042,
        ),
        pb.LinkView(
            prefill_worker_id="prefill-0",
            decode_worker_id="decode-1",
            state=pb.LINK_STATE_QUARANTINED,
            detail="no answer",
            failures=3,
        ),
    ],
    ways=["p_then_d", "d_alone"],
    known_blocks=1234,
    role_advice=pb.RoleAdvice(why="2 P + 2 D meets the SLO for 61%, 3 P + 1 D for 98%"),
    handoffs=pb.HandoffCounts(offered=1, receiving=2, received=3, released=40, lost=5),
    refused_pairs=[pb.RefusedPair(prefill_worker_id="p", decode_worker_id="d", reason="dtype float32 against float16")],
)
LOCAL = RunState(
    "127.0.0.1:3",
    "",
    "m",
    None,
    (ProcessRecord("decode-0", ProcessId(os.getpid(), 1), "a:1", (), "/run/d.log", "was killed by SIGKILL"),),
)


def shown(view: pb.WatchResponse, local: RunState | None = None) -> str:
    output = io.StringIO()
    show(Console(file=output, width=200), "127.0.0.1:3", view, local)
    return output.getvalue()


def test_table_shows_every_worker_and_why() -> None:
    lines = shown(VIEW, LOCAL).splitlines()
    assert lines[0] == "router router-1 at 127.0.0.1:3: not ready: a decode worker"
    assert " ".join(lines[1].split()) == "worker role address state epoch engine model load KV blocks held requests"
    assert " ".join(lines[3].split()) == (
        "prefill-0 prefill 127.0.0.1:1 ready 01234567 vllm 0.32.0 SmolLM2 2 run, 5 wait 40/100 6 (30 blocks) 8"
    )
    assert lines[2].split() == ["?", "?", "127.0.0.1:2", "refused", "0"]
    assert lines[4:] == [
        "127.0.0.1:2: it restarted",
        "steps of prefill-0: 9.88 ms with one answer, 42.2 us per prompt token; error 3.4% after 512, 3 not believed",
        "refused: p to d: dtype float32 against float16",
        "link prefill-0 to decode-0: ready, rc_mlx5/mlx5_0:1, tcp/eth0, 12.35 GB/s, 0.004 ms",
        "link prefill-0 to decode-1: quarantined, 3 failures, no answer",
        "roles: 2 P + 2 D meets the SLO for 61%, 3 P + 1 D for 98%",
        "ways open: p_then_d, d_alone; KV blocks known in prefix caches: 1234",
        "requests in flight 3; prompts recomputed on decode 2; hand-offs 4 (3.0 MiB): 1 offered, 2 receiving, "
        "3 received, 40 released, 5 lost; prompt tokens computed 1000; tokens generated 70",
        "decode-0 was killed by SIGKILL; log: /run/d.log",
    ]


def test_a_router_without_workers() -> None:
    lines = shown(pb.WatchResponse(router_id="r", ready=True)).splitlines()
    assert lines[0] == "router r at 127.0.0.1:3: ready"
    assert len(lines) == 2


def test_role_is_the_one_it_has_now() -> None:
    view = pb.WatchResponse()
    view.CopyFrom(VIEW)
    view.workers[0].load.role = ROLE_DECODE
    assert " decode " in shown(view).splitlines()[3]


def test_json_has_proto_names_zeros_and_local_processes() -> None:
    read = json.loads(as_json("127.0.0.1:3", VIEW, LOCAL))
    assert read["router"] == "127.0.0.1:3"
    assert read["ready"] is False
    assert read["waiting_for"] == "a decode worker"
    assert read["workers"][0]["load"]["used_blocks"] == 40
    assert read["workers"][0]["load"]["steps"] == "0"
    assert read["workers"][0]["state"] == "WORKER_STATE_READY"
    assert read["processes"] == [
        {
            "name": "decode-0",
            "pid": os.getpid(),
            "alive": False,
            "exit": "was killed by SIGKILL",
            "log": "/run/d.log",
        }
    ]
    assert "processes" not in json.loads(as_json("127.0.0.1:3", VIEW, None))
