"""The cluster, dressed as vLLM's engine core.

vLLM's front end (AsyncLLM and the servers on top of it) talks to an EngineCoreClient: requests in as token ids, outputs
back once per step. This client's engine is the dispatcher, so the whole of vLLM's surface works on two pools and cannot
tell them from one engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from google.protobuf import struct_pb2
from vllm.exceptions import GracefulHTTPError, LoRAAdapterNotFoundError, VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.metrics.stats import PrefillStats

from twostroke.engine.vllm import logprobs as logprobs_codec
from twostroke.engine.vllm.adapters import adapter_digest
from twostroke.engine.vllm.sampling import to_wire as sampling_to_wire
from twostroke.errors import HTTP_STATUS, InvalidRequestError, TwostrokeError, UnsupportedFieldError
from twostroke.router.dispatch import Dispatcher
from twostroke.router.output import Output
from twostroke.router.vllm.event_stream import Admission
from twostroke.telemetry.tracing import Tracer
from twostroke.v1 import engine_pb2 as pb

_FINISH = {
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    pb.FINISH_REASON_ABORT: FinishReason.ABORT,
    pb.FINISH_REASON_ERROR: FinishReason.ERROR,
    pb.FINISH_REASON_REPETITION: FinishReason.REPETITION,
}

# What vLLM's engine core calls weights that were never replaced in place, as those of workers never are.
_WEIGHTS = "default"

# Parts of a request that no engine of the cluster takes, with the name that a client knows them by.
_REFUSED = {
    "mm_features": "images, audio or video",
    "pooling_params": "embeddings and pooling",
    "prompt_embeds": "prompt_embeds",
    "data_parallel_rank": "data_parallel_rank",
    "kv_hints": "kv_hints",
    "resumable": "streamed prompts",
}


def to_vllm_error(error: TwostrokeError) -> Exception:
    """The exception from which vLLM's servers make the right HTTP status."""
    made: Exception
    if isinstance(error, InvalidRequestError):
        made = VLLMValidationError(error.message)
    else:
        made = GracefulHTTPError(error.message, HTTPStatus(HTTP_STATUS.get(error.code, 500)))
    # The gRPC edge wants the original back from behind vLLM's front end.
    made.__cause__ = error
    return made


def engine_request(request: EngineCoreRequest, adapters: Mapping[str, pb.Adapter]) -> pb.EngineRequest:
    """Encodes. adapters: those that were loaded. Raises UnsupportedFieldError naming what the cluster does not do."""
    for field, name in _REFUSED.items():
        if getattr(request, field):
            raise UnsupportedFieldError(f"{name} cannot be served through two pools")
    wire = pb.EngineRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling=sampling_to_wire(request.sampling_params),
        priority=request.priority,
        trace_context=request.trace_headers,
    )
    if request.lora_request is not None:
        wire.adapter.CopyFrom(adapters[request.lora_request.lora_name])
    if request.cache_salt is not None:
        wire.cache_salt = request.cache_salt
    if request.reasoning_ended is not None:
        wire.reasoning_ended = request.reasoning_ended
    if request.session_id is not None:
        wire.session_id = request.session_id
    if request.reasoning_parser_kwargs:
        kwargs = struct_pb2.Struct()
        kwargs.update(request.reasoning_parser_kwargs)
        wire.reasoning_parser_kwargs.CopyFrom(kwargs)
    return wire


