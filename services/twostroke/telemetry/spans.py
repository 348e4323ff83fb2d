"""The spans of a request: what the tracer writes, and what docs/observability.md lists."""

from __future__ import annotations

from dataclasses import dataclass


# Compared by identity, since attributes are keys of dictionaries on the way of every request.
@dataclass(frozen=True, slots=True, eq=False)
class Attribute:
    """One attribute of a span."""

    key: str
    meaning: str


@dataclass(frozen=True, slots=True, eq=False)
class SpanType:
    """One kind of span. name: its span name, and of the edge's the beginning of it."""

    name: str
    service: str
    covers: str
    attributes: tuple[Attribute, ...]


OPERATION = Attribute("gen_ai.operation.name", "chat, text_completion or generate_content (GenAI conventions)")
PROVIDER = Attribute("gen_ai.provider.name", "twostroke")
REQUEST_MODEL = Attribute("gen_ai.request.model", "the model that is served")
RESPONSE_ID = Attribute("gen_ai.response.id", "the request's public id, as in logs and status")
FINISH_REASONS = Attribute("gen_ai.response.finish_reasons", "how each choice ended")
INPUT_TOKENS = Attribute("gen_ai.usage.input_tokens", "tokens of the prompt")
OUTPUT_TOKENS = Attribute("gen_ai.usage.output_tokens", "tokens of the answer, of all choices")
CACHED_TOKENS = Attribute("gen_ai.usage.cache_read.input_tokens", "tokens of the prompt that prefill had in its cache")
TTFT = Attribute("gen_ai.response.time_to_first_chunk", "seconds to the first token, as the router sent it")
ERROR_TYPE = Attribute("error.type", "reason of the failure, see docs/errors.md")

REQUEST_ID = Attribute("twostroke.request_id", "the engine request; one per choice")
ATTEMPT = Attribute("twostroke.attempt", "number of the attempt, from 1")
ATTEMPTS = Attribute("twostroke.attempts", "attempts that were made")
OPTION = Attribute("twostroke.placement.option", "how it was placed: p_then_d, d_alone, p_alone or lent_decoder")
WHY = Attribute("twostroke.placement.why", "cost of the best of every way that was open, cheapest first")
PREDICTED_TTFT_MS = Attribute("twostroke.placement.ttft_ms", "predicted time from placement to the first token")
PREDICTED_ITL_MS = Attribute("twostroke.placement.itl_ms", "predicted time between tokens")
PREDICTED_CACHED = Attribute("twostroke.placement.cached_tokens", "prompt tokens that its reader was known to have")
PREFILL_WORKER = Attribute("twostroke.prefill.worker_id", "the worker that reads the prompt")
DECODE_WORKER = Attribute("twostroke.decode.worker_id", "the worker that writes the answer")
WORKER = Attribute("twostroke.worker_id", "the worker whose span it is")
HANDOFF_ID = Attribute("twostroke.handoff_id", "the attempt, as workers and ledger name it")
HANDOFF_BYTES = Attribute("twostroke.handoff.bytes", "bytes of KV that were on offer")
HANDOFF_BLOCKS = Attribute("twostroke.handoff.blocks", "blocks of KV that were on offer")
HANDOFF_TOKENS = Attribute("twostroke.handoff.tokens", "prompt tokens whose KV was fetched")
HANDOFF_CHUNKS = Attribute("twostroke.handoff.chunks", "reads that it took; absent where the connector cannot tell")
HANDOFF_LANES = Attribute("twostroke.handoff.lanes", "transports in use, as the link's probe found them")
HANDOFF_GB_PER_S = Attribute("twostroke.handoff.gb_per_s", "bytes over the span's duration, waits for prefill included")
LINK_GB_PER_S = Attribute("twostroke.link.gb_per_s", "rate of the link's last probe")
EXPOSED_MS = Attribute("twostroke.handoff.exposed_ms", "how much later than the first token the KV was there")
COMPUTED_TOKENS = Attribute("twostroke.prompt.computed_tokens", "prompt tokens that this worker computed")
PROMPT_CACHED_TOKENS = Attribute("twostroke.prompt.cached_tokens", "prompt tokens that this worker had in its cache")
STEPS = Attribute("twostroke.steps", "engine steps that the worker made meanwhile")

REQUEST = SpanType(
    "{gen_ai.operation.name} {gen_ai.request.model}",
    "router",
    "a client's request from its arrival to the end of the answer; parent of all others, child of the caller's span",
    (
        *(OPERATION, PROVIDER, REQUEST_MODEL, RESPONSE_ID, FINISH_REASONS, INPUT_TOKENS, OUTPUT_TOKENS),
        *(CACHED_TOKENS, TTFT, ATTEMPTS, ERROR_TYPE),
    ),
)
PLACE = SpanType(
    "place",
    "router",
    "the decision, and the wait for somebody who can serve; from the second attempt on linked to the failed attempt",
    (
        *(REQUEST_ID, ATTEMPT, OPTION, PREFILL_WORKER, DECODE_WORKER),
        *(WHY, PREDICTED_TTFT_MS, PREDICTED_ITL_MS, PREDICTED_CACHED),
    ),
)
ATTEMPT_SPAN = SpanType(
    "attempt",
    "router",
    "from placement to the failure of an attempt; only of attempts that failed; linked to the one before",
    (REQUEST_ID, ATTEMPT, PREFILL_WORKER, DECODE_WORKER, ERROR_TYPE),
)
PREFILL_QUEUE = SpanType(
    "prefill.queue", "worker", "a prompt from its admission to its first step", (WORKER, HANDOFF_ID)
)
PREFILL_RUN = SpanType(
    "prefill.run",
    "worker",
    "from the first step to the first token",
    (WORKER, HANDOFF_ID, INPUT_TOKENS, PROMPT_CACHED_TOKENS, COMPUTED_TOKENS, ERROR_TYPE),
)
HANDOFF = SpanType(
    "handoff",
    "router",
    "from the moment at which decode is told to fetch KV to the moment at which it has the prompt",
    (
        *(REQUEST_ID, ATTEMPT, PREFILL_WORKER, DECODE_WORKER, HANDOFF_BYTES, HANDOFF_BLOCKS, HANDOFF_TOKENS),
        *(HANDOFF_CHUNKS, HANDOFF_LANES, HANDOFF_GB_PER_S, LINK_GB_PER_S, EXPOSED_MS, ERROR_TYPE),
    ),
)
DECODE_WAIT = SpanType(
    "decode.wait",
    "worker",
    "from admission on the decode worker to its first step: memory, KV, room",
    (WORKER, HANDOFF_ID, COMPUTED_TOKENS, ERROR_TYPE),
)
DECODE_RUN = SpanType(
    "decode.run", "worker", "from that step to the end of the answer", (WORKER, HANDOFF_ID, STEPS, ERROR_TYPE)
)

SPANS = (REQUEST, PLACE, PREFILL_QUEUE, PREFILL_RUN, HANDOFF, DECODE_WAIT, DECODE_RUN, ATTEMPT_SPAN)
