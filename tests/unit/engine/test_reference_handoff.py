"""A hand-off is read whole and right, or its request fails alone; whatever ends it, its blocks come back."""

import asyncio

import pytest

from twostroke.engine.base import Stroke
from twostroke.engine.reference_model import block_words, expected_tokens
from twostroke.errors import EngineError, KvCorruptError, KvLostError, LayoutMismatchError
from twostroke.kv.shm import PeerSegment, Segment
from twostroke.v1.engine_pb2 import SamplingParams
from twostroke.v1.kv_pb2 import Handoff
from unit.engine.reference_rig import Rig, answer, finish, load_of, prompt_of, request

PROMPT = prompt_of(48)
FULL = expected_tokens(PROMPT, count=8)


async def split(rig, prefill, decode, edit=lambda handoff: None):
    """One request over two engines; edit changes its hand-off or the world before decode fetches."""
    first = await answer(prefill, request("r", PROMPT), Stroke.PREFILL)
    edit(first.handoff)
    return await answer(decode, request("r", PROMPT, output_token_ids=first.tokens), Stroke.DECODE, first.handoff)


def words(rig, handoff):
    """The source's blocks, through an attachment of our own."""
    return PeerSegment.attach(
        handoff.shm.segment, epoch=handoff.source_epoch, block_words=block_words(16), folder=rig.folder
    )


def older_generation(rig, handoff):
    handoff.shm.hold_generation -= 1


def other_epoch(rig, handoff):
    handoff.source_epoch = "another"


def other_segment(rig, handoff):
    handoff.shm.segment = handoff.shm.segment[:-8] + "00000000"


def unknown_block(rig, handoff):
    handoff.shm.block_ids[1] = 100000


def block_taken_again(rig, handoff):
    peer = words(rig, handoff)
    peer.generations[handoff.shm.block_ids[1]] = handoff.shm.hold_generation + 1
    peer.close()


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (older_generation, r"the hold of generation \d+ in segment \S+ is over"),
        (other_epoch, "belongs to another epoch"),
        (other_segment, "is gone"),
        (unknown_block, "has 256 blocks"),
        (block_taken_again, r"block 1 \(\d+ of segment \S+\) was taken again: generation"),
    ],
)
async def test_kv_that_is_not_there_any_more_fails_one_request(tmp_path, edit, reason):
    async with Rig(tmp_path) as rig:
        prefill, decode = await rig.start("p"), await rig.start("d")
        await decode.admit(request("other", prompt_of(10), SamplingParams(max_tokens=30)), Stroke.WHOLE)
        await decode.next_step()
        first = await answer(prefill, request("r", PROMPT), Stroke.PREFILL)
        edit(rig, first.handoff)
        await decode.admit(request("r", PROMPT, output_token_ids=first.tokens), Stroke.DECODE, first.handoff)
        failed = [output for output in (await decode.next_step()).outputs if output.request_id == "r"]
        outputs = []
        while not any(output.done for output in outputs):
            outputs += (await decode.next_step()).outputs
    assert len(failed) == 1
    assert isinstance(failed[0].failure, KvLostError)
    assert failed[0].done
    assert failed[0].token_ids == ()
    with pytest.raises(KvLostError, match=reason):
        raise failed[0].failure
    assert {output.request_id for output in outputs} == {"other"}


async def test_a_source_that_closed_has_lost_its_kv(tmp_path):
    async with Rig(tmp_path) as rig:
        prefill, decode = await rig.start("p"), await rig.start("d")
        first = await answer(prefill, request("r", PROMPT), Stroke.PREFILL)
        await prefill.close()
        result = await answer(decode, request("r", PROMPT), Stroke.DECODE, first.handoff)
        load = await load_of(decode)
    assert isinstance(result.failure, KvLostError)
    assert (load.used_blocks, load.kv_received_handoffs) == (0, 0)


async def test_blocks_of_another_size_do_not_fit(tmp_path):
    async with Rig(tmp_path) as rig:
        prefill, decode = await rig.start("p", block_size_tokens=48), await rig.start("d")

        def claim_three(handoff: Handoff):
            handoff.shm.block_ids.extend([1, 2])

        result = await split(rig, prefill, decode, claim_three)
    assert isinstance(result.failure, LayoutMismatchError)


