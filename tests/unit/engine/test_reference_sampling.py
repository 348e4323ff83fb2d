"""Sampling parameters are obeyed, or refused by name."""

import math
from collections import Counter

import numpy as np
import pytest

from twostroke.engine.base import Stroke
from twostroke.engine.reference_kv import mixed_int
from twostroke.engine.reference_model import VOCAB_SIZE, expected_tokens
from twostroke.engine.reference_rules import SUPPORTED_FIELDS, rules_of
from twostroke.engine.reference_sampling import Ranking, choose
from twostroke.errors import InvalidRequestError, PromptTooLongError, UnsupportedFieldError
from twostroke.v1.engine_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    RepetitionDetection,
    SamplingParams,
    StructuredOutputs,
    TokenSequence,
)
from twostroke.v1.kv_pb2 import Handoff, NixlTransfer, ShmTransfer
from unit.engine.reference_rig import Rig, answer, prompt_of, request

PROMPT = prompt_of(20)
FREE = expected_tokens(PROMPT, count=30)


async def ask(tmp_path, sampling, stroke=Stroke.WHOLE, **settings):
    async with Rig(tmp_path) as rig:
        return await answer(await rig.start(**settings), request("r", PROMPT, sampling), stroke)


async def test_end_of_text_ends_the_answer(tmp_path):
    result = await ask(tmp_path, SamplingParams(eos_token_id=FREE[4]))
    assert result.tokens == FREE[:5]
    assert result.finish.reason == FINISH_REASON_STOP
    assert result.finish.WhichOneof("stop") is None


async def test_end_of_text_can_be_ignored(tmp_path):
    result = await ask(tmp_path, SamplingParams(eos_token_id=FREE[4], ignore_eos=True, max_tokens=10))
    assert result.tokens == FREE[:10]
    assert result.finish.reason == FINISH_REASON_LENGTH


async def test_a_stop_token_ends_the_answer_and_is_named(tmp_path):
    result = await ask(tmp_path, SamplingParams(stop_token_ids=[1, FREE[6]]))
    assert result.tokens == FREE[:7]
    assert (result.finish.reason, result.finish.stop_token_id) == (FINISH_REASON_STOP, FREE[6])


@pytest.mark.parametrize(
    "ender", [{"eos_token_id": FREE[2]}, {"stop_token_ids": [FREE[2]]}, {"all_stop_token_ids": [FREE[2]]}]
)
async def test_nothing_that_ends_is_chosen_before_min_tokens(tmp_path, ender):
    sampling = SamplingParams(min_tokens=6, max_tokens=12, **ender)
    result = await ask(tmp_path, sampling)
    assert result.tokens[:2] == FREE[:2]
    assert FREE[2] not in result.tokens[:6]
    assert len(result.tokens) >= 6
    assert result.tokens == expected_tokens(PROMPT, sampling, 12)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=1),
        SamplingParams(eos_token_id=FREE[0]),
        SamplingParams(stop_token_ids=[FREE[0]]),
    ],
    ids=["max_tokens", "eos", "stop"],
)
async def test_an_answer_that_the_first_token_ends_leaves_no_handoff(tmp_path, sampling):
    async with Rig(tmp_path) as rig:
        engine = await rig.start()
        await engine.admit(request("r", PROMPT, sampling), Stroke.PREFILL)
        await engine.next_step()
        step = await engine.next_step()
    (output,) = step.outputs
    assert (list(output.token_ids), output.done, output.handoff) == (FREE[:1], True, None)
    assert output.finish is not None
    assert (step.load.held_handoffs, step.load.used_blocks) == (0, 0)


async def test_without_max_tokens_the_model_is_filled(tmp_path):
    result = await ask(tmp_path, SamplingParams(), max_model_len_tokens=50)
    assert result.tokens == FREE[:30]
    assert result.finish.reason == FINISH_REASON_LENGTH


async def test_seeds_decide_sampled_tokens(tmp_path):
    answers = [
        await ask(
            tmp_path, SamplingParams(temperature=1.5, top_p=0.95, top_k=50, min_p=0.001, seed=seed, max_tokens=20)
        )
        for seed in (1, 1, 2, -3)
    ]
    assert answers[0].tokens == answers[1].tokens
    assert len({tuple(result.tokens) for result in answers}) == 3
    sampling = SamplingParams(temperature=1.5, top_p=0.95, top_k=50, min_p=0.001, seed=2, max_tokens=20)
    assert answers[2].tokens == expected_tokens(PROMPT, sampling, 20)


