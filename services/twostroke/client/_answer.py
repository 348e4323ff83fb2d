"""Folding the pieces of a stream into an answer. No I/O."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

from google.protobuf.message import Message

from twostroke.client._types import (
    Chunk,
    Completion,
    Finish,
    Model,
    PositionLogprobs,
    Timeline,
    TokenLogprob,
    Usage,
)
from twostroke.errors import InvalidRequestError
from twostroke.v1 import engine_pb2, inference_pb2

_T = TypeVar("_T")


class Answer:
    """What has arrived of one answer. Streams are answers that can be iterated."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[PositionLogprobs] | None = None
        self._end: tuple[Finish, Usage, Timeline] | None = None
        self._over = ""

    @property
    def request_id(self) -> str:
        """The request's id, the same at every router that was tried."""
        return self._request_id

    @property
    def text(self) -> str:
        """The text so far; the whole text once the stream has ended."""
        if len(self._texts) > 1:
            self._texts = ["".join(self._texts)]
        return self._texts[0] if self._texts else ""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens so far; all of them once the stream has ended."""
        return tuple(self._token_ids)

    @property
    def logprobs(self) -> tuple[PositionLogprobs, ...] | None:
        """The log probabilities so far, one entry per token; None unless `logprobs` was asked for."""
        return None if self._logprobs is None else tuple(self._logprobs)

    @property
    def finish(self) -> Finish:
        """Why the answer ended. Raises InvalidRequestError before the end of the stream."""
        return self._ended()[0]

    @property
    def usage(self) -> Usage:
        """What the answer cost. Raises InvalidRequestError before the end of the stream."""
        return self._ended()[1]

    @property
    def timeline(self) -> Timeline:
        """Where the time went. Raises InvalidRequestError before the end of the stream."""
        return self._ended()[2]

    @property
    def completion(self) -> Completion:
        """The whole answer. Raises InvalidRequestError before the end of the stream."""
        finish, usage, timeline = self._ended()
        return Completion(self.request_id, self.text, self.token_ids, self.logprobs, finish, usage, timeline)

    def _ended(self) -> tuple[Finish, Usage, Timeline]:
        if self._end is None:
            raise InvalidRequestError(
                f"the answer to request {self._request_id} has not ended; read its stream to the end first"
            )
        return self._end

    def _check_not_over(self) -> None:
        if self._over:
            raise InvalidRequestError(f"the stream of request {self._request_id} is over: {self._over}")

    def _finalize(self, why: str) -> bool:
        """Ends the stream for that reason; False when it had ended already."""
        if self._over:
            return False
        self._over = "the answer has ended" if self._end is not None else why
        return True

    def _fold(self, response: inference_pb2.GenerateResponse) -> Chunk | None:
        logprobs = _positions(response.logprobs) if response.HasField("logprobs") else None
        chunk = Chunk(response.text, tuple(response.token_ids), logprobs)
        if chunk.text:
            self._texts.append(chunk.text)
        self._token_ids.extend(chunk.token_ids)
        if logprobs is not None:
            self._logprobs = (self._logprobs or []) + list(logprobs)
        if response.HasField("finish"):
            self._end = (
                _finish(response.finish),
                _mirror(Usage, response.usage),
                _mirror(Timeline, response.timeline),
            )
        return chunk if chunk.text or chunk.token_ids else None


def models(response: inference_pb2.ListModelsResponse) -> tuple[Model, ...]:
    """The models of an answer to ListModels, in its order."""
    return tuple(_mirror(Model, model) for model in response.models)


def _mirror(kind: type[_T], message: Message) -> _T:
    return kind(**{field.name: getattr(message, field.name) for field in fields(kind)})  # type: ignore[arg-type]


def _finish(finish: engine_pb2.Finish) -> Finish:
    try:
        name = engine_pb2.FinishReason.Name(finish.reason)
    except ValueError:
        name = f"FINISH_REASON_{finish.reason}"
    stopped: dict[str, Any] = {}
    if (stop := finish.WhichOneof("stop")) is not None:
        stopped[stop] = getattr(finish, stop)
    return Finish(name.removeprefix("FINISH_REASON_").lower(), **stopped)


def _positions(logprobs: engine_pb2.Logprobs) -> tuple[PositionLogprobs, ...]:
    columns = logprobs.columns
    rows = []
    for position, rank in enumerate(logprobs.ranks):
        row = slice(position * columns, (position + 1) * columns)
        chosen, *others = map(TokenLogprob, logprobs.token_ids[row], logprobs.logprobs[row])
        # Rows are padded to equal length with negative ids.
        alternatives = tuple(other for other in others if other.token_id >= 0)
        rows.append(PositionLogprobs(chosen.token_id, chosen.logprob, rank, alternatives))
    return tuple(rows)
