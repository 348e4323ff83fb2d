"""Many requests at random over small pools: every answer is the model's, and every block comes back.

Some hand-offs are taken while prefill computes, some afterwards.
"""

import asyncio
import random
from dataclasses import dataclass, field

import pytest

from twostroke.engine.base import EngineOutput, Stroke
from twostroke.engine.reference import ReferenceEngine
from twostroke.engine.reference_model import expected_tokens
from twostroke.v1.engine_pb2 import EngineRequest, SamplingParams
from unit.engine.reference_rig import Rig, load_of, prompt_of

REQUESTS = 60


@dataclass
class Crowd:
    """Routes random requests: prefill then decode, all on decode, released in between, or cancelled."""

    chance: random.Random
    decodes: list[ReferenceEngine]
    requests: dict[str, EngineRequest] = field(default_factory=dict)
    answers: dict[str, list[int]] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    open: set[str] = field(default_factory=set)
    early: dict[str, tuple[ReferenceEngine, list[int]]] = field(default_factory=dict)
    """Where an answer is written whose prompt may still be computed, and what of it came."""
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, index: int) -> EngineRequest:
        chance = self.chance
        prompt = prompt_of(100, seed=chance.randrange(3))[: chance.randint(1, 90)]
        sampling = SamplingParams(max_tokens=chance.randint(1, 40))
        if chance.random() < 0.3:
            sampling.MergeFrom(SamplingParams(temperature=1.2, seed=index, top_p=0.9))
        message = EngineRequest(request_id=f"r{index}", prompt_token_ids=prompt, sampling=sampling)
        if chance.random() < 0.2:
            message.cache_salt = "salt"
        message.priority = chance.randrange(2)
        self.requests[message.request_id] = message
        self.answers[message.request_id] = []
        self.open.add(message.request_id)
        return message

    async def pump(self, engine: ReferenceEngine) -> None:
        while True:
            for output in (await engine.next_step()).outputs:
                await self.take(engine, output)

    async def take(self, engine: ReferenceEngine, output: EngineOutput) -> None:
        request_id, chance = output.request_id, self.chance
        assert output.failure is None
        assert request_id not in self.cancelled
        writer, written = self.early.get(request_id, (None, self.answers[request_id]))
        (written if engine is writer else self.answers[request_id]).extend(output.token_ids)
        if chance.random() < 0.01:
            for each in {engine, writer or engine}:
                await each.cancel([request_id])
            self.cancelled.add(request_id)
        elif output.handoff is not None and output.handoff.in_progress:
            if chance.random() < 0.5:
                decode = chance.choice(self.decodes)
                self.early[request_id] = (decode, [])
                await decode.admit(self.requests[request_id], Stroke.DECODE, output.handoff)
            return
        elif output.handoff is not None:
            if writer is not None:
                return
            message, handoff = self.requests[request_id], output.handoff
            message.output_token_ids.extend(self.answers[request_id])
            if chance.random() < 0.2:
                assert await engine.release([request_id]) == 1
                handoff = None
            await chance.choice(self.decodes).admit(message, Stroke.DECODE, handoff)
            return
        elif not output.done:
            return
        self.open.remove(request_id)
        if not self.open:
            self.over.set()


@pytest.mark.parametrize("seed", range(4))
async def test_nothing_is_wrong_and_nothing_leaks(tmp_path, seed):
    chance = random.Random(seed)
    async with Rig(tmp_path) as rig:
        prefills = [await rig.start(f"p{i}", reference_blocks=16, step_budget_tokens=40) for i in range(2)]
        decodes = [await rig.start(f"d{i}", reference_blocks=12, step_budget_tokens=24) for i in range(2)]
        crowd = Crowd(chance, decodes)
        for message in [crowd.add(index) for index in range(REQUESTS)]:
            if chance.random() < 0.8:
                await chance.choice(prefills).admit(message, Stroke.PREFILL)
            else:
                await chance.choice(decodes).admit(message, Stroke.WHOLE)
        pumps = [asyncio.create_task(crowd.pump(engine)) for engine in (*prefills, *decodes)]
        waiting = asyncio.create_task(crowd.over.wait())
        done, _ = await asyncio.wait([waiting, *pumps], return_when=asyncio.FIRST_COMPLETED)
        for task in (waiting, *pumps):
            task.cancel()
        await asyncio.gather(*pumps, waiting, return_exceptions=True)
        assert [task.result() for task in done] == [True]
        loads = [await load_of(engine) for engine in (*prefills, *decodes)]
    for request_id, message in crowd.requests.items():
        expected = expected_tokens(message.prompt_token_ids, message.sampling, 40)
        got = crowd.answers[request_id] + crowd.early.get(request_id, (None, []))[1]
        if request_id in crowd.cancelled:
            expected = expected[: len(got)]
        assert got == expected
    assert 5 < len(crowd.early) < REQUESTS
    assert 0 < len(crowd.cancelled) < REQUESTS / 2
    for load in loads:
        assert (load.used_blocks, load.held_handoffs, load.waiting_requests, load.running_requests) == (0, 0, 0, 0)
    assert sum(load.kv_received_handoffs for load in loads) > 20
