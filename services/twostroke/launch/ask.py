"""One request to a router, its answer shown as it arrives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import grpc.aio

from twostroke.config import ClientSettings, load
from twostroke.errors import UnavailableError
from twostroke.launch.cluster import unreachable
from twostroke.rpc.channel import connect
from twostroke.v1.engine_pb2 import SamplingParams, TokenSequence
from twostroke.v1.inference_pb2 import ChatMessage, ChatMessages, GenerateRequest, GenerateResponse
from twostroke.v1.inference_pb2_grpc import InferenceServiceStub


def chat(question: str, max_tokens: int) -> GenerateRequest:
    """A question to a chat model, answered greedily."""
    messages = ChatMessages(messages=[ChatMessage(role="user", content=question)])
    return GenerateRequest(chat=messages, sampling=_greedy(max_tokens))


def text(prompt: str, max_tokens: int) -> GenerateRequest:
    """Plain text to go on with, greedily."""
    return GenerateRequest(text=prompt, sampling=_greedy(max_tokens))


def tokens(token_ids: Sequence[int], max_tokens: int) -> GenerateRequest:
    """Token ids to go on with, greedily."""
    return GenerateRequest(tokens=TokenSequence(token_ids=token_ids), sampling=_greedy(max_tokens))


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


async def stream(
    target: str, request: GenerateRequest, timeout_s: float, show: Callable[[str], None]
) -> GenerateResponse:
    """Sends the request, calls `show` with every new piece of text, returns the last piece with its timeline.

    Token ids are shown where the router sends no text. Raises what the router raised, UnavailableError when none
    answers or the stream ends early. Cancellation cancels the request.
    """
    last: GenerateResponse | None = None
    client = load(ClientSettings)
    async with connect(target, client.rpc) as channel:
        call = InferenceServiceStub(channel).Generate(request, timeout=timeout_s, metadata=client.metadata())
        try:
            async for last in call:
                bare = request.HasField("tokens") and not last.text
                show("".join(f"{token} " for token in last.token_ids) if bare else last.text)
        except grpc.aio.AioRpcError as error:
            raise unreachable(target, error) from error
        finally:
            call.cancel()
    if last is None or not last.HasField("finish"):
        raise UnavailableError(f"{target} ended the answer early")
    return last
