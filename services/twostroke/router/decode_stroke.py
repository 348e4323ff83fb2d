"""The second stroke of a request: one admission on one decode worker."""

from __future__ import annotations

import asyncio
from typing import Protocol

from twostroke.errors import TwostrokeError, WorkerLostError
from twostroke.router.member import Member
from twostroke.router.session import DecodeSession
from twostroke.v1.engine_pb2 import EngineRequest, Finish, Logprobs, PromptStats
from twostroke.v1.kv_pb2 import Handoff


class Listener(Protocol):
    """Whose answer is written. Called from the event loop; must not block."""

    def prompt_ready(self, stats: PromptStats) -> None:
        """The worker has the prompt's KV."""

    def deliver(
        self,
        token_ids: list[int],
        logprobs: Logprobs | None,
        finish: Finish | None,
        prompt: PromptStats | None = None,
        prompt_logprobs: Logprobs | None = None,
    ) -> None:
        """New tokens, and with the last of them how the answer ended."""


class DecodeStroke:
    """Hears of every step that concerns it.

    hold_back: keep what is written until `let_go`, because the first token has not come yet.
    """

    def __init__(self, listener: Listener, member: Member, handoff: Handoff | None, *, hold_back: bool) -> None:
        loop = asyncio.get_running_loop()
        self.over: asyncio.Future[None] = loop.create_future()
        """The answer is complete, or what ended it."""
        self.ready: asyncio.Future[None] = loop.create_future()
        """The worker has the prompt's KV."""
        # Nobody may be waiting any more when it fails.
        self.over.add_done_callback(lambda future: future.cancelled() or future.exception())
        self.member = member
        self._listener = listener
        self._handoff = handoff
        self._held_back: list[tuple[list[int], Logprobs | None, Finish | None]] | None = [] if hold_back else None
        self._prompt: tuple[PromptStats | None, Logprobs | None] = (None, None)
        self._session: DecodeSession | None = None
        self._slot = 0

    def admit(self, request: EngineRequest, timeout_s: float, chunk_tokens: int) -> None:
        """Sends it to the worker. Raises WorkerLostError when that is gone."""
        if self.member.session is None:
            raise WorkerLostError(f"decode worker {self.member.worker_id} went away before it was admitted")
        self._session = self.member.session
        self._slot = self._session.admit(self, request, self._handoff, timeout_s, chunk_tokens)

    def cancel(self) -> None:
        """Ends it on the worker, unless it is over there; nothing more is heard of it."""
        self._held_back = None
        if self._session is not None:
            self._session.cancel(self._slot)

    def let_go(self) -> None:
        """The first token has been delivered: delivers what was kept, and from now on everything at once."""
        held_back, self._held_back = self._held_back or [], None
        for written in held_back:
            self.tokens(*written)

    def prompt_ready(self, stats: PromptStats, prompt_logprobs: Logprobs | None) -> None:
        """See SlotOwner."""
        if not self.ready.done():
            self.ready.set_result(None)
        if self._handoff is None:
            self._prompt = (stats, prompt_logprobs)
        self._listener.prompt_ready(stats)

    def tokens(self, token_ids: list[int], logprobs: Logprobs | None, finish: Finish | None) -> None:
        """See SlotOwner."""
        if self._held_back is not None:
            self._held_back.append((token_ids, logprobs, finish))
            return
        prompt, self._prompt = self._prompt, (None, None)
        self._listener.deliver(token_ids, logprobs, finish, *prompt)
        if finish is not None and not self.over.done():
            self.over.set_result(None)

    def failed(self, error: TwostrokeError) -> None:
        """See SlotOwner."""
        if not self.over.done():
            self.over.set_exception(error)
