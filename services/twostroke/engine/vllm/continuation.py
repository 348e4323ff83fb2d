"""How vLLM goes on from tokens that it did not choose itself. The one place where that is decided, per request.

Appended: the tokens count as the end of the prompt, and the engine starts that many tokens later. This costs no step,
and only the last of them is computed where the KV of the others came along.

Forced: the engine takes those steps again, with a logits processor that leaves one choice (forced_tokens.py), and the
repeats are dropped. A step each, but everything that an engine keeps about its own output stands as if it had chosen
the tokens: counts of penalties, the state of the grammar, the position in the request's random numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.v1 import engine_pb2 as pb
from twostroke.v1.kv_pb2 import Handoff


@dataclass(frozen=True, slots=True)
class Continuation:
    """The tokens that a request has already, in the way in which the engine is given them."""

    appended: tuple[int, ...] = ()
    forced: tuple[int, ...] = ()
    brought: bool = False
    """The first token comes with the KV; it is appended then, unless forces_brought."""
    forces_brought: bool = False


def continuation(request: pb.EngineRequest, handoff: Handoff | None) -> Continuation:
    """Chooses the way for one request."""
    chosen = tuple(request.output_token_ids)
    forces = depends_on_output(request.sampling)
    if not chosen:
        brought = handoff is not None and handoff.in_progress
        return Continuation(brought=brought, forces_brought=brought and forces)
    return Continuation(forced=chosen) if forces else Continuation(appended=chosen)


def depends_on_output(sampling: pb.SamplingParams) -> bool:
    """Whether the choice of a token depends on more of the output before it than its token ids.

    The repetition penalty does not: it looks at prompt and output alike. Lengths do not either: they are shortened.
    """
    return bool(
        sampling.presence_penalty
        or sampling.frequency_penalty
        or (sampling.HasField("seed") and (not sampling.HasField("temperature") or sampling.temperature > 0))
        or sampling.bad_words
        or sampling.HasField("structured_outputs")
        or sampling.HasField("thinking_token_budget")
        or sampling.HasField("repetition_detection")
    )
