"""A rank's part: its KV memory, its transfer thread, and the notes between that and the rest of the family."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.platforms import current_platform

from twostroke.config import child_environment
from twostroke.engine.vllm.affinity import unpinned
from twostroke.engine.vllm.direct import notes
from twostroke.engine.vllm.direct.holds import Announcement
from twostroke.errors import ConfigError, LayoutMismatchError, TwostrokeError
from twostroke.kv.backends import open_transport
from twostroke.kv.checks import Action, check_host, read_host, transport_options
from twostroke.kv.digest import Ranges, digest
from twostroke.kv.holds import HoldTable, hold_name
from twostroke.kv.link import LinkReport
from twostroke.kv.memory import Blocks, slice_between
from twostroke.kv.mover import Callbacks, Mover
from twostroke.kv.pages import populate
from twostroke.kv.receive import Outcome, Part, Receive
from twostroke.kv.transport import unpack_address
from twostroke.v1.kv_pb2 import Handoff, KvEndpoint, KvMemory

log = logging.getLogger(__name__)

SAMPLE = 16
"""Of memory of a device one piece in so many is compared: it must be copied to the host for that."""


class Rank:
    """The connector in a rank's process."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        self._extra: dict[str, Any] = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._number: int = get_tensor_model_parallel_rank()
        self._ranks: int = vllm_config.parallel_config.tensor_parallel_size
        self._table = HoldTable(Path(self._extra["hold_table"]))
        self._fatal: Exception | None = None
        self._mover: Mover | None = None
        self.first_tokens: dict[str, int] = {}
        """By request, from the end of a receive to the end of the request."""

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Opens the transport over the KV memory. Raises ConfigError for KV that cannot be handed over."""
        extra = self._extra
        memory, storage = self._describe(kv_caches)
        name = f"{extra['worker_id']}/{extra['epoch']}/{self._number}"
        on_host = next(iter(kv_caches.values())).device.type == "cpu"
        with unpinned():
            options = _checked_options(storage[1])
            transport = open_transport(extra["transport"], name, library=extra["library"], options=options)
            transport.register(*storage)
            callbacks = Callbacks(
                lambda hold: self._tell_core(notes.Renewed(hold)),
                lambda hold: self._tell_core(notes.Read(self._number, hold)),
                self._receive_ended,
                self._fail,
            )
            self._mover = Mover(
                transport,
                memory,
                callbacks,
                timeout_s=extra["timeout_s"],
                readers=self._ranks,
                verify=extra["verify"] and (1 if on_host else SAMPLE),
                digest_of=digest if on_host else device_digest(next(iter(kv_caches.values()))),
            )
            self._mailbox = notes.Mailbox(Path(extra["folder"]), notes.rank_name(self._number))
            self._mover.start()
            self._mailbox.listen(self._hear, "twostroke-notes")
            if on_host:
                threading.Thread(target=populate, args=storage, name="twostroke-pages", daemon=True).start()
        log.info("KV of %d bytes is readable over %s", storage[1], getattr(transport, "library", extra["transport"]))

    def _describe(self, kv_caches: dict[str, torch.Tensor]) -> tuple[KvMemory, tuple[int, int]]:
        if len(self._kv_cache_config.kv_cache_groups) != 1:
            raise ConfigError(
                "this model has several kinds of KV; the twostroke connector moves one: use --kv-connector nixl"
            )
        views = list(kv_caches.values())
        storages = {view.untyped_storage().data_ptr(): view.untyped_storage().nbytes() for view in views}
        shapes = {(view.shape, view.stride()) for view in views}
        if len(storages) != 1 or len(shapes) != 1 or views[0].dim() != 4:
            raise ConfigError(
                f"KV of shapes {sorted(str(shape) for shape, _ in shapes)} in {len(storages)} pieces is not "
                "understood; use --kv-connector nixl"
            )
        size, (_, heads, tokens, content) = views[0].element_size(), views[0].shape
        stride = [step * size for step in views[0].stride()]
        memory = KvMemory(
            hold_table_address=self._table.address,
            layer_addresses=[view.data_ptr() for view in views],
            block_stride_bytes=stride[0],
            head_stride_bytes=stride[1],
            token_stride_bytes=0 if current_platform.is_cpu() else stride[2],
            content_bytes=content * size,
            block_tokens=tokens,
            first_head=self._first_head(heads),
            heads=heads,
        )
        return memory, next(iter(storages.items()))

    def _first_head(self, heads: int) -> int:
        total: int = self._config.model_config.get_total_num_kv_heads()
        if total >= self._ranks:
            return self._number * heads
        # Fewer heads than ranks: neighbours have the same one.
        return self._number * total // self._ranks

    def endpoint(self) -> tuple[bytes, bytes]:
        """Address, and serialized KvMemory."""
        mover = self._running()
        return mover.address, mover.memory.SerializeToString()

    def announce(self, announcements: Iterable[Announcement]) -> None:
        """The step that completes these has been given to the device. Raises EngineError when nothing moves any more:
        the engine cannot do its work then."""
        if self._fatal is not None:
            raise RuntimeError(f"the KV transfer thread has ended: {self._fatal}")
        mover = self._running()
        is_written = None
        for hold, first, block_ids in announcements:
            is_written = is_written or _event()
            mover.call(partial(mover.source.announce, hold, Blocks(first, block_ids), is_written))

    def forget(self, request_ids: Iterable[str]) -> None:
        """These requests are over."""
        for request_id in request_ids:
            self.first_tokens.pop(request_id, None)

    def close(self) -> None:
        """Ends the transfer thread."""
        if self._mover is not None:
            self._mover.close()

    def _running(self) -> Mover:
        assert self._mover is not None, "register first"
        return self._mover

    def _fail(self, error: Exception) -> None:
        self._fatal = error
        # An idle core takes no step in which it would hear.
        self._tell_core(notes.Broken(f"{type(error).__name__}: {error}"))

    def _tell_core(self, note: notes.Note) -> None:
        self._mailbox.send(notes.CORE, note)

    def _hear(self, note: Any) -> None:
        mover = self._running()
        mover.call(lambda: self._obey(mover, note))

    def _obey(self, mover: Mover, note: Any) -> None:
        match note:
            case notes.Offer(hold):
                mover.source.offer(hold)
            case notes.Finish(hold, blocks, first_token_id):
                mover.source.finish(hold, blocks, first_token_id)
            case notes.Withdraw(hold, reason):
                mover.source.withdraw(hold, reason)
            case notes.Expect(request_id, handoff):
                self._expect(mover, request_id, Handoff.FromString(handoff))
            case notes.Begin(request_id, first, block_ids):
                mover.reader.begin(request_id, Blocks(first, block_ids))
            case notes.Skip(request_id):
                mover.reader.skip(request_id)
            case notes.Cancel(request_id):
                mover.reader.cancel(request_id)
            case notes.DropPeer(prefix):
                mover.drop(prefix)
            case notes.Probe():
                self._probe(mover, note)

    def _expect(self, mover: Mover, request_id: str, handoff: Handoff) -> None:
        direct = handoff.direct
        try:
            parts = self._parts(mover, direct.endpoint)
        except TwostrokeError as error:
            self._tell_core(
                notes.Ended(self._number, request_id, None, 0, 0.0, error.message, False, [], unusable=False)
            )
            return
        name = hold_name(handoff.handoff_id, direct.hold_generation)
        receive = Receive(request_id, name, direct.hold_slot, direct.hold_generation, parts, time.monotonic())
        mover.reader.expect(receive)

    def _parts(self, mover: Mover, endpoint: KvEndpoint) -> list[Part]:
        """The ranks of a source that have heads of ours. Raises LayoutMismatchError."""
        parts: list[Part] = []
        own = set(range(mover.memory.first_head, mover.memory.first_head + mover.memory.heads))
        heads: set[int] = set()
        for address, remote in zip(endpoint.addresses, endpoint.memories, strict=True):
            cut = slice_between(remote, mover.memory)
            if cut is None or cut.heads:
                source = unpack_address(address, self._extra["transport"]).name
                mover.know(source, address)
                parts.append(Part(source, remote, cut, len(endpoint.addresses)))
                heads |= set(range(cut.first_head, cut.first_head + cut.heads)) if cut else own
        if heads != own:
            raise LayoutMismatchError(f"the source has KV heads {sorted(heads)} of {sorted(own)}; run one version")
        return parts

    def _receive_ended(self, outcome: Outcome) -> None:
        if outcome.first_token_id is not None:
            self.first_tokens[outcome.request_id] = outcome.first_token_id
        self._tell_core(
            notes.Ended(
                self._number,
                outcome.request_id,
                outcome.first_token_id,
                outcome.nbytes,
                outcome.duration_s,
                outcome.failure,
                outcome.corrupt,
                list(outcome.missing),
                unusable=bool(outcome.quarantine),
                chunks=outcome.chunks,
            )
        )

    def _probe(self, mover: Mover, note: notes.Probe) -> None:
        endpoint = KvEndpoint.FromString(note.endpoint)

        def over(outcome: LinkReport | TwostrokeError) -> None:
            if isinstance(outcome, TwostrokeError):
                report, error = LinkReport(), (outcome.reason, outcome.message)
            else:
                report, error = outcome, None
            self._mailbox.send(
                notes.MAIN,
                notes.Probed(
                    note.number,
                    self._number,
                    list(report.lanes),
                    report.rdma,
                    report.bytes_per_s,
                    report.latency_ms,
                    error,
                ),
            )

        try:
            parts = self._parts(mover, endpoint)
        except TwostrokeError as error:
            over(error)
            return
        # The first one stands for all: they are on the same host.
        part = parts[0]
        address = endpoint.addresses[list(endpoint.memories).index(part.remote)]
        mover.probe(part.source, address, part.remote, over)


def _checked_options(registered_bytes: int) -> dict[str, str]:
    """UCX options that fit this host. Raises ConfigError when it does not allow what is needed."""
    findings = check_host(read_host(), registered_bytes)
    for finding in findings:
        if finding.action is not Action.NONE:
            log.warning("%s: %s", finding.check, finding.message)
    return transport_options(findings, child_environment().get("UCX_TLS", ""))


def device_digest(view: torch.Tensor) -> Callable[[Ranges], bytes]:
    """Digests of a device's memory, within the allocation that a tensor is a view of. Copies on a stream of its own, so
    that it waits for no computation, and none for it."""
    storage = view.untyped_storage()
    memory = torch.empty(0, dtype=torch.uint8, device=view.device).set_(storage)  # type: ignore[call-overload]
    base, stream = storage.data_ptr(), torch.cuda.Stream(view.device)

    def run(ranges: Ranges) -> bytes:
        with torch.cuda.stream(stream):
            copies = [memory[start - base : start - base + nbytes].cpu() for start, nbytes in ranges.tolist()]
        return digest(np.array([[copy.data_ptr(), copy.nbytes] for copy in copies], np.int64))

    return run


def _event() -> Callable[[], bool] | None:
    """Tells whether the device has done all that it was given until now; None on the CPU, where it has."""
    if not torch.cuda.is_available():
        return None
    event = torch.cuda.Event()
    event.record()
    is_over: Callable[[], bool] = event.query
    return is_over
