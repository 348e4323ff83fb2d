"""Every route of the HTTP server: which workers serve it, or what it says instead."""

from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from engine.conftest import MODEL, TwoPools, body_of, served, watch

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

BOTH, PREFILL, NOBODY = {"prefill-0", "decode-0"}, {"prefill-0"}, set[str]()
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 4}
HELLO = [{"role": "user", "content": "Hello."}]


@dataclass(frozen=True)
class Route:
    """A call of one route."""

    path: str
    served_by: set[str]
    body: dict[str, Any] | None = None
    method: str = "POST"
    status: int = 200
    says: str = ""
    call: str = ""
    """The path as it is called, where it has a variable part."""
    answer: dict[str, Any] = field(default_factory=dict)


def text(path: str, body: dict[str, Any], by: set[str] = BOTH) -> Route:
    return Route(path, by, {**GREEDY, **body})


TOKENS = {"token_ids": [504, 3575, 282], "sampling_params": {"temperature": 0, "max_tokens": 4}}
ROUTES = [
    text("/v1/completions", {"prompt": "Hello"}),
    text("/v1/chat/completions", {"messages": HELLO}),
    text("/v1/chat/completions/batch", {"messages": [HELLO, HELLO]}),
    Route("/v1/responses", BOTH, {"model": MODEL, "input": "Hello.", "temperature": 0, "max_output_tokens": 4}),
    text("/v1/messages", {"messages": HELLO}),
    text("/invocations", {"prompt": "Hello"}),
    Route("/inference/v1/generate", BOTH, TOKENS),
    # One token is all that a score needs, so prefill alone writes it.
    Route(
        "/generative_scoring",
        PREFILL,
        {"model": MODEL, "query": "Is it good? ", "items": ["yes", "no"], "label_token_ids": [28, 216]},
    ),
    Route("/v1/messages/count_tokens", NOBODY, {"model": MODEL, "messages": HELLO}),
    Route("/tokenize", NOBODY, {"model": MODEL, "prompt": "Hello"}),
    Route("/detokenize", NOBODY, {"model": MODEL, "tokens": [504, 3575]}),
    Route("/v1/completions/render", NOBODY, {"model": MODEL, "prompt": "Hello"}),
    Route("/v1/chat/completions/render", NOBODY, {"model": MODEL, "messages": HELLO}),
    text("/v1/messages/render", {"messages": HELLO}, NOBODY),
    Route("/v1/responses/render", NOBODY, {"model": MODEL, "input": "Hello."}),
    *(
        Route(path, NOBODY, method="GET")
        for path in ("/v1/models", "/health", "/ping", "/version", "/metrics", "/load")
    ),
    Route("/ping", NOBODY),
    # What two pools do not do says so.
    Route("/v1/systemone", NOBODY, {"model": MODEL, "messages": HELLO}, status=404, says="two pools"),
    Route("/scale_elastic_ep", NOBODY, {"new_data_parallel_size": 2}, status=404, says="two pools"),
    Route("/is_scaling_elastic_ep", NOBODY, {}, status=404, says="two pools"),
    Route("/kv_event_sources", NOBODY, method="GET", status=404, says="two pools"),
    Route("/inference/v1/abort_requests", NOBODY, {"request_ids": ["nothing"]}),
    Route("/v1/responses/{response_id}", NOBODY, method="GET", call="/v1/responses/resp_nothing", status=404),
    Route("/v1/responses/{response_id}/cancel", NOBODY, {}, call="/v1/responses/resp_nothing/cancel", status=404),
    # They take what an engine wrote, not a prompt; without it they name what is missing.
    Route("/v1/completions/derender", NOBODY, {}, status=400, says="required|Field"),
    Route("/v1/chat/completions/derender", NOBODY, {}, status=400, says="required|Field"),
]


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
async def test_a_route_runs_through_both_pools_or_says_that_it_does_not(route: Route, two_pools: TwoPools) -> None:
    """O-61."""
    before = await served(two_pools.grpc)
    async with httpx.AsyncClient(base_url=two_pools.http, timeout=120) as client:
        answer = await client.request(route.method, route.call or route.path, json=route.body)
    assert answer.status_code == route.status, body_of(answer.content)
    assert any(part in answer.text for part in route.says.split("|")), answer.text
    await watch(two_pools.grpc, lambda view: not view.requests)
    after = await served(two_pools.grpc)
    assert set().union(*(workers for name, workers in after.items() if name not in before)) == route.served_by


async def test_the_table_names_every_route_there_is(two_pools: TwoPools) -> None:
    async with httpx.AsyncClient(base_url=two_pools.http, timeout=60) as client:
        described = (await client.get("/openapi.json")).json()["paths"]
    there = {(method.upper(), path) for path, methods in described.items() for method in methods}
    named = {(route.method, route.path) for route in ROUTES}
    assert there - named == set()
