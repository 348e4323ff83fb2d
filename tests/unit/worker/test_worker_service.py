"""What a worker's report carries over the wire."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from twostroke.engine.base import EngineLoad, StepSample
from twostroke.policy.step_model import StepBatch
from twostroke.v1 import worker_pb2 as pb
from twostroke.worker.worker_service import WorkerService


def test_a_step_is_told_with_what_spare_cores_saved() -> None:
    host: Any = SimpleNamespace(epoch="e", draining=asyncio.Event(), stalled="")
    sample = StepSample(StepBatch(3, 1200, 512, 130816.0, 2), 0.125, 0.05)
    (told,) = WorkerService(host, pb.ROLE_PREFILL)._report(EngineLoad(), [sample]).step_samples
    assert (told.sequences, told.prefill_tokens, told.prefill_chunks) == (3, 512, 2)
    assert (told.duration_ms, told.spared_ms) == (125.0, 50.0)
