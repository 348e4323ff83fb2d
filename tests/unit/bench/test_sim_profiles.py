"""Where bench-sim-serve measures a worker."""

import asyncio

import pytest

from twostroke.bench import sim_profiles
from twostroke.bench.stacks import Stack
from twostroke.errors import UnavailableError
from twostroke.launch.processes import ProcessSpec
from twostroke.sim.fit import Sample
from twostroke.sim.profile import Measured
from twostroke.v1.worker_pb2 import GetInfoResponse
from unit.bench.test_load import answer, server


def test_a_worker_alone_does_both_strokes_on_all_cores() -> None:
    def spec(name: str, *flags: str) -> ProcessSpec:
        return ProcessSpec(name, ("python", *flags), f"127.0.0.1:{len(name)}", {})

    workers = (spec("prefill-0", "--role=prefill"), spec("decode-0", "--role=decode", "--cores=1"))
    router = spec("router", "--workers=a,b", "--dtype=float32")
    pair = Stack("twostroke", ((router, *workers),), ("127.0.0.1", 1), ("router",), ("prefill-0", "decode-0"))
    ((made_router, only),) = sim_profiles.alone(pair, (0, 1)).stages
    assert only.command == ("python", "--role=both", "--cores=0,1")
    assert made_router.command == ("python", f"--workers={only.address}", "--dtype=float32")


def test_the_time_outside_the_engine_is_of_medians() -> None:
    """One slow step and one slow answer of five are not what a chat meets."""
    chat = [Sample(seconds, 1, prefill_tokens=44) for seconds in (0.08, 0.08, 0.2)]
    passes = [Measured(GetInfoResponse(), [each, Sample(9.0, 8, prefill_tokens=4096)], [0.003]) for each in chat]
    assert sim_profiles.hop_s([0.09, 0.091, 0.092, 0.093, 0.9], passes) == pytest.approx(0.012)
    assert sim_profiles.hop_s([0.01], passes) == 0


async def test_company_reads_on_until_it_is_left() -> None:
    asked = 0
    enough = asyncio.Event()

    async def count(request: dict[str, object], writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        if asked > 20:
            enough.set()
        await answer(request, writer)

    async with server(count) as address:
        async with sim_profiles.company(address) as clients:
            await enough.wait()
            assert not clients.done()
        assert clients.cancelled()


async def test_company_that_was_refused_is_told() -> None:
    async def refuse(_: dict[str, object], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\n\r\nno")

    async def keep_company(address: tuple[str, int]) -> None:
        async with sim_profiles.company(address) as clients:
            await asyncio.wait([clients])

    async with server(refuse) as address:
        with pytest.raises(UnavailableError, match="400"):
            await keep_company(address)
