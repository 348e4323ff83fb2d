"""A worker takes no answer that it has no blocks for, whoever asks; see docs/architecture.md, Several routers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from twostroke.config import WorkerSettings
from twostroke.engine.base import EngineOutput, Stroke
from twostroke.engine.reference import ReferenceEngine
from twostroke.errors import OverloadedError, TwostrokeError
from twostroke.v1.engine_pb2 import EngineRequest, SamplingParams
from twostroke.worker.host import EngineHost


class Owner:
    def __init__(self) -> None:
        self.over = asyncio.Event()

    def deliver(self, output: EngineOutput) -> None:
        if output.done:
            self.over.set()

    def flush(self) -> None:
        """Every output counts by itself."""

    def lost(self, error: TwostrokeError) -> None:
        raise error


def request(name: str, tokens: int) -> EngineRequest:
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    return EngineRequest(request_id=name, prompt_token_ids=range(tokens), sampling=sampling)


async def test_blocks_are_promised_from_the_admission_on_and_free_again_at_the_end(tmp_path: Path) -> None:
    settings = WorkerSettings(engine="reference", reference_blocks=64, block_size_tokens=16)
    engine = ReferenceEngine(settings, epoch="e", worker_id="w", folder=tmp_path)
    host = EngineHost(engine, await engine.start(), "w", "e")
    owner = Owner()
    # No step has run: only promises count.
    await host.admit(request("a", 600), Stroke.WHOLE, owner)
    with pytest.raises(OverloadedError, match="no room for 38 KV blocks: of 64, 0 are in use and 38 promised"):
        await host.admit(request("b", 600), Stroke.WHOLE, owner)
    await host.admit(request("small", 300), Stroke.WHOLE, Owner())
    await host.admit(request("read", 600), Stroke.PREFILL, Owner())
    await host.cancel(["small", "read"])
    assert host.active_requests == 1, "a refused one is not there"

    stepping = asyncio.create_task(host.run())
    async with asyncio.timeout(10):
        await owner.over.wait()
        again = Owner()
        await host.admit(request("b", 600), Stroke.WHOLE, again)
        await again.over.wait()
    stepping.cancel()
    await asyncio.gather(stepping, return_exceptions=True)
    await engine.close()
