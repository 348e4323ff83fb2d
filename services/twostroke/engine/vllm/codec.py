"""Requests and outputs of vLLM's engine core to and from the wire."""

from __future__ import annotations

import time
from typing import Any

from google.protobuf.json_format import MessageToDict
from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutputs, EngineCoreRequest

from twostroke.engine.base import Stroke
from twostroke.engine.vllm.continuation import Continuation, continuation
from twostroke.engine.vllm.forced_tokens import BROUGHT_ARG, FORCED_TOKENS_ARG
from twostroke.engine.vllm.logprobs import to_wire as logprobs_to_wire
from twostroke.engine.vllm.report import APPEND_ARG, CHUNK_ARG
from twostroke.engine.vllm.sampling import from_wire as sampling_from_wire
from twostroke.v1 import engine_pb2 as pb

__all__ = [
    "Continuation",
    "continuation",
    "core_request",
    "layout_order",
    "logprobs_to_wire",
    "no_outputs",
    "prompt_stats",
]


def core_request(
    request: pb.EngineRequest,
    vllm_id: str,
    stroke: Stroke,
    max_tokens: int,
    going_on: Continuation,
    lora: LoRARequest | None,
    kv_transfer: dict[str, Any] | None,
    chunk_tokens: int = 0,
) -> EngineCoreRequest:
    """What vLLM's engine core is given.

    max_tokens: the limit of the whole answer, already cut to the model's length. going_on: how it is given the tokens
    that the request has already. lora: what the request's adapter is to vLLM. kv_transfer: the connector's parameters.
    chunk_tokens: see Engine.admit. Raises ValueError for sampling parameters out of range.
    """
    sampling = sampling_from_wire(request.sampling)
    extra: dict[str, Any] = {}
    if stroke is Stroke.PREFILL:
        sampling.max_tokens = 1
        # One token is all that prefill writes; that it may not end the answer is what min_tokens asks of it.
        sampling.min_tokens = min(1, sampling.min_tokens)
    else:
        sampling.max_tokens = max_tokens - len(going_on.appended)
        sampling.min_tokens = max(0, sampling.min_tokens - len(going_on.appended))
        if going_on.appended or going_on.forced or going_on.brought:
            # They went out with the first token; they would make decode compute the prompt again.
            sampling.prompt_logprobs = None
            sampling.skip_reading_prefix_cache = False
        if going_on.forced:
            extra[FORCED_TOKENS_ARG] = list(going_on.forced)
        if going_on.forces_brought:
            extra[BROUGHT_ARG] = vllm_id
        elif going_on.brought:
            extra[APPEND_ARG] = True
    if chunk_tokens:
        extra[CHUNK_ARG] = chunk_tokens
    if kv_transfer is not None:
        extra["kv_transfer_params"] = kv_transfer
    sampling.extra_args = extra or None
    return EngineCoreRequest(
        request_id=vllm_id,
        prompt_token_ids=[*request.prompt_token_ids, *going_on.appended],
        mm_features=None,
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=lora,
        cache_salt=request.cache_salt if request.HasField("cache_salt") else None,
        data_parallel_rank=None,
        priority=request.priority,
        trace_headers=dict(request.trace_context) or None,
        reasoning_ended=request.reasoning_ended if request.HasField("reasoning_ended") else None,
        reasoning_parser_kwargs=MessageToDict(request.reasoning_parser_kwargs)
        if request.HasField("reasoning_parser_kwargs")
        else None,
        session_id=request.session_id if request.HasField("session_id") else None,
    )


def no_outputs() -> EngineCoreOutputs:
    """What a step without requests brings."""
    return EngineCoreOutputs()


def prompt_stats(output: Any, admitted_s: float, appended: int) -> pb.PromptStats:
    """What the prompt cost, from the first output of a request.

    admitted_s: monotonic time of its admission. appended: tokens at the end of its prompt that are not of the prompt.
    """
    now = time.monotonic()
    scheduled = next(
        (event.timestamp for event in output.events or () if event.type == EngineCoreEventType.SCHEDULED), now
    )
    stats = output.prefill_stats
    wire = pb.PromptStats(queue_ms=(scheduled - admitted_s) * 1000, run_ms=(now - scheduled) * 1000)
    if stats is not None:
        wire.prompt_tokens = stats.num_prompt_tokens - appended
        wire.cached_tokens = stats.num_local_cached_tokens
        wire.transferred_tokens = stats.num_external_cached_tokens
        # vLLM counts a fetched prompt as computed nowhere, but a step runs its last token, or the answer's first.
        wire.computed_tokens = max(1, stats.num_computed_tokens - appended)
    return wire


def layout_order() -> str:
    """Order of the axes of vLLM's KV memory (layer, block, head, token, content): what was asked for; "LBH" on the CPU,
    whose kernels mix the tokens of a block; or "backend", where the attention backend chooses."""
    from vllm import envs
    from vllm.platforms import current_platform

    return "LBH" if current_platform.is_cpu() else str(envs.VLLM_KV_CACHE_LAYOUT or "backend")
