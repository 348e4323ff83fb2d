"""Metrics of a cluster, scraped by a real Prometheus, and the dashboards' queries run against it."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.reference_cluster import Cluster, free_ports, request, running
from twostroke.telemetry.metrics import ROUTER_METRICS, WORKER_METRICS

ROOT = Path(__file__).parents[2]
DASHBOARDS = sorted((ROOT / "docker/grafana/dashboards").glob("*.json"))
ALERTS = ROOT / "docker/grafana/alerts.yaml"
METRICS = {metric.name: metric for metric in (*ROUTER_METRICS, *WORKER_METRICS)}
WAIT_S = 30.0
PROCESSES = ("router", "prefill-0", "decode-0")

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no prometheus here; apt-get install prometheus brings it"
)
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool here; apt-get install prometheus brings it"
)


def queries(dashboard: Path) -> Iterator[tuple[str, str]]:
    for panel in json.loads(dashboard.read_text())["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def names_in(expression: str) -> set[str]:
    found = re.findall(r"\b(?:twostroke_|vllm:|gen_ai_server_)\w+", expression)
    return {re.sub(r"_(bucket|count|sum)$", "", name) for name in found}


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboards_ask_only_for_what_there_is(dashboard: Path) -> None:
    asked = {name for _, query in queries(dashboard) for name in names_in(query)}
    assert asked
    assert asked <= METRICS.keys()


def test_alerts_ask_only_for_what_there_is() -> None:
    text = re.sub(r"(description|summary):.*", "", ALERTS.read_text())
    assert names_in(text) <= METRICS.keys()
    for bucket, bound in re.findall(r'(\w+)_bucket\{le="([\d.]+)"', text):
        assert float(bound) in METRICS[bucket].buckets


@needs_promtool
@pytest.mark.parametrize(
    "command", ["check rules docker/grafana/alerts.yaml", "test rules tests/telemetry/alerts_test.yaml"]
)
def test_alert_rules(command: str) -> None:
    done = subprocess.run(["promtool", *command.split()], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


class Prometheus:
    """A Prometheus that scrapes every second."""

    def __init__(self, port: int) -> None:
        self._http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}/api/v1")

    async def ask(self, query: str) -> list[dict[str, Any]]:
        answer = (await self._http.get("/query", params={"query": query})).json()
        assert answer["status"] == "success", f"{query}: {answer}"
        return list(answer["data"]["result"])

    async def until(self, query: str) -> list[dict[str, Any]]:
        """What it answers once it answers something."""
        async with asyncio.timeout(WAIT_S):
            found = await self._try(query)
            while not found:
                await asyncio.sleep(0.2)
                found = await self._try(query)
        return found

    async def _try(self, query: str) -> list[dict[str, Any]]:
        try:
            return await self.ask(query)
        except httpx.TransportError:
            return []


@asynccontextmanager
async def prometheus(folder: Path, targets: list[str]) -> AsyncIterator[Prometheus]:
    port = free_ports(1)[0]
    config = folder / "prometheus.yaml"
    scrape = {"job_name": "twostroke", "static_configs": [{"targets": targets}]}
    config.write_text(
        json.dumps({"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": [scrape]})
    )
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                *("prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"),
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    server = Prometheus(port)
    try:
        yield server
    finally:
        await server._http.aclose()
        process.kill()
        process.wait()


@asynccontextmanager
async def observed(**options: Any) -> AsyncIterator[tuple[Cluster, list[str]]]:
    """A cluster, and where its metrics are."""
    ports = dict(zip(PROCESSES, free_ports(3), strict=True))
    flags = {name: ("--metrics-port", str(port)) for name, port in ports.items()}
    own = {name: (*flags[name], *options.get("own_flags", {}).get(name, ())) for name in PROCESSES[1:]}
    router = (*flags["router"], *options.get("router_flags", ()))
    worker, wait = options.get("worker_flags", ()), options.get("wait", True)
    async with running(own_flags=own, router_flags=router, worker_flags=worker, wait=wait) as cluster:
        yield cluster, [f"127.0.0.1:{port}" for port in ports.values()]


async def scraped(target: str) -> dict[str, float]:
    """The samples of one process, by name and labels as they are written."""
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"http://{target}/metrics")).text
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


async def test_what_requests_leave_in_the_numbers() -> None:
    async with observed() as (cluster, targets):
        for n in range(3):
            await cluster.ask(request(range(1000 * n, 1000 * n + 320), 5))
        await cluster.ask(request(range(50), 1))
        await cluster.empty()
        router, prefill, decode = [await scraped(target) for target in targets]
    labels = 'gen_ai_operation_name="text_completion",gen_ai_provider_name="twostroke",gen_ai_request_model="reference"'
    assert router[f"gen_ai_server_time_to_first_token_seconds_count{{{labels}}}"] == 4
    assert router[f"gen_ai_server_time_per_output_token_seconds_count{{{labels}}}"] == 3, "not of answers of one token"
    assert router['twostroke_requests_total{finish="length"}'] == 4
    assert router['twostroke_placements_total{option="p_then_d"}'] == 4
    assert router['twostroke_prompts_total{kv="transferred"}'] == 3
    assert router['twostroke_prompts_total{kv="none"}'] == 1
    assert router['twostroke_tokens_total{kind="input"}'] == 3 * 320 + 50
    assert router['twostroke_tokens_total{kind="cached_input"}'] == 48
    assert router['twostroke_tokens_total{kind="output"}'] == 16
    assert router["twostroke_handoff_exposed_seconds_count"] == 3
    assert router["twostroke_handoff_bytes_total"] == 3 * 20 * 512
    assert router['twostroke_handoffs_total{outcome="released"}'] >= 3
    assert router["twostroke_router_ready"] == 1
    assert router['twostroke_link_state{decode="decode-0",prefill="prefill-0",state="ready"}'] == 1
    assert decode['twostroke_kv_received_handoffs_total{worker="decode-0"}'] == 3
    assert decode['twostroke_kv_received_bytes_total{worker="decode-0"}'] == 3 * 20 * 512
    assert prefill['vllm:num_requests_running{engine="0",model_name="reference"}'] == 0
    assert prefill['vllm:prompt_tokens_total{engine="0",model_name="reference"}'] == 3 * 320 + 2, "48 were cached"
    assert not any(name.startswith("gen_ai") for name in (*prefill, *decode)), "counted once, at the router"
    assert {name.partition("{")[0].removesuffix("_created") for name in prefill} >= {
        "vllm:num_requests_waiting",
        "vllm:num_requests_running",
        "vllm:kv_cache_usage_perc",
        "vllm:cache_config_info",
    }


async def test_a_broken_transfer_shows_as_requests_served_without_it() -> None:
    """O-99: the link is cut; a worker of role both serves everybody alone, and all looks healthy."""
    cut = '[{"fault": "cut", "worker": "prefill-0"}]'
    own = {"decode-0": ("--role", "both", "--reference-faults", cut)}
    async with observed(own_flags=own, wait=False) as (cluster, targets):
        await cluster.until(lambda view: view.ready and any(link.failures for link in view.links))
        for n in range(50):
            answer = await cluster.ask(request(range(n, n + 40), 3))
            assert len(answer.token_ids) == 3
        router = await scraped(targets[0])
    assert router['twostroke_prompts_total{kv="transferred"}'] == 0
    assert router['twostroke_prompts_total{kv="local"}'] == 50


async def test_metrics_can_be_switched_off() -> None:
    off = ("--no-metrics",)
    async with running(worker_flags=off, router_flags=off) as cluster:
        await cluster.ask(request(range(50), 2))
        logs = [cluster.log(name) for name in PROCESSES]
    assert not any("metrics on" in log for log in logs)


@needs_prometheus
async def test_prometheus_scrapes_and_every_query_returns_data(tmp_path: Path) -> None:
    async with (
        observed(worker_flags=("--reference-step-ms", "5")) as (cluster, targets),
        prometheus(tmp_path, targets) as server,
    ):
        await server.until("count(up == 1) == 3")
        for n in range(12):
            await asyncio.gather(*(cluster.ask(request(range(10 * n, 10 * n + 400), 40)) for _ in range(4)))
        for path in DASHBOARDS:
            for title, query in queries(path):
                found = await server.until(query.replace("[$__rate_interval]", "[20s]"))
                assert all(each["value"] for each in found), f"{path.stem}: {title}"
        ended = await server.ask("sum(gen_ai_server_time_to_first_token_seconds_count) - sum(twostroke_requests_total)")
        assert float(ended[0]["value"][1]) == 0
