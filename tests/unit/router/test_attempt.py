"""Both strokes of an attempt in every order that two machines can bring about, with workers that do as told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from twostroke.errors import KvCorruptError, KvLostError, OverloadedError, TwostrokeError, WorkerLostError
from twostroke.policy.inflight import InFlight, Report
from twostroke.policy.ledger import HandoffState, Life
from twostroke.policy.placement import ClusterSnapshot, PlacementRequest, Plan, WorkerSnapshot, place
from twostroke.router.attempt import RETRYABLE, Attempt
from twostroke.router.handoffs import Handoffs
from twostroke.router.member import Member
from twostroke.router.output import Output
from twostroke.router.pool import WorkerPool
from twostroke.router.progress import Progress
from twostroke.router.session import SlotOwner
from twostroke.v1.engine_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, EngineRequest, Finish, PromptStats
from twostroke.v1.kv_pb2 import Handoff, KvLayout
from twostroke.v1.prefill_pb2 import (
    PrefillFinished,
    PrefillFirstToken,
    PrefillQueued,
    PrefillRequest,
    PrefillResponse,
    PrefillStarted,
)
from twostroke.v1.worker_pb2 import GetInfoResponse

END = Finish(reason=FINISH_REASON_LENGTH)
READY = PromptStats(prompt_tokens=9, transferred_tokens=9)


@dataclass
class Call:
    """One Prefill call: says what it is given, or breaks."""

    request: PrefillRequest
    events: asyncio.Queue[PrefillResponse | Exception | None] = field(default_factory=asyncio.Queue)
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True

    async def __aiter__(self) -> AsyncIterator[PrefillResponse]:
        while (event := await self.events.get()) is not None:
            if isinstance(event, Exception):
                raise event
            yield event

    def handoff(self, *, in_progress: bool) -> Handoff:
        return Handoff(handoff_id=self.request.request.request_id, bytes=64, in_progress=in_progress)

    def start(self, *, early: bool = True) -> None:
        self.events.put_nowait(PrefillResponse(queued=PrefillQueued()))
        handoff = self.handoff(in_progress=True) if early else None
        self.events.put_nowait(PrefillResponse(started=PrefillStarted(handoff=handoff)))

    def first(self, token: int, finish: Finish | None = None) -> None:
        self.events.put_nowait(PrefillResponse(first_token=PrefillFirstToken(token_id=token, finish=finish)))

    def finish(self, *, handoff: bool = True) -> None:
        offered = self.handoff(in_progress=False) if handoff else None
        self.events.put_nowait(PrefillResponse(finished=PrefillFinished(handoff=offered)))
        self.events.put_nowait(None)

    def breaks(self, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> None:
        nothing = grpc.aio.Metadata()
        self.events.put_nowait(grpc.aio.AioRpcError(code, nothing, nothing, "gone"))


@dataclass
class Slot:
    """One admission."""

    owner: SlotOwner
    request: EngineRequest
    handoff: Handoff | None
    chunk_tokens: int = 0
    cancels: int = 0


class Worker:
    """As much of a Member as an attempt needs, with its own session."""

    def __init__(self, address: str) -> None:
        self.address = self.worker_id = address
        self.router_id = "router"
        """Why it was set aside."""
        self.info = GetInfoResponse(worker_id=address, epoch="1", layout=KvLayout(block_size_tokens=16))
        self.life = Life(address, address, "1")
        self.prefill = self.session = self
        self.prefills: set[Callable[[str], None]] = set()
        self.calls: list[Call] = []
        self.slots: list[Slot] = []
        self.released: list[str] = []
        self.refusal: TwostrokeError | None = None

    def Prefill(self, request: PrefillRequest, timeout: float, metadata: object) -> Call:
        self.calls.append(Call(request))
        return self.calls[-1]

    def admit(
        self, owner: SlotOwner, request: EngineRequest, handoff: Handoff | None, timeout_s: float, chunk_tokens: int
    ) -> int:
        self.slots.append(Slot(owner, request, handoff, chunk_tokens))
        if self.refusal is not None:
            owner.failed(self.refusal)
        return len(self.slots) - 1

    def cancel(self, slot: int) -> None:
        self.slots[slot].cancels += 1

    def release(self, request_id: str) -> None:
        self.released.append(request_id)


class Stage:
    """A prefill worker, decode workers, and an attempt at a request with a prompt of nine tokens."""

    def __init__(
        self, decodes: int = 1, delivered: Sequence[int] = (), handoff_timeout_s: float = 5, chunk_tokens: int = 0
    ) -> None:
        self.p = Worker("p")
        self.d = [Worker(f"d{index}") for index in range(decodes)]
        self.outputs: list[Output] = []
        self.links = self
        self.inflight = InFlight()
        self.reported = asyncio.Event()
        self.blamed: list[tuple[str, str]] = []
        self.praised: list[tuple[str, str]] = []
        self.sent: list[str] = []
        self.verdicts: list[tuple[str, bool]] = []
        self.handoffs = Handoffs(lambda address: cast(Member, self.member(address)))
        request = EngineRequest(request_id="r", prompt_token_ids=range(9))
        self.progress = Progress(request, self.outputs.append, asyncio.get_running_loop().time() + 60)
        self.progress.delivered.extend(delivered)
        self.attempt = Attempt("r.1", self.progress, cast(WorkerPool, self), handoff_timeout_s, chunk_tokens)
        run = self.attempt.two_strokes(cast(Member, self.p), cast(Member, self.d[0]))
        self.task = asyncio.create_task(run)

    def member(self, address: str) -> Worker:
        return next(worker for worker in (self.p, *self.d) if worker.address == address)

    def snapshot(self) -> ClusterSnapshot:
        workers = [WorkerSnapshot("p", True, False, free_blocks=99)]
        return ClusterSnapshot([*workers, *(WorkerSnapshot(d.address, False, True, free_blocks=99) for d in self.d)])

    def place_answer(self, request: PlacementRequest, snapshot: ClusterSnapshot, *, waits: bool = True) -> Plan:
        return place(request, snapshot)

    async def wait_report(self) -> None:
        await self.reported.wait()
        self.reported.clear()

    def failed(self, pair: tuple[str, str], error: TwostrokeError) -> None:
        self.blamed.append(pair)

    def report(self, pair: tuple[str, str]) -> None:
        """No link was probed."""

    def succeeded(self, pair: tuple[str, str]) -> None:
        self.praised.append(pair)

    def used(self, address: str) -> None:
        self.sent.append(address)

    def worked(self, address: str, *, well: bool) -> None:
        self.verdicts.append((address, well))

    @property
    def call(self) -> Call:
        return self.p.calls[0]

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]

    async def until(self, condition: Callable[[], Any]) -> None:
        for _ in range(10_000):
            if condition():
                return
            await asyncio.sleep(0)
        raise AssertionError("it did not happen")

    async def settled(self) -> None:
        """When nothing more happens by itself."""
        for _ in range(20):
            await asyncio.sleep(0)

    async def started(self, **options: bool) -> Slot:
        await self.until(lambda: self.p.calls)
        self.call.start(**options)
        await self.until(lambda: self.d[0].slots)
        return self.d[0].slots[0]

    def check_ended(self) -> None:
        """Both sides have been told, once."""
        assert self.call.cancelled
        assert self.p.released == ["r.1"]
        assert all(slot.cancels == 1 for worker in self.d for slot in worker.slots)
        assert {s: n for s, n in self.handoffs.counts().items() if n} in (
            {HandoffState.RELEASED: 1},
            {HandoffState.LOST: 1},
        )


async def test_decode_is_admitted_when_prefill_starts_and_not_before() -> None:
    stage = Stage()
    await stage.until(lambda: stage.p.calls)
    stage.call.events.put_nowait(PrefillResponse(queued=PrefillQueued()))
    await stage.settled()
    assert stage.d[0].slots == []
    slot = await stage.started()
    assert slot.handoff.in_progress
    assert list(slot.request.output_token_ids) == []
    stage.call.first(7)
    stage.call.finish()
    await stage.until(lambda: stage.tokens == [7])
    slot.owner.prompt_ready(READY, None)
    await stage.until(lambda: stage.p.released)
    slot.owner.tokens([8], None, END)
    await stage.task
    assert stage.tokens == [7, 8]
    assert stage.praised == [("p", "d0")]
    assert stage.sent == ["p", "d0"]
    assert stage.verdicts == [("p", True), ("d0", True)]
    stage.check_ended()


@pytest.mark.parametrize("pieces", [[[8], [9]], [[8, 9]]], ids=["one by one", "all at once"])
async def test_what_decode_writes_before_the_first_token_waits_for_it(pieces: list[list[int]]) -> None:
    """O-09, O-10: joined by position, whatever comes first."""
    stage = Stage()
    slot = await stage.started()
    slot.owner.prompt_ready(READY, None)
    for piece in pieces:
        slot.owner.tokens(piece, None, END if piece is pieces[-1] else None)
    await stage.settled()
    assert stage.tokens == []
    assert not stage.task.done()
    stage.call.first(7)
    await stage.task
    assert stage.tokens == [7, 8, 9]
    assert stage.outputs[-1].finish == END
    stage.check_ended()


async def test_decode_is_not_held_up_by_prefills_late_end() -> None:
    """O-48."""
    stage = Stage()
    slot = await stage.started()
    stage.call.first(7)
    slot.owner.prompt_ready(READY, None)
    slot.owner.tokens([8], None, END)
    await stage.task
    assert stage.tokens == [7, 8]
    stage.check_ended()


@pytest.mark.parametrize("has_prompt", [False, True])
async def test_prefill_lost_before_its_first_token_fails_the_attempt_and_drops_what_was_kept(has_prompt: bool) -> None:
    stage = Stage()
    slot = await stage.started()
    if has_prompt:
        slot.owner.prompt_ready(READY, None)
    slot.owner.tokens([8], None, None)
    stage.call.breaks()
    with pytest.raises(TwostrokeError, match="gone"):
        await stage.task
    assert stage.tokens == []
    assert stage.progress.failed_on == {"p"}
    assert stage.verdicts == [("p", False)]
    stage.check_ended()
    assert stage.handoffs.counts()[HandoffState.RELEASED if has_prompt else HandoffState.LOST] == 1


@pytest.mark.parametrize("code", [grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE])
async def test_a_prompt_that_a_worker_gave_up_may_be_placed_again(code: grpc.StatusCode) -> None:
    """A worker that ends cancels its calls."""
    stage = Stage()
    await stage.started()
    stage.call.breaks(code)
    with pytest.raises(RETRYABLE):
        await stage.task
    assert stage.progress.failed_on == {"p"}
    stage.check_ended()


async def test_prefill_lost_after_its_first_token_leaves_the_verdict_to_decode() -> None:
    stage = Stage()
    slot = await stage.started()
    stage.call.first(7)
    stage.call.breaks()
    await stage.settled()
    assert not stage.task.done()
    slot.owner.prompt_ready(READY, None)
    slot.owner.tokens([8], None, END)
    await stage.task
    assert stage.tokens == [7, 8]
    stage.check_ended()


async def test_prefill_lost_with_chunks_that_never_come_fails_the_attempt() -> None:
    stage = Stage()
    slot = await stage.started()
    stage.call.first(7)
    stage.call.breaks()
    await stage.until(lambda: stage.tokens)
    slot.owner.failed(KvLostError("the source is dead"))
    with pytest.raises(KvLostError):
        await stage.task
    assert stage.progress.failed_on == {"p"}
    stage.check_ended()


@pytest.mark.parametrize("decode_fails", [False, True])
async def test_a_first_token_that_ends_the_answer_cancels_decode(decode_fails: bool) -> None:
    """O-32: that there was nothing to read is nobody's fault."""
    stage = Stage()
    slot = await stage.started()
    if decode_fails:
        slot.owner.failed(KvLostError("the offer was taken back"))
        await stage.settled()
    stage.call.first(7, Finish(reason=FINISH_REASON_STOP))
    stage.call.finish(handoff=False)
    await stage.task
    assert stage.tokens == [7]
    assert all(slot.cancels == 1 for slot in stage.d[0].slots)
    assert stage.blamed == []
    assert stage.p.released == [], "it holds nothing"
    assert not any(stage.handoffs.counts().values())


