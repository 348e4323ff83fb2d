"""What a router counts of requests that are over."""

from typing import Any

import pytest

from twostroke.errors import OverloadedError
from twostroke.router.edge import Edge
from twostroke.router.metrics import RequestMetrics
from twostroke.router.observer import RequestObserver
from twostroke.router.output import FailedAttempt, Trail
from twostroke.telemetry.metrics import Registry

LABELS = 'gen_ai_operation_name="chat",gen_ai_provider_name="twostroke",gen_ai_request_model="m"'


@pytest.fixture
def registry() -> Registry:
    return Registry()


@pytest.fixture
def observer(registry: Registry) -> RequestObserver:
    return RequestObserver(None, RequestMetrics(registry), log_prompts=False)


def trail(**more: Any) -> Trail:
    common = {
        "received_s": 10.0,
        "placed_s": 10.1,
        "first_token_s": 10.3,
        "prefill_ended_s": 10.3,
        "finished_s": 11.3,
        "decode_started_s": 10.34,
        "handoff_begun_s": 10.2,
        "handoff_ready_s": 10.34,
        "transferred_tokens": 90,
        "prompt_tokens": 100,
        "completion_tokens": 11,
        "attempts": 1,
        "option": "p_then_d",
        "finish": "stop",
        "transferred_bytes": 4096,
        "prefill_queue_ms": 20.0,
        "prefill_run_ms": 180.0,
    }
    return Trail(**{**common, **more})


def counted(registry: Registry) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in registry.render().decode().splitlines() if line[0] != "#"]
    return {name: float(value) for name, _, value in lines}


def over(observer: RequestObserver, made: Trail, *, recomputed: bool = False) -> None:
    observer.over("r-1", [], made, Edge(None, "chat", "m", None), recomputed=recomputed)


def test_latencies(registry: Registry, observer: RequestObserver) -> None:
    over(observer, trail())
    found = counted(registry)
    assert found[f"gen_ai_server_time_to_first_token_seconds_sum{{{LABELS}}}"] == pytest.approx(0.3)
    assert found[f"gen_ai_server_time_per_output_token_seconds_sum{{{LABELS}}}"] == pytest.approx(0.1)
    name = f'gen_ai_server_request_duration_seconds_sum{{error_type="",{LABELS}}}'
    assert found[name] == pytest.approx(1.3)
    assert found["twostroke_handoff_exposed_seconds_sum"] == pytest.approx(0.04)
    assert found["twostroke_prefill_queue_seconds_sum"] == pytest.approx(0.02)


def test_a_request_without_a_token_has_no_time_to_the_first(registry: Registry, observer: RequestObserver) -> None:
    empty = {"first_token_s": None, "handoff_ready_s": None, "decode_started_s": None, "transferred_tokens": 0}
    over(observer, trail(**empty, finish="", failure="nobody", error_type="NO_WORKER"))
    found = counted(registry)
    assert f"gen_ai_server_time_to_first_token_seconds_count{{{LABELS}}}" not in found
    assert found['twostroke_requests_total{finish="error"}'] == 1
    assert found[f'gen_ai_server_request_duration_seconds_count{{error_type="NO_WORKER",{LABELS}}}'] == 1
    assert found['twostroke_prompts_total{kv="none"}'] == 1


@pytest.mark.parametrize(
    ("more", "recomputed", "kv"),
    [
        ({}, False, "transferred"),
        ({}, True, "recomputed"),
        ({"transferred_tokens": 0}, False, "local"),
        ({"transferred_tokens": 0, "decode_started_s": None}, False, "none"),
    ],
)
def test_where_kv_came_from(
    registry: Registry, observer: RequestObserver, more: dict[str, Any], recomputed: bool, kv: str
) -> None:
    over(observer, trail(**more), recomputed=recomputed)
    found = counted(registry)
    kinds = ("transferred", "recomputed", "local", "none")
    assert {each: found[f'twostroke_prompts_total{{kv="{each}"}}'] for each in kinds} == {
        each: float(each == kv) for each in kinds
    }


@pytest.mark.parametrize(("answered", "retries"), [(True, 2), (False, 1)])
def test_attempts(registry: Registry, observer: RequestObserver, answered: bool, retries: int) -> None:
    """The last failure of a request that failed is no retry."""
    failed = FailedAttempt(10.1, 10.2, "p", "went away", "WORKER_LOST", "d", "p_then_d", None)
    over(observer, trail(failed_attempts=[failed, failed], attempts=3 if answered else 2, option="d_alone"))
    found = counted(registry)
    assert found['twostroke_retries_total{reason="WORKER_LOST"}'] == retries
    assert found['twostroke_placements_total{option="p_then_d"}'] == 2
    assert found['twostroke_placements_total{option="d_alone"}'] == float(answered)


def test_refusals(registry: Registry, observer: RequestObserver) -> None:
    edge = Edge(None, "chat", "m", None)
    error = OverloadedError("full")
    observer.refused(error, edge)
    assert counted(registry)[f'twostroke_refusals_total{{reason="{error.reason}"}}'] == 1
    assert edge.refusal is error
