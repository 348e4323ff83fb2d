"""A worker's metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from twostroke.engine.base import EngineInfo, EngineLoad, EngineOutput, Stroke
from twostroke.errors import TwostrokeError
from twostroke.telemetry import metrics
from twostroke.telemetry.metrics import Collector, Family, Metric, Registry, family
from twostroke.v1.engine_pb2 import EngineRequest


class WorkerMetrics(Collector):
    """An Observer of the host. All but the time of steps is read from the engine's load when it is asked for.

    role: the worker's role now.
    """

    def __init__(
        self, registry: Registry, worker_id: str, epoch: str, info: EngineInfo, role: Callable[[], str]
    ) -> None:
        self._worker_id = worker_id
        self._epoch = epoch
        self._info = info
        self._role = role
        self._load = EngineLoad()
        self._stepped_s = 0.0
        self._step_time = registry.histogram(metrics.STEP_TIME).labels(worker_id)
        registry.collect_from(self)

    def admitted(self, request: EngineRequest, stroke: Stroke) -> None:
        """See Observer."""

    def stepped(self, outputs: Sequence[EngineOutput], load: EngineLoad) -> None:
        """See Observer."""
        now_s = time.monotonic()
        if load.steps > self._load.steps and self._load.running_requests:
            self._step_time.observe((now_s - self._stepped_s) / (load.steps - self._load.steps))
        self._load, self._stepped_s = load, now_s

    def cancelled(self, request_ids: Sequence[str]) -> None:
        """See Observer."""

    def lost(self, error: TwostrokeError) -> None:
        """See Observer."""

    def collect(self) -> Iterable[Family]:
        """See Collector."""
        load, info = self._load, self._info
        vllm, own = (info.model, "0"), (self._worker_id,)
        blocks = (str(info.layout.block_size_tokens), str(info.total_blocks))
        values: dict[Metric, tuple[tuple[str, ...], float]] = {
            metrics.WAITING: (vllm, load.waiting_requests),
            metrics.RUNNING: (vllm, load.running_requests),
            metrics.KV_USAGE: (vllm, load.used_blocks / max(1, info.total_blocks)),
            metrics.CACHE_INFO: ((*vllm, *blocks), 1),
            metrics.PROMPT_TOKENS: (vllm, load.computed_prompt_tokens),
            metrics.GENERATED_TOKENS: (vllm, load.generated_tokens),
            metrics.WORKER_INFO: ((*own, self._role(), info.engine, info.model, self._epoch), 1),
            metrics.PENDING: (own, load.pending_prompt_tokens),
            metrics.HELD_HANDOFFS: (own, load.held_handoffs),
            metrics.HELD_BLOCKS: (own, load.held_blocks),
            metrics.KV_BYTES: (own, load.kv_received_bytes),
            metrics.KV_HANDOFFS: (own, load.kv_received_handoffs),
            metrics.STEPS: (own, load.steps),
        }
        return [family(metric, {labels: value}) for metric, (labels, value) in values.items()]