class ClusterCore(EngineCoreClient):
    """See the module. `bind` it to the AsyncLLM's output processor before the first request."""

    def __init__(self, dispatcher: Dispatcher, sse_comment_s: float) -> None:
        self.sse_comment_s = sse_comment_s
        self._dispatcher = dispatcher
        self._outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self._processor: Any = None
        self._adapters: dict[str, pb.Adapter] = {}
        # What AsyncLLM looks at beyond the abstract class.
        self.resources = SimpleNamespace(engine_dead=False)
        self.engine_ranks_managed = [0]
        self.on_http_start: Callable[[], None] = lambda: None
        dispatcher.connect(self._take)

    def bind(self, output_processor: Any) -> None:
        """Whose requests these are; failures are put into their queues."""
        self._processor = output_processor

    @property
    def tracer(self) -> Tracer | None:
        """Where the spans of HTTP requests go; None when tracing is off."""
        return self._dispatcher.observer.tracer

    def waiting_for(self) -> str:
        """What keeps the cluster from serving; empty when nothing does."""
        return self._dispatcher.waiting_for()

    def closed_for(self) -> str:
        """What keeps the router from taking requests; see Dispatcher.closed_for."""
        return self._dispatcher.closed_for()

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Starts a request. Raises what `to_vllm_error` makes of a refusal."""
        try:
            self._dispatcher.submit(engine_request(request, self._adapters), public_id=request.external_req_id or "")
        except TwostrokeError as error:
            # AsyncLLM registered it already and does not clean up when this raises.
            self._processor.abort_requests([request.request_id], internal=True)
            refusal = to_vllm_error(error)
            Admission.refuse(refusal)
            raise refusal from error
        Admission.accept()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Ends requests on every worker."""
        for request_id in request_ids:
            self._dispatcher.cancel(request_id)

    async def get_output_async(self) -> EngineCoreOutputs:
        """The next step's outputs."""
        return await self._outputs.get()

    def _take(self, outputs: Sequence[Output]) -> None:
        converted = [_convert(output) for output in outputs if output.failure is None]
        if converted:
            self._outputs.put_nowait(EngineCoreOutputs(outputs=converted, weight_version=_WEIGHTS))
        for output in outputs:
            if output.failure is not None:
                self._fail(output.request_id, output.failure)

    def _fail(self, request_id: str, error: TwostrokeError) -> None:
        state = self._processor.request_states.get(request_id)
        if state is None:
            return
        # One choice of several takes the whole request down: a client cannot use half an answer.
        whole = state.parent_req.request_id if state.parent_req is not None else request_id
        state.queue.put(to_vllm_error(error))
        for other in self._processor.abort_requests([whole], internal=True):
            self._dispatcher.cancel(other)

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        """Text generation."""
        return ("generate",)

    async def is_sleeping_async(self) -> bool:
        """Never."""
        return False

    async def is_scheduler_paused_async(self) -> bool:
        """Never."""
        return False

    async def add_lora_async(self, lora_request: LoRARequest) -> bool:
        """Takes an adapter, or a new version of one. Raises what makes vLLM's server answer 404 when it is not there.

        Workers load it with the first request that names it.
        """
        name, path = lora_request.lora_name, lora_request.lora_path
        try:
            digest = await asyncio.to_thread(adapter_digest, Path(path))
        except (OSError, ValueError) as error:
            # ValueError: a path that no file can have.
            raise LoRAAdapterNotFoundError(name, path) from error
        self._adapters[name] = pb.Adapter(name=name, path=path, digest=digest)
        return True

    async def reset_prefix_cache_async(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Not done: the caches are the workers'."""
        return False

    async def reset_mm_cache_async(self) -> None:
        """There is none."""

    async def reset_encoder_cache_async(self) -> None:
        """There is none."""

    def dp_engines_running(self) -> bool:
        """Not data parallel."""
        return False

    def shutdown(self, timeout: float | None = None) -> None:
        """The dispatcher outlives the front end; nothing to do."""


def _convert(output: Output) -> EngineCoreOutput:
    converted = EngineCoreOutput(request_id=output.request_id, new_token_ids=list(output.token_ids))
    if output.logprobs is not None:
        converted.new_logprobs = logprobs_codec.to_lists(output.logprobs)
    if output.prompt_logprobs is not None:
        converted.new_prompt_logprobs_tensors = logprobs_codec.to_tensors(output.prompt_logprobs)
    if output.finish is not None:
        converted.finish_reason = _FINISH[output.finish.reason]
        stop = output.finish.WhichOneof("stop")
        converted.stop_reason = getattr(output.finish, stop) if stop else None
    if output.prompt is not None:
        stats = output.prompt
        converted.prefill_stats = PrefillStats(
            num_prompt_tokens=stats.prompt_tokens,
            num_computed_tokens=stats.computed_tokens,
            num_cached_tokens=stats.cached_tokens,
            num_local_cached_tokens=stats.cached_tokens,
        )
    return converted
