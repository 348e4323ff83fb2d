"""Our connector, seen from the process that serves."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from twostroke.config import WorkerSettings
from twostroke.engine.base import EngineLoad, LinkReport
from twostroke.engine.vllm.direct import notes
from twostroke.engine.vllm.handoffs import Failed, News, Received, Recomputed, Source, Started
from twostroke.errors import KvCorruptError, KvLostError, LayoutMismatchError, TwostrokeError, by_reason
from twostroke.kv.holds import HoldTable
from twostroke.kv.layout import CUTTING_CONNECTOR
from twostroke.v1.kv_pb2 import DirectTransfer, Handoff, KvEndpoint, KvMemory

_FOLDER = "twostroke-kv-"
_SHM = Path("/dev/shm")  # noqa: S108


class DirectHandoffs:
    """KV moves while prefill computes."""

    transport = "direct"

    def __init__(self, worker_id: str, epoch: str) -> None:
        _remove_stale()
        self._worker_id = worker_id
        self._epoch = epoch
        self._folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-"))
        self._hold_table = (_SHM if os.access(_SHM, os.W_OK) else self._folder) / f"{_FOLDER}{os.getpid()}-{epoch}"
        HoldTable(self._hold_table)
        self._mailbox = notes.Mailbox(self._folder, notes.MAIN)
        self._mailbox.socket.setblocking(False)
        self._endpoint = KvEndpoint()
        self._held: set[str] = set()
        self._probes: dict[tuple[int, int], asyncio.Future[LinkReport]] = {}
        self._numbers = itertools.count()
        self._hear: Callable[[News], None] = lambda news: None

    def connector(self, settings: WorkerSettings) -> str:
        return f"{CUTTING_CONNECTOR}/{settings.kv_transport}"

    def arguments(self, settings: WorkerSettings, engine_id: str) -> dict[str, Any]:
        from vllm.config import KVTransferConfig

        config = KVTransferConfig(
            kv_connector="HandoffConnector",
            kv_connector_module_path="twostroke.engine.vllm.direct.connector",
            kv_role="kv_both",
            engine_id=engine_id,
            # Which failures are computed again, and which are not, is decided by our scheduler.
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={
                "folder": str(self._folder),
                "hold_table": str(self._hold_table),
                "worker_id": self._worker_id,
                "epoch": self._epoch,
                "transport": settings.kv_transport,
                "library": settings.kv_library,
                "verify": settings.kv_verify,
                "lease_s": settings.kv_lease_s,
                "timeout_s": settings.kv_stall_s,
                "recompute_tokens": settings.kv_recompute_tokens,
            },
        )
        return {"kv_transfer_config": config}

    def adjust(self, config: Any) -> None:
        """Puts our scheduler in the place of vLLM's."""
        scheduler = config.scheduler_config
        kind = "AsyncHandoffScheduler" if scheduler.async_scheduling else "HandoffScheduler"
        scheduler.scheduler_cls = f"twostroke.engine.vllm.direct.scheduler.{kind}"

    async def attach(self, client: Any, hear: Callable[[News], None]) -> KvEndpoint:
        ranks = await client.call_utility_async("twostroke_attach")
        # All have mapped it.
        self._hold_table.unlink()
        self._endpoint = KvEndpoint(
            addresses=[bytes(address) for address, _ in ranks],
            memories=[KvMemory.FromString(bytes(memory)) for _, memory in ranks],
        )
        self._hear = hear
        asyncio.get_running_loop().add_reader(self._mailbox.socket, self._take_notes)
        return self._endpoint

    def offer(self) -> dict[str, Any]:
        return {"offer": True}

    def fetch(self, handoff: Handoff, *, token_known: bool) -> dict[str, Any]:
        return {
            "fetch": handoff.SerializeToString(),
            "tokens": handoff.tokens,
            "token_known": token_known,
            # vLLM counts requests that wait for KV by this.
            "do_remote_prefill": True,
        }

    def describe(self, source: Source, request_id: str, tokens: int, params: dict[str, Any]) -> Handoff:
        self._held.add(request_id)
        handoff = source.handoff(request_id, tokens)
        handoff.direct.CopyFrom(
            DirectTransfer(endpoint=self._endpoint, hold_slot=params["slot"], hold_generation=params["generation"])
        )
        return handoff

    async def release(self, request_ids: Sequence[str]) -> int:
        held = [request_id for request_id in request_ids if request_id in self._held]
        if held:
            self._held.difference_update(held)
            self._send(notes.CORE, notes.Release(held))
        return len(held)

    async def probe(self, worker_id: str, epoch: str, endpoint: KvEndpoint) -> LinkReport:
        """Tries every rank's link. The slowest rate and the longest latency count."""
        number = next(self._numbers)
        if not endpoint.addresses:
            raise LayoutMismatchError(f"{worker_id} offers no KV memory; use one --kv-connector everywhere")
        ranks = range(len(self._endpoint.addresses))
        waiting = [asyncio.get_running_loop().create_future() for _ in ranks]
        self._probes.update({(number, rank): future for rank, future in zip(ranks, waiting, strict=True)})
        note = notes.Probe(number, f"{worker_id}/{epoch}", endpoint.SerializeToString())
        try:
            for rank in ranks:
                self._send(notes.rank_name(rank), note)
            reports = await asyncio.gather(*waiting)
        finally:
            for rank in ranks:
                del self._probes[number, rank]
        return LinkReport(
            tuple(dict.fromkeys(lane for report in reports for lane in report.lanes)),
            all(report.rdma for report in reports),
            min(report.bytes_per_s for report in reports),
            max(report.latency_ms for report in reports),
        )

    def drop_peer(self, worker_id: str, epoch: str) -> None:
        for rank in range(len(self._endpoint.addresses)):
            self._send(notes.rank_name(rank), notes.DropPeer(f"{worker_id}/{epoch}/"))

    def count(self, load: EngineLoad, stats: Any) -> EngineLoad:
        said = stats.kv_connector_stats
        if not said:
            return load
        return replace(
            load,
            held_handoffs=said["held_handoffs"],
            held_blocks=said["held_blocks"],
            kv_received_bytes=said["received_bytes"],
            kv_received_handoffs=said["received_handoffs"],
        )

    def close(self) -> None:
        with suppress(RuntimeError):
            asyncio.get_running_loop().remove_reader(self._mailbox.socket)
        self._mailbox.socket.close()
        self._hold_table.unlink(missing_ok=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _send(self, name: str, note: notes.Note) -> None:
        self._mailbox.send(name, note)

    def _take_notes(self) -> None:
        with suppress(BlockingIOError):
            while True:
                self._take(self._mailbox.take())

    def _take(self, note: Any) -> None:
        match note:
            case notes.Started(request_id, slot, generation):
                self._hear(Started(request_id, {"slot": slot, "generation": generation}))
            case notes.Failed(request_id, reason, corrupt):
                kind: type[TwostrokeError] = KvCorruptError if corrupt else KvLostError
                self._hear(Failed(request_id, kind(f"the KV of {request_id} did not arrive: {reason}")))
            case notes.Recomputed(request_id, tokens):
                self._hear(Recomputed(request_id, tokens))
            case notes.Received(request_id, chunks):
                self._hear(Received(request_id, chunks))
            case notes.Withdrawn(handoff_id):
                self._held.discard(handoff_id)
            case notes.Probed():
                self._probed(note)

    def _probed(self, note: notes.Probed) -> None:
        future = self._probes.get((note.number, note.rank))
        if future is None or future.done():
            return
        if note.error is not None:
            reason, message = note.error
            future.set_exception((by_reason(reason) or TwostrokeError)(message))
        else:
            future.set_result(LinkReport(tuple(note.lanes), note.rdma, note.bytes_per_s, note.latency_ms))


def _remove_stale() -> None:
    """Removes what killed workers left behind."""
    for folder in (Path(tempfile.gettempdir()), _SHM):
        for path in folder.glob(f"{_FOLDER}*"):
            pid = path.name.removeprefix(_FOLDER).partition("-")[0]
            if pid.isdigit() and not Path(f"/proc/{pid}").exists():
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