def flip(rig, block, word):
    def edit(handoff):
        peer = words(rig, handoff)
        peer.words[handoff.shm.block_ids[block], word] ^= 1 << 40
        peer.close()

    return edit


async def test_a_corrupt_block_is_named(tmp_path):
    async with Rig(tmp_path) as rig:
        prefill, decode = await rig.start("p"), await rig.start("d")
        # Words of a block: layer, K or V, token. 53 = 1 * 32 + 1 * 16 + 5.
        result = await split(rig, prefill, decode, flip(rig, 2, 53))
        load = await load_of(prefill)
    assert isinstance(result.failure, KvCorruptError)
    assert "block 2 (" in result.failure.message
    assert "at layer 1, position 37, V" in result.failure.message
    assert result.tokens == []
    assert load.held_handoffs == 1, "whoever repairs this may still want to read it"


@pytest.mark.parametrize("block", [0, 1, 2])
async def test_without_verification_a_corrupt_block_shows_in_the_tokens(tmp_path, block):
    async with Rig(tmp_path) as rig:
        prefill, decode = await rig.start("p"), await rig.start("d", verify=False)
        right = await split(rig, prefill, decode)
        other = await rig.start("e", verify=False)
        wrong = await split(rig, prefill, other, flip(rig, block, 53))
    assert FULL[1:] == right.tokens
    assert wrong.failure is None
    assert wrong.tokens[0] != FULL[1]


async def test_without_verification_blocks_in_the_wrong_order_show_too(tmp_path):
    async with Rig(tmp_path) as rig:
        prefill, decode = await rig.start("p"), await rig.start("d", verify=False)

        def swap(handoff):
            ids = list(handoff.shm.block_ids)
            handoff.shm.block_ids[:] = [ids[1], ids[0], ids[2]]

        wrong = await split(rig, prefill, decode, swap)
    assert wrong.tokens[0] != FULL[1]


async def test_a_handoff_is_read_once(tmp_path):
    async with Rig(tmp_path) as rig:
        prefill, decode = await rig.start("p"), await rig.start("d")
        first = await answer(prefill, request("r", PROMPT), Stroke.PREFILL)
        assert (await answer(decode, request("r", PROMPT), Stroke.DECODE, first.handoff)).tokens == FULL
        await prefill.next_step()
        again = await answer(decode, request("s", prompt_of(48)), Stroke.DECODE, first.handoff)
    assert isinstance(again.failure, KvLostError)


async def test_holds_share_a_cached_prefix(tmp_path):
    async with Rig(tmp_path) as rig:
        prefill, decode = await rig.start("p"), await rig.start("d")
        first = await answer(prefill, request("a", PROMPT), Stroke.PREFILL)
        second = await answer(prefill, request("b", PROMPT), Stroke.PREFILL)
        assert await prefill.release(["a"]) == 1
        result = await answer(decode, request("b", PROMPT), Stroke.DECODE, second.handoff)
        lost = await answer(decode, request("a", prompt_of(48)), Stroke.DECODE, first.handoff)
    assert second.prompt.cached_tokens == 32
    assert set(first.handoff.shm.block_ids[:2]) == set(second.handoff.shm.block_ids[:2])
    assert result.tokens == FULL
    assert isinstance(lost.failure, KvLostError)


async def test_a_lease_ends_also_while_nothing_runs(tmp_path):
    async with Rig(tmp_path) as rig:
        engine = await rig.start(kv_lease_s=30)
        first = await answer(engine, request("r", PROMPT), Stroke.PREFILL)
        waiting = asyncio.create_task(engine.next_step())
        rig.now_s += 29.9
        done, _ = await asyncio.wait({waiting}, timeout=0.1)
        assert not done
        rig.now_s += 0.2
        step = await waiting
        decode = await rig.start("d")
        late = await answer(decode, request("r", PROMPT), Stroke.DECODE, first.handoff)
    assert step.outputs == []
    assert (step.load.held_handoffs, step.load.used_blocks) == (0, 0)
    assert isinstance(late.failure, KvLostError)


async def test_release_frees_what_it_names(tmp_path):
    async with Rig(tmp_path) as rig:
        engine = await rig.start()
        for request_id in ("a", "b"):
            await answer(engine, request(request_id, prompt_of(20, seed=ord(request_id))), Stroke.PREFILL)
        assert await engine.release(["a", "unknown"]) == 1
        assert await engine.release(["a"]) == 0
        step = await engine.next_step()
    assert (step.load.held_handoffs, step.load.used_blocks) == (1, 2)


