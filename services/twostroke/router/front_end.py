"""What the gRPC edge needs of a front end, and the plain one: token ids in, token ids out, no tokenizer, no vLLM."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol, TypeAlias

from twostroke.errors import InvalidRequestError, PromptTooLongError, UnknownModelError, UnsupportedFieldError
from twostroke.router.dispatch import Dispatcher
from twostroke.router.output import Output
from twostroke.v1.engine_pb2 import EngineRequest
from twostroke.v1.inference_pb2 import GenerateRequest, GenerateResponse, Model, Usage

Tokenize: TypeAlias = Callable[[str], Awaitable[list[int]]]
"""The tokens of a plain text."""


async def no_tokenizer(text: str) -> list[int]:
    """Raises InvalidRequestError."""
    raise InvalidRequestError(
        "this router has no tokenizer and takes token ids, not text; start it with --front-end vllm for text and chat"
    )


class FrontEnd(Protocol):
    """Turns public requests into the cluster's, and its outputs into answers."""

    def models(self) -> Sequence[Model]:
        """What it serves."""

    def generate(self, request: GenerateRequest, timeout_s: float | None) -> AsyncIterator[GenerateResponse]:
        """Answers one request; ending the iteration early cancels it everywhere.

        Raises InvalidRequestError for a request that nobody can serve, and the TwostrokeError that ended it otherwise.
        """


class PlainFrontEnd:
    """Serves token ids. Takes every output of the dispatcher."""

    def __init__(self, dispatcher: Dispatcher, model_name: str) -> None:
        self._dispatcher = dispatcher
        self._model_name = model_name
        self._queues: dict[str, asyncio.Queue[Output]] = {}
        dispatcher.connect(self._take)

    def _take(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            if queue := self._queues.get(output.request_id):
                queue.put_nowait(output)

    def models(self) -> Sequence[Model]:
        """The one model that the workers serve."""
        return [Model(name=self._model_name, max_model_len_tokens=self._dispatcher.pool.max_model_len_tokens())]

    async def generate(self, request: GenerateRequest, timeout_s: float | None) -> AsyncIterator[GenerateResponse]:
        """See FrontEnd.generate."""
        request_id = request.request_id or uuid.uuid4().hex
        engine_request = self._engine_request(request, request_id)
        queue: asyncio.Queue[Output] = asyncio.Queue()
        self._queues[request_id] = queue
        usage = Usage(prompt_tokens=len(engine_request.prompt_token_ids))
        try:
            self._dispatcher.submit(engine_request, timeout_s=timeout_s)
            while True:
                output = await queue.get()
                response = self._response(request_id, output, usage)
                yield response
                if output.finish is not None:
                    return
        finally:
            del self._queues[request_id]
            self._dispatcher.cancel(request_id)

    def _engine_request(self, request: GenerateRequest, request_id: str) -> EngineRequest:
        kind = request.WhichOneof("prompt")
        if kind != "tokens":
            raise InvalidRequestError(
                f"this router has no tokenizer and takes token ids, not {kind or 'an empty prompt'}; "
                "start it with --front-end vllm for text and chat"
            )
        if request.include_stop_str_in_output or request.keep_special_tokens:
            raise UnsupportedFieldError("include_stop_str_in_output and keep_special_tokens need --front-end vllm")
        if request_id in self._queues:
            raise InvalidRequestError(f"request id {request_id!r} is in use; choose another")
        tokens = len(request.tokens.token_ids)
        if not tokens:
            raise InvalidRequestError("the prompt is empty; send at least one token")
        limit = self._dispatcher.pool.max_model_len_tokens()
        if limit and tokens >= limit:
            raise PromptTooLongError(f"the prompt has {tokens} tokens; the model takes {limit}, the answer included")
        engine_request = EngineRequest(
            request_id=request_id,
            prompt_token_ids=request.tokens.token_ids,
            sampling=request.sampling,
            priority=request.priority,
        )
        if request.HasField("cache_salt"):
            engine_request.cache_salt = request.cache_salt
        return engine_request

    def _response(self, request_id: str, output: Output, usage: Usage) -> GenerateResponse:
        if output.failure is not None:
            raise output.failure
        if output.prompt is not None:
            usage.cached_tokens = output.prompt.cached_tokens
        usage.completion_tokens += len(output.token_ids)
        response = GenerateResponse(request_id=request_id, token_ids=output.token_ids, logprobs=output.logprobs)
        if output.finish is not None:
            response.finish.CopyFrom(output.finish)
            response.usage.CopyFrom(usage)
            if trail := self._dispatcher.trail(request_id):
                response.timeline.CopyFrom(trail.timeline())
        return response


def check_model(request: GenerateRequest, models: Sequence[Model]) -> None:
    """Raises UnknownModelError unless the request names a served model, or none."""
    names = [model.name for model in models]
    if request.model and request.model not in names:
        raise UnknownModelError(f"model {request.model!r} is not served here; there is {', '.join(names)}")
