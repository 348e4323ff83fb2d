"""What the two clients share: their settings, checked, and how they begin a call. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from twostroke.client._attempts import Attempts, Routers
from twostroke.client._options import Prompt, build_request, timeout_s
from twostroke.client._retry import RetryPolicy
from twostroke.config import RpcSettings
from twostroke.errors import ConfigError, InvalidRequestError
from twostroke.v1.inference_pb2 import GenerateRequest

Metadata = tuple[tuple[str, str], ...]

DEFAULT_RPC = RpcSettings()


class Core:
    """The settings of a client. Raises ConfigError naming the one that cannot work."""

    def __init__(
        self,
        targets: str | Sequence[str],
        timeout_s: float | None,
        retries: int | RetryPolicy,
        api_key: str | None,
        rpc: RpcSettings,
    ) -> None:
        self.routers = Routers(_targets(targets))
        self.rpc = rpc
        self.metadata = _metadata(api_key)
        self.closed = False
        self._policy = retries if isinstance(retries, RetryPolicy) else RetryPolicy(retries)
        self._timeout_s = _default_timeout_s(timeout_s)

    def generate(self, prompt: Prompt, options: Mapping[str, object]) -> tuple[GenerateRequest, Attempts]:
        """The message and the attempts of one answer. Raises InvalidRequestError."""
        self.check_open()
        request = build_request(prompt, options)
        return request, self.attempts(f"request_id {request.request_id}", options.get("timeout_s"))

    def attempts(self, call: str, call_timeout_s: object) -> Attempts:
        """The attempts of a call. Raises InvalidRequestError for a wrong timeout_s."""
        return Attempts(call, self.routers, self._policy, timeout_s(call_timeout_s, self._timeout_s))

    def check_open(self) -> None:
        """Raises InvalidRequestError once the client has been closed."""
        if self.closed:
            raise InvalidRequestError("the client is closed; make a new one")


def _targets(targets: object) -> tuple[str, ...]:
    several = (targets,) if isinstance(targets, str) else targets
    if not isinstance(several, Sequence) or not several:
        raise ConfigError(f"targets is {targets!r}; give the router's host:port, or a list of them")
    for target in several:
        host, _, port = target.rpartition(":") if isinstance(target, str) else ("", "", "")
        if not host or "," in host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"targets has {target!r}; write host:port, several routers as a list")
    return tuple(several)


def _metadata(api_key: object) -> Metadata:
    if api_key is None:
        return ()
    if not isinstance(api_key, str) or not api_key or not api_key.isascii() or not api_key.isprintable():
        raise ConfigError("api_key must be a non-empty string of printable ASCII")
    return (("authorization", f"Bearer {api_key}"),)


def _default_timeout_s(value: object) -> float | None:
    try:
        return timeout_s(value, None)
    except InvalidRequestError as error:
        raise ConfigError(error.message) from None