@pytest.mark.parametrize("steps", range(7))
@pytest.mark.parametrize("stroke", list(Stroke))
async def test_cancel_frees_everything_in_every_phase(tmp_path, stroke, steps):
    async with Rig(tmp_path) as rig:
        prefill, engine = await rig.start("p"), await rig.start("d", step_budget_tokens=20)
        handoff = None
        if stroke is Stroke.DECODE:
            handoff = (await answer(prefill, request("r", PROMPT), Stroke.PREFILL)).handoff
        await engine.admit(request("r", PROMPT, SamplingParams(max_tokens=30)), stroke, handoff)
        for _ in range(steps):
            if stroke is Stroke.PREFILL and steps > 4:
                break
            await engine.next_step()
        await engine.cancel(["r", "unknown"])
        # An output of the cancelled request would be a KeyError in here.
        load = await load_of(engine)
    assert load.used_blocks == load.held_handoffs == load.running_requests == load.waiting_requests == 0
    assert load.pending_prompt_tokens == 0


async def test_cancel_in_the_middle_of_a_step_keeps_the_request_silent(tmp_path):
    async with Rig(tmp_path) as rig:
        gate, entered = asyncio.Event(), asyncio.Event()

        async def sleep(_: float) -> None:
            entered.set()
            await gate.wait()

        rig.sleep = sleep
        engine = await rig.start()
        for request_id in ("gone", "stays"):
            await engine.admit(request(request_id, PROMPT, SamplingParams(max_tokens=2)), Stroke.WHOLE)
        stepping = asyncio.create_task(engine.next_step())
        await entered.wait()
        await engine.cancel(["gone"])
        gate.set()
        step = await stepping
    assert [output.request_id for output in step.outputs] == ["stays"]
    assert list(step.outputs[0].token_ids) == FULL[:1]
    assert step.load.used_blocks == 3


@pytest.mark.parametrize("stroke", [Stroke.WHOLE, Stroke.DECODE])
async def test_cancelling_next_step_loses_no_step(tmp_path, stroke):
    async with Rig(tmp_path) as rig:
        instant, entered = rig.sleep, asyncio.Event()

        async def stuck(_: float) -> None:
            entered.set()
            await asyncio.Event().wait()

        handoff = None
        if stroke is Stroke.DECODE:
            handoff = (await answer(await rig.start("p"), request("r", PROMPT), Stroke.PREFILL)).handoff
        rig.sleep = lambda duration_s: rig.sleeper(duration_s)
        rig.sleeper = stuck
        engine = await rig.start("d")
        await engine.admit(request("r", PROMPT), stroke, handoff)
        for _ in range(3):
            entered.clear()
            stepping = asyncio.create_task(engine.next_step())
            await entered.wait()
            stepping.cancel()
            with pytest.raises(asyncio.CancelledError):
                await stepping
        rig.sleeper = instant
        answers, load = await finish(engine, "r")
    assert answers["r"].tokens == FULL
    assert load.steps == 8


async def test_closing_wakes_next_step_and_removes_the_segment(tmp_path):
    async with Rig(tmp_path) as rig:
        engine = await rig.start()
        assert len(list(tmp_path.iterdir())) == 1
        stepping = asyncio.create_task(engine.next_step())
        await asyncio.sleep(0)
        await engine.close()
        await engine.close()
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(EngineError, match="closed"):
            await stepping
        with pytest.raises(EngineError, match="closed"):
            await engine.admit(request("r", PROMPT), Stroke.WHOLE)
        await engine.cancel(["r"])
        assert await engine.release(["r"]) == 0


async def test_a_segment_belongs_to_its_engine(tmp_path):
    stale = Segment.create(epoch="x", blocks=1, block_words=4, folder=tmp_path)
    live = Segment.create(epoch="y", blocks=1, block_words=4, folder=tmp_path)
    path = tmp_path / stale.name
    content = path.read_bytes()
    stale.close()
    path.write_bytes(content)  # as if its owner had been killed
    async with Rig(tmp_path) as rig:
        await rig.start()
        assert not path.exists(), "a dead engine's segment goes when the next engine starts"
        assert (tmp_path / live.name).exists()
        live.close()