@pytest.mark.parametrize(
    "shape",
    [{}, {"allowed_token_ids": list(range(100))}, {"repetition_penalty": 1 + 1e-6}],
    ids=["closed form", "allowed", "penalised"],
)
def test_ranks_are_drawn_with_their_probabilities(shape):
    rules = rules_of(SamplingParams(temperature=1, top_k=3, **shape), 100)
    draws = 1000
    ranks = Counter[int]()
    for index in range(draws):
        hash_ = mixed_int(index + 1)
        token = choose(hash_, rules, [1], 1)
        ranks[int(Ranking.of(hash_, 100).ranks(np.array([token]))[0])] += 1
    assert set(ranks) == {0, 1, 2}
    for rank, probability in ((0, 4 / 7), (1, 2 / 7), (2, 1 / 7)):
        assert abs(ranks[rank] / draws - probability) < 0.05


@pytest.mark.parametrize("narrow", [{"top_p": 0.4}, {"min_p": 0.9}, {"top_k": 1}, {"temperature": 1e-6}])
def test_a_narrow_choice_is_the_greedy_one(narrow):
    assert expected_tokens(PROMPT, SamplingParams(**{"temperature": 1.0, "seed": 5, **narrow}), 20) == FREE[:20]


async def test_log_probabilities_name_the_chosen_token_first(tmp_path):
    result = await ask(tmp_path, SamplingParams(logprobs=3, temperature=2, seed=4, max_tokens=12))
    seen = set()
    for output in result.outputs:
        (token,) = output.token_ids
        logprobs = output.logprobs
        assert logprobs.columns == 4
        assert logprobs.token_ids[0] == token
        assert len(set(logprobs.token_ids[1:])) == 3
        assert list(logprobs.logprobs[1:]) == pytest.approx([-math.log(2) * rank for rank in (1, 2, 3)])
        assert logprobs.logprobs[0] == pytest.approx(-math.log(2) * logprobs.ranks[0])
        if logprobs.ranks[0] <= 3:
            assert logprobs.token_ids[logprobs.ranks[0]] == token
        seen.add(logprobs.ranks[0])
    assert len(seen) > 1, "at temperature 2 not every token is the most likely"


async def test_log_probabilities_are_equal_across_pools(tmp_path):
    sampling = SamplingParams(logprobs=2, max_tokens=5)
    whole = await ask(tmp_path, sampling)
    async with Rig(tmp_path) as rig:
        prefill, decode = await rig.start("p"), await rig.start("d")
        first = await answer(prefill, request("r", PROMPT, sampling), Stroke.PREFILL)
        rest = await answer(
            decode, request("r", PROMPT, sampling, output_token_ids=first.tokens), Stroke.DECODE, first.handoff
        )
    split = [output.logprobs for output in [*first.outputs[1:], *rest.outputs]]
    assert split == [output.logprobs for output in whole.outputs]


async def test_the_whole_vocabulary_can_be_reported(tmp_path):
    async with Rig(tmp_path) as rig:
        engine = await rig.start(vocab_size=32)
        result = await answer(engine, request("r", [1], SamplingParams(logprobs=-1, max_tokens=1)))
    assert result.outputs[0].logprobs.columns == 33
    assert sorted(result.outputs[0].logprobs.token_ids[1:]) == list(range(32))


async def test_only_allowed_tokens_are_chosen(tmp_path):
    sampling = SamplingParams(allowed_token_ids=[5, 6, 7], max_tokens=30)
    result = await ask(tmp_path, sampling)
    assert set(result.tokens) == {5, 6, 7}
    assert result.tokens == expected_tokens(PROMPT, sampling, 30)


async def test_bias_decides(tmp_path):
    result = await ask(tmp_path, SamplingParams(logit_bias={42: 1e6, FREE[0]: -1e6}, max_tokens=4))
    assert result.tokens == [42] * 4
    banned = await ask(tmp_path, SamplingParams(logit_bias={FREE[0]: -100}, max_tokens=1))
    assert banned.tokens != FREE[:1]
    far = await ask(tmp_path, SamplingParams(logit_bias=dict.fromkeys(range(0, VOCAB_SIZE, 2), -100), max_tokens=9))
    assert {token % 2 for token in far.tokens} == {1}


@pytest.mark.parametrize("penalty", [{"presence_penalty": 1e6}, {"frequency_penalty": 1e6}])
async def test_penalties_count_the_answer_also_across_pools(tmp_path, penalty):
    sampling = SamplingParams(allowed_token_ids=[5, 6, 7, 8], max_tokens=4, **penalty)
    async with Rig(tmp_path) as rig:
        prefill, decode = await rig.start("p"), await rig.start("d")
        first = await answer(prefill, request("r", PROMPT, sampling), Stroke.PREFILL)
        rest = await answer(
            decode, request("r", PROMPT, sampling, output_token_ids=first.tokens), Stroke.DECODE, first.handoff
        )
    assert sorted(first.tokens + rest.tokens) == [5, 6, 7, 8]
    assert first.tokens + rest.tokens == expected_tokens(PROMPT, sampling, 4)


def test_other_penalties_do_not_count_the_prompt():
    chosen = set()
    for other in range(10):
        sampling = SamplingParams(allowed_token_ids=[PROMPT[0], other], max_tokens=1)
        plain = expected_tokens(PROMPT, sampling)
        sampling.presence_penalty = sampling.frequency_penalty = 1e6
        assert expected_tokens(PROMPT, sampling) == plain
        chosen |= set(plain)
    assert PROMPT[0] in chosen