@pytest.mark.parametrize(
    ("error", "avoided"),
    [
        (OverloadedError("no room"), set()),
        (WorkerLostError("died"), {"d0"}),
        (KvCorruptError("wrong bytes"), set()),
        (KvLostError("no answer"), set()),
    ],
)
async def test_another_decode_worker_takes_the_same_handoff_while_prefill_computes(
    error: TwostrokeError, avoided: set[str]
) -> None:
    stage = Stage(decodes=2)
    slot = await stage.started()
    slot.owner.failed(error)
    await stage.until(lambda: stage.d[1].slots)
    other = stage.d[1].slots[0]
    assert other.handoff.in_progress
    assert stage.blamed == [], "prefill may be the one that failed"
    stage.call.first(7)
    stage.call.finish()
    await stage.until(lambda: stage.tokens)
    assert stage.blamed == ([("p", "d0")] if isinstance(error, KvCorruptError | KvLostError) else [])
    other.owner.prompt_ready(READY, None)
    other.owner.tokens([8], None, END)
    await stage.task
    assert stage.tokens == [7, 8]
    assert stage.progress.failed_on == avoided
    assert len(stage.p.calls) == 1
    stage.check_ended()


async def test_the_only_decode_worker_is_asked_again_when_it_has_reported() -> None:
    """Its room went to another router's request."""
    stage = Stage()
    (await stage.started()).owner.failed(OverloadedError("no room"))
    stage.call.first(7)
    stage.call.finish()
    await stage.settled()
    assert len(stage.d[0].slots) == 1, "not while nothing has changed"
    for number in (2, 3):
        stage.reported.set()
        await stage.settled()
        assert len(stage.d[0].slots) == number
        again = stage.d[0].slots[-1]
        assert again.handoff is not None
        assert not again.handoff.in_progress
        assert list(again.request.output_token_ids) == [7]
        if number == 2:
            again.owner.failed(OverloadedError("no room"))
            await stage.settled()
            assert len(stage.d[0].slots) == 2
    again.owner.prompt_ready(READY, None)
    again.owner.tokens([8], None, END)
    await stage.task
    assert stage.tokens == [7, 8]
    assert stage.progress.failed_on == set()
    stage.check_ended()


