"""Our scheduler over vLLM's, in this process, with made-up steps: what cannot be had from a model on demand."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

BLOCK = 16
BLOCKS = 24


class Family:
    """A core, with mailboxes in the place of its rank and its main process."""

    def __init__(self, model: str, folder: Path, recompute_tokens: int = 64, *, ahead: bool = False) -> None:
        """ahead: the scheduler is that of engines which schedule a step while the last one runs."""
        import torch
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        from twostroke.config import WorkerSettings
        from twostroke.engine.vllm.direct import notes
        from twostroke.engine.vllm.direct.handoffs import DirectHandoffs
        from twostroke.engine.vllm.direct.scheduler import AsyncHandoffScheduler, HandoffScheduler
        from twostroke.engine.vllm.launch import create_config

        self.handoffs = DirectHandoffs("w", "e")
        settings = WorkerSettings(
            model=model,
            step_budget_tokens=64,
            block_size_tokens=BLOCK,
            max_model_len_tokens=256,
            kv_recompute_tokens=recompute_tokens,
            kv_lease_s=1,
        )
        config = create_config(settings, self.handoffs.arguments(settings, "w-e"))
        self.handoffs.adjust(config)
        config.cache_config.num_gpu_blocks = BLOCKS
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        kv = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
        self.heard: dict[str, queue.SimpleQueue[Any]] = {}
        box = notes.Mailbox(Path(config.kv_transfer_config.kv_connector_extra_config["folder"]), notes.rank_name(0))
        self.heard["rank"] = queue.SimpleQueue()
        box.listen(self.heard["rank"].put, "rank")
        self.main: list[Any] = []
        self.handoffs._take = self.main.append  # type: ignore[method-assign]
        kind: Any = AsyncHandoffScheduler if ahead else HandoffScheduler
        self.scheduler: Any = kind(
            vllm_config=config,
            kv_cache_config=kv,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.free = self.pool.get_num_free_blocks()
        self._next_token = 1000
        self._chosen: dict[int, dict[str, list[int]]] = {}
        self.reports: list[dict[str, Any]] = []
        """Of the steps that are over."""

    def add(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int,
        *,
        chunk_tokens: int = 0,
        appends: bool = False,
        **params: Any,
    ) -> None:
        from vllm import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request

        from twostroke.engine.vllm.report import APPEND_ARG, CHUNK_ARG

        init_none_hash(sha256)
        extra = {"kv_transfer_params": params, CHUNK_ARG: chunk_tokens, APPEND_ARG: appends}
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
        hasher = get_request_block_hasher(BLOCK, sha256)
        self.scheduler.add_request(Request(request_id, prompt, sampling, None, block_hasher=hasher))

    def offer(self, request_id: str, prompt: list[int], max_tokens: int = 1) -> None:
        self.add(request_id, prompt, max_tokens, **self.handoffs.offer())

    def fetch(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int = 8,
        *,
        token_known: bool = False,
        appends: bool = False,
    ) -> None:
        from twostroke.v1.kv_pb2 import Handoff

        handoff = Handoff(handoff_id=request_id, tokens=len(prompt), in_progress=True)
        self.add(
            request_id, prompt, max_tokens, appends=appends, **self.handoffs.fetch(handoff, token_known=token_known)
        )

    def step(self) -> dict[str, int]:
        """One step; every request that has its prompt chooses a token. Returns the tokens that were computed."""
        planned, scheduled = self.plan()
        self.end(planned)
        return scheduled

    def plan(self) -> tuple[Any, dict[str, int]]:
        """A step begins. Returns it, and the tokens that it computes."""
        planned = self.scheduler.schedule()
        tokens = {}
        for request_id in planned.num_scheduled_tokens:
            request = self.scheduler.requests[request_id]
            self._next_token += 1
            done = request.num_computed_tokens >= request.num_tokens
            tokens[request_id] = [self._next_token] if done else []
        self._chosen[id(planned)] = tokens
        return planned, dict(planned.num_scheduled_tokens)

    def end(self, planned: Any, spared_s: float = 0.0) -> None:
        """It is over. spared_s: of its work, what was done on spare cores."""
        from vllm.v1.outputs import ModelRunnerOutput

        from twostroke.engine.vllm.report import take_report

        chosen = self._chosen.pop(id(planned))
        output: Any = ModelRunnerOutput(
            list(chosen), {name: at for at, name in enumerate(chosen)}, list(chosen.values())
        )
        output.spared_s = spared_s
        for outputs in self.scheduler.update_from_output(planned, output).values():
            self.reports.append(dict(take_report(outputs.scheduler_stats)))

    def tell(self, note: Any) -> None:
        """As a rank or main would."""
        self.scheduler.connector.core.inbox.put(note)

    def hold(self, request_id: str) -> str:
        """The name of the hold of a request."""
        return str(self.scheduler.connector.core.held._holds[request_id].name)

    def ended(self, request_id: str, failure: str | None = None, missing: tuple[int, ...] = (), **more: Any) -> None:
        from twostroke.engine.vllm.direct import notes

        said = {"first_token_id": 7, "corrupt": False, "unusable": False, **more}
        self.tell(
            notes.Ended(
                rank=0, request_id=request_id, nbytes=1, duration_s=0.0, failure=failure, missing=list(missing), **said
            )
        )

    def rank_heard(self, kind: type) -> Any:
        """The next note of this kind that the rank got."""
        while True:
            note = self.heard["rank"].get(timeout=5)
            if isinstance(note, kind):
                return note

    def main_heard(self) -> list[Any]:
        """What main got."""
        self.handoffs._take_notes()
        heard, self.main[:] = list(self.main), []
        return heard

    def in_use(self) -> int:
        return int(self.free - self.pool.get_num_free_blocks())


def prompt(tokens: int, first: int = 0) -> list[int]:
    return list(range(first, first + tokens))
