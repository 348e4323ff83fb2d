"""LoRA adapters: which version of which one a request means, and what that is to vLLM."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

from vllm.lora.request import LoRARequest

from twostroke.errors import InvalidRequestError, UnavailableError
from twostroke.v1 import engine_pb2 as pb

_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")


def adapter_digest(folder: Path) -> str:
    """16 hex digits of an adapter's files, all of them read. Raises OSError when it has no configuration."""
    digest = hashlib.sha256((folder / _FILES[0]).read_bytes())
    for path in (folder / name for name in _FILES[1:]):
        if path.exists():
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def _rank(folder: Path) -> int:
    config = json.loads((folder / _FILES[0]).read_text())
    return int(config.get("r", 0))


class Adapters:
    """The adapters of one engine.

    vLLM caches blocks under an adapter's name and path, and weights under its number, so here each version has its own
    name and number: one that is replaced in place finds neither its predecessor's KV nor its weights.
    """

    def __init__(
        self, load: Callable[[LoRARequest], Awaitable[bool]], limit: int, max_rank: int, worker_id: str
    ) -> None:
        self._load = load
        self._limit = limit
        self._max_rank = max_rank
        self._worker_id = worker_id
        self._numbers = itertools.count(1)
        self._known: dict[tuple[str, str, str], LoRARequest] = {}
        self._loading = asyncio.Lock()

    async def get(self, adapter: pb.Adapter) -> LoRARequest:
        """The adapter, loaded if need be: an engine that finds out during a step that it cannot be loaded would die.

        Raises InvalidRequestError for one that cannot be served here, UnavailableError for files that are not those
        that the router has.
        """
        if not self._limit:
            raise InvalidRequestError(f"worker {self._worker_id} serves no LoRA adapters; start it with --max-loras")
        key = (adapter.name, adapter.path, adapter.digest)
        async with self._loading:
            if key not in self._known:
                self._known[key] = await self._loaded(adapter)
        return self._known[key]

    async def _loaded(self, adapter: pb.Adapter) -> LoRARequest:
        try:
            digest = await asyncio.to_thread(adapter_digest, Path(adapter.path))
        except OSError as error:
            raise UnavailableError(
                f"worker {self._worker_id} has no adapter {adapter.name!r} at {adapter.path}: {error.strerror}"
            ) from error
        if digest != adapter.digest:
            raise UnavailableError(
                f"adapter {adapter.name!r} at {adapter.path} is {digest} on worker {self._worker_id} and "
                f"{adapter.digest} on the router; load it again on the router, or copy its files"
            )
        if (rank := _rank(Path(adapter.path))) > self._max_rank:
            raise InvalidRequestError(
                f"adapter {adapter.name!r} has rank {rank}, worker {self._worker_id} takes {self._max_rank}; "
                "set --max-lora-rank"
            )
        request = LoRARequest(f"{adapter.name}@{digest}", next(self._numbers), adapter.path)
        try:
            await self._load(request)
        except Exception as error:
            said = str(error).strip().splitlines()
            why = said[-1] if said else type(error).__name__
            raise InvalidRequestError(
                f"worker {self._worker_id} cannot load adapter {adapter.name!r}: {why}"
            ) from error
        return request