async def test_nobody_waits_for_ever_for_a_prefill_that_cannot_be_read() -> None:
    """O-33: a link error and a prefill that says nothing more."""
    stage = Stage(handoff_timeout_s=0.02)
    (await stage.started()).owner.failed(KvLostError("no KV came"))
    with pytest.raises(KvLostError, match="no KV came"):
        await stage.task
    assert stage.progress.failed_on == {"p"}
    stage.check_ended()


async def test_the_timeout_of_a_handoff_counts_from_the_end_of_prefill() -> None:
    stage = Stage(handoff_timeout_s=0.05)
    await stage.started()
    stage.call.first(7)
    await asyncio.wait({stage.task}, timeout=0.15)
    assert not stage.task.done(), "prefill may take as long as it takes"
    stage.call.finish()
    with pytest.raises(KvLostError, match="--handoff-timeout-s"):
        await stage.task
    assert len(stage.d[0].slots) == 2, "once more, with the whole prompt there"
    assert stage.blamed == [("p", "d0")] * 2
    stage.check_ended()


async def test_a_decode_worker_lost_in_mid_answer_ends_the_attempt() -> None:
    """The source has freed the KV by then."""
    stage = Stage(decodes=2)
    slot = await stage.started()
    stage.call.first(7)
    stage.call.finish()
    await stage.until(lambda: stage.tokens)
    slot.owner.prompt_ready(READY, None)
    slot.owner.tokens([8], None, None)
    slot.owner.failed(WorkerLostError("died"))
    with pytest.raises(WorkerLostError):
        await stage.task
    assert stage.progress.delivered == [7, 8]
    assert stage.progress.failed_on == {"d0"}
    assert stage.d[1].slots == []
    stage.check_ended()