async def test_the_repetition_penalty_counts_the_prompt_too():
    sampling = SamplingParams(allowed_token_ids=[PROMPT[0], PROMPT[1], 9], repetition_penalty=1e9, max_tokens=1)
    assert expected_tokens(PROMPT, sampling) == [9]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt_logprobs", 0),
        ("logprob_token_ids", [1]),
        ("bad_words", [TokenSequence(token_ids=[1])]),
        ("structured_outputs", StructuredOutputs(json_object=True)),
        ("thinking_token_budget", 5),
        ("repetition_detection", RepetitionDetection(min_count=2)),
        ("stop", ["x"]),
    ],
)
async def test_what_is_not_done_is_refused_by_name(tmp_path, field, value):
    with pytest.raises(UnsupportedFieldError, match=rf"\b{field}\b"):
        await ask(tmp_path, SamplingParams(**{field: value}))


def test_every_field_is_either_done_or_refused():
    refused = {
        "prompt_logprobs",
        "logprob_token_ids",
        "bad_words",
        "structured_outputs",
        "thinking_token_budget",
        "repetition_detection",
        "stop",
    }
    assert SUPPORTED_FIELDS | refused == set(SamplingParams.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", math.nan),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", 2),
        ("max_tokens", 0),
        ("repetition_penalty", 0),
        ("presence_penalty", math.inf),
        ("frequency_penalty", math.nan),
        ("logprobs", -2),
        ("logprobs", VOCAB_SIZE + 1),
        ("logit_bias", {VOCAB_SIZE: 1}),
        ("logit_bias", {1: math.inf}),
        ("allowed_token_ids", [VOCAB_SIZE]),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(InvalidRequestError, match=rf"^{field}\b"):
        rules_of(SamplingParams(**{field: value}), VOCAB_SIZE)


def test_contradictions_are_refused():
    with pytest.raises(InvalidRequestError, match="min_tokens is 5, above max_tokens, 4"):
        rules_of(SamplingParams(min_tokens=5, max_tokens=4), VOCAB_SIZE)
    with pytest.raises(InvalidRequestError, match="min_tokens leaves nothing to choose"):
        rules_of(SamplingParams(min_tokens=1, eos_token_id=3, allowed_token_ids=[3]), VOCAB_SIZE)
    with pytest.raises(InvalidRequestError, match="min_tokens leaves nothing to choose"):
        rules_of(SamplingParams(min_tokens=1, stop_token_ids=[0, 1]), 2)


async def test_requests_that_cannot_be_served_queue_nothing(tmp_path):
    shm = Handoff(tokens=20, shm=ShmTransfer(block_ids=[1, 2]))
    refusals = [
        (request("", PROMPT), Stroke.WHOLE, None, "request id ''"),
        (request("r", []), Stroke.WHOLE, None, "the prompt is empty"),
        (request("r", [VOCAB_SIZE]), Stroke.WHOLE, None, "token 49152 is not below the vocabulary's size, 49152"),
        (request("r", PROMPT, output_token_ids=[1] * 8), Stroke.WHOLE, None, "max_tokens is 8, and 8 tokens"),
        (request("r", PROMPT), Stroke.WHOLE, shm, "the whole stroke takes no hand-off"),
        (request("r", PROMPT), Stroke.DECODE, Handoff(tokens=20, nixl=NixlTransfer()), "travels by nixl"),
        (request("r", PROMPT[:19]), Stroke.DECODE, shm, "covers 20 tokens, the prompt has 19"),
        (request("r", PROMPT), Stroke.DECODE, Handoff(tokens=20, shm=ShmTransfer(block_ids=[1])), "20 tokens fill 2"),
    ]
    async with Rig(tmp_path) as rig:
        engine = await rig.start()
        for message, stroke, handoff, reason in refusals:
            with pytest.raises(InvalidRequestError, match=reason):
                await engine.admit(message, stroke, handoff)
        await engine.admit(request("r", PROMPT), Stroke.WHOLE)
        with pytest.raises(InvalidRequestError, match="request id 'r' is empty or in use here"):
            await engine.admit(request("r", PROMPT), Stroke.WHOLE)
        assert (await engine.next_step()).load.running_requests == 1


async def test_a_prompt_that_does_not_fit_names_both_numbers(tmp_path):
    async with Rig(tmp_path) as rig:
        engine = await rig.start(max_model_len_tokens=20)
        with pytest.raises(PromptTooLongError, match=r"20 tokens; the model takes 20"):
            await engine.admit(request("r", PROMPT), Stroke.WHOLE)
        fits = await answer(engine, request("r", PROMPT[:19]))
    assert fits.finish.reason == FINISH_REASON_LENGTH
    assert len(fits.tokens) == 1
