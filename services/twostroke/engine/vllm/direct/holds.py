"""The engine core's part: which blocks are held for readers, and which requests wait for theirs.

Held blocks carry a reference of ours in vLLM's block pool, from the moment they are announced: whatever happens to the
request, they are not used again before they are given back here. Nothing in this file may be called from another
thread than the engine core's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from twostroke.engine.vllm.direct import notes
from twostroke.kv.holds import Holds, hold_name

Announcement = tuple[str, int, list[int]]
"""Name of the hold, index of the first block, ids."""


@dataclass(slots=True)
class _Hold:
    slot: int
    generation: int
    name: str
    """Among ranks and their peers."""
    blocks: list[Any] = field(default_factory=list)
    finished: bool = False
    expires_s: float = float("inf")
    read_by: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Wait:
    """A request that waits for KV of so many tokens."""

    tokens: int
    begun: bool = False
    ended: dict[int, notes.Ended] = field(default_factory=dict)


class HeldBlocks:
    """What the scheduler side of the connector knows.

    tell: sends a note to every rank. tell_main: to the main process. clock: monotonic seconds.
    """

    def __init__(
        self,
        holds: Holds,
        ranks: int,
        block_tokens: int,
        lease_s: float,
        tell: Callable[[notes.Note], None],
        tell_main: Callable[[notes.Note], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._table = holds
        self._ranks = ranks
        self._block_tokens = block_tokens
        self._lease_s = lease_s
        self._tell = tell
        self._tell_main = tell_main
        self._clock = clock
        self._offers: dict[str, Any] = {}
        """Requests whose KV is to be held, by id, from their arrival to their end."""
        self._holds: dict[str, _Hold] = {}
        self._waits: dict[str, _Wait] = {}
        self._leaving: dict[str, _Wait] = {}
        """Waits that were given up, until all ranks have said that nothing writes any more."""
        self.manager: Any = None
        """vLLM's KVCacheManager."""
        self.received_bytes = 0
        self.received_handoffs = 0

    @property
    def waits(self) -> bool:
        """Whether a request waits for its KV. Callable from another thread."""
        return bool(self._waits)

    @property
    def held_handoffs(self) -> int:
        """Hand-offs whose prompt is done and that wait to be read."""
        return sum(hold.finished for hold in self._holds.values())

    @property
    def held_blocks(self) -> int:
        """Blocks that are held, of unfinished prompts too."""
        return sum(len(hold.blocks) for hold in self._holds.values())

    def arrived(self, request: Any) -> None:
        """A new request."""
        params = request.kv_transfer_params or {}
        if params.get("offer"):
            self._offers[request.request_id] = request
        elif params.get("fetch"):
            self._waits[request.request_id] = _Wait(params["tokens"])
            self._tell(notes.Expect(request.request_id, bytes(params["fetch"])))

    def missing_tokens(self, request: Any, computed_tokens: int) -> int:
        """Tokens that are to be fetched. None when all are here already, which the source is told at once."""
        wait = self._waits.get(request.request_id)
        if wait is None:
            return 0
        missing = wait.tokens - computed_tokens
        if missing <= 0:
            del self._waits[request.request_id]
            self._tell(notes.Skip(request.request_id))
        return max(0, missing)

    def allocated(self, request: Any, block_ids: list[int], external_tokens: int) -> None:
        """There is room for what is to be fetched."""
        wait = self._waits.get(request.request_id)
        if wait is None or wait.begun or not external_tokens:
            return
        wait.begun = True
        first = (wait.tokens - external_tokens) // self._block_tokens
        end = -(-wait.tokens // self._block_tokens)
        self._tell(notes.Begin(request.request_id, first, block_ids[first:end]))

    def announce(self, scheduled_tokens: dict[str, int]) -> list[Announcement]:
        """What the step that is about to run will complete; takes a reference to each of the blocks."""
        announcements = []
        for request_id in [request_id for request_id in scheduled_tokens if request_id in self._offers]:
            request = self._offers[request_id]
            hold = self._holds.get(request_id) or self._begin(request_id)
            computed = request.num_computed_tokens + scheduled_tokens[request_id]
            complete = computed >= request.num_prompt_tokens
            count = -(-request.num_prompt_tokens // self._block_tokens) if complete else computed // self._block_tokens
            first = len(hold.blocks)
            blocks = self.manager.get_blocks(request_id).blocks[0][first:count]
            if blocks:
                self.manager.block_pool.touch(blocks)
                hold.blocks.extend(blocks)
                announcements.append((hold.name, first, [block.block_id for block in blocks]))
        return announcements

    def _begin(self, request_id: str) -> _Hold:
        slot, generation = self._table.take()
        hold = self._holds[request_id] = _Hold(slot, generation, hold_name(request_id, generation))
        self._tell(notes.Offer(hold.name))
        self._tell_main(notes.Started(request_id, hold.slot, hold.generation))
        return hold

    def finished(self, request: Any, *, keep: bool) -> dict[str, int] | None:
        """A request is over. keep: its KV is on offer, if it is one of those. Returns what describes the hold."""
        wait = self._waits.pop(request.request_id, None)
        if wait is not None:
            self._leaving[request.request_id] = wait
            self._tell(notes.Cancel(request.request_id))
        offered = self._offers.pop(request.request_id, None) is not None
        hold = self._holds.get(request.request_id)
        if not offered or hold is None:
            return None
        if not keep:
            self.release([request.request_id], "the prompt ended without it")
            return None
        hold.finished = True
        hold.expires_s = self._clock() + self._lease_s
        self._tell(notes.Finish(hold.name, len(hold.blocks), request.output_token_ids[-1]))
        return {"slot": hold.slot, "generation": hold.generation, "blocks": len(hold.blocks)}

    def renewed(self, name: str) -> None:
        """A reader still wants it."""
        if (hold := self._named(name)) and hold.finished:
            hold.expires_s = self._clock() + self._lease_s

    def read(self, rank: int, name: str) -> None:
        """A rank's part was read; when all are, the blocks are given back."""
        if hold := self._named(name):
            hold.read_by.add(rank)
            if len(hold.read_by) == self._ranks:
                self.release([_handoff_id(name)], "it was read")

    def _named(self, name: str) -> _Hold | None:
        hold = self._holds.get(_handoff_id(name))
        return hold if hold is not None and hold.name == name else None

    def release(self, handoff_ids: Iterable[str], reason: str) -> None:
        """Gives blocks back; unknown ids are ignored."""
        for handoff_id in handoff_ids:
            hold = self._holds.pop(handoff_id, None)
            if hold is not None:
                self._offers.pop(handoff_id, None)
                self._table.give_back([hold.slot])
                self.manager.block_pool.free_blocks(reversed(hold.blocks))
                self._tell(notes.Withdraw(hold.name, reason))
                self._tell_main(notes.Withdrawn(handoff_id))

    def expire(self) -> None:
        """Gives back what nobody came for."""
        now_s = self._clock()
        due = [handoff_id for handoff_id, hold in self._holds.items() if hold.expires_s <= now_s]
        self.release(due, "its lease ended")

    def has_expired(self) -> bool:
        """Whether `expire` would do something. Callable from another thread."""
        now_s = self._clock()
        return any(hold.expires_s <= now_s for hold in list(self._holds.values()))

    def ended(self, note: notes.Ended) -> list[notes.Ended] | None:
        """A rank is through with a receive. Returns what all ranks said once the last one has, else None."""
        wait = self._waits.get(note.request_id) or self._leaving.get(note.request_id)
        if wait is None:
            return None
        wait.ended[note.rank] = note
        if len(wait.ended) < self._ranks:
            return None
        said = list(wait.ended.values())
        self._waits.pop(note.request_id, None)
        self._leaving.pop(note.request_id, None)
        if not any(each.failure for each in said):
            self.received_handoffs += 1
            self.received_bytes += sum(each.nbytes for each in said)
        return said

    def pin(self, block_ids: Iterable[int]) -> None:
        """Keeps blocks out of use for ever: something may still write into them."""
        self.manager.block_pool.touch([self.manager.block_pool.blocks[block_id] for block_id in block_ids])


def _handoff_id(name: str) -> str:
    return name.rpartition("#")[0]