async def test_a_later_attempt_continues_from_what_the_client_has() -> None:
    """O-59: the hand-off's token is not used, and decode need not wait for it."""
    stage = Stage(delivered=[7, 8])
    slot = await stage.started()
    asked = stage.call.request.request
    assert (asked.sampling.max_tokens, asked.sampling.ignore_eos) == (2, True)
    assert list(slot.request.output_token_ids) == [7, 8]
    slot.owner.prompt_ready(READY, None)
    slot.owner.tokens([9], None, None)
    stage.call.first(99)
    stage.call.finish()
    slot.owner.tokens([10], None, END)
    await stage.task
    assert stage.tokens == [9, 10]
    stage.check_ended()


async def test_an_engine_without_early_offers_is_handed_over_when_it_is_done() -> None:
    stage = Stage()
    await stage.until(lambda: stage.p.calls)
    stage.call.start(early=False)
    stage.call.first(7)
    await stage.until(lambda: stage.tokens)
    assert stage.d[0].slots == []
    stage.call.finish()
    await stage.until(lambda: stage.d[0].slots)
    slot = stage.d[0].slots[0]
    assert list(slot.request.output_token_ids) == [7]
    slot.owner.prompt_ready(READY, None)
    slot.owner.tokens([8], None, END)
    await stage.task
    assert stage.tokens == [7, 8]
    stage.check_ended()


