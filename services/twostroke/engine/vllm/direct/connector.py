"""What vLLM sees of our connector: one class, two roles."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.v1.request import RequestStatus

from twostroke.engine.vllm.affinity import run_where_the_worker_may
from twostroke.engine.vllm.direct import notes
from twostroke.engine.vllm.direct.holds import Announcement, HeldBlocks
from twostroke.engine.vllm.direct.rank import Rank
from twostroke.kv.holds import Holds, HoldTable

LEASE_LOOK_S = 0.5
"""How often an idle core looks for leases that ended."""
AWAKE_S = 0.05
"""How often an idle core steps while KV is on its way to it. What has not run for a second runs slowly once, in core
and ranks, and that would be the step after the hand-off. vLLM's own connectors have it step all the time."""


@dataclass
class StepMetadata(KVConnectorMetadata):
    """From the core to the ranks, with each step: what is complete after it."""

    announcements: list[Announcement] = field(default_factory=list)


@dataclass
class RankEndpoint(KVConnectorHandshakeMetadata):
    """From a rank to the core, once: where its KV is. memory: a serialized KvMemory."""

    address: bytes
    memory: bytes


@dataclass
class HandoffStats(KVConnectorStats):
    """Numbers of the core, absolute, with the steps in which they changed."""

    def is_empty(self) -> bool:
        """Whether there is nothing new."""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """The later one counts."""
        return other

    def reduce(self) -> dict[str, int | float]:
        """As they are."""
        return dict(self.data)

    def reset(self) -> None:
        """Forgets."""
        self.data.clear()


class Core:
    """The connector in the engine core."""

    def __init__(self, vllm_config: Any) -> None:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.ranks = vllm_config.parallel_config.world_size
        self._mailbox = notes.Mailbox(Path(extra["folder"]), notes.CORE)
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.endpoints: list[tuple[bytes, bytes]] = []
        self.wake: Callable[[], None] = lambda: None
        self.recompute_tokens: int = extra["recompute_tokens"]
        self.held = HeldBlocks(
            Holds(HoldTable(Path(extra["hold_table"]))),
            self.ranks,
            vllm_config.cache_config.block_size,
            extra["lease_s"],
            self._tell_ranks,
            self.tell_main,
        )
        self._told: dict[str, int] = {}
        self._arrived = threading.Event()
        self._step_due = False
        self._mailbox.listen(self._hear, "twostroke-notes")
        threading.Thread(target=self._watch, name="twostroke-watch", daemon=True).start()

    def tell_main(self, note: notes.Note) -> None:
        """To the process that serves."""
        self._mailbox.send(notes.MAIN, note)

    def has_news(self) -> bool:
        """Whether notes wait to be taken in or leases to be ended, or the core is to stay awake."""
        return self._step_due or not self.inbox.empty() or self.held.has_expired()

    def arrived(self, request: Any) -> None:
        """A new request."""
        self.held.arrived(request)
        self._arrived.set()

    def stepping(self) -> None:
        """A step begins."""
        self._step_due = False

    def stats(self) -> HandoffStats | None:
        """What changed since the last call."""
        held = self.held
        now = {
            "held_handoffs": held.held_handoffs,
            "held_blocks": held.held_blocks,
            "received_bytes": held.received_bytes,
            "received_handoffs": held.received_handoffs,
        }
        if now == self._told:
            return None
        self._told = now
        return HandoffStats(dict(now))

    def _tell_ranks(self, note: notes.Note) -> None:
        for rank in range(self.ranks):
            self._mailbox.send(notes.rank_name(rank), note)

    def _hear(self, note: Any) -> None:
        self.inbox.put(note)
        self.wake()

    def _watch(self) -> None:
        while True:
            if self.held.waits:
                time.sleep(AWAKE_S)
                self._step_due = True
            else:
                self._arrived.wait(LEASE_LOOK_S)
                self._arrived.clear()
            if self._step_due or self.held.has_expired():
                self.wake()


class HandoffConnector(KVConnectorBase_V1, SupportsHMA):
    """Holds KV on prefill, reads it on decode. The scheduler must be one of `scheduler.py`."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            run_where_the_worker_may()
            self.core = Core(vllm_config)
        else:
            self.rank = Rank(vllm_config, kv_cache_config)

    # Scheduler side.

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """vLLM's own hook."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self.core.held.manager = kv_cache_manager

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Where the ranks' KV is."""
        self.core.endpoints = [(metadata[rank].address, metadata[rank].memory) for rank in sorted(metadata)]

    def on_new_request(self, request: Any) -> None:
        """Notes requests that offer KV, or wait for it."""
        self.core.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """All prompt tokens that are not here come from the source."""
        missing = self.core.held.missing_tokens(request, num_computed_tokens)
        return (missing, True) if missing > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """There is room for what is to be fetched."""
        self.core.held.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """What will be complete after this step."""
        return StepMetadata(self.core.held.announce(scheduler_output.num_scheduled_tokens))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """vLLM may free its references: those to held blocks are ours."""
        keep = request.status == RequestStatus.FINISHED_LENGTH_CAPPED
        return False, self.core.held.finished(request, keep=keep)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The same, for models with one kind of KV."""
        return self.request_finished_all_groups(request, (block_ids,))

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """The core's numbers."""
        return self.core.stats() if self.role is KVConnectorRole.SCHEDULER else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """As they crossed a process boundary."""
        return HandoffStats(data or {})

    # Rank side.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Makes the memory readable and starts the transfer thread."""
        self.rank.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Where this rank's KV is."""
        return RankEndpoint(*self.rank.endpoint())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads are begun by notes, not by steps."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No load is waited for."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Chunks are announced whole, not by layer."""

    def wait_for_save(self) -> None:
        """After the forward pass: what it completed can be read, once the device has written it."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        self.rank.announce(metadata.announcements)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Ends are told by notes; what was kept of the requests can go."""
        self.rank.forget(finished_req_ids)
        return None, None

    def first_token(self, request_id: str) -> int | None:
        """The token that came with a request's KV."""
        return self.rank.first_tokens.get(request_id)

    def shutdown(self) -> None:
        """Ends the transfer thread before the memory goes."""
        if self.role is KVConnectorRole.WORKER:
            self.rank.close()
