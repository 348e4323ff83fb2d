"""Reference engines on a clock that only moves when somebody sleeps."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from twostroke.config import WorkerSettings
from twostroke.engine.base import EngineLoad, EngineOutput, Stroke
from twostroke.engine.reference import ReferenceEngine
from twostroke.errors import TwostrokeError
from twostroke.v1.engine_pb2 import EngineRequest, Finish, PromptStats, SamplingParams
from twostroke.v1.kv_pb2 import Handoff


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """A prompt without repetition that is easy to tell from others."""
    return [(7919 * (index + 1) + 131 * seed) % 49152 for index in range(length)]


def request(
    request_id: str, prompt: list[int], sampling: SamplingParams | None = None, **fields: object
) -> EngineRequest:
    return EngineRequest(
        request_id=request_id, prompt_token_ids=prompt, sampling=sampling or SamplingParams(max_tokens=8), **fields
    )


@dataclass
class Answer:
    """All that an engine said about one request."""

    tokens: list[int] = field(default_factory=list)
    outputs: list[EngineOutput] = field(default_factory=list)
    prompt: PromptStats | None = None
    handoff: Handoff | None = None
    finish: Finish | None = None
    failure: TwostrokeError | None = None

    def add(self, output: EngineOutput) -> None:
        assert not any(earlier.done for earlier in self.outputs), "an output after the last one"
        self.outputs.append(output)
        self.tokens += output.token_ids
        self.prompt = output.prompt or self.prompt
        self.handoff = output.handoff or self.handoff
        self.finish = output.finish or self.finish
        self.failure = output.failure or self.failure


class Rig:
    """Engines that share a clock and a folder; on exit they are closed, and the folder must be empty."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now_s = 100.0
        self.engines: list[ReferenceEngine] = []

    async def __aenter__(self) -> "Rig":
        return self

    async def __aexit__(self, *_: object) -> None:
        for engine in self.engines:
            await engine.close()
        assert list(self.folder.iterdir()) == []

    def clock(self) -> float:
        return self.now_s

    async def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s
        await asyncio.sleep(0)

    def new(self, name: str = "p", *, verify: bool = True, vocab_size: int = 49152, **settings: object):
        engine = ReferenceEngine(
            WorkerSettings(engine="reference", **{"reference_blocks": 256, **settings}),
            epoch=f"epoch-of-{name}",
            worker_id=name,
            clock=self.clock,
            sleep=self.sleep,
            verify=verify,
            vocab_size=vocab_size,
            folder=self.folder,
        )
        self.engines.append(engine)
        return engine

    async def start(self, name: str = "p", **options: object) -> ReferenceEngine:
        engine = self.new(name, **options)
        await engine.start()
        return engine


async def finish(engine: ReferenceEngine, *request_ids: str) -> tuple[dict[str, Answer], EngineLoad]:
    """Steps until these requests are done."""
    answers = {request_id: Answer() for request_id in request_ids}
    while True:
        step = await engine.next_step()
        for output in step.outputs:
            answers[output.request_id].add(output)
        if all(answer.outputs and answer.outputs[-1].done for answer in answers.values()):
            return answers, step.load


async def answer(
    engine: ReferenceEngine, message: EngineRequest, stroke: Stroke = Stroke.WHOLE, handoff: Handoff | None = None
) -> Answer:
    """Admits one request and steps until it is done."""
    await engine.admit(message, stroke, handoff)
    answers, _ = await finish(engine, message.request_id)
    return answers[message.request_id]


async def load_of(engine: ReferenceEngine) -> EngineLoad:
    """The load after one more request, which leaves nothing behind."""
    await engine.admit(request("probe", [1], SamplingParams(max_tokens=1)), Stroke.WHOLE)
    _, load = await finish(engine, "probe")
    return load
