"""Batching, blocks, the prefix cache, preemption and the counters."""

import pytest

from twostroke.engine.base import EngineLoad, Stroke
from twostroke.engine.reference_model import expected_tokens
from twostroke.v1.engine_pb2 import SamplingParams
from unit.engine.reference_rig import Answer, Rig, answer, finish, prompt_of, request


@pytest.mark.parametrize(
    ("late", "blocks"), [(True, [3, 3, 5, 7]), (False, [7, 7, 7, 7])], ids=["offered when done", "offered at once"]
)
async def test_a_prompt_is_computed_in_chunks_of_the_step_budget(tmp_path, late, blocks):
    async with Rig(tmp_path) as rig:
        engine = await rig.start(
            step_budget_tokens=40, reference_step_ms=2, reference_token_us=100, reference_late=late
        )
        await engine.admit(request("r", prompt_of(100)), Stroke.PREFILL)
        started = await engine.next_step()
        assert [output.started for output in started.outputs] == [True]
        assert started.load == EngineLoad(
            running_requests=1, pending_prompt_tokens=100, pending_prompts=1, used_blocks=blocks[0]
        )
        begin_s, loads = rig.now_s, []
        for _ in range(3):
            step = await engine.next_step()
            loads.append(step.load)
    assert [load.pending_prompt_tokens for load in loads] == [60, 20, 0]
    assert [load.used_blocks for load in loads] == blocks[1:]
    assert [load.computed_prompt_tokens for load in loads] == [40, 80, 100]
    assert (loads[-1].held_handoffs, loads[-1].held_blocks) == (1, 7)
    assert rig.now_s - begin_s == pytest.approx(3 * 2e-3 + 100 * 100e-6)
    stats = step.outputs[0].prompt
    assert (stats.prompt_tokens, stats.computed_tokens, stats.queue_ms) == (100, 100, 0)
    assert stats.run_ms == pytest.approx(16)


async def test_queue_time_is_the_time_before_the_first_step(tmp_path):
    async with Rig(tmp_path) as rig:
        engine = await rig.start(max_sequences=1, reference_step_ms=5, reference_token_us=0)
        await engine.admit(request("a", prompt_of(4), SamplingParams(max_tokens=3)), Stroke.WHOLE)
        await engine.admit(request("b", prompt_of(5), SamplingParams(max_tokens=1)), Stroke.WHOLE)
        answers, _ = await finish(engine, "a", "b")
    assert answers["a"].prompt.queue_ms == 0
    assert answers["b"].prompt.queue_ms == pytest.approx(15)
    assert answers["b"].prompt.run_ms == pytest.approx(5)


async def test_decoding_sequences_go_before_prompts(tmp_path):
    async with Rig(tmp_path) as rig:
        engine = await rig.start(step_budget_tokens=8)
        await engine.admit(request("old", prompt_of(8), SamplingParams(max_tokens=30)), Stroke.WHOLE)
        await engine.next_step()
        await engine.admit(request("new", prompt_of(21, seed=1), SamplingParams(max_tokens=1)), Stroke.WHOLE)
        steps = [await engine.next_step() for _ in range(3)]
    assert [[output.request_id for output in step.outputs] for step in steps] == [["old"], ["old"], ["old", "new"]]
    assert [step.load.pending_prompt_tokens for step in steps] == [14, 7, 0], "8 tokens a step, one of them decoded"


async def test_lower_priority_numbers_start_first_then_older_requests(tmp_path):
    order = []
    async with Rig(tmp_path) as rig:
        engine = await rig.start(max_sequences=1)
        for request_id, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -1)):
            await engine.admit(
                request(request_id, prompt_of(3), SamplingParams(max_tokens=1), priority=priority), Stroke.WHOLE
            )
        while len(order) < 4:
            order += [output.request_id for output in (await engine.next_step()).outputs if output.done]
    assert order == ["d", "b", "a", "c"]


async def test_no_more_sequences_run_than_allowed(tmp_path):
    async with Rig(tmp_path) as rig:
        engine = await rig.start(max_sequences=2)
        for request_id in "abc":
            await engine.admit(request(request_id, prompt_of(3)), Stroke.WHOLE)
        load = (await engine.next_step()).load
    assert (load.running_requests, load.waiting_requests, load.pending_prompt_tokens) == (2, 1, 3)


