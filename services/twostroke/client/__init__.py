"""The Python SDK: streams and whole answers from routers, for asyncio and for blocking code.

    async with AsyncClient("router:50051", timeout_s=60) as client:
        async for chunk in client.generate("Once upon a time", max_tokens=64):
            print(chunk.text, end="")

Everything that it raises is a TwostrokeError.
"""

from twostroke.client._client import AsyncClient
from twostroke.client._options import GenerateOptions, Prompt
from twostroke.client._retry import RetryPolicy
from twostroke.client._stream import AsyncStream
from twostroke.client._sync import Client, Stream
from twostroke.client._types import (
    ChatMessage,
    Chunk,
    Completion,
    Finish,
    Model,
    PositionLogprobs,
    Timeline,
    TokenLogprob,
    Usage,
)
from twostroke.config import RpcSettings
from twostroke.errors import (
    AnswerLostError,
    ConfigError,
    DeadlineError,
    EngineError,
    InvalidRequestError,
    NoWorkerError,
    OverloadedError,
    PromptTooLongError,
    TwostrokeError,
    UnavailableError,
    UnknownModelError,
    UnsupportedFieldError,
    WorkerLostError,
)

__all__ = [
    "AnswerLostError",
    "AsyncClient",
    "AsyncStream",
    "ChatMessage",
    "Chunk",
    "Client",
    "Completion",
    "ConfigError",
    "DeadlineError",
    "EngineError",
    "Finish",
    "GenerateOptions",
    "InvalidRequestError",
    "Model",
    "NoWorkerError",
    "OverloadedError",
    "PositionLogprobs",
    "Prompt",
    "PromptTooLongError",
    "RetryPolicy",
    "RpcSettings",
    "Stream",
    "Timeline",
    "TokenLogprob",
    "TwostrokeError",
    "UnavailableError",
    "UnknownModelError",
    "UnsupportedFieldError",
    "Usage",
    "WorkerLostError",
]
