"""A prompt's KV is fetched while it is computed: all of it in the end, or the request fails alone and nothing stays."""

import asyncio
import json

import pytest

from twostroke.engine.base import EngineOutput, Stroke
from twostroke.engine.reference import ReferenceEngine
from twostroke.engine.reference_model import block_words, expected_tokens
from twostroke.errors import KvCorruptError, KvLostError, LayoutMismatchError, WorkerLostError
from twostroke.kv.shm import PeerSegment
from twostroke.v1.engine_pb2 import EngineRequest, SamplingParams
from twostroke.v1.kv_pb2 import Handoff, KvEndpoint
from unit.engine.reference_rig import Answer, Rig, answer, finish, load_of, prompt_of, request

PROMPT = prompt_of(100)
FULL = expected_tokens(PROMPT, count=8)
CHUNKED = {"step_budget_tokens": 32}
BLOCK_BYTES = 512


async def begin(prefill: ReferenceEngine, message: EngineRequest) -> Handoff:
    """The hand-off that is offered before anything is computed."""
    await prefill.admit(message, Stroke.PREFILL)
    started = (await prefill.next_step()).outputs[0]
    assert started.started
    assert started.handoff is not None
    assert started.handoff.in_progress
    return started.handoff


async def until_received(decode: ReferenceEngine, blocks: int) -> list[EngineOutput]:
    """Steps until so many blocks have arrived since the start."""
    outputs: list[EngineOutput] = []
    while True:
        step = await decode.next_step()
        outputs += step.outputs
        if step.load.kv_received_bytes >= blocks * BLOCK_BYTES:
            assert step.load.kv_received_bytes == blocks * BLOCK_BYTES
            return outputs


async def test_blocks_are_read_as_they_are_written(tmp_path):
    async with Rig(tmp_path) as rig:
        prefill, decode = await rig.start("p", **CHUNKED), await rig.start("d")
        handoff = await begin(prefill, request("r", PROMPT))
        await decode.admit(request("r", PROMPT), Stroke.DECODE, handoff)
        load = (await decode.next_step()).load
        assert (load.used_blocks, load.waiting_requests, load.running_requests) == (7, 1, 0)
        assert load.kv_received_bytes == 0
        for blocks in (2, 4, 6):
            assert (await prefill.next_step()).outputs == []
            assert await until_received(decode, blocks) == []
        last = (await prefill.next_step()).outputs[0]
        answers, load = await finish(decode, "r")
        after = await load_of(prefill)
    result = answers["r"]
    assert list(last.token_ids) == FULL[:1]
    assert last.handoff is not None
    assert not last.handoff.in_progress
    assert result.tokens == FULL[1:], "the first token is prefill's to report"
    assert (result.prompt.transferred_tokens, result.prompt.cached_tokens, result.prompt.computed_tokens) == (100, 0, 0)
    assert (load.kv_received_handoffs, load.kv_received_bytes) == (1, 7 * BLOCK_BYTES)
    assert (after.held_handoffs, after.held_blocks, after.used_blocks) == (0, 0, 0), "the reader's word freed it"


async def test_tokens_that_are_there_already_count_instead_of_prefills_first(tmp_path):
    """O-09, O-10: what was delivered is neither lost nor repeated."""
    async with Rig(tmp_path) as rig:
        prefill, decode = await rig.start("p", **CHUNKED), await rig.start("d")
        bare = request("r", PROMPT, SamplingParams(max_tokens=2, ignore_eos=True))
        handoff = await begin(prefill, bare)
        await decode.admit(request("r", PROMPT, output_token_ids=FULL[:3]), Stroke.DECODE, handoff)
        await finish(prefill, "r")
        result = (await finish(decode, "r"))[0]["r"]
    assert result.tokens == FULL[3:]


async def test_the_forced_token_counts_for_limits_and_penalties(tmp_path):
    """O-11: decode stands as if it had chosen the first token itself."""
    sampling = SamplingParams(max_tokens=3, presence_penalty=2.0, frequency_penalty=1.0)
    async with Rig(tmp_path) as rig:
        prefill, decode = await rig.start("p"), await rig.start("d")
        handoff = await begin(prefill, request("r", PROMPT, sampling))
        await decode.admit(request("r", PROMPT, sampling), Stroke.DECODE, handoff)
        first = (await finish(prefill, "r"))[0]["r"]
        second = (await finish(decode, "r"))[0]["r"]
    assert first.tokens + second.tokens == expected_tokens(PROMPT, sampling, 3)
    assert second.finish is not None


