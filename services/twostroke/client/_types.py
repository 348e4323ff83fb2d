"""What goes in and comes out, as plain values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation.

    role: "system", "user" or "assistant".
    """

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and the natural logarithm of its raw probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The chosen token of one position, and what else could have been chosen.

    rank: 1 where the chosen token was the most likely one.
    alternatives: the most likely tokens, likely ones first; the chosen token may be among them.
    """

    token_id: int
    logprob: float
    rank: int
    alternatives: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of the answer. The texts and tokens of all chunks in order are the whole answer.

    text: may be empty while a character or a possible stop string is incomplete.
    token_ids: new tokens; may be empty where held back text is let go.
    logprobs: one entry per token of `token_ids`; None unless `logprobs` was asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class Finish:
    """Why the answer ended.

    reason: "stop" (end of text, stop token or stop string), "length" (max_tokens or the model's length), "abort",
        "error" or "repetition"; a router of a newer version may say something else.
    stop_token_id, stop_string: what it stopped on, where something in particular stopped it.
    """

    reason: str
    stop_token_id: int | None = None
    stop_string: str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """What the answer cost, in tokens.

    cached_tokens: prompt tokens that were found in the prefix cache where the prompt was computed.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """Where the time went, and who did the work. Times are milliseconds since the router got the request.

    decode_worker_id: empty when the first token ended the answer.
    decode_computed_tokens: prompt tokens computed on the decode worker.
    transferred_tokens, transferred_bytes: prompt tokens whose KV moved, and its size.
    attempts: how often the router placed the request.
    """

    prefill_worker_id: str
    decode_worker_id: str
    placed_ms: float
    prefill_started_ms: float
    prefill_finished_ms: float
    first_token_ms: float
    decode_started_ms: float
    finished_ms: float
    decode_computed_tokens: int
    transferred_tokens: int
    transferred_bytes: int
    attempts: int


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer.

    logprobs: one entry per token; None unless `logprobs` was asked for.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] | None
    finish: Finish
    usage: Usage
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class Model:
    """A model that can be served now.

    max_model_len_tokens: longest sequence, prompt and answer together.
    """

    name: str
    max_model_len_tokens: int
