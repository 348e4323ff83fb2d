"""What becomes of vLLM's outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from twostroke.engine.base import EngineOutput, Stroke
from twostroke.engine.vllm.codec import prompt_stats
from twostroke.engine.vllm.continuation import Continuation
from twostroke.engine.vllm.logprobs import to_wire as logprobs_to_wire
from twostroke.errors import KvCorruptError
from twostroke.v1 import engine_pb2 as pb

_FINISH = (
    pb.FINISH_REASON_STOP,
    pb.FINISH_REASON_LENGTH,
    pb.FINISH_REASON_ABORT,
    pb.FINISH_REASON_ERROR,
    pb.FINISH_REASON_REPETITION,
)
LENGTH, ERROR = 1, 3
"""vLLM's numbers of these ends."""


@dataclass(slots=True)
class Request:
    """What is remembered of a request while the engine has it."""

    request_id: str
    stroke: Stroke
    prompt_tokens: int
    admitted_s: float
    ends_with_first: bool
    """One token is all that the client wants, so nothing is handed over."""
    going_on: Continuation
    """Tokens that the request has already; the forced ones come again and must not be reported."""
    repeated: int = 0
    started: bool = False
    reported: bool = False
    """What the prompt cost has been reported."""
    chunks: int = 0
    """In which the prompt's KV came."""
    recomputed: int = 0
    """Prompt tokens that did not arrive and are computed here."""


def convert(state: Request, output: Any) -> EngineOutput:
    """One output of vLLM's, without tokens that were forced. How the request ended is for the caller."""
    result = EngineOutput(state.request_id, started=not state.started, done=output.finish_reason is not None)
    state.started = True
    if not state.reported:
        state.reported = True
        result.prompt = prompt_stats(output, state.admitted_s, len(state.going_on.appended))
        result.prompt.computed_tokens += state.recomputed
        result.prompt.transfer_chunks = state.chunks
        result.prompt_logprobs = logprobs_to_wire(output.new_prompt_logprobs_tensors)
    skipped = _skip_forced(state, output, result)
    result.token_ids = output.new_token_ids[skipped:]
    result.logprobs = logprobs_to_wire(output.new_logprobs, skipped)
    return result


def _skip_forced(state: Request, output: Any, result: EngineOutput) -> int:
    forced = state.going_on.forced
    if state.going_on.forces_brought:
        # Which one it was, prefill has told.
        forced = tuple(output.new_token_ids[:1]) if state.repeated == 0 else (0,)
    skipped = min(len(forced) - state.repeated, len(output.new_token_ids))
    expected = forced[state.repeated : state.repeated + skipped]
    state.repeated += skipped
    if tuple(output.new_token_ids[:skipped]) != expected:
        result.failure = KvCorruptError(
            f"the engine took {list(output.new_token_ids[:skipped])} where {list(expected)} was forced"
        )
    return skipped


def finish_of(output: Any) -> pb.Finish:
    """How an answer ended."""
    reason, stop_reason = int(output.finish_reason), output.stop_reason
    finish = pb.Finish(reason=_FINISH[min(reason, len(_FINISH) - 1)])
    if isinstance(stop_reason, int):
        finish.stop_token_id = stop_reason
    elif stop_reason is not None:
        finish.stop_string = stop_reason
    return finish
