"""Who may use the router, who may change its cluster, and how often somebody may ask. Keys are kept as digests."""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from enum import Enum
from typing import TypeAlias

from twostroke.config import RouterSettings, read_file
from twostroke.errors import ConfigError, PermissionDeniedError, RateLimitedError, UnauthenticatedError

log = logging.getLogger(__name__)

TENANT_HEADER = "x-twostroke-tenant"
_CALLERS = 10_000
_TENANT_CHARS = 64
_ADMIN_METHODS = frozenset({"/twostroke.v1.ClusterService/Drain", "/twostroke.v1.ClusterService/SetRole"})
_GENERATE = "/twostroke.v1.InferenceService/Generate"

Caller: TypeAlias = bytes | str


class Need(Enum):
    """What a call needs."""

    NOTHING = "nothing"
    USE = "use"
    ADMIN = "admin"


class Access:
    """The keys and the shares of one router.

    keys: those of clients; none lets everybody in. admin: changes the cluster, and is a client's key too.
    rate_per_s: requests per second of a key, or of an address without one; 0 is any number. burst: at once on top.
    """

    def __init__(
        self,
        keys: Iterable[str] = (),
        admin: str = "",
        rate_per_s: float = 0.0,
        burst: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keys = frozenset(map(_digest, keys))
        self._admin = _digest(admin) if admin else None
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._clock = clock
        self._shares: OrderedDict[Caller, tuple[float, float]] = OrderedDict()

    @classmethod
    def of(cls, settings: RouterSettings) -> Access:
        """As the settings have it. Raises ConfigError for a key file that cannot be read or holds no key."""
        keys = [*settings.api_keys.get_secret_value().split(","), *_lines("--api-keys-file", settings.api_keys_file)]
        admin = [settings.admin_key.get_secret_value(), *_lines("--admin-key-file", settings.admin_key_file)]
        access = cls(
            (key.strip() for key in keys if key.strip()),
            next(filter(None, reversed(admin)), ""),
            settings.rate_per_s,
            settings.rate_burst,
        )
        if not access._keys and not _is_loopback(settings.host):
            log.warning("anybody who reaches %s may use this router; --api-keys-file lets in clients", settings.host)
        return access

    @property
    def closed(self) -> bool:
        """Whether clients need a key."""
        return bool(self._keys)

    def check(self, need: Need, key: str, address: str, *, counted: bool) -> None:
        """Lets a call through, or raises why not.

        key: what the caller sent, or empty. counted: it takes from the caller's share.
        Raises UnauthenticatedError, PermissionDeniedError, RateLimitedError with the time to wait.
        """
        if need is Need.NOTHING:
            return
        digest = _digest(key) if key else None
        known = digest is not None and (digest in self._keys or digest == self._admin)
        if self._keys and not known:
            raise UnauthenticatedError(
                "this key is not known here" if key else "a key is needed: Authorization: Bearer KEY"
            )
        if need is Need.ADMIN:
            self._check_admin(digest)
        if counted and self._rate_per_s:
            self._take(digest if digest is not None and known else address)

    def tenant(self, key: str, header: str) -> str:
        """Whose share of the cluster a call uses: the key's, and where none is asked for, that of the header
        x-twostroke-tenant, if there is one."""
        return header[:_TENANT_CHARS] if header and not self.closed else _digest(key).hex()[:16] if key else ""

    def _check_admin(self, digest: bytes | None) -> None:
        if self._admin is None and self._keys:
            raise PermissionDeniedError("this changes the cluster, and the router has no admin key (--admin-key-file)")
        if self._admin is not None and digest != self._admin:
            raise PermissionDeniedError("this changes the cluster and needs the admin key")

    def _take(self, caller: Caller) -> None:
        now_s = self._clock()
        left, since_s = self._shares.pop(caller, (float(self._burst), now_s))
        left = min(float(self._burst), left + (now_s - since_s) * self._rate_per_s)
        self._shares[caller] = (max(left - 1, 0.0) if left >= 1 else left, now_s)
        while len(self._shares) > _CALLERS:
            self._shares.popitem(last=False)
        if left < 1:
            raise RateLimitedError(
                f"more than {self._rate_per_s:g} requests per second (--rate-per-s)",
                retry_after_s=(1 - left) / self._rate_per_s,
            )

    def guard(self, method: str, authorization: str, peer: str) -> None:
        """See rpc.interceptors.Guard."""
        need = Need.ADMIN if method in _ADMIN_METHODS else Need.USE
        # "ipv4:10.0.0.1:5000": the port is another one with every connection.
        address = peer.partition(":")[2].rpartition(":")[0] or peer
        self.check(need, bearer(authorization), address, counted=method == _GENERATE)


def bearer(authorization: str) -> str:
    """The key in an Authorization header; empty when there is none."""
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _digest(key: str) -> bytes:
    # Comparing digests tells by its duration nothing about a key.
    return hashlib.sha256(key.encode()).digest()


def _lines(flag: str, path: str) -> list[str]:
    if not path:
        return []
    lines = [line.strip() for line in read_file(flag, path).decode(errors="replace").splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"{flag} {path}: it holds no key; write one a line")
    return keys


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
