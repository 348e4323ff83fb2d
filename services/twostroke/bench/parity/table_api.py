"""Rows of the other routes that write text."""

from __future__ import annotations

from twostroke.bench.parity.row import MODEL, Row

_QUESTION = "What is the capital of France?"


def api_rows() -> list[Row]:
    """Responses, messages, tokens in and tokens out."""
    responses = {"model": MODEL, "input": _QUESTION, "temperature": 0, "max_output_tokens": 10}
    messages = {
        "model": MODEL,
        "messages": [{"role": "user", "content": _QUESTION}],
        "temperature": 0,
        "max_tokens": 10,
        "system": "Be short.",
    }
    generate = {"token_ids": [504, 3575, 282], "sampling_params": {"temperature": 0, "max_tokens": 8, "logprobs": 2}}
    return [
        Row("responses", "/v1/responses", responses),
        Row("responses, streamed", "/v1/responses", responses | {"stream": True}),
        Row("messages", "/v1/messages", messages),
        Row("messages, streamed", "/v1/messages", messages | {"stream": True}),
        Row("messages with a stop sequence", "/v1/messages", messages | {"stop_sequences": ["Paris"]}),
        Row("tokens in, tokens out", "/inference/v1/generate", generate),
    ]
