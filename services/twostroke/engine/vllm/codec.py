"""Requests and outputs of vLLM's engine core to and from the wire."""

from __future__ import annotations

import time
from typing import Any

from google.protobuf.json_format import MessageToDict
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutputs, EngineCoreRequest

from twostroke.engine.base import Stroke
from twostroke.engine.vllm.forced_tokens import FORCED_TOKENS_ARG
from twostroke.engine.vllm.logprobs import to_wire as logprobs_to_wire
from twostroke.engine.vllm.nixl import from_wire as nixl_from_wire
from twostroke.engine.vllm.nixl import request_params
from twostroke.engine.vllm.nixl import to_wire as nixl_to_wire
from twostroke.engine.vllm.sampling import from_wire as sampling_from_wire
from twostroke.v1 import engine_pb2 as pb
from twostroke.v1.kv_pb2 import Handoff

__all__ = ["core_request", "layout_order", "logprobs_to_wire", "nixl_to_wire", "no_outputs", "prompt_stats"]


def core_request(
    request: pb.EngineRequest, stroke: Stroke, handoff: Handoff | None, max_tokens: int, *, hold: bool
) -> EngineCoreRequest:
    """What vLLM's engine core is given.

    max_tokens: the limit of the whole answer, already cut to the model's length. hold: keep the prompt's KV afterwards.
    Raises ValueError for sampling parameters out of range.
    """
    sampling = sampling_from_wire(request.sampling)
    extra: dict[str, Any] = {}
    if stroke is Stroke.PREFILL:
        sampling.max_tokens = 1
        # One token is all that prefill writes; that it may not end the answer is what min_tokens asks of it.
        sampling.min_tokens = min(1, sampling.min_tokens)
        if hold:
            extra["kv_transfer_params"] = request_params()
    else:
        sampling.max_tokens = max_tokens
        if handoff is not None:
            extra["kv_transfer_params"] = nixl_from_wire(handoff.nixl)
            # Prefill reported them; they would make decode compute the prompt again.
            sampling.prompt_logprobs = None
            sampling.skip_reading_prefix_cache = False
        if request.output_token_ids:
            extra[FORCED_TOKENS_ARG] = list(request.output_token_ids)
    sampling.extra_args = extra or None
    return EngineCoreRequest(
        request_id=request.request_id,
        prompt_token_ids=list(request.prompt_token_ids),
        mm_features=None,
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
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


def prompt_stats(output: Any, admitted_s: float) -> pb.PromptStats:
    """What the prompt cost, from the first output of a request. admitted_s: monotonic time of its admission."""
    now = time.monotonic()
    scheduled = next(
        (event.timestamp for event in output.events or () if event.type == EngineCoreEventType.SCHEDULED), now
    )
    stats = output.prefill_stats
    wire = pb.PromptStats(queue_ms=(scheduled - admitted_s) * 1000, run_ms=(now - scheduled) * 1000)
    if stats is not None:
        wire.prompt_tokens = stats.num_prompt_tokens
        wire.cached_tokens = stats.num_local_cached_tokens
        wire.transferred_tokens = stats.num_external_cached_tokens
        # vLLM counts a fetched prompt as computed nowhere, but runs its last token again to choose the next from it.
        wire.computed_tokens = max(1, stats.num_computed_tokens)
    return wire


def layout_order() -> str:
    """Order of the axes of vLLM's KV memory (layer, block, head, token, content): what was asked for, the CPU's only
    one, or "backend" where the attention backend chooses and the connector's handshake compares."""
    from vllm import envs
    from vllm.platforms import current_platform

    return "LBHNC" if current_platform.is_cpu() else str(envs.VLLM_KV_CACHE_LAYOUT or "backend")