async def test_what_prefill_had_cached_can_be_read_at_once(tmp_path):
    async with Rig(tmp_path) as rig:
        prefill, decode = await rig.start("p"), await rig.start("d")
        await answer(prefill, request("before", PROMPT[:64], SamplingParams(max_tokens=1)))
        handoff = await begin(prefill, request("r", PROMPT))
        await decode.admit(request("r", PROMPT), Stroke.DECODE, handoff)
        assert await until_received(decode, 4) == []


async def test_a_warm_decode_worker_reads_exactly_the_blocks_that_it_lacks(tmp_path):
    """O-05: the last missing ones, in order."""
    async with Rig(tmp_path) as rig:
        prefill, decode = await rig.start("p", **CHUNKED), await rig.start("d")
        await answer(decode, request("before", PROMPT[:64], SamplingParams(max_tokens=1)))
        handoff = await begin(prefill, request("r", PROMPT))
        await decode.admit(request("r", PROMPT), Stroke.DECODE, handoff)
        await finish(prefill, "r")
        answers, load = await finish(decode, "r")
    assert answers["r"].tokens == FULL[1:]
    assert answers["r"].prompt.cached_tokens == 64
    assert load.kv_received_bytes == 3 * BLOCK_BYTES


async def test_a_full_prefix_hit_still_frees_prefill(tmp_path):
    """O-27: decode reads nothing, and says so."""
    prompt = prompt_of(64)
    async with Rig(tmp_path) as rig:
        prefill, decode = await rig.start("p"), await rig.start("d")
        await answer(decode, request("before", [*prompt, 1], SamplingParams(max_tokens=1)))
        handoff = await begin(prefill, request("r", prompt))
        await decode.admit(request("r", prompt), Stroke.DECODE, handoff)
        await finish(prefill, "r")
        answers, load = await finish(decode, "r")
        held = (await load_of(prefill)).held_handoffs
    assert answers["r"].tokens == expected_tokens(prompt, count=8)[1:]
    assert (load.kv_received_bytes, load.kv_received_handoffs, held) == (0, 1, 0)


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_a_prompt_that_ends_with_its_first_token_is_not_offered(tmp_path, max_tokens):
    async with Rig(tmp_path) as rig:
        prefill = await rig.start("p")
        await prefill.admit(request("r", PROMPT, SamplingParams(max_tokens=max_tokens)), Stroke.PREFILL)
        started = (await prefill.next_step()).outputs[0]
    assert (started.handoff is None) is (max_tokens == 1)


async def test_an_end_of_text_as_first_token_takes_the_offer_back(tmp_path):
    """O-32: decode never waits for KV that nobody will offer."""
    sampling = SamplingParams(eos_token_id=FULL[0], max_tokens=50)
    async with Rig(tmp_path) as rig:
        prefill, decode = await rig.start("p", **CHUNKED), await rig.start("d")
        handoff = await begin(prefill, request("r", PROMPT, sampling))
        await decode.admit(request("r", PROMPT, sampling), Stroke.DECODE, handoff)
        ended = (await finish(prefill, "r"))[0]["r"]
        result = (await finish(decode, "r"))[0]["r"]
        loads = [await load_of(engine) for engine in (prefill, decode)]
    assert ended.finish is not None
    assert ended.tokens == FULL[:1]
    assert isinstance(result.failure, KvLostError)
    assert [(load.used_blocks, load.held_handoffs) for load in loads] == [(0, 0), (0, 0)]


async def cancel_source(rig: Rig, prefill: ReferenceEngine, handoff: Handoff) -> None:
    await prefill.cancel(["r"])


async def close_source(rig: Rig, prefill: ReferenceEngine, handoff: Handoff) -> None:
    await prefill.close()


async def stall_source(rig: Rig, prefill: ReferenceEngine, handoff: Handoff) -> None:
    rig.now_s += 10


async def take_a_block_again(rig: Rig, prefill: ReferenceEngine, handoff: Handoff) -> None:
    peer = PeerSegment.attach(
        handoff.shm.segment, epoch=handoff.source_epoch, block_words=block_words(16), folder=rig.folder
    )
    peer.generations[handoff.shm.block_ids[0]] = handoff.shm.hold_generation + 1
    peer.close()


