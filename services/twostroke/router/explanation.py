"""The dry run of a request: where it would go now, and why."""

from __future__ import annotations

from collections.abc import Sequence

from twostroke.errors import InvalidRequestError, NoWorkerError
from twostroke.policy.explain import explain
from twostroke.policy.placement import PlacementRequest
from twostroke.router.dispatch import Dispatcher
from twostroke.router.progress import expected_tokens, priority
from twostroke.v1 import cluster_pb2 as pb
from twostroke.v1.engine_pb2 import EngineRequest, SamplingParams


def dry_run(dispatcher: Dispatcher, request: pb.ExplainRequest, prompt: Sequence[int]) -> pb.ExplainResponse:
    """What would be decided of a request. prompt: its tokens, where they are known; else they count as in no cache.

    Raises InvalidRequestError for an empty prompt and for a class that there is not.
    """
    tokens = len(prompt) or request.prompt_tokens
    if not tokens:
        raise InvalidRequestError("the prompt is empty; give text, token ids, or how many tokens it has")
    pool = dispatcher.pool
    cached = pool.prefixes.cached_tokens(EngineRequest(prompt_token_ids=prompt)) if prompt else {}
    sampling = SamplingParams(max_tokens=request.max_tokens) if request.HasField("max_tokens") else SamplingParams()
    wanted = PlacementRequest(
        tokens,
        expected_output_tokens=expected_tokens(sampling),
        cached_tokens=cached,
        slo=pool.slo_classes.of(request.slo),
        deadline_s=request.deadline_ms / 1000 or dispatcher.request_timeout_s,
        priority=priority(request.priority),
    )
    try:
        plan = pool.place(wanted)
    except NoWorkerError as error:
        return pb.ExplainResponse(option="wait", text=f"wait: {error.message}")
    names = {member.address: member.worker_id for member in pool.members}
    decode = names.get(plan.decode, plan.decode)
    return pb.ExplainResponse(
        option=plan.option.value,
        prefill_worker_id=names.get(plan.prefill, plan.prefill) if plan.prefill else decode,
        decode_worker_id=decode,
        chunk_tokens=plan.chunk_tokens or 0,
        text=explain(plan, names),
    )