async def test_a_request_waits_for_blocks(tmp_path):
    async with Rig(tmp_path) as rig:
        engine = await rig.start(reference_blocks=4)
        held = await answer(engine, request("held", prompt_of(48)), Stroke.PREFILL)
        await engine.admit(request("waits", prompt_of(40, seed=1)), Stroke.WHOLE)
        step = await engine.next_step()
        assert step.outputs == []
        assert (step.load.waiting_requests, step.load.used_blocks) == (1, 3)
        assert await engine.release(["held"]) == 1
        answers, load = await finish(engine, "waits")
    assert held.handoff.blocks == 3
    assert answers["waits"].tokens == expected_tokens(prompt_of(40, seed=1), count=8)
    assert load.used_blocks == 0


async def test_preempted_sequences_are_computed_again_with_the_same_tokens(tmp_path):
    prompts = {f"r{index}": prompt_of(30, seed=index) for index in range(4)}
    async with Rig(tmp_path) as rig:
        engine = await rig.start(reference_blocks=9, step_budget_tokens=64)
        for request_id, prompt in prompts.items():
            await engine.admit(request(request_id, prompt, SamplingParams(max_tokens=60)), Stroke.WHOLE)
        answers, load = await finish(engine, *prompts)
    for request_id, prompt in prompts.items():
        assert answers[request_id].tokens == expected_tokens(prompt, count=60)
        assert sum(output.prompt is not None for output in answers[request_id].outputs) == 1
    assert load.computed_prompt_tokens > 120, "somebody was preempted, and its prompt computed again"
    assert load.generated_tokens == 240
    assert load.used_blocks == 0


async def test_the_youngest_gives_way(tmp_path):
    finished = []
    async with Rig(tmp_path) as rig:
        engine = await rig.start(reference_blocks=4)
        for request_id in ("old", "young"):
            await engine.admit(request(request_id, prompt_of(30), SamplingParams(max_tokens=20)), Stroke.WHOLE)
        preempted = 0
        while len(finished) < 2:
            step = await engine.next_step()
            preempted += step.load.waiting_requests
            finished += [output.request_id for output in step.outputs if output.done]
    assert finished == ["old", "young"]
    assert preempted > 0


async def test_a_prompt_of_higher_priority_takes_the_block_of_a_planned_sequence(tmp_path):
    urgent = prompt_of(64, seed=1)
    async with Rig(tmp_path) as rig:
        engine = await rig.start(reference_blocks=6, step_budget_tokens=9)
        await engine.admit(request("old", prompt_of(30), SamplingParams(max_tokens=30)), Stroke.WHOLE)
        for _ in range(4):
            await engine.next_step()
        await engine.admit(request("urgent", urgent, priority=-1), Stroke.WHOLE)
        answers, load = await finish(engine, "old", "urgent")
    assert answers["urgent"].tokens == expected_tokens(urgent, count=8)
    assert answers["old"].tokens == expected_tokens(prompt_of(30), count=30)[1:]
    assert load.computed_prompt_tokens > 30 + 64, "old was preempted"


async def test_a_fetched_sequence_can_be_preempted(tmp_path):
    prompts = {f"r{index}": prompt_of(30, seed=index) for index in range(3)}
    async with Rig(tmp_path) as rig:
        prefill, decode = await rig.start("p"), await rig.start("d", reference_blocks=7)
        firsts: dict[str, Answer] = {}
        for request_id, prompt in prompts.items():
            sampling = SamplingParams(max_tokens=60)
            firsts[request_id] = await answer(prefill, request(request_id, prompt, sampling), Stroke.PREFILL)
            message = request(request_id, prompt, sampling, output_token_ids=firsts[request_id].tokens)
            await decode.admit(message, Stroke.DECODE, firsts[request_id].handoff)
        rests, load = await finish(decode, *prompts)
    for request_id, prompt in prompts.items():
        assert firsts[request_id].tokens + rests[request_id].tokens == expected_tokens(prompt, count=60)
        assert rests[request_id].prompt.transferred_tokens == 30
    assert load.computed_prompt_tokens > 0, "the prompt of a preempted sequence is computed here"


@pytest.mark.parametrize(("length", "cached"), [(15, 0), (16, 0), (17, 16), (48, 32), (50, 48)])
async def test_a_prefix_is_found_again_but_for_one_token_at_least(tmp_path, length, cached):
    prompt = prompt_of(length)
    async with Rig(tmp_path) as rig:
        engine = await rig.start()
        first = await answer(engine, request("a", prompt))
        again = await answer(engine, request("b", prompt))
    assert (first.prompt.cached_tokens, first.prompt.computed_tokens) == (0, length)
    assert (again.prompt.cached_tokens, again.prompt.computed_tokens) == (cached, length - cached)
    assert again.tokens == first.tokens == expected_tokens(prompt, count=8)


