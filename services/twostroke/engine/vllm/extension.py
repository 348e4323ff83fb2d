"""What we add to vLLM's worker processes, called through its collective RPC."""

from __future__ import annotations

import os

from vllm.distributed.kv_transfer import get_kv_transfer_group


class WorkerExtension:
    """Mixed into vLLM's worker class."""

    def twostroke_release(self, request_ids: list[str]) -> int:
        """Gives up KV held for these requests; returns how many held any."""
        return int(get_kv_transfer_group().release(request_ids))

    def twostroke_pin(self, cores: list[int]) -> list[int]:
        """Pins the thread that computes; returns where it runs now."""
        if cores:
            os.sched_setaffinity(0, cores)
        return sorted(os.sched_getaffinity(0))
