"""Every way through the engines gives the answer that the model alone gives."""

import pytest

from twostroke.engine.base import Stroke
from twostroke.engine.reference_model import expected_tokens
from twostroke.v1.engine_pb2 import FINISH_REASON_LENGTH, SamplingParams
from unit.engine.reference_rig import Rig, answer, finish, load_of, prompt_of, request

GREEDY = [16546, 16115, 25314, 9471, 33778, 6401]
SEEDED = [16546, 10428, 33484, 39041, 23191, 30101]
LENGTHS = [1, 15, 16, 17, 48, 3000]


def test_the_model_answers_as_it_always_did():
    # Pinned: a change here is a new MODEL_VERSION.
    assert expected_tokens([1, 2, 3], count=6) == GREEDY
    assert expected_tokens([1, 2, 3], SamplingParams(temperature=1, seed=7), 6) == SEEDED
    assert expected_tokens([1, 3, 2], count=1) != GREEDY[:1]


@pytest.mark.parametrize("length", LENGTHS)
async def test_one_engine_gives_the_models_answer(tmp_path, length):
    prompt = prompt_of(length)
    async with Rig(tmp_path) as rig:
        engine = await rig.start(step_budget_tokens=100)
        whole = await answer(engine, request("r", prompt, SamplingParams(max_tokens=40)))
    assert whole.tokens == expected_tokens(prompt, count=40)
    assert whole.finish.reason == FINISH_REASON_LENGTH
    assert [len(output.token_ids) for output in whole.outputs] == [1] * 40
    assert whole.outputs[0].started
    assert whole.prompt.computed_tokens == length
    assert sum(output.prompt is not None for output in whole.outputs) == 1


@pytest.mark.parametrize("length", LENGTHS)
async def test_two_pools_give_the_answer_of_one(tmp_path, length):
    prompt = prompt_of(length)
    sampling = SamplingParams(max_tokens=40)
    async with Rig(tmp_path) as rig:
        prefill, decode = await rig.start("p", step_budget_tokens=100), await rig.start("d", step_budget_tokens=100)
        first = await answer(prefill, request("r", prompt, sampling), Stroke.PREFILL)
        rest = await answer(
            decode, request("r", prompt, sampling, output_token_ids=first.tokens), Stroke.DECODE, first.handoff
        )
        load = (await prefill.next_step()).load
    assert [output.started for output in first.outputs] == [True, False]
    assert first.outputs[0].token_ids == ()
    assert first.finish is None
    assert first.tokens + rest.tokens == expected_tokens(prompt, count=40)
    assert len(rest.tokens) == 39
    assert (rest.prompt.transferred_tokens, rest.prompt.computed_tokens, rest.prompt.cached_tokens) == (length, 0, 0)
    assert (load.held_handoffs, load.used_blocks) == (0, 0), "the source frees what was read, without an RPC"


async def test_a_handoff_says_what_it_holds(tmp_path):
    async with Rig(tmp_path) as rig:
        engine = await rig.start("p", kv_lease_s=7)
        first = await answer(engine, request("r", prompt_of(33)), Stroke.PREFILL)
    handoff = first.handoff
    assert (handoff.handoff_id, handoff.source_worker_id, handoff.source_epoch) == ("r", "p", "epoch-of-p")
    assert (handoff.tokens, handoff.blocks, handoff.lease_ms) == (33, 3, 7000)
    assert handoff.bytes == 3 * 16 * 2 * 2 * 8, "blocks, tokens, layers, K and V, bytes per word"
    assert len(set(handoff.shm.block_ids)) == 3


async def test_decode_may_start_before_the_first_token_is_known(tmp_path):
    prompt = prompt_of(20)
    async with Rig(tmp_path) as rig:
        prefill, decode = await rig.start("p"), await rig.start("d")
        first = await answer(prefill, request("r", prompt), Stroke.PREFILL)
        rest = await answer(decode, request("r", prompt), Stroke.DECODE, first.handoff)
    assert rest.tokens == expected_tokens(prompt, count=8)
    assert rest.tokens[:1] == first.tokens


@pytest.mark.parametrize("delivered", [1, 5, 30])
@pytest.mark.parametrize("stroke", [Stroke.WHOLE, Stroke.DECODE])
async def test_an_answer_goes_on_from_what_was_delivered(tmp_path, delivered, stroke):
    prompt, full = prompt_of(21), expected_tokens(prompt_of(21), count=40)
    async with Rig(tmp_path) as rig:
        engine = await rig.start(step_budget_tokens=16)
        rest = await answer(
            engine, request("r", prompt, SamplingParams(max_tokens=40), output_token_ids=full[:delivered]), stroke
        )
    assert rest.tokens == full[delivered:]


@pytest.mark.parametrize("delivered", [1, 20, 30])
async def test_a_handoff_of_an_answer_under_way_covers_the_prompt_alone(tmp_path, delivered):
    prompt, full = prompt_of(21), expected_tokens(prompt_of(21), count=40)
    sampling = SamplingParams(max_tokens=40)
    async with Rig(tmp_path) as rig:
        prefill, decode = await rig.start("p"), await rig.start("d")
        first = await answer(prefill, request("r", prompt, sampling, output_token_ids=full[:delivered]), Stroke.PREFILL)
        held = (await load_of(prefill)).used_blocks
        rest = await answer(
            decode,
            request("r", prompt, sampling, output_token_ids=full[: delivered + 1]),
            Stroke.DECODE,
            first.handoff,
        )
    assert first.tokens == full[delivered : delivered + 1]
    assert (first.handoff.tokens, first.handoff.blocks, held) == (21, 2, 2)
    assert rest.tokens == full[delivered + 1 :]
    assert (rest.prompt.transferred_tokens, rest.prompt.computed_tokens) == (21, 0)


async def test_sequences_of_a_batch_do_not_touch_each_other(tmp_path):
    prompts = {f"r{index}": prompt_of(5 + 11 * index, seed=index) for index in range(12)}
    async with Rig(tmp_path) as rig:
        engine = await rig.start(step_budget_tokens=64, max_sequences=8)
        for request_id, prompt in prompts.items():
            await engine.admit(request(request_id, prompt, SamplingParams(max_tokens=30)), Stroke.WHOLE)
        answers, load = await finish(engine, *prompts)
    for request_id, prompt in prompts.items():
        assert answers[request_id].tokens == expected_tokens(prompt, count=30)
    assert load.used_blocks == 0


async def test_the_vocabulary_bounds_the_tokens(tmp_path):
    async with Rig(tmp_path) as rig:
        engine = await rig.start(vocab_size=11)
        whole = await answer(engine, request("r", [10, 0, 3], SamplingParams(max_tokens=50)))
    assert whole.tokens == expected_tokens([10, 0, 3], count=50, vocab_size=11)
    assert set(whole.tokens) <= set(range(11))
    assert len(set(whole.tokens)) > 5


async def test_another_block_size_changes_no_answer(tmp_path):
    prompt = prompt_of(50)
    async with Rig(tmp_path) as rig:
        prefill, decode = await rig.start("p", block_size_tokens=7), await rig.start("d", block_size_tokens=7)
        first = await answer(prefill, request("r", prompt), Stroke.PREFILL)
        rest = await answer(decode, request("r", prompt), Stroke.DECODE, first.handoff)
    assert first.handoff.blocks == 8
    assert rest.tokens == expected_tokens(prompt, count=8)