@pytest.mark.parametrize(
    ("happens", "reason"),
    [
        (cancel_source, "is over"),
        (close_source, "is dead"),
        (stall_source, r"no KV of hand-off r came from p for 10.0 s; 2 of 7 blocks had arrived \(--kv-stall-s\)"),
        (take_a_block_again, "was taken again"),
    ],
)
async def test_a_source_that_ceases_fails_the_request_and_only_that(tmp_path, happens, reason):
    """O-26, O-33, O-41: no wait without an end, and nothing that others notice."""
    async with Rig(tmp_path) as rig:
        prefill, decode = await rig.start("p", **CHUNKED), await rig.start("d")
        other = request("other", prompt_of(10), SamplingParams(max_tokens=40))
        await decode.admit(other, Stroke.WHOLE)
        handoff = await begin(prefill, request("r", PROMPT))
        await decode.admit(request("r", PROMPT), Stroke.DECODE, handoff)
        await prefill.next_step()
        await until_received(decode, 2)
        await happens(rig, prefill, handoff)
        answers, load = {"r": Answer(), "other": Answer()}, None
        while not all(each.outputs and each.outputs[-1].done for each in answers.values()):
            step = await decode.next_step()
            for output in step.outputs:
                answers[output.request_id].add(output)
            load = step.load
    assert isinstance(answers["r"].failure, KvLostError)
    with pytest.raises(KvLostError, match=reason):
        raise answers["r"].failure
    assert answers["r"].tokens == []
    assert answers["other"].failure is None
    assert (load.used_blocks, load.waiting_requests) == (0, 0)


async def test_a_preempted_prompt_is_offered_anew_when_it_is_done(tmp_path):
    """O-15: what decode was reading is over before its blocks are taken again."""
    async with Rig(tmp_path) as rig:
        source, decode = await rig.start("p", reference_blocks=10, step_budget_tokens=17), await rig.start("d")
        grows = request("grows", prompt_of(44, seed=1), SamplingParams(max_tokens=20), priority=-1)
        await source.admit(grows, Stroke.WHOLE)
        for _ in range(3):
            await source.next_step()
        handoff = await begin(source, request("r", PROMPT))
        await decode.admit(request("r", PROMPT), Stroke.DECODE, handoff)
        answers, offers = {"r": Answer(), "grows": Answer()}, []
        while not (answers["r"].outputs and answers["r"].outputs[-1].done):
            for output in (await source.next_step()).outputs:
                answers[output.request_id].add(output)
                offers += [output.handoff] if output.handoff else []
        lost = (await finish(decode, "r"))[0]["r"]
        message = request("r", PROMPT, output_token_ids=answers["r"].tokens)
        again = await answer(decode, message, Stroke.DECODE, offers[0])
    assert isinstance(lost.failure, KvLostError)
    assert [offer.in_progress for offer in offers] == [False]
    assert offers[0].shm.hold_generation != handoff.shm.hold_generation
    assert answers["r"].tokens + again.tokens == FULL


@pytest.mark.parametrize("blocks", [[0], [3], [5], [1, 4]])
async def test_a_block_that_did_not_arrive_is_never_decoded_over(tmp_path, blocks):
    """O-02: the failed block is named; the first token is right all the same."""
    prompt = prompt_of(6 * 16)
    plan = [{"at_request": 1, "fault": "corrupt", "block": block, "byte": 40} for block in blocks]
    async with Rig(tmp_path) as rig:
        prefill = await rig.start("p", step_budget_tokens=32, reference_faults=json.dumps(plan))
        decode = await rig.start("d")
        handoff = await begin(prefill, request("r", prompt))
        for _ in range(2):
            await prefill.next_step()
        await decode.admit(request("r", prompt), Stroke.DECODE, handoff)
        read_bytes = (await decode.next_step()).load.kv_received_bytes
        first = (await finish(prefill, "r"))[0]["r"]
        result = (await finish(decode, "r"))[0]["r"]
        load = await load_of(decode)
        clean = await begin(prefill, request("s", prompt))
        await decode.admit(request("s", prompt), Stroke.DECODE, clean)
        await finish(prefill, "s")
        again = (await finish(decode, "s"))[0]["s"]
    full = expected_tokens(prompt, count=8)
    assert read_bytes == min(4, blocks[0]) * BLOCK_BYTES
    assert first.tokens == full[:1]
    assert isinstance(result.failure, KvCorruptError)
    assert f"block {blocks[0]} (" in result.failure.message
    assert (result.tokens, load.used_blocks) == ([], 0)
    assert again.tokens == full[1:], "nothing of the bad block is left on either side"


