"""The console's routes as an ASGI handler: its files, the state that they show, the actions behind their buttons."""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
from google.protobuf.message_factory import GetMessageClass

from twostroke.errors import InvalidRequestError, TwostrokeError
from twostroke.router.cluster_service import ClusterService
from twostroke.v1 import cluster_pb2 as pb

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

API = "/console/api"
_SHOWN_REQUESTS = 100
_MAX_ACTION_BYTES = 65536
_FILES = {
    "/console": ("index.html", "text/html; charset=utf-8"),
    **{
        f"/console/{name}": (name, f"text/{kind}; charset=utf-8")
        for name, kind in (
            ("style.css", "css"),
            ("app.js", "javascript"),
            ("charts.js", "javascript"),
            ("chat.js", "javascript"),
            ("view.js", "javascript"),
        )
    },
    "/console/icon.svg": ("icon.svg", "image/svg+xml"),
}
# Nothing comes from elsewhere, nothing runs that is not a file of ours, no other page shows this one in a frame.
_HEADERS = (
    (b"content-security-policy", b"default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
)
_ACTIONS = ("Drain", "SetRole")


def is_page(path: str) -> bool:
    """Whether a path is one of the console's own files, which hold nothing secret."""
    return path.removesuffix("/") in _FILES


class Console:
    """Serves the console of one router.

    models: the names that clients may ask for. trace_url: what a trace's id is appended to, or empty.
    """

    def __init__(self, cluster: ClusterService, models: Callable[[], list[str]], trace_url: str = "") -> None:
        self._cluster = cluster
        self._models = models
        self._trace_url = trace_url

    async def __call__(self, path: str, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """Answers one HTTP call."""
        method = scope["method"]
        if method in ("GET", "HEAD") and is_page(path):
            name, kind = _FILES[path.removesuffix("/")]
            content = importlib.resources.files(__package__).joinpath("assets", name).read_bytes()
            await _answer(send, 200, kind, b"" if method == "HEAD" else content)
        elif method == "GET" and path == f"{API}/state":
            await _answer(send, 200, "application/json", json.dumps(self.state()).encode())
        elif method == "POST" and path.startswith(f"{API}/actions/"):
            await self._act(path.rpartition("/")[2], receive, send)
        else:
            await _answer(send, 404, "text/plain; charset=utf-8", b"the console has no such page\n")

    def state(self) -> dict[str, Any]:
        """What the page shows: the cluster and its requests in proto field names, the models, what can be done."""
        cluster = MessageToDict(self._cluster.view(), preserving_proto_field_name=True, **_ZEROS)
        requests = MessageToDict(self._cluster.requests(_SHOWN_REQUESTS), preserving_proto_field_name=True, **_ZEROS)
        shown = {"cluster": cluster, **requests, "models": self._models(), "actions": sorted(actions())}
        return {**shown, "trace_url": self._trace_url}

    async def _act(self, name: str, receive: _Receive, send: _Send) -> None:
        method = actions().get(name)
        if method is None:
            await _answer(send, 404, "application/json", _message(f"this router has no {name}"))
            return
        try:
            request = ParseDict(await _json(receive), GetMessageClass(method.input_type)())
            response = await getattr(self._cluster, name)(request, None)
        except (ParseError, InvalidRequestError) as error:
            await _answer(send, 400, "application/json", _message(str(error)))
        except TwostrokeError as error:
            await _answer(send, 503, "application/json", _message(error.message))
        else:
            await _answer(send, 200, "application/json", json.dumps(MessageToDict(response)).encode())


_ZEROS: Mapping[str, Any] = {"always_print_fields_with_no_presence": True}


def actions() -> dict[str, Any]:
    """What this router can do to its cluster: the RPCs of ClusterService that change it."""
    methods = pb.DESCRIPTOR.services_by_name["ClusterService"].methods_by_name
    return {name: methods[name] for name in _ACTIONS if name in methods}


async def _json(receive: _Receive) -> Any:
    body = b""
    more = True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = bool(message.get("more_body"))
        if len(body) > _MAX_ACTION_BYTES:
            raise InvalidRequestError(f"an action is at most {_MAX_ACTION_BYTES} bytes")
    try:
        return json.loads(body or b"{}")
    except ValueError as error:
        raise InvalidRequestError(f"not JSON: {error}") from error


def _message(text: str) -> bytes:
    return json.dumps({"error": {"message": text}}).encode()


async def _answer(send: _Send, status: int, kind: str, body: bytes) -> None:
    headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode()), *_HEADERS]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
