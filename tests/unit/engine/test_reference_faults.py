"""What injected faults do to an engine."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

import twostroke
from twostroke.engine.base import Stroke
from twostroke.engine.reference_model import block_words, expected_tokens
from twostroke.errors import ConfigError, EngineError, KvCorruptError, KvLostError, OverloadedError
from twostroke.kv.shm import PeerSegment, remove_stale
from twostroke.v1.kv_pb2 import Handoff
from unit.engine.reference_rig import Rig, answer, finish, load_of, prompt_of, request

PROMPT = prompt_of(48)


def faults(*plan: dict[str, object]) -> dict[str, str]:
    return {"reference_faults": json.dumps(plan)}


async def test_a_bad_plan_is_refused_before_the_start(tmp_path):
    rig = Rig(tmp_path)
    with pytest.raises(ConfigError, match="--reference-faults: entry 0"):
        rig.new(reference_faults='[{"fault": "stall"}]')


async def test_a_stall_lasts_and_passes(tmp_path):
    async with Rig(tmp_path) as rig:
        engine = await rig.start(
            reference_step_ms=1, reference_token_us=0, **faults({"at_step": 3, "fault": "stall", "duration_s": 20})
        )
        await engine.admit(request("r", PROMPT), Stroke.WHOLE)
        durations = []
        for _ in range(4):
            begin_s = rig.now_s
            await engine.next_step()
            durations.append(rig.now_s - begin_s)
    assert durations == pytest.approx([0.001, 0.001, 20.001, 0.001])


async def test_an_endless_stall_holds_a_request_after_it_started(tmp_path):
    async with Rig(tmp_path) as rig:
        engine = await rig.start(**faults({"at_request": 2, "fault": "stall"}))
        await answer(engine, request("a", PROMPT), Stroke.PREFILL)
        await engine.admit(request("b", PROMPT), Stroke.PREFILL)
        assert (await engine.next_step()).outputs[0].started
        stepping = asyncio.create_task(engine.next_step())
        done, _ = await asyncio.wait({stepping}, timeout=0.05)
        assert not done
        stepping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stepping
        stepping = asyncio.create_task(engine.next_step())
        await engine.cancel(["b"])
        done, _ = await asyncio.wait({stepping}, timeout=0.05)
        assert not done, "a stall does not end because someone stopped waiting for it"
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await stepping


async def test_a_crash_takes_the_engine_for_good(tmp_path):
    async with Rig(tmp_path) as rig:
        engine = await rig.start(**faults({"at_step": 3, "fault": "crash"}))
        await engine.admit(request("r", PROMPT), Stroke.WHOLE)
        tokens = [(await engine.next_step()).outputs[0].token_ids[0] for _ in range(2)]
        for _ in range(2):
            with pytest.raises(EngineError, match="crashed the engine at step 3"):
                await engine.next_step()
        with pytest.raises(EngineError, match="crashed"):
            await engine.admit(request("s", PROMPT), Stroke.WHOLE)
        await engine.cancel(["r"])
    assert tokens == expected_tokens(PROMPT, count=2)


async def test_slow_steps_take_longer(tmp_path):
    async with Rig(tmp_path) as rig:
        engine = await rig.start(
            reference_step_ms=2,
            reference_token_us=0,
            **faults({"at_step": 2, "fault": "slow", "factor": 10, "count": 2}),
        )
        await engine.admit(request("r", PROMPT), Stroke.WHOLE)
        durations = []
        for _ in range(4):
            begin_s = rig.now_s
            await engine.next_step()
            durations.append(rig.now_s - begin_s)
    assert durations == pytest.approx([0.002, 0.02, 0.02, 0.002])


async def test_one_handoff_is_corrupt_and_the_next_one_is_not(tmp_path):
    async with Rig(tmp_path) as rig:
        # Byte 130 lies in word 16 of the block: layer 0, V, token 0.
        prefill = await rig.start("p", **faults({"at_request": 2, "fault": "corrupt", "block": 1, "byte": 130}))
        decode = await rig.start("d")
        results = []
        for request_id in "abc":
            # Salted, so that decode has none of the blocks yet.
            message = request(request_id, PROMPT, cache_salt=request_id)
            first = await answer(prefill, message, Stroke.PREFILL)
            results.append(await answer(decode, message, Stroke.DECODE, first.handoff))
            await prefill.release([request_id])
        again = await answer(prefill, request("d", PROMPT, cache_salt="b"))
    assert [result.tokens for result in results] == [expected_tokens(PROMPT, count=8), [], again.tokens]
    assert isinstance(results[1].failure, KvCorruptError)
    assert "block 1 (" in results[1].failure.message
    assert "layer 0, position 16, V" in results[1].failure.message
    assert again.tokens == expected_tokens(PROMPT, count=8), "the corrupt block does not serve as a prefix"


async def test_a_refused_request_was_not_queued(tmp_path):
    async with Rig(tmp_path) as rig:
        engine = await rig.start(**faults({"at_request": 2, "fault": "refuse"}))
        await engine.admit(request("a", PROMPT), Stroke.WHOLE)
        with pytest.raises(OverloadedError, match="request 2") as caught:
            await engine.admit(request("b", PROMPT), Stroke.WHOLE)
        assert caught.value.retry_after_s == 1.0
        await engine.admit(request("b", PROMPT), Stroke.WHOLE)
        answers, _ = await finish(engine, "a", "b")
        assert (await load_of(engine)).used_blocks == 0
    assert answers["b"].tokens == expected_tokens(PROMPT, count=8)


DYING = """
import asyncio, sys
from pathlib import Path
from twostroke.config import WorkerSettings
from twostroke.engine.base import Stroke
from twostroke.engine.reference import ReferenceEngine
from twostroke.v1.engine_pb2 import EngineRequest

async def main():
    settings = WorkerSettings(engine="reference", reference_faults='[{"at_request": 2, "fault": "exit"}]')
    engine = ReferenceEngine(settings, epoch="e", worker_id="p", folder=Path(sys.argv[1]))
    await engine.start()
    for request_id in "ab":
        request = EngineRequest(request_id=request_id, prompt_token_ids=range(48))
        await engine.admit(request, Stroke.PREFILL)
        while True:
            outputs = (await engine.next_step()).outputs
            if outputs and outputs[-1].done:
                print(outputs[-1].handoff.SerializeToString().hex(), flush=True)
                break

asyncio.run(main())
"""


async def test_exit_ends_the_process_and_its_kv_is_lost(tmp_path):
    source_root = Path(twostroke.__file__).parent.parent
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "error", "-c", DYING, str(tmp_path)),
        env={"PYTHONPATH": str(source_root)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    stdout, stderr = await process.communicate()
    assert (process.returncode, stderr) == (70, b"")
    (segment,) = tmp_path.iterdir()
    with pytest.raises(KvLostError, match="is dead"):
        PeerSegment.attach(segment.name, epoch="e", block_words=block_words(16), folder=tmp_path)
    async with Rig(tmp_path) as rig:
        handoff = Handoff.FromString(bytes.fromhex(stdout.decode()))
        result = await answer(await rig.start("d"), request("a", list(range(48))), Stroke.DECODE, handoff)
    assert isinstance(result.failure, KvLostError)
    assert remove_stale(tmp_path) == []
