"""vLLM's engine core as an Engine."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from twostroke.config import WorkerSettings
from twostroke.engine.base import EngineInfo, EngineLoad, EngineOutput, EngineStep, LinkReport, Stroke
from twostroke.engine.vllm.affinity import core_list
from twostroke.engine.vllm.handoffs import Failed, Handoffs, News, NixlHandoffs, Received, Source, Started
from twostroke.engine.vllm.launch import Phases, create_config, is_cpu, prepare_environment, start_client
from twostroke.engine.vllm.report import Report, take_report, to_change, to_sample
from twostroke.errors import (
    EngineError,
    InvalidRequestError,
    KvLostError,
    PromptTooLongError,
    UnsupportedFieldError,
)
from twostroke.kv.layout import block_bytes
from twostroke.v1 import engine_pb2 as pb
from twostroke.v1.kv_pb2 import Handoff, KvEndpoint

if TYPE_CHECKING:
    from twostroke.engine.vllm import outputs

log = logging.getLogger(__name__)


class VllmEngine:
    """One EngineCore without a front end."""

    def __init__(self, settings: WorkerSettings, worker_id: str, epoch: str) -> None:
        self._settings = settings
        self._worker_id = worker_id
        self._epoch = epoch
        self._requests: dict[str, outputs.Request] = {}
        """By vLLM's ids."""
        self._vllm_ids: dict[str, str] = {}
        """Of requests whose id in vLLM is another one."""
        self._numbers = itertools.count(1)
        self._early: list[EngineOutput] = []
        """Outputs that vLLM did not bring."""
        self._load = EngineLoad()
        self._progress: dict[str, int] = {}
        """Tokens computed of prompts that have begun, by vLLM's ids."""
        self._client: Any = None
        self._background: set[asyncio.Task[Any]] = set()

    async def start(self) -> EngineInfo:
        """Imports vLLM, starts its processes and waits for them; blocks the loop, which serves nothing yet."""
        phases = Phases()
        prepare_environment(self._settings)
        with phases.measure("import vLLM"):
            import vllm
            import vllm.v1.engine.core_client

            # Not before: they import vLLM.
            from twostroke.engine.vllm import codec, outputs
            from twostroke.engine.vllm.adapters import Adapters
            from twostroke.engine.vllm.describe import block_hashing, engine_info, kv_layout, step_prior
        self._codec, self._outputs = codec, outputs
        settings = self._settings
        with phases.measure("read configuration"):
            self._handoffs = self._new_handoffs()
            arguments = self._handoffs.arguments(settings, f"{self._worker_id}-{self._epoch}")
            self._config = create_config(settings, arguments)
            self._handoffs.adjust(self._config)
        with phases.measure("start engine"):
            self._client = start_client(self._config)
            self._adapters = Adapters(
                self._client.add_lora_async, self._settings.max_loras, self._settings.max_lora_rank, self._worker_id
            )
            endpoint = await self._handoffs.attach(self._client, self._hear)
        with phases.measure("pin cores"):
            await self._client.collective_rpc_async("twostroke_pin", args=(core_list(settings.cores),))
        if is_cpu():
            await self._client.collective_rpc_async("twostroke_keep_seeds")
        if settings.spare_cores and is_cpu():
            with phases.measure("prepare spare cores"):
                lists = core_list(settings.cores), core_list(settings.spare_cores)
                await self._client.collective_rpc_async("twostroke_spare_cores", args=lists)
        if settings.step_log:
            await self._client.collective_rpc_async("twostroke_log_steps", args=(settings.step_log,))
        layout = kv_layout(self._config, self._handoffs.connector(settings), vllm.__version__)
        self._source = Source(
            self._worker_id,
            self._epoch,
            settings.kv_lease_s * 1000,
            layout.block_size_tokens,
            block_bytes(layout, self._config.model_config.dtype.itemsize),
        )
        weights = await self._client.collective_rpc_async("twostroke_weights")
        prior = step_prior(self._config, layout, weights)
        hashing = await self._client.call_utility_async("twostroke_block_hashing")
        await self._client.call_utility_async("twostroke_most_step_s", settings.most_step_s)
        self._info = engine_info(
            self._config, layout, vllm.__version__, phases.durations_ms, endpoint, prior, block_hashing(hashing),
            settings,
        )  # fmt: skip
        return self._info

    def _new_handoffs(self) -> Handoffs:
        if self._settings.kv_connector == "nixl":
            return NixlHandoffs()
        from twostroke.engine.vllm.direct.handoffs import DirectHandoffs

        return DirectHandoffs(self._worker_id, self._epoch)

    async def admit(
        self, request: pb.EngineRequest, stroke: Stroke, handoff: Handoff | None = None, chunk_tokens: int = 0
    ) -> None:
        """Queues a request; see Engine.admit."""
        self._validate(request, stroke, handoff)
        lora = await self._adapters.get(request.adapter) if request.HasField("adapter") else None
        room = self._config.model_config.max_model_len - len(request.prompt_token_ids)
        limit = min(request.sampling.max_tokens, room) if request.sampling.HasField("max_tokens") else room
        going_on = self._codec.continuation(request, handoff)
        kv_transfer = None
        if stroke is Stroke.PREFILL and limit > 1:
            kv_transfer = self._handoffs.offer()
        elif handoff is not None:
            kv_transfer = self._handoffs.fetch(handoff, token_known=not going_on.brought)
        vllm_id = self._vllm_id(request.request_id, stroke)
        self._requests[vllm_id] = self._outputs.Request(
            request.request_id,
            stroke,
            len(request.prompt_token_ids),
            time.monotonic(),
            ends_with_first=stroke is Stroke.PREFILL and limit <= 1,
            going_on=going_on,
        )
        try:
            core_request = self._codec.core_request(
                request, vllm_id, stroke, limit, going_on, lora, kv_transfer, chunk_tokens
            )
            await self._client.add_request_async(core_request)
        except ValueError as error:
            self._forget(vllm_id)
            raise InvalidRequestError(str(error)) from error
        except BaseException as error:
            self._forget(vllm_id)
            if self._client.resources.engine_dead:
                raise EngineError("vLLM's engine is dead") from error
            raise

    def _vllm_id(self, request_id: str, stroke: Stroke) -> str:
        """The id under which vLLM gets a request. One that fetches KV gets a new one each time: vLLM may still have an
        earlier admission of it that was cancelled and waits for its last read."""
        if stroke is not Stroke.DECODE:
            return request_id
        self._vllm_ids[request_id] = vllm_id = f"{request_id}~{next(self._numbers)}"
        return vllm_id

    def _forget(self, vllm_id: str) -> bool:
        state = self._requests.pop(vllm_id, None)
        if state is not None and self._vllm_ids.get(state.request_id) == vllm_id:
            del self._vllm_ids[state.request_id]
        return state is not None

    def _validate(self, request: pb.EngineRequest, stroke: Stroke, handoff: Handoff | None) -> None:
        config = self._config.model_config
        tokens = len(request.prompt_token_ids)
        if not tokens:
            raise InvalidRequestError("the prompt is empty; send at least one token")
        if tokens >= config.max_model_len:
            raise PromptTooLongError(
                f"the prompt has {tokens} tokens; the model takes {config.max_model_len}, the answer included"
            )
        vocab_size = config.get_vocab_size()
        if (largest := max(request.prompt_token_ids)) >= vocab_size:
            raise InvalidRequestError(f"token id {largest} is not below the model's vocabulary size of {vocab_size}")
        if stroke is Stroke.PREFILL and request.output_token_ids:
            raise UnsupportedFieldError("output_token_ids cannot be continued by a prefill; admit for the whole")
        if handoff is not None and handoff.WhichOneof("transport") != self._handoffs.transport:
            here, there = self._handoffs.transport, handoff.WhichOneof("transport")
            raise InvalidRequestError(f"this worker fetches KV by {here}, not by {there}; use one --kv-connector")

    async def cancel(self, request_ids: Sequence[str]) -> None:
        """Aborts requests, and releases held ones."""
        vllm_ids = [self._vllm_ids.get(request_id, request_id) for request_id in request_ids]
        known = [vllm_id for vllm_id in vllm_ids if self._forget(vllm_id)]
        if known:
            await self._client.abort_requests_async(known)
        await self.release(request_ids)

    async def release(self, request_ids: Sequence[str]) -> int:
        """Frees held KV; the engine reports the blocks as free after its next step."""
        released = await self._handoffs.release(request_ids)
        if released:
            # Nothing may step after this to tell that they are gone.
            self._wake()
        return released

    def _wake(self) -> None:
        self._client.outputs_queue.put_nowait(self._codec.no_outputs())

    async def probe(self, worker_id: str, epoch: str, endpoint: KvEndpoint) -> LinkReport:
        """Tries the link to another engine."""
        return await self._handoffs.probe(worker_id, epoch, endpoint)

    async def drop_peer(self, worker_id: str, epoch: str) -> None:
        """Forgets an epoch of another engine."""
        self._handoffs.drop_peer(worker_id, epoch)

    def _hear(self, news: News) -> None:
        """What the connector tells outside of steps."""
        state = self._requests.get(news.request_id)
        if state is None:
            return
        if isinstance(news, Received):
            # Told with the prompt's own output; nobody waits for it.
            state.chunks = news.chunks
            return
        if isinstance(news, Started):
            state.started = True
            handoff = self._handoffs.describe(self._source, news.request_id, state.prompt_tokens, news.params)
            handoff.in_progress = True
            self._early.append(EngineOutput(state.request_id, started=True, handoff=handoff))
        elif isinstance(news, Failed):
            self._forget(news.request_id)
            self._early.append(EngineOutput(state.request_id, failure=news.error, done=True))
        else:
            state.recomputed += news.tokens
        self._wake()

    async def next_step(self) -> EngineStep:
        """Waits for vLLM's next outputs."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            step = await self._client.get_output_async()
        except EngineDeadError as error:
            raise EngineError("vLLM's engine died; its own message is in the log") from error
        converted = [self._convert(output) for output in step.outputs if output.request_id in self._requests]
        early, self._early = self._early, []
        report = take_report(step.scheduler_stats)
        self._count(step.scheduler_stats, converted, report)
        samples, changes = map(to_sample, report["steps"]), map(to_change, report["blocks"])
        return EngineStep([*early, *converted], self._load, list(samples), list(changes))

    def _convert(self, output: Any) -> EngineOutput:
        state = self._requests[output.request_id]
        result = self._outputs.convert(state, output)
        if result.done:
            self._end(state, output, result)
        return result

    def _end(self, state: outputs.Request, output: Any, result: EngineOutput) -> None:
        request_id = state.request_id
        self._forget(output.request_id)
        reason = int(output.finish_reason)
        if reason == self._outputs.ERROR and not result.failure:
            where = "its KV could not be fetched" if state.stroke is Stroke.DECODE else "the engine reported an error"
            result.failure = KvLostError(f"request {request_id} failed: {where}")
            return
        handed_over = state.stroke is Stroke.PREFILL and not state.ends_with_first and reason == self._outputs.LENGTH
        if handed_over:
            result.handoff = self._handoffs.describe(
                self._source, request_id, state.prompt_tokens, output.kv_transfer_params
            )
            return
        result.finish = self._outputs.finish_of(output)
        if state.stroke is Stroke.PREFILL and output.kv_transfer_params:
            # The stock connector holds KV of answers that ended on the first token, too.
            self._handoffs.describe(self._source, request_id, state.prompt_tokens, output.kv_transfer_params)
            self._in_background(self.release([request_id]))

    def _in_background(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _count(self, stats: Any, outputs: Sequence[EngineOutput], report: Report) -> None:
        load = self._load
        if stats is not None:
            self._progress = report["progress"]
        pending = [
            max(0, state.prompt_tokens - self._progress.get(vllm_id, 0))
            for vllm_id, state in self._requests.items()
            if not state.reported and state.stroke is not Stroke.DECODE
        ]
        prompts = [output.prompt for output in outputs if output.prompt is not None]
        self._load = replace(
            load,
            pending_prompt_tokens=sum(pending),
            pending_prompts=len(pending),
            computed_prompt_tokens=load.computed_prompt_tokens + sum(prompt.computed_tokens for prompt in prompts),
            generated_tokens=load.generated_tokens + sum(len(output.token_ids) for output in outputs),
            steps=load.steps + (stats is not None),
        )
        if stats is None:
            return
        self._load = self._handoffs.count(
            replace(
                self._load,
                waiting_requests=stats.num_waiting_reqs + stats.num_skipped_waiting_reqs,
                running_requests=stats.num_running_reqs,
                used_blocks=round(stats.kv_cache_usage * self._info.total_blocks),
            ),
            stats,
        )

    async def close(self) -> None:
        """Stops vLLM's processes."""
        if self._client is not None:
            client, self._client = self._client, None
            with contextlib.suppress(Exception):
                await asyncio.to_thread(client.shutdown, 2.0)
            self._handoffs.close()
