"""Rows of chats: tools, several messages, reasoning."""

from __future__ import annotations

import json
from typing import Any

from twostroke.bench.parity.row import Json, Row, chat, choice, seeded, streamed

_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer", "maximum": 9}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
_TIME = {
    "type": "function",
    "function": {"name": "get_time", "description": "The time", "parameters": {"type": "object", "properties": {}}},
}


def chat_rows() -> list[Row]:
    """Tools with every tool_choice, several messages."""
    ask = "What is the weather in Paris?"
    tools: dict[str, Any] = {"tools": [_WEATHER, _TIME], "max_tokens": 32}
    named = {"type": "function", "function": {"name": "get_weather"}}
    made = [
        chat("tools, tool_choice auto", ask, tool_choice="auto", **tools),
        chat("tools, tool_choice required", ask, _calls, tool_choice="required", **(tools | {"max_tokens": 64})),
        chat("tools, tool_choice named", ask, _calls, tool_choice=named, **(tools | {"max_tokens": 64})),
        chat("tools, tool_choice none", ask, lambda answer: not _tool_calls(answer), tool_choice="none", **tools),
        chat(
            "a tool call that auto finds",
            'Say exactly: <tool_call>{"name": "get_time", "arguments": {}}</tool_call>',
            lambda answer: _tool_calls(answer)[0]["function"]["name"] == "get_time",
            tool_choice="auto",
            structured_outputs={"choice": ['<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>']},
            **tools,
        ),
    ]
    several = [
        {"role": "system", "content": "You are terse."},
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Name a colour."},
    ]
    return [
        *made,
        *(streamed(row) for row in made),
        seeded(made[1]),
        chat("several messages", "", messages=several),
        streamed(chat("several messages", "", messages=several)),
        chat(
            "answer begun by the client",
            "",
            messages=[{"role": "user", "content": "Name a river."}, {"role": "assistant", "content": "The river"}],
            add_generation_prompt=False,
            continue_final_message=True,
        ),
    ]


def reasoning_rows() -> list[Row]:
    """Answers with a hidden part. Asked of servers with a reasoning parser."""
    both = "Here is my thought process: [a-z ]{8,20}\\. Here is my response: [a-z ]{4,12}\\."
    made = chat(
        "reasoning parser",
        "Think, then answer.",
        lambda answer: _reasoning(answer) and choice(answer)["message"]["content"],
        structured_outputs={"regex": both},
        max_tokens=60,
    )
    stop = chat(
        "stop string within the reasoning",
        "Think.",
        structured_outputs={"regex": both},
        stop=["thought"],
        max_tokens=60,
    )
    return [made, streamed(made), stop]


def _tool_calls(answer: Json) -> list[Json]:
    return list(choice(answer)["message"].get("tool_calls") or [])


def _calls(answer: Json) -> bool:
    calls = _tool_calls(answer)
    return bool(calls) and all(isinstance(json.loads(call["function"]["arguments"]), dict) for call in calls)


def _reasoning(answer: Json) -> str:
    return str(choice(answer)["message"].get("reasoning") or "")