async def test_the_next_turn_finds_the_answer_of_the_last_one(tmp_path):
    async with Rig(tmp_path) as rig:
        engine = await rig.start()
        turn = await answer(engine, request("a", prompt_of(30), SamplingParams(max_tokens=40)))
        prompt = [*prompt_of(30), *turn.tokens, 5]
        follow = await answer(engine, request("b", prompt))
    assert follow.prompt.cached_tokens == 64
    assert follow.tokens == expected_tokens(prompt, count=8)


async def test_other_prefixes_salts_and_skips_find_nothing(tmp_path):
    prompt = prompt_of(40)
    skip = SamplingParams(max_tokens=8, skip_reading_prefix_cache=True)
    async with Rig(tmp_path) as rig:
        engine = await rig.start()
        await answer(engine, request("a", prompt, cache_salt="x"))
        others = [
            await answer(engine, request("b", prompt)),
            await answer(engine, request("c", prompt, cache_salt="y")),
            await answer(engine, request("d", prompt, skip, cache_salt="x")),
            await answer(engine, request("e", [1, *prompt[1:]], cache_salt="x")),
        ]
        same = await answer(engine, request("f", prompt, cache_salt="x"))
    assert [other.prompt.cached_tokens for other in others] == [0, 0, 0, 0]
    assert same.prompt.cached_tokens == 32


async def test_decode_fetches_only_what_its_cache_lacks(tmp_path):
    prompt = prompt_of(48)
    async with Rig(tmp_path) as rig:
        prefill, decode = await rig.start("p"), await rig.start("d")
        await answer(decode, request("warm", prompt[:33]))
        first = await answer(prefill, request("r", prompt), Stroke.PREFILL)
        rest = await answer(decode, request("r", prompt, output_token_ids=first.tokens), Stroke.DECODE, first.handoff)
        all_there = await answer(prefill, request("s", prompt), Stroke.PREFILL)
        await decode.admit(request("s", prompt), Stroke.DECODE, all_there.handoff)
        answers, load = await finish(decode, "s")
        assert (await prefill.next_step()).load.held_handoffs == 0
    assert (rest.prompt.cached_tokens, rest.prompt.transferred_tokens, rest.prompt.computed_tokens) == (32, 16, 0)
    assert first.tokens + rest.tokens == expected_tokens(prompt, count=8)
    assert (answers["s"].prompt.cached_tokens, answers["s"].prompt.transferred_tokens) == (48, 0)
    assert answers["s"].tokens == expected_tokens(prompt, count=8)
    assert (load.kv_received_handoffs, load.kv_received_bytes) == (2, 512)


async def test_cached_blocks_are_taken_oldest_first_and_last_of_all(tmp_path):
    async with Rig(tmp_path) as rig:
        engine = await rig.start(reference_blocks=8)
        one = SamplingParams(max_tokens=1)
        await answer(engine, request("a", prompt_of(33, seed=1), one))
        await answer(engine, request("b", prompt_of(33, seed=2), one))
        # Four blocks cache prefixes, four have nothing to offer: the latter go first, then a's second block.
        await answer(engine, request("c", prompt_of(70, seed=3), one))
        cached = [
            (await answer(engine, request(f"again-{seed}", prompt_of(33, seed=seed), one))).prompt.cached_tokens
            for seed in (2, 1)
        ]
    assert cached == [32, 16]


async def test_load_counts_what_happened(tmp_path):
    prompt = prompt_of(20)
    async with Rig(tmp_path) as rig:
        prefill, decode = await rig.start("p"), await rig.start("d")
        first = await answer(prefill, request("r", prompt), Stroke.PREFILL)
        await decode.admit(request("r", prompt, output_token_ids=first.tokens), Stroke.DECODE, first.handoff)
        _, received = await finish(decode, "r")
        given = (await prefill.next_step()).load
    assert received == EngineLoad(kv_received_bytes=2 * 512, kv_received_handoffs=1, generated_tokens=7, steps=7)
    assert given == EngineLoad(computed_prompt_tokens=20, generated_tokens=1, steps=1)
