"""Every metric by name, kind, labels and meaning, and the registry of a process that holds them.

Names that GenAI conventions define are spelled as Prometheus spells them; names that dashboards of vLLM look for are
vLLM's; the others begin with twostroke_.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

Family = CounterMetricFamily | GaugeMetricFamily

# GenAI conventions, extended downwards for small models on fast machines.
_TTFT_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_TPOT_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_DURATION_BUCKETS_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_SHORT_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

GENAI_LABELS = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. name: as queries name it; counters end with _total."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


# Of the router.
DURATION = Metric(
    "gen_ai_server_request_duration_seconds",
    "histogram",
    "From a request's arrival to the end of its answer.",
    (*GENAI_LABELS, "error_type"),
    _DURATION_BUCKETS_S,
)
TTFT = Metric(
    "gen_ai_server_time_to_first_token_seconds",
    "histogram",
    "From a request's arrival to its first token; counted here and nowhere else.",
    GENAI_LABELS,
    _TTFT_BUCKETS_S,
)
TPOT = Metric(
    "gen_ai_server_time_per_output_token_seconds",
    "histogram",
    "Time per token after the first, on the average of one answer.",
    GENAI_LABELS,
    _TPOT_BUCKETS_S,
)
REQUESTS = Metric("twostroke_requests_total", "counter", "Requests that are over, by how they ended.", ("finish",))
REFUSALS = Metric("twostroke_refusals_total", "counter", "Requests that the router did not take.", ("reason",))
QUEUED = Metric("twostroke_requests_queued", "gauge", "Requests that wait at the router for a worker with room.")
ACTIVE = Metric("twostroke_requests_in_flight", "gauge", "Requests that are not over.")
TOKENS = Metric("twostroke_tokens_total", "counter", "Tokens of requests that are over.", ("kind",))
PLACEMENTS = Metric("twostroke_placements_total", "counter", "Attempts that were placed, by option.", ("option",))
RETRIES = Metric("twostroke_retries_total", "counter", "Attempts that failed and were placed again.", ("reason",))
PROMPTS = Metric(
    "twostroke_prompts_total",
    "counter",
    "Prompts of requests that are over, by where their KV came from when the answer was written: transferred, "
    "recomputed (decode computed a transferred prompt again), local (one worker did both strokes), none (the first "
    "token was the last, or nothing was written).",
    ("kv",),
)
QUEUE_TIME = Metric(
    "twostroke_prefill_queue_seconds", "histogram", "Prompts waiting for their first step.", (), _SHORT_BUCKETS_S
)
PREFILL_TIME = Metric(
    "twostroke_prefill_run_seconds", "histogram", "Prompts from first step to first token.", (), _SHORT_BUCKETS_S
)
EXPOSED = Metric(
    "twostroke_handoff_exposed_seconds",
    "histogram",
    "How much later than the first token decode had the prompt's KV.",
    (),
    _SHORT_BUCKETS_S,
)
HANDOFF_BYTES = Metric("twostroke_handoff_bytes_total", "counter", "Bytes of KV of hand-offs that came through.")
HANDOFFS = Metric("twostroke_handoffs", "gauge", "Hand-offs now, by state.", ("state",))
HANDOFFS_OVER = Metric("twostroke_handoffs_total", "counter", "Hand-offs that are over, by outcome.", ("outcome",))
RECOMPUTED = Metric(
    "twostroke_recomputed_prompts_total", "counter", "Prompts that decode computed again although KV was transferred."
)
READY = Metric("twostroke_router_ready", "gauge", "1 while the router can serve.")
WORKERS = Metric("twostroke_workers", "gauge", "Workers that the router knows, by state.", ("state",))
KNOWN_BLOCKS = Metric("twostroke_known_blocks", "gauge", "KV blocks of workers' prefix caches that the router knows.")
STEP_ERROR = Metric(
    "twostroke_step_model_error",
    "gauge",
    "Mean relative error of what the router predicts of a worker's latest steps.",
    ("worker",),
)
ROLE_ADVICE = Metric(
    "twostroke_role_advice",
    "gauge",
    "1 for the role that the controller of roles would give a worker, or gives it (--roles).",
    ("worker", "role"),
)
ROLE_CHANGES = Metric("twostroke_role_changes_total", "counter", "Roles that the controller of roles changed.")
LINK_LABELS = ("prefill", "decode")
LINK_STATE = Metric(
    "twostroke_link_state", "gauge", "1 for the state in which the link is, 0 for others.", (*LINK_LABELS, "state")
)
LINK_RATE = Metric(
    "twostroke_link_bytes_per_second", "gauge", "Rate of the link's last probe; 0 if unmeasured.", LINK_LABELS
)
LINK_LATENCY = Metric("twostroke_link_latency_seconds", "gauge", "Smallest read of the link's last probe.", LINK_LABELS)
LINK_FAILURES = Metric(
    "twostroke_link_failures_total", "counter", "Probes and transfers of the link that failed.", LINK_LABELS
)
LINK_LANES = Metric(
    "twostroke_link_lanes_info", "gauge", "1; names the transports in use.", (*LINK_LABELS, "lanes", "rdma")
)

# Of a worker.
_VLLM = ("model_name", "engine")
WAITING = Metric("vllm:num_requests_waiting", "gauge", "Requests that wait for their first step.", _VLLM)
RUNNING = Metric("vllm:num_requests_running", "gauge", "Requests that run.", _VLLM)
KV_USAGE = Metric("vllm:kv_cache_usage_perc", "gauge", "Share of KV blocks in use, 1 being all.", _VLLM)
CACHE_INFO = Metric(
    "vllm:cache_config_info", "gauge", "1; block size and number of blocks.", (*_VLLM, "block_size", "num_gpu_blocks")
)
PROMPT_TOKENS = Metric("vllm:prompt_tokens_total", "counter", "Prompt tokens that were computed.", _VLLM)
GENERATED_TOKENS = Metric("vllm:generation_tokens_total", "counter", "Tokens that were generated.", _VLLM)
WORKER_INFO = Metric(
    "twostroke_worker_info", "gauge", "1; what the worker is.", ("worker", "role", "engine", "model", "epoch")
)
PENDING = Metric("twostroke_pending_prompt_tokens", "gauge", "Prompt tokens that are not computed yet.", ("worker",))
HELD_HANDOFFS = Metric("twostroke_held_handoffs", "gauge", "Hand-offs that wait to be fetched.", ("worker",))
HELD_BLOCKS = Metric("twostroke_held_blocks", "gauge", "Blocks that are held for decode workers.", ("worker",))
KV_BYTES = Metric("twostroke_kv_received_bytes_total", "counter", "Bytes of KV fetched from others.", ("worker",))
KV_HANDOFFS = Metric("twostroke_kv_received_handoffs_total", "counter", "Hand-offs fetched from others.", ("worker",))
STEPS = Metric("twostroke_steps_total", "counter", "Engine steps.", ("worker",))
STEP_TIME = Metric(
    "twostroke_step_seconds",
    "histogram",
    "From one step's end to the next one's while requests run: the time between two tokens of an answer.",
    ("worker",),
    _SHORT_BUCKETS_S,
)

ROUTER_METRICS = (
    *(
        DURATION,
        TTFT,
        TPOT,
        REQUESTS,
        REFUSALS,
        QUEUED,
        ACTIVE,
        TOKENS,
        PLACEMENTS,
        RETRIES,
        PROMPTS,
        QUEUE_TIME,
        PREFILL_TIME,
        EXPOSED,
    ),
    *(HANDOFF_BYTES, HANDOFFS, HANDOFFS_OVER, RECOMPUTED, READY, WORKERS, LINK_STATE, LINK_RATE, LINK_LATENCY),
    *(LINK_FAILURES, LINK_LANES, KNOWN_BLOCKS, STEP_ERROR, ROLE_ADVICE, ROLE_CHANGES),
)
WORKER_METRICS = (
    *(WAITING, RUNNING, KV_USAGE, CACHE_INFO, PROMPT_TOKENS, GENERATED_TOKENS, WORKER_INFO, PENDING, HELD_HANDOFFS),
    *(HELD_BLOCKS, KV_BYTES, KV_HANDOFFS, STEPS, STEP_TIME),
)


class Registry:
    """The metrics of one process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)

    def histogram(self, metric: Metric) -> Histogram:
        """Made and registered."""
        return Histogram(metric.name, metric.meaning, metric.labels, buckets=metric.buckets, registry=self._registry)

    def counter(self, metric: Metric) -> Counter:
        """Made and registered."""
        return Counter(metric.name, metric.meaning, metric.labels, registry=self._registry)

    def collect_from(self, collector: Collector) -> None:
        """Asks the collector at every scrape."""
        self._registry.register(collector)

    def render(self) -> bytes:
        """In Prometheus' text format, version 0.0.4."""
        return generate_latest(self._registry)


class Collector:
    """Reads numbers where they are kept anyway, when they are asked for."""

    def collect(self) -> Iterable[Family]:
        """The families now."""
        raise NotImplementedError


def family(metric: Metric, samples: Mapping[tuple[str, ...], float]) -> Family:
    """One metric now. samples: its values by the values of its labels."""
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    made: Family = kind(metric.name, metric.meaning, labels=metric.labels)
    for labels, value in samples.items():
        made.add_metric(labels, value)
    return made
