"""Asks one row of one server and brings streamed answers into the form of whole ones."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Iterator
from typing import Any

from twostroke.bench.parity.row import Json, Row

_TIMEOUT_S = 300.0


async def ask(address: tuple[str, int], row: Row) -> Json:
    """The answer: its JSON, or of a stream the JSON that the same request has without one, and "http_status".

    A stream that ends without its end mark has "broken" set. Cancellation leaves the request to its time-out.
    """
    return await asyncio.to_thread(_ask, address, row)


def _ask(address: tuple[str, int], row: Row) -> Json:
    connection = http.client.HTTPConnection(*address, timeout=_TIMEOUT_S)
    try:
        connection.request("POST", row.path, json.dumps(dict(row.body)), {"Content-Type": "application/json"})
        response = connection.getresponse()
        content = response.read()
        kind = response.headers.get_content_type()
    finally:
        connection.close()
    answer = whole(list(events(content))) if kind == "text/event-stream" else json.loads(content)
    return {"http_status": response.status, **answer}


def events(content: bytes) -> Iterator[Json | str]:
    """The data of server-sent events; comments are left out, the end mark is a text."""
    for line in content.splitlines():
        if line.startswith(b"data: "):
            data = line.removeprefix(b"data: ")
            yield data.decode() if data == b"[DONE]" else json.loads(data)


def whole(found: list[Json | str]) -> Json:
    """The events of one stream as one answer."""
    made = [event for event in found if isinstance(event, dict)]
    if made and "choices" not in made[0] and "error" not in made[0]:
        return _typed(made)
    answer: Json = {"choices": []} if found and found[-1] == "[DONE]" else {"choices": [], "broken": True}
    for event in made:
        if "error" in event:
            answer["error"] = event["error"]
        if event.get("usage") is not None:
            answer["usage"] = event["usage"]
            answer["usage_events"] = answer.get("usage_events", 0) + 1
        for part in event.get("choices", ()):
            _add(answer["choices"], part)
    return answer


def _add(choices: list[Json], part: Json) -> None:
    index = part["index"]
    while len(choices) <= index:
        choices.append({"index": len(choices)})
    choice = choices[index]
    for name, value in part.items():
        if name == "delta":
            _grow(choice.setdefault("message", {}), value)
        elif name != "index":
            _grow(choice, {name: value})


def _grow(target: Json, part: Json) -> None:
    """Appends texts and lists, fills in what was missing."""
    for name, value in part.items():
        old: Any = target.get(name)
        if name == "tool_calls":
            _grow_calls(target.setdefault(name, []), value or [])
        elif value is None or old is None:
            target[name] = old if value is None else value
        elif isinstance(old, dict):
            _grow(old, value)
        elif isinstance(old, list) or (isinstance(old, str) and name not in _SAID_ONCE):
            target[name] = old + value
        else:
            target[name] = value


_SAID_ONCE = frozenset({"role", "type", "id", "finish_reason", "stop_reason", "prompt_token_ids"})


def _grow_calls(calls: list[Json], parts: list[Json]) -> None:
    for part in parts:
        while len(calls) <= part["index"]:
            calls.append({})
        rest = {name: value for name, value in part.items() if name != "index"}
        _grow(calls[part["index"]], rest)


def _typed(made: list[Json]) -> Json:
    """Of routes whose events have types: the types in order of appearance, the joined texts, the last event."""
    texts: dict[str, str] = {}
    for event in made:
        delta = event.get("delta")
        text = delta if isinstance(delta, str) else (delta or {}).get("text", "")
        texts[event["type"]] = texts.get(event["type"], "") + text
    usage = [event["usage"] for event in made if event.get("usage")]
    return {"types": list(texts), "texts": texts, "usage": usage[-1] if usage else None, "last": made[-1]}
