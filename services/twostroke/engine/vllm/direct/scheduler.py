"""vLLM's scheduler, which also minds the news of transfers, and lets the engine core sleep while it waits for them.

vLLM steps an engine once a millisecond, through all its processes, as long as a request waits for KV. Here a request
that waits does not count as work: the core sleeps on its input queue, and what arrives from the ranks wakes it there.
News takes effect at the beginning of a step, without the empty step that vLLM would need to carry it.
"""

from __future__ import annotations

import logging
import queue
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from twostroke.engine.vllm.direct import notes
from twostroke.engine.vllm.report import APPEND_ARG
from twostroke.engine.vllm.scheduling import SharingScheduling

log = logging.getLogger(__name__)


def attach(core: Any) -> list[tuple[bytes, bytes]]:
    """Lets news wake the core. A utility of EngineCore: called over vLLM's own channel, in the core's thread.

    Returns address and serialized KvMemory of every rank.
    """
    connector: Any = core.scheduler.connector
    connector.core.wake = lambda: core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
    return list(connector.core.endpoints)


EngineCore.twostroke_attach = attach


class _HandoffScheduling(SharingScheduling):
    """What both schedulers have more than vLLM's."""

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Takes in the news, then schedules as ever."""
        self._take_news()
        return super().schedule(*args, **kwargs)

    def has_requests(self) -> bool:
        """Whether there is anything to compute or to tell; requests that only wait for KV are neither."""
        if self.connector is not None and self.connector.core.has_news():
            return True
        return super().has_requests() and not self._only_waits()

    def _only_waits(self) -> bool:
        if self.running or self.waiting or self.finished_req_ids:
            return False
        return all(
            request.is_finished()
            or (
                request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
                and request.request_id not in self.finished_recving_kv_req_ids
            )
            for request in self.requests.values()
        )

    def _take_news(self) -> None:
        core = self.connector.core
        core.stepping()
        held = core.held
        held.expire()
        while True:
            try:
                note = core.inbox.get_nowait()
            except queue.Empty:
                return
            match note:
                case notes.Release(handoff_ids):
                    held.release(handoff_ids, "nobody will read it")
                case notes.Renewed(hold):
                    held.renewed(hold)
                case notes.Read(rank, hold):
                    held.read(rank, hold)
                case notes.Broken(reason):
                    raise RuntimeError(f"the KV transfer thread has ended: {reason}")
                case notes.Ended():
                    said = held.ended(note)
                    if said is not None:
                        self._receive_ended(note.request_id, said)

    def _receive_ended(self, request_id: str, said: list[notes.Ended]) -> None:
        request = self.requests.get(request_id)
        unusable = {block for each in said if each.unusable for block in each.missing}
        self.connector.core.held.pin(unusable)
        failures = [each for each in said if each.failure]
        if request is not None and not request.is_finished():
            _append_first_token(request, said)
        if not failures:
            self.connector.core.tell_main(notes.Received(request_id, sum(each.chunks for each in said)))
        if request is not None and not request.is_finished() and failures:
            missing = {block for each in failures for block in each.missing}
            if self._may_recompute(request, said, missing, unusable):
                tokens = len(missing) * self.block_size
                reason = str(failures[0].failure)
                self.connector.core.tell_main(notes.Recomputed(request_id, tokens, reason))
                self._handle_invalid_blocks(missing, {})
            else:
                corrupt = any(each.corrupt for each in failures)
                self.connector.core.tell_main(notes.Failed(request_id, str(failures[0].failure), corrupt))
                self.finish_requests(request_id, RequestStatus.FINISHED_ERROR)
                request = self.requests.get(request_id)
        if request is not None:
            # Those that ended while they waited are freed by this, the others go on.
            self._update_from_kv_xfer_finished(KVConnectorOutput(finished_recving={request_id}))

    def _may_recompute(self, request: Any, said: list[notes.Ended], missing: set[int], unusable: set[int]) -> bool:
        """Whether what is missing may be computed here: it is little, in a safe place, and the first token is known.

        Never what arrived wrong: that is for the link to answer for.
        """
        known = bool((request.kv_transfer_params or {}).get("token_known")) or all(
            each.first_token_id is not None for each in said
        )
        few = len(missing) * self.block_size <= self.connector.core.recompute_tokens
        waits = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        wrong = any(each.corrupt for each in said)
        return bool(known and few and waits and missing and not unusable and not wrong)


def _append_first_token(request: Any, said: list[notes.Ended]) -> None:
    """Ends the prompt of a request that asks for it with the token that came with its KV: the next step computes that
    one, and chooses the second token of the answer."""
    known = [each.first_token_id for each in said if each.first_token_id is not None]
    sampling = request.sampling_params
    if not (sampling.extra_args or {}).pop(APPEND_ARG, False):
        return
    if not known:
        if not any(each.failure for each in said):
            raise RuntimeError(f"request {request.request_id} has its KV, but not its first token")
        return
    request.prompt_token_ids = [*request.prompt_token_ids, known[0]]
    request._all_token_ids.append(known[0])
    request.num_prompt_tokens += 1
    request.update_block_hashes()
    request.max_tokens -= 1
    sampling.max_tokens -= 1
    sampling.min_tokens = max(0, sampling.min_tokens - 1)


class HandoffScheduler(_HandoffScheduling):
    """For engines that compute one step at a time."""


class AsyncHandoffScheduler(_HandoffScheduling, AsyncScheduler):
    """For engines that schedule a step while the last one runs."""
