"""What routers place by: how steps are shared among prompts, what they took, and which blocks there are."""

import pytest

from twostroke.engine.base import EngineStep, Stroke
from twostroke.engine.reference import ReferenceEngine
from twostroke.policy.block_hash import KvIdentity, block_hashes
from twostroke.policy.kv_events import Applied
from twostroke.policy.kv_journal import KvJournal
from twostroke.policy.prefix_index import PrefixIndex
from twostroke.policy.step_model import StepBatch
from twostroke.v1.engine_pb2 import EngineRequest, SamplingParams
from unit.engine.reference_rig import Rig, answer, prompt_of, request

ONE = SamplingParams(max_tokens=1)


async def made(engine: ReferenceEngine) -> EngineStep:
    """The next step that was computed."""
    while not (step := await engine.next_step()).samples:
        pass
    return step


async def test_a_short_prompt_does_not_wait_for_a_long_one_nor_the_long_one_for_many_short_ones(tmp_path):
    async with Rig(tmp_path) as rig:
        engine = await rig.start(step_budget_tokens=64, reference_blocks=512)
        await engine.admit(request("long", prompt_of(1024), ONE), Stroke.WHOLE)
        await made(engine)
        await engine.admit(request("short", prompt_of(12, seed=1), ONE), Stroke.WHOLE)
        step = await made(engine)
        assert [output.request_id for output in step.outputs if output.token_ids] == ["short"]
        assert step.samples[0].batch == StepBatch(0, 0, 28, 12 * 6 + 16 * (64 + 8), 2), "the long one has a quarter"
        steps = 2
        while True:
            steps += 1
            await engine.admit(request(f"r{steps}", prompt_of(64, seed=steps), ONE), Stroke.WHOLE)
            done = [output.request_id for output in (await made(engine)).outputs if output.done]
            if "long" in done:
                break
        assert steps <= 1024 // 16 + 1, "a quarter of each step is for the oldest"


@pytest.mark.parametrize("stroke", [Stroke.PREFILL, Stroke.WHOLE])
async def test_no_step_computes_more_of_a_prompt_than_was_allowed(tmp_path, stroke):
    async with Rig(tmp_path) as rig:
        engine = await rig.start(step_budget_tokens=64)
        await engine.admit(request("lent", prompt_of(100), ONE), stroke, chunk_tokens=24)
        await engine.admit(request("other", prompt_of(300, seed=1), ONE), stroke)
        steps = [await made(engine) for _ in range(5)]
    batches, load = [step.samples[0].batch for step in steps], steps[-1].load
    assert [batch.prefill_tokens for batch in batches] == [64, 64, 64, 64, 20], "a step in which one ends is short"
    assert [batch.prefill_chunks for batch in batches] == [2, 2, 2, 2, 2]
    assert load.pending_prompt_tokens == 400 - 4 * 64 - 20
    assert load.pending_prompts == 1, "4 steps of 24 and one of 4"


async def test_steps_are_reported_with_what_they_held_and_took(tmp_path):
    async with Rig(tmp_path) as rig:
        engine = await rig.start(step_budget_tokens=40, reference_step_ms=2, reference_token_us=100)
        await engine.admit(request("a", prompt_of(50), SamplingParams(max_tokens=3)), Stroke.WHOLE)
        steps = [await engine.next_step() for _ in range(4)]
    samples = [sample for step in steps for sample in step.samples]
    assert [sample.batch for sample in samples] == [
        StepBatch(0, 0, 40, 800, 1),
        StepBatch(0, 0, 10, 10 * 45, 1),
        StepBatch(1, 51, 0, 0, 0),
        StepBatch(1, 52, 0, 0, 0),
    ]
    assert [sample.duration_s for sample in samples] == pytest.approx([6e-3, 3e-3, 2e-3, 2e-3])
    assert steps[-1].load.steps == len(samples)


async def test_the_prior_is_what_steps_take(tmp_path):
    async with Rig(tmp_path) as rig:
        engine = rig.new(reference_step_ms=2, reference_token_us=100)
        prior = (await engine.start()).prior
        await engine.admit(request("a", prompt_of(50), SamplingParams(max_tokens=3)), Stroke.WHOLE)
        samples = [sample for _ in range(3) for sample in (await engine.next_step()).samples]
    assert [prior.step_s(sample.batch) for sample in samples] == pytest.approx([each.duration_s for each in samples])


class Listener:
    """Steps an engine, and follows what it tells of its blocks."""

    def __init__(self, engine: ReferenceEngine) -> None:
        self._engine = engine
        self._journal = KvJournal("e")
        self.index = PrefixIndex()
        self.index.apply("w", self._journal.snapshot())

    async def ask(self, message: EngineRequest) -> list[int]:
        """Steps until the answer is there; returns it."""
        await self._engine.admit(message, Stroke.WHOLE)
        tokens: list[int] = []
        while True:
            step = await self._engine.next_step()
            if batch := self._journal.record(step.kv_changes):
                assert self.index.apply("w", batch) is Applied.YES
            for output in step.outputs:
                tokens += output.token_ids
                if output.done:
                    return tokens


async def test_blocks_are_told_under_the_hashes_that_a_router_computes(tmp_path):
    """Prompt and answer, salts apart, and each block's end when its memory is taken."""
    prompt, other = prompt_of(40), prompt_of(120, seed=3)
    async with Rig(tmp_path) as rig:
        engine = rig.new(reference_blocks=8)
        hashing = (await engine.start()).block_hashing
        size, root = hashing.block_size_tokens, hashing.root
        listener = Listener(engine)
        tokens = await listener.ask(request("a", prompt, SamplingParams(max_tokens=30)))
        computed = block_hashes([*prompt, *tokens[:-1]], size, root=root)
        assert len(computed) == 4
        assert listener.index.hits(computed) == {"w": 4}
        assert listener.index.hits(block_hashes(prompt, size, KvIdentity(salt="t"), root)) == {}
        await listener.ask(request("b", prompt, ONE, cache_salt="t"))
        assert listener.index.hits(block_hashes(prompt, size, KvIdentity(salt="t"), root)) == {"w": 2}
        assert listener.index.hits(computed) == {"w": 4}
        await listener.ask(request("c", other, ONE))
    assert listener.index.hits(computed) == {}
    assert listener.index.hits(block_hashes(other, size, root=root)) == {"w": 7}


async def test_what_came_from_another_worker_is_told_as_well(tmp_path):
    prompt = prompt_of(40)
    async with Rig(tmp_path) as rig:
        prefill, decode = await rig.start("p"), await rig.start("d")
        first = await answer(prefill, request("r", prompt), Stroke.PREFILL)
        await decode.admit(request("r", prompt, output_token_ids=first.tokens), Stroke.DECODE, first.handoff)
        journal = KvJournal("e")
        done = False
        while not done:
            step = await decode.next_step()
            journal.record(step.kv_changes)
            done = any(output.done for output in step.outputs)
    index = PrefixIndex()
    index.apply("d", journal.snapshot())
    assert index.hits(block_hashes(prompt, 16)) == {"d": 2}
