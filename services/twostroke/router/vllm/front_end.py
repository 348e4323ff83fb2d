"""vLLM's AsyncLLM over the cluster, and the gRPC edge's use of it."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.renderers import ChatParams
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.executor import Executor

from twostroke.engine.vllm.sampling import from_wire
from twostroke.errors import InvalidRequestError, TwostrokeError
from twostroke.router.dispatch import Dispatcher
from twostroke.router.vllm.cluster_core import ClusterCore
from twostroke.v1 import engine_pb2 as pb
from twostroke.v1.inference_pb2 import GenerateRequest, GenerateResponse, Model, Usage

_FINISH = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_ABORT,
    "error": pb.FINISH_REASON_ERROR,
    "repetition": pb.FINISH_REASON_REPETITION,
}


def make_llm(vllm_config: Any, dispatcher: Dispatcher, *, log_stats: bool, sse_comment_s: float) -> AsyncLLM:
    """An unmodified AsyncLLM whose engine core is the cluster."""
    core = ClusterCore(dispatcher, sse_comment_s)

    def make_core(*_: Any, **__: Any) -> EngineCoreClient:
        return core

    stock = EngineCoreClient.make_async_mp_client
    EngineCoreClient.make_async_mp_client = staticmethod(make_core)
    try:
        llm = AsyncLLM(
            vllm_config=vllm_config,
            executor_class=Executor.get_class(vllm_config),
            log_stats=log_stats,
            log_requests=False,
        )
    finally:
        EngineCoreClient.make_async_mp_client = stock
    core.bind(llm.output_processor)
    return llm


class VllmFrontEnd:
    """Serves text, chat and token ids over gRPC with the same AsyncLLM that serves HTTP."""

    def __init__(self, llm: AsyncLLM, dispatcher: Dispatcher, model_name: str) -> None:
        self._llm = llm
        self._dispatcher = dispatcher
        self._model_name = model_name
        self._max_model_len_tokens = llm.model_config.max_model_len

    def models(self) -> Sequence[Model]:
        """The one model."""
        return [Model(name=self._model_name, max_model_len_tokens=self._max_model_len_tokens)]

    async def generate(self, request: GenerateRequest, timeout_s: float | None) -> AsyncIterator[GenerateResponse]:
        """See FrontEnd.generate."""
        request_id = request.request_id or uuid.uuid4().hex
        try:
            prompt = await self._render(request)
            sampling = _sampling(request)
            answer = self._llm.generate(prompt, sampling, request_id, priority=request.priority)
            sent = 0
            async for output in answer:
                choice = output.outputs[0]
                yield self._response(request_id, output, sent)
                sent += len(choice.token_ids)
        except (VLLMClientError, GracefulHTTPError, ValueError) as error:
            if isinstance(error.__cause__, TwostrokeError):
                raise error.__cause__ from None
            raise InvalidRequestError(str(error)) from error

    async def tokenize(self, text: str) -> list[int]:
        """The tokens of a plain text. Raises InvalidRequestError for one that the model does not take."""
        try:
            return list((await self._render(GenerateRequest(text=text)))["prompt_token_ids"])
        except (VLLMClientError, ValueError) as error:
            raise InvalidRequestError(str(error)) from error

    async def _render(self, request: GenerateRequest) -> Any:
        renderer = self._llm.renderer
        extras = {"cache_salt": request.cache_salt} if request.HasField("cache_salt") else None
        kind = request.WhichOneof("prompt")
        if kind == "chat":
            messages = [{"role": message.role, "content": message.content} for message in request.chat.messages]
            kwargs = MessageToDict(request.chat.template_kwargs)
            params = ChatParams(chat_template_kwargs={"add_generation_prompt": True} | kwargs)
            _, prompts = await renderer.render_chat_async([messages], params, prompt_extras=extras)
            return prompts[0]
        if kind == "text":
            raw: Any = request.text
        elif kind == "tokens":
            raw = {"prompt_token_ids": list(request.tokens.token_ids)}
        else:
            raise InvalidRequestError("the prompt is empty; set text, chat or tokens")
        parsed = parse_model_prompt(self._llm.model_config, raw)
        return (await renderer.render_cmpl_async([parsed], prompt_extras=extras))[0]

    def _response(self, request_id: str, output: Any, sent: int) -> GenerateResponse:
        choice = output.outputs[0]
        response = GenerateResponse(request_id=request_id, text=choice.text, token_ids=choice.token_ids)
        if choice.logprobs:
            response.logprobs.CopyFrom(_logprobs(choice.logprobs, choice.token_ids))
        if choice.finish_reason is not None:
            response.finish.reason = _FINISH[choice.finish_reason]
            if isinstance(choice.stop_reason, int):
                response.finish.stop_token_id = choice.stop_reason
            elif choice.stop_reason is not None:
                response.finish.stop_string = choice.stop_reason
            response.usage.CopyFrom(
                Usage(
                    prompt_tokens=len(output.prompt_token_ids or ()),
                    completion_tokens=sent + len(choice.token_ids),
                    cached_tokens=output.num_cached_tokens or 0,
                )
            )
            if trail := self._dispatcher.trail(request_id):
                response.timeline.CopyFrom(trail.timeline())
        return response


def _sampling(request: GenerateRequest) -> SamplingParams:
    sampling = from_wire(request.sampling)
    sampling.detokenize = True
    sampling.output_kind = RequestOutputKind.DELTA
    sampling.stop = list(request.sampling.stop)
    sampling.include_stop_str_in_output = request.include_stop_str_in_output
    sampling.skip_special_tokens = not request.keep_special_tokens
    if sampling.stop and not sampling.include_stop_str_in_output:
        sampling.output_text_buffer_length = max(len(text) for text in sampling.stop) - 1
    return sampling


def _logprobs(values: Any, token_ids: Sequence[int]) -> pb.Logprobs:
    wire = pb.Logprobs(columns=max(len(position) for position in values))
    for token_id, position in zip(token_ids, values, strict=True):
        alternatives = sorted(position.items(), key=lambda item: (item[0] != token_id, item[1].rank))
        padding = wire.columns - len(alternatives)
        wire.token_ids.extend([token for token, _ in alternatives] + [-1] * padding)
        wire.logprobs.extend([value.logprob for _, value in alternatives] + [float("-inf")] * padding)
        wire.ranks.append(position[token_id].rank)
    return wire
