"""vLLM's engine core as an Engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from twostroke.config import WorkerSettings
from twostroke.engine.base import EngineInfo, EngineLoad, EngineOutput, EngineStep, Stroke
from twostroke.engine.vllm.launch import Phases, create_config, prepare_environment, start_client
from twostroke.errors import (
    EngineError,
    InvalidRequestError,
    KvCorruptError,
    KvLostError,
    PromptTooLongError,
    UnsupportedFieldError,
)
from twostroke.kv.layout import block_bytes, model_digest
from twostroke.v1 import engine_pb2 as pb
from twostroke.v1.kv_pb2 import Handoff, KvLayout

log = logging.getLogger(__name__)

_FINISH = (pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_ABORT, pb.FINISH_REASON_ERROR)
_FINISH_REPETITION = pb.FINISH_REASON_REPETITION


@dataclass(slots=True)
class _Request:
    """What is remembered of a request while the engine has it."""

    stroke: Stroke
    prompt_tokens: int
    admitted_s: float
    ends_with_first: bool
    """One token is all that the client wants, so nothing is handed over."""
    forced: tuple[int, ...] = ()
    """Tokens that the engine takes again and that must not be reported."""
    repeated: int = 0
    started: bool = False


class VllmEngine:
    """One EngineCore without a front end."""

    def __init__(self, settings: WorkerSettings, worker_id: str, epoch: str) -> None:
        self._settings = settings
        self._worker_id = worker_id
        self._epoch = epoch
        self._requests: dict[str, _Request] = {}
        self._held: set[str] = set()
        self._load = EngineLoad()
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
            from twostroke.engine.vllm import codec
        self._codec = codec
        with phases.measure("read configuration"):
            self._config = create_config(self._settings, f"{self._worker_id}-{self._epoch}")
        with phases.measure("start engine"):
            self._client = start_client(self._config)
        with phases.measure("pin cores"):
            cores = _core_list(self._settings.cores)
            await self._client.collective_rpc_async("twostroke_pin", args=(cores,))
        self._layout = self._describe_layout(vllm.__version__)
        self._block_bytes = block_bytes(self._layout, self._config.model_config.dtype.itemsize)
        return self._describe(vllm.__version__, phases)

    def _describe_layout(self, version: str) -> KvLayout:
        model, cache = self._config.model_config, self._config.cache_config
        folder = Path(model.model)
        return KvLayout(
            model_digest=model_digest(folder) if folder.is_dir() else f"{model.model}@{model.revision or 'main'}",
            dtype=str(model.dtype).removeprefix("torch.") if cache.cache_dtype == "auto" else cache.cache_dtype,
            block_size_tokens=cache.block_size,
            layers=model.get_num_layers(self._config.parallel_config),
            kv_heads=model.get_total_num_kv_heads(),
            head_size=model.get_head_size(),
            tensor_parallel=self._config.parallel_config.tensor_parallel_size,
            order=self._codec.layout_order(),
            connector=self._settings.kv_connector,
            connector_version=f"vllm {version}",
        )

    def _describe(self, version: str, phases: Phases) -> EngineInfo:
        self._total_blocks = self._config.cache_config.num_gpu_blocks
        return EngineInfo(
            engine="vllm",
            engine_version=version,
            model=self._config.model_config.model,
            max_model_len_tokens=self._config.model_config.max_model_len,
            vocab_size=self._config.model_config.get_vocab_size(),
            total_blocks=self._total_blocks,
            step_budget_tokens=self._config.scheduler_config.max_num_batched_tokens,
            max_sequences=self._config.scheduler_config.max_num_seqs,
            layout=self._layout,
            start_phases=tuple(phases.durations_ms),
        )

    async def admit(self, request: pb.EngineRequest, stroke: Stroke, handoff: Handoff | None = None) -> None:
        """Queues a request; see Engine.admit."""
        self._validate(request, stroke, handoff)
        room = self._config.model_config.max_model_len - len(request.prompt_token_ids)
        limit = min(request.sampling.max_tokens, room) if request.sampling.HasField("max_tokens") else room
        self._requests[request.request_id] = _Request(
            stroke,
            len(request.prompt_token_ids),
            time.monotonic(),
            ends_with_first=stroke is Stroke.PREFILL and limit <= 1,
            forced=tuple(request.output_token_ids),
        )
        try:
            core_request = self._codec.core_request(
                request, stroke, handoff, limit, hold=stroke is Stroke.PREFILL and limit > 1
            )
            await self._client.add_request_async(core_request)
        except ValueError as error:
            del self._requests[request.request_id]
            raise InvalidRequestError(str(error)) from error
        except BaseException as error:
            del self._requests[request.request_id]
            if self._client.resources.engine_dead:
                raise EngineError("vLLM's engine is dead") from error
            raise

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
        if handoff is not None and handoff.WhichOneof("transport") != "nixl":
            raise InvalidRequestError(f"this worker fetches KV by nixl, not by {handoff.WhichOneof('transport')}")

    async def cancel(self, request_ids: Sequence[str]) -> None:
        """Aborts requests, and releases held ones."""
        known = [request_id for request_id in request_ids if self._requests.pop(request_id, None)]
        if known:
            await self._client.abort_requests_async(known)
        await self.release([request_id for request_id in request_ids if request_id in self._held])

    async def release(self, request_ids: Sequence[str]) -> int:
        """Frees held KV; the engine reports the blocks as free after its next step."""
        held = [request_id for request_id in request_ids if request_id in self._held]
        if not held:
            return 0
        self._held.difference_update(held)
        # Nothing may step after this to tell that they are gone.
        self._client.outputs_queue.put_nowait(self._codec.no_outputs())
        released = await self._client.collective_rpc_async("twostroke_release", args=(held,))
        return int(max(released))

    async def next_step(self) -> EngineStep:
        """Waits for vLLM's next outputs."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            outputs = await self._client.get_output_async()
        except EngineDeadError as error:
            raise EngineError("vLLM's engine died; its own message is in the log") from error
        converted = [self._convert(output) for output in outputs.outputs if output.request_id in self._requests]
        self._count(outputs.scheduler_stats, converted)
        return EngineStep([output for output in converted if output is not None], self._load)

    def _convert(self, output: Any) -> EngineOutput | None:
        state = self._requests[output.request_id]
        result = EngineOutput(output.request_id, started=not state.started, done=output.finish_reason is not None)
        if not state.started:
            state.started = True
            result.prompt = self._codec.prompt_stats(output, state.admitted_s)
            result.prompt_logprobs = self._codec.logprobs_to_wire(output.new_prompt_logprobs_tensors)
        skipped = self._skip_forced(state, output, result)
        result.token_ids = output.new_token_ids[skipped:]
        result.logprobs = self._codec.logprobs_to_wire(output.new_logprobs, skipped)
        if result.done:
            self._end(state, output, result)
        return result

    def _skip_forced(self, state: _Request, output: Any, result: EngineOutput) -> int:
        skipped = min(len(state.forced) - state.repeated, len(output.new_token_ids))
        expected = state.forced[state.repeated : state.repeated + skipped]
        state.repeated += skipped
        if tuple(output.new_token_ids[:skipped]) != expected:
            result.failure = KvCorruptError(
                f"the engine took {list(output.new_token_ids[:skipped])} where {list(expected)} was forced"
            )
        return skipped

    def _end(self, state: _Request, output: Any, result: EngineOutput) -> None:
        request_id = output.request_id
        del self._requests[request_id]
        reason = int(output.finish_reason)
        if reason == 3 and not result.failure:
            where = "its KV could not be fetched" if state.stroke is Stroke.DECODE else "the engine reported an error"
            result.failure = KvLostError(f"request {request_id} failed: {where}")
            return
        handed_over = state.stroke is Stroke.PREFILL and not state.ends_with_first and reason == 1
        if handed_over:
            self._held.add(request_id)
            result.handoff = self._handoff(request_id, state, output.kv_transfer_params)
            return
        result.finish = self._finish(reason, output.stop_reason)
        if state.stroke is Stroke.PREFILL and output.kv_transfer_params:
            # The stock connector holds KV of answers that ended on the first token, too.
            self._held.add(request_id)
            self._in_background(self.release([request_id]))

    def _in_background(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _finish(self, reason: int, stop_reason: int | str | None) -> pb.Finish:
        finish = pb.Finish(reason=_FINISH[reason] if reason < len(_FINISH) else _FINISH_REPETITION)
        if isinstance(stop_reason, int):
            finish.stop_token_id = stop_reason
        elif stop_reason is not None:
            finish.stop_string = stop_reason
        return finish

    def _handoff(self, request_id: str, state: _Request, params: dict[str, Any]) -> Handoff:
        transfer = self._codec.nixl_to_wire(params)
        blocks = sum(len(group.block_ids) for group in transfer.groups)
        return Handoff(
            handoff_id=request_id,
            source_worker_id=self._worker_id,
            source_epoch=self._epoch,
            tokens=state.prompt_tokens,
            blocks=blocks,
            bytes=blocks * self._block_bytes,
            lease_ms=self._settings.kv_lease_s * 1000,
            nixl=transfer,
        )

    def _count(self, stats: Any, outputs: Sequence[EngineOutput | None]) -> None:
        load = self._load
        if stats is not None and not stats.kv_cache_usage:
            # A lease that ended, or a decode worker that read, frees held KV without telling this process.
            self._held.clear()
        prompts = [output.prompt for output in outputs if output is not None and output.prompt is not None]
        self._load = replace(
            load,
            held_handoffs=len(self._held),
            pending_prompt_tokens=sum(r.prompt_tokens for r in self._requests.values() if not r.started),
            computed_prompt_tokens=load.computed_prompt_tokens + sum(prompt.computed_tokens for prompt in prompts),
            generated_tokens=load.generated_tokens + sum(len(o.token_ids) for o in outputs if o is not None),
            steps=load.steps + (stats is not None),
        )
        if stats is None:
            return
        received = list((stats.kv_connector_stats or {}).get("bytes_transferred", ()))
        self._load = replace(
            self._load,
            waiting_requests=stats.num_waiting_reqs + stats.num_skipped_waiting_reqs,
            running_requests=stats.num_running_reqs,
            used_blocks=round(stats.kv_cache_usage * self._total_blocks),
            kv_received_bytes=load.kv_received_bytes + int(sum(received)),
            kv_received_handoffs=load.kv_received_handoffs + len(received),
        )

    async def close(self) -> None:
        """Stops vLLM's processes."""
        if self._client is not None:
            client, self._client = self._client, None
            with contextlib.suppress(Exception):
                await asyncio.to_thread(client.shutdown, 2.0)


def _core_list(cores: str) -> list[int]:
    """The cores of "0,2-4"; empty for an empty text."""
    result: list[int] = []
    for part in filter(None, cores.split(",")):
        first, _, last = part.partition("-")
        result.extend(range(int(first), int(last or first) + 1))
    return result