PHASES = ("queued", "receiving", "first token", "finished", "decoding")


@pytest.mark.parametrize("phase", PHASES)
async def test_cancel_tells_both_sides_once_in_every_phase(phase: str) -> None:
    """O-63, O-84."""
    stage = Stage()
    await stage.until(lambda: stage.p.calls)
    reached = PHASES.index(phase)
    if reached >= 1:
        slot = await stage.started()
    if reached >= 2:
        stage.call.first(7)
        await stage.until(lambda: stage.tokens)
    if reached >= 3:
        stage.call.finish()
        for _ in range(5):
            await asyncio.sleep(0)
    if reached >= 4:
        slot.owner.prompt_ready(READY, None)
        slot.owner.tokens([8], None, None)
    stage.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stage.task
    assert len(stage.d[0].slots) == (reached > 0)
    stage.check_ended()


async def test_the_chunks_of_a_plan_go_to_whoever_computes_the_prompt() -> None:
    stage = Stage(chunk_tokens=64)
    slot = await stage.started()
    assert stage.call.request.chunk_tokens == 64
    assert slot.chunk_tokens == 0
    stage.call.first(7, END)
    stage.call.finish(handoff=False)
    await stage.task


async def test_one_worker_alone_is_told_the_chunks_and_counted_until_the_prompt_is_read() -> None:
    """Its blocks are promised until then: a prompt that waits on its worker has none."""
    stage = Stage(chunk_tokens=64)
    stage.task.cancel()
    await asyncio.gather(stage.task, return_exceptions=True)
    facts = WorkerSnapshot("d0", False, True, free_blocks=99, total_blocks=99, block_size_tokens=16)
    stage.inflight.describe(facts)
    stage.progress.ticket = "t"
    stage.inflight.placed("t", stage.progress.placement(), Plan(None, "d0"), 0.0)
    task = asyncio.create_task(stage.attempt.alone(cast(Member, stage.d[0])))
    await stage.until(lambda: stage.d[0].slots)
    (slot,) = stage.d[0].slots
    assert (slot.handoff, slot.chunk_tokens) == (None, 64)
    stage.inflight.reported("d0", Report(0, 0, 0, 0), asyncio.get_running_loop().time() + 60)
    (seen,) = stage.inflight.snapshots(["d0"])
    assert (seen.pending_prompts, seen.free_blocks) == (1, 99 - 9)
    slot.owner.prompt_ready(PromptStats(prompt_tokens=9, computed_tokens=9), None)
    slot.owner.tokens([7], None, END)
    await task
    stage.inflight.reported("d0", Report(0, 0, 1, 1), asyncio.get_running_loop().time() + 60)
    (seen,) = stage.inflight.snapshots(["d0"])
    assert (seen.pending_prompts, seen.free_blocks) == (0, 99 - 1 - 7)
    assert stage.tokens == [7]
    assert stage.progress.trail.prefill_worker_id == stage.progress.trail.decode_worker_id == "d0"


async def test_one_request_that_fails_again_and_again_counts_once_against_its_worker() -> None:
    stage = Stage()
    (await stage.started()).owner.failed(WorkerLostError("this request kills it"))
    stage.call.first(7)
    stage.call.finish()
    await stage.until(lambda: len(stage.d[0].slots) == 2)
    stage.d[0].slots[1].owner.failed(WorkerLostError("this request kills it"))
    with pytest.raises(WorkerLostError, match="this request"):
        await stage.task
    assert [verdict for verdict in stage.verdicts if verdict[0] == "d0"] == [("d0", False)]