@pytest.mark.parametrize("blocks", [0, 2, 4])
async def test_another_decode_worker_takes_over_in_mid_prefill(tmp_path, blocks):
    async with Rig(tmp_path) as rig:
        prefill, gone = await rig.start("p", **CHUNKED), await rig.start("d")
        handoff = await begin(prefill, request("r", PROMPT))
        await gone.admit(request("r", PROMPT), Stroke.DECODE, handoff)
        for _ in range(blocks // 2):
            await prefill.next_step()
        if blocks:
            await until_received(gone, blocks)
        await gone.cancel(["r"])
        load = await load_of(gone)
        other = await rig.start("e")
        await other.admit(request("r", PROMPT), Stroke.DECODE, handoff)
        await finish(prefill, "r")
        result = (await finish(other, "r"))[0]["r"]
    assert (load.used_blocks, load.waiting_requests) == (0, 0)
    assert result.tokens == FULL[1:]


async def test_an_ended_epoch_fails_what_waits_for_its_kv(tmp_path):
    """O-79: other epochs, and other workers, are left alone."""
    async with Rig(tmp_path) as rig:
        dies, lives, decode = await rig.start("p"), await rig.start("q"), await rig.start("d")
        for source in (dies, lives):
            name = "r" if source is dies else "s"
            await decode.admit(request(name, PROMPT), Stroke.DECODE, await begin(source, request(name, PROMPT)))
        await decode.drop_peer("p", "an earlier epoch")
        assert (await decode.next_step()).outputs == []
        await decode.drop_peer("p", "epoch-of-p")
        failures = (await decode.next_step()).outputs
        await finish(lives, "s")
        answers, load = await finish(decode, "s")
    assert [(output.request_id, type(output.failure), output.done) for output in failures] == [("r", KvLostError, True)]
    assert answers["s"].tokens == FULL[1:]
    assert load.used_blocks == 0


async def test_what_is_fetched_takes_no_place_from_what_runs(tmp_path):
    """O-49: long prompts that are still being computed elsewhere do not keep short answers waiting."""
    async with Rig(tmp_path) as rig:
        decode = await rig.start("d", max_sequences=1)
        for name in ("r0", "r1", "r2"):
            source = await rig.start(f"of-{name}")
            await decode.admit(request(name, PROMPT), Stroke.DECODE, await begin(source, request(name, PROMPT)))
        short = await answer(decode, request("short", prompt_of(5)))
    assert short.tokens == expected_tokens(prompt_of(5), count=8)


async def test_a_prompt_that_arrived_and_waits_for_its_turn_is_aborted_without_a_trace(tmp_path):
    """O-29: a hundred times."""
    async with Rig(tmp_path) as rig:
        prefill, decode = await rig.start("p"), await rig.start("d", max_sequences=1)
        await decode.admit(request("runs", prompt_of(5), SamplingParams(max_tokens=2000)), Stroke.WHOLE)
        await decode.next_step()
        for index in range(100):
            message = request(f"r{index}", prompt_of(40, seed=index))
            await decode.admit(message, Stroke.DECODE, await begin(prefill, message))
            await finish(prefill, message.request_id)
            while (step := await decode.next_step()).load.kv_received_handoffs == index:
                pass
            assert (step.load.waiting_requests, step.load.running_requests) == (1, 1)
            await decode.cancel([message.request_id])
        await decode.cancel(["runs"])
        loads = [await load_of(engine) for engine in (prefill, decode)]
    assert [(load.used_blocks, load.waiting_requests, load.held_blocks) for load in loads] == [(0, 0, 0)] * 2


async def test_leases_that_end_while_their_requests_are_cancelled_are_no_error(tmp_path):
    """O-31: twenty in one tick, in either order."""
    async with Rig(tmp_path) as rig:
        prefill = await rig.start("p", kv_lease_s=1)
        names = [f"r{index}" for index in range(20)]
        for index, name in enumerate(names):
            await answer(prefill, request(name, prompt_of(20, seed=index)), Stroke.PREFILL)
        rig.now_s += 1
        await prefill.cancel(names[:10])
        step = await prefill.next_step()
        assert await prefill.release(names) == 0
        await prefill.cancel(names)
        load = await load_of(prefill)
    assert (step.load.held_handoffs, step.load.held_blocks, load.used_blocks) == (0, 0, 0)


async def test_eight_prompts_that_arrive_together_in_a_tiny_pool_all_get_their_answers(tmp_path):
    """O-40: KV that arrived and no block for the next step is a wait, not the end."""
    prompts = {f"r{index}": prompt_of(32, seed=index) for index in range(8)}
    sampling = SamplingParams(max_tokens=40)
    async with Rig(tmp_path) as rig:
        prefill = await rig.start("p", step_budget_tokens=512)
        decode = await rig.start("d", reference_blocks=17, max_model_len_tokens=100)
        for name, prompt in prompts.items():
            await prefill.admit(request(name, prompt, sampling), Stroke.PREFILL)
        offers = {output.request_id: output.handoff for output in (await prefill.next_step()).outputs}
        for name, prompt in prompts.items():
            await decode.admit(request(name, prompt, sampling), Stroke.DECODE, offers[name])
        firsts, _ = await finish(prefill, *prompts)
        answers, load = await finish(decode, *prompts)
    for name, prompt in prompts.items():
        assert firsts[name].tokens + answers[name].tokens == expected_tokens(prompt, sampling, 40)
    assert load.used_blocks == 0


@pytest.mark.parametrize("steps", range(6))
async def test_cancel_on_both_sides_frees_everything_at_any_moment(tmp_path, steps):
    """O-28, O-29, O-30, O-31: free blocks return to the start, and to be told twice is no error."""
    async with Rig(tmp_path) as rig:
        prefill, decode = await rig.start("p", **CHUNKED), await rig.start("d")
        for _ in range(20):
            handoff = await begin(prefill, request("r", PROMPT))
            await decode.admit(request("r", PROMPT), Stroke.DECODE, handoff)
            for _ in range(steps):
                for engine in (prefill, decode):
                    stepping = asyncio.create_task(engine.next_step())
                    await asyncio.wait({stepping}, timeout=0.005)
                    stepping.cancel()
                    await asyncio.gather(stepping, return_exceptions=True)
            for engine in (decode, prefill, prefill, decode):
                await engine.cancel(["r"])
        loads = [await load_of(engine) for engine in (prefill, decode)]
    for load in loads:
        assert (load.used_blocks, load.held_handoffs, load.running_requests, load.waiting_requests) == (0, 0, 0, 0)


async def test_a_probe_reads_the_pattern_and_measures(tmp_path):
    async with Rig(tmp_path) as rig:
        prefill, decode = rig.new("p"), await rig.start("d")
        info = await prefill.start()
        report = await decode.probe("p", "epoch-of-p", info.kv_endpoint)
        with pytest.raises(KvCorruptError, match="pattern"):
            await decode.probe("p", "another epoch", info.kv_endpoint)
        with pytest.raises(LayoutMismatchError):
            await (await rig.start("e", block_size_tokens=32)).probe("p", "epoch-of-p", info.kv_endpoint)
        await prefill.close()
        with pytest.raises(WorkerLostError, match="is gone"):
            await decode.probe("p", "epoch-of-p", info.kv_endpoint)
    assert report.lanes == ("shm/mmap",)
    assert not report.rdma
    assert report.bytes_per_s > 1e6
    assert 0 < report.latency_ms < 100


async def test_a_cut_link_fails_probes_and_handoffs_of_that_worker_only(tmp_path):
    async with Rig(tmp_path) as rig:
        plan = json.dumps([{"fault": "cut", "worker": "p", "at_read": 2, "count": 2}])
        prefill, other = rig.new("p"), rig.new("q")
        ends = {name: (await engine.start()).kv_endpoint for name, engine in (("p", prefill), ("q", other))}
        decode = await rig.start("d", reference_faults=plan)
        await decode.probe("p", "epoch-of-p", ends["p"])
        with pytest.raises(WorkerLostError, match="cuts the link from p"):
            await decode.probe("p", "epoch-of-p", ends["p"])
        await decode.probe("q", "epoch-of-q", ends["q"])
        first = await answer(prefill, request("r", PROMPT), Stroke.PREFILL)
        message = request("r", PROMPT, output_token_ids=first.tokens)
        cut = await answer(decode, message, Stroke.DECODE, first.handoff)
        again = await answer(decode, message, Stroke.DECODE, first.handoff)
    assert isinstance(cut.failure, KvLostError)
    assert again.tokens == FULL[1:]


async def test_an_endpoint_of_another_kind_is_refused(tmp_path):
    async with Rig(tmp_path) as rig:
        decode = await rig.start("d")
        for endpoint in (KvEndpoint(), KvEndpoint(addresses=[b"\xff/../etc"])):
            with pytest.raises(Exception, match="not the name of a KV segment"):
                await decode.probe("p", "e", endpoint)
