"""The console's routes, without a browser."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from twostroke.errors import NoWorkerError
from twostroke.router.cluster_service import _request
from twostroke.router.console import pages
from twostroke.router.console.pages import API, Console, actions
from twostroke.router.output import FailedAttempt, Trail
from twostroke.v1 import cluster_pb2 as pb

ASSETS = Path(pages.__file__).parent / "assets"


class Cluster:
    """A cluster service that remembers what it was asked to do."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.trails: list[tuple[str, Trail]] = []

    def view(self) -> pb.WatchResponse:
        return pb.WatchResponse(router_id="r", ready=True, workers=[pb.WorkerView(address="a:1")])

    def requests(self, limit: int) -> pb.ListRequestsResponse:
        now_s = time.monotonic()
        return pb.ListRequestsResponse(requests=[_request(name, trail, now_s) for name, trail in self.trails])

    async def Drain(self, request: Any, context: Any) -> Any:
        self.asked.append(request)
        if request.worker_id == "gone":
            raise NoWorkerError("no worker is called gone")
        return pb.ClusterServiceDrainResponse(requests=3)


async def call(
    cluster: Cluster, path: str, method: str = "GET", body: bytes = b""
) -> tuple[int, dict[str, str], bytes]:
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    async def send(message: Any) -> None:
        sent.append(message)

    console = Console(cluster, lambda: ["m"])  # type: ignore[arg-type]
    await console(path, {"method": method}, receive, send)
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], headers, sent[1]["body"]


@pytest.mark.parametrize("path", ["/console", "/console/", "/console/app.js", "/console/icon.svg"])
async def test_its_files_may_load_nothing_from_elsewhere(path: str) -> None:
    status, headers, body = await call(Cluster(), path)
    assert status == 200
    assert headers["content-security-policy"].startswith("default-src 'self'; frame-ancestors 'none'")
    assert len(body) == int(headers["content-length"]) > 100


async def test_every_file_that_is_named_is_served_and_none_is_left_over() -> None:
    named = {"index.html"}
    for file in ASSETS.iterdir():
        text = file.read_text()
        named |= set(re.findall(r'(?:from "\./|"/console/)([a-z]+\.[a-z]+)"', text))
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), f"{file.name} names another host"
    assert named == {file.name for file in ASSETS.iterdir()}
    for name in named - {"index.html"}:
        assert (await call(Cluster(), f"/console/{name}"))[0] == 200


@pytest.mark.parametrize("path", ["/console/../pages.py", "/console/api", f"{API}/actions/Watch"])
async def test_nothing_else_is_served(path: str) -> None:
    for method in ("GET", "POST"):
        assert (await call(Cluster(), path, method))[0] == 404


async def test_the_state_has_the_cluster_and_every_request() -> None:
    cluster, now_s = Cluster(), time.monotonic()
    running = Trail(received_s=now_s - 1, prompt_tokens=7)
    failed = Trail(received_s=now_s - 3, placed_s=now_s - 2, failure="it died", over=True, attempts=2)
    failed.failed_attempts.append(
        FailedAttempt(
            placed_s=now_s - 2.9,
            failed_s=now_s - 2.5,
            prefill_worker_id="prefill-0",
            decode_worker_id="decode-0",
            reason="lost",
            error_type="WORKER_LOST",
            option="",
            handoff_begun_s=None,
        )
    )
    done = Trail(received_s=now_s - 3, answered=True, over=True, completion_tokens=5)
    left = Trail(received_s=now_s - 3, over=True)
    cluster.trails = [("a", running), ("b", failed), ("c", done), ("d", left)]
    status, _, body = await call(cluster, f"{API}/state")
    state = json.loads(body)
    assert status == 200
    assert (state["cluster"]["router_id"], state["models"]) == ("r", ["m"])
    assert state["actions"] == sorted(actions()) == ["Drain", "SetRole"]
    states = [request["state"].removeprefix("REQUEST_STATE_") for request in state["requests"]]
    assert states == ["RUNNING", "FAILED", "FINISHED", "CANCELLED"]
    attempt = state["requests"][1]["failed_attempts"][0]
    assert (round(attempt["placed_ms"]), round(attempt["failed_ms"]), attempt["reason"]) == (100, 500, "lost")
    assert state["requests"][0]["timeline"]["first_token_ms"] == 0


async def test_an_action_is_the_rpc_of_its_name() -> None:
    cluster = Cluster()
    status, _, body = await call(cluster, f"{API}/actions/Drain", "POST", b'{"worker_id": "decode-0"}')
    assert (status, json.loads(body)) == (200, {"requests": 3})
    assert cluster.asked == [pb.ClusterServiceDrainRequest(worker_id="decode-0")]


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (b"{", 400, "not JSON"),
        (b'{"worker": "x"}', 400, "worker"),
        (b'{"worker_id": "gone"}', 503, "called gone"),
        (b" " * 70000, 400, "at most"),
    ],
)
async def test_an_action_that_fails_says_why(body: bytes, status: int, text: str) -> None:
    got, _, answer = await call(Cluster(), f"{API}/actions/Drain", "POST", body)
    assert got == status
    assert text in json.loads(answer)["error"]["message"]
