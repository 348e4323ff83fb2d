"""KV that is handed over while it is computed: when memory is taken, who takes over, what every end leaves behind."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

import grpc.aio
import pytest
import pytest_asyncio

from cluster.reference_cluster import Answer, Cluster, request, running
from twostroke.config import RpcSettings
from twostroke.engine.reference_model import expected_tokens
from twostroke.rpc.channel import connect
from twostroke.v1.cluster_pb2 import WatchResponse, WorkerView
from twostroke.v1.engine_pb2 import SamplingParams
from twostroke.v1.worker_pb2 import WatchLoadRequest, WatchLoadResponse
from twostroke.v1.worker_pb2_grpc import WorkerServiceStub

# A prompt token takes half a millisecond, a step reads 64 of them.
SLOW = ("--reference-token-us", "500", "--step-budget-tokens", "64")
ABORTS = 2000
AT_ONCE = 50


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def slow() -> AsyncIterator[Cluster]:
    async with running(prefill=1, decode=2, worker_flags=SLOW) as cluster:
        yield cluster


pytestmark = pytest.mark.asyncio(loop_scope="module")


def prompt(tokens: int, salt: int) -> list[int]:
    return [(i * 7919 + salt * 104729) % 40000 for i in range(tokens)]


def oracle(tokens: list[int], count: int) -> list[int]:
    return expected_tokens(tokens, SamplingParams(temperature=0), count)


def worker(view: WatchResponse, name: str) -> WorkerView:
    return next(each for each in view.workers if each.info.worker_id == name)


def decode_blocks(view: WatchResponse) -> int:
    return sum(each.load.used_blocks for each in view.workers if each.info.worker_id.startswith("decode"))


def receiving(view: WatchResponse) -> bool:
    """A prompt is being computed, and a decode worker has blocks for it."""
    return worker(view, "prefill-0").load.pending_prompt_tokens > 0 and decode_blocks(view) > 0


async def test_decode_has_the_blocks_before_prefill_has_finished(slow: Cluster) -> None:
    tokens = prompt(3000, 1)
    asked = asyncio.create_task(slow.ask(request(tokens, 10)))
    view = await slow.until(receiving)
    assert worker(view, "prefill-0").load.generated_tokens == 0
    assert decode_blocks(view) == 188, "all of the prompt's at once"
    assert (view.handoffs.receiving, view.handoffs.offered) == (1, 0)
    view = await slow.until(lambda view: any(each.load.kv_received_bytes for each in view.workers))
    assert worker(view, "prefill-0").load.generated_tokens == 0, "they are read while prefill computes"
    answer = await asked
    assert answer.token_ids == oracle(tokens, 10)
    assert answer.last.timeline.transferred_tokens == 3000
    assert answer.last.timeline.attempts == 1
    await slow.empty()


async def test_no_decode_memory_is_held_while_a_prompt_queues(slow: Cluster) -> None:
    """The second is longer, so it does not pass the first."""
    first, second = prompt(2000, 2), prompt(2400, 3)
    asked = [asyncio.create_task(slow.ask(request(first, 5)))]
    await slow.until(receiving)
    asked.append(asyncio.create_task(slow.ask(request(second, 5))))
    queued = await slow.until(lambda view: worker(view, "prefill-0").load.waiting_requests == 1)
    assert decode_blocks(queued) == 125, "the first prompt's only"
    assert (queued.handoffs.receiving, queued.handoffs.offered) == (1, 1)
    answers = await asyncio.gather(*asked)
    assert [answer.token_ids for answer in answers] == [oracle(first, 5), oracle(second, 5)]


@pytest.mark.parametrize("phase", ["queued on prefill", "computing and receiving", "decoding"])
async def test_a_client_that_leaves_frees_both_sides(slow: Cluster, phase: str) -> None:
    """O-25, O-28, O-62, O-63: in every phase, within seconds, without a time-out."""
    before = (await slow.empty()).handoffs
    asked = [asyncio.create_task(slow.ask(request(prompt(2000, 4 + index), 20_000))) for index in range(3)]
    if phase == "queued on prefill":
        await slow.until(lambda view: receiving(view) and worker(view, "prefill-0").load.waiting_requests == 2)
    elif phase == "computing and receiving":
        await slow.until(receiving)
    else:
        await slow.until(lambda view: sum(each.load.running_requests for each in view.workers) == 3)
    for each in asked:
        each.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    after = (await slow.empty()).handoffs
    assert (after.offered, after.receiving, after.received, after.lost) == (0, 0, 0, 0)
    assert after.released - before.released == 3
    short = prompt(20, 9)
    assert (await slow.ask(request(short, 2), timeout_s=3)).token_ids == oracle(short, 2), (
        "it does not wait behind them"
    )


@pytest.mark.parametrize("blocks", [1, 2, 20])
async def test_an_instruction_after_a_long_repetition_is_read(slow: Cluster, blocks: int) -> None:
    """O-01."""
    tokens = [700 + blocks] * (16 * blocks - 3) + [1, 2, 3]
    answer = await slow.ask(request(tokens, 12))
    assert answer.token_ids == oracle(tokens, 12)
    assert answer.last.timeline.transferred_tokens == len(tokens)


async def test_a_hundred_prompts_of_one_to_four_blocks_equal_one_engine(slow: Cluster) -> None:
    """O-08: index of the first difference, if any."""
    prompts = [prompt(1 + index * 64 // 100, 100 + index) for index in range(100)]
    answers = await asyncio.gather(*(slow.ask(request(tokens, 8)) for tokens in prompts))
    for tokens, answer in zip(prompts, answers, strict=True):
        expected = oracle(tokens, 8)
        difference = next((i for i in range(8) if answer.token_ids[i : i + 1] != expected[i : i + 1]), None)
        assert difference is None, f"prompt of {len(tokens)} tokens differs at {difference}"


@pytest.mark.parametrize("request_id", ["with spaces", "漢字 é", "x" * 300, "a/b?c=d&e"])
async def test_any_request_id_names_its_handoff(slow: Cluster, request_id: str) -> None:
    """O-36."""
    wanted = request(prompt(40, 11), 6)
    wanted.request_id = request_id
    assert (await slow.ask(wanted)).token_ids == oracle(prompt(40, 11), 6)


async def test_cancelling_one_request_in_mid_transfer_leaves_ten_others_alone(slow: Cluster) -> None:
    """O-43."""
    prompts = [prompt(30, 20 + index) for index in range(10)]
    others = [asyncio.create_task(slow.ask(request(tokens, 300))) for tokens in prompts]
    await slow.until(lambda view: sum(each.router_requests for each in view.workers) == 10)
    gone = asyncio.create_task(slow.ask(request(prompt(2000, 12), 5)))
    await slow.until(lambda view: receiving(view) and decode_blocks(view) >= 125)
    gone.cancel()
    answers = await asyncio.gather(*others)
    assert [answer.token_ids for answer in answers] == [oracle(tokens, 300) for tokens in prompts]
    await slow.empty()


async def test_a_decode_worker_killed_while_it_receives_is_replaced_for_the_same_handoff() -> None:
    """Prefill goes on and is not asked again."""
    async with running(prefill=1, decode=2, worker_flags=SLOW) as cluster:
        tokens = prompt(2500, 1)
        asked = asyncio.create_task(cluster.ask(request(tokens, 30)))
        view = await cluster.until(receiving)
        cluster.kill(next(each.info.worker_id for each in view.workers if each.router_requests))
        answer = await asked
        assert answer.token_ids == oracle(tokens, 30)
        assert answer.last.timeline.attempts == 1
        view = await cluster.empty()
        assert worker(view, "prefill-0").load.computed_prompt_tokens == 2500
        assert (view.handoffs.released, view.handoffs.lost) == (1, 0)


async def test_prefill_killed_in_mid_prompt_is_replaced_and_decode_gives_its_blocks_back() -> None:
    """O-26, O-33, O-41, O-78: error within a set time; ten others on the same decode worker do not notice."""
    async with running(prefill=2, decode=1, worker_flags=SLOW) as cluster:
        prompts = [prompt(30, 20 + index) for index in range(10)]
        others = [asyncio.create_task(cluster.ask(request(short, 400))) for short in prompts]
        await cluster.until(lambda view: worker(view, "decode-0").router_requests == 10)
        tokens = prompt(2000, 1)
        asked = asyncio.create_task(cluster.ask(request(tokens, 10)))
        view = await cluster.until(
            lambda view: decode_blocks(view) > 130 and any(each.load.pending_prompt_tokens for each in view.workers)
        )
        victim = next(each.info.worker_id for each in view.workers if each.load.pending_prompt_tokens)
        cluster.kill(victim)
        answer = await asked
        assert answer.token_ids == oracle(tokens, 10)
        assert answer.last.timeline.attempts == 2
        assert answer.last.timeline.prefill_worker_id != victim
        answers = await asyncio.gather(*others)
        assert [each.token_ids for each in answers] == [oracle(short, 400) for short in prompts]
        assert all(each.last.timeline.attempts == 1 for each in answers)
        view = await cluster.empty()
        assert not any(link.failures for link in view.links), "no link is to blame"


@pytest.mark.parametrize("pieces", [1, 3])
async def test_prefill_killed_after_the_first_token_ends_no_stream(pieces: int) -> None:
    """With all chunks read, decode goes on; without, the prompt is placed again. Neither repeats a token."""
    async with running(prefill=2, decode=1, worker_flags=("--reference-step-ms", "5")) as cluster:
        tokens = prompt(300, 1)
        answer, killed = Answer(), ""
        async for piece in cluster.stream(request(tokens, 60)):
            answer.token_ids.extend(piece.token_ids)
            answer.pieces.append(piece)
            if len(answer.pieces) == pieces:
                view = await cluster.view()
                used = [each.info.worker_id for each in view.workers if each.load.generated_tokens]
                killed = next((name for name in used if name.startswith("prefill")), "prefill-0")
                cluster.kill(killed)
        assert answer.token_ids == oracle(tokens, 60)
        assert answer.last.usage.completion_tokens == 60
        if pieces > 1:
            assert answer.last.timeline.attempts == 1, "decode had the whole prompt"


async def test_a_restarted_prefill_worker_is_met_as_a_new_one() -> None:
    """O-79: the old life's links and hand-offs are dropped, peers are told, no one else restarts."""
    async with running(prefill=1, decode=1, worker_flags=SLOW) as cluster:
        asked = asyncio.create_task(cluster.ask(request(prompt(2000, 1), 5)))
        view = await cluster.until(receiving)
        epoch = worker(view, "prefill-0").info.epoch
        cluster.kill("prefill-0")
        cluster.start_worker("prefill-0", *SLOW)
        answer = await asked
        assert answer.token_ids == oracle(prompt(2000, 1), 5)
        assert answer.last.timeline.attempts > 1
        view = await cluster.ready(2)
        assert worker(view, "prefill-0").info.epoch != epoch
        answers = await asyncio.gather(*(cluster.ask(request(prompt(40, index), 5)) for index in range(20)))
        assert [each.token_ids for each in answers] == [oracle(prompt(40, index), 5) for index in range(20)]
        view = await cluster.empty()
        assert view.handoffs.lost >= 1
        assert f"epoch {epoch} of worker prefill-0 is over" in cluster.log("router")
        assert f"epoch {epoch} of worker prefill-0 is over; its KV is given up" in cluster.log("decode-0")


async def test_a_prefill_engine_that_stalls_costs_the_deadline_for_chunks_and_not_the_requests() -> None:
    """O-33, O-35: the stalled worker's process answers everything else."""
    stall = {"prefill-0": ("--reference-faults", '[{"at_step": 5, "fault": "stall"}]')}
    flags = (*SLOW, "--kv-stall-s", "0.4")
    async with running(
        prefill=2, worker_flags=flags, own_flags=stall, router_flags=("--handoff-timeout-s", "0.4")
    ) as c:
        prompts = [prompt(1000, index) for index in range(2)]
        answers = await asyncio.gather(*(c.ask(request(tokens, 5)) for tokens in prompts))
        assert [answer.token_ids for answer in answers] == [oracle(tokens, 5) for tokens in prompts]
        timelines = [answer.last.timeline for answer in answers]
        assert {timeline.prefill_worker_id for timeline in timelines} == {"prefill-1"}
        assert max(timeline.attempts for timeline in timelines) > 1
        # A stalled engine reports nothing, not even that it is empty.
        await c.until(lambda view: not view.requests and not decode_blocks(view))
        assert "no KV of hand-off" in c.log("router")


async def test_a_prefill_worker_that_stays_silent_costs_the_client_no_more_than_its_deadline() -> None:
    """O-35: decode's leg is aborted with it."""
    stall = ("--reference-faults", '[{"at_step": 5, "fault": "stall"}]')
    async with running(worker_flags=SLOW, own_flags={"prefill-0": stall}) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.ask(request(prompt(2000, 1), 5), timeout_s=1.5)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await cluster.until(lambda view: not view.requests and not decode_blocks(view))


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_process_that_is_stopped_in_mid_transfer_is_treated_as_lost_and_comes_back_clean(side: str) -> None:
    """O-26, O-33, O-78: it neither answers nor dies; what it does when it goes on harms nobody."""
    flags = (*SLOW, "--kv-stall-s", "0.5")
    router = ("--handoff-timeout-s", "0.5")
    async with running(prefill=2, decode=2, worker_flags=flags, router_flags=router) as cluster:
        tokens = prompt(1500, 1)
        asked = asyncio.create_task(cluster.ask(request(tokens, 20)))
        busy = {"prefill": lambda each: each.load.pending_prompt_tokens, "decode": lambda each: each.load.used_blocks}
        view = await cluster.until(lambda view: decode_blocks(view) and any(map(busy["prefill"], view.workers)))
        victim = next(
            each.info.worker_id for each in view.workers if each.info.worker_id.startswith(side) and busy[side](each)
        )
        cluster.signal(victim, signal.SIGSTOP)
        answer = await asked
        assert answer.token_ids == oracle(tokens, 20)
        timeline = answer.last.timeline
        assert victim not in (timeline.prefill_worker_id, timeline.decode_worker_id)
        assert timeline.attempts == (2 if side == "prefill" else 1)
        cluster.signal(victim, signal.SIGCONT)
        await cluster.ready(4)
        await cluster.empty()
        prompts = [prompt(100, index) for index in range(8)]
        answers = await asyncio.gather(*(cluster.ask(request(each, 5)) for each in prompts))
        assert [each.token_ids for each in answers] == [oracle(each, 5) for each in prompts]


@pytest.mark.parametrize("fault", ["crash", "exit"])
async def test_a_prefill_engine_that_fails_is_replaced(fault: str) -> None:
    """O-35: and the failure is not taken for the request's."""
    own = {"prefill-0": ("--reference-faults", f'[{{"at_step": 3, "fault": "{fault}"}}]')}
    async with running(prefill=2, worker_flags=SLOW, own_flags=own) as cluster:
        prompts = [prompt(500, index) for index in range(4)]
        answers = await asyncio.gather(*(cluster.ask(request(tokens, 5)) for tokens in prompts))
        assert [answer.token_ids for answer in answers] == [oracle(tokens, 5) for tokens in prompts]
        assert max(answer.last.timeline.attempts for answer in answers) > 1


async def test_kv_whose_lease_ended_before_decode_fetched_it_is_not_used() -> None:
    """O-03: with a hold of one second and a decode worker that stands still for longer."""
    flags = ("--kv-lease-s", "1", "--reference-late")
    async with running(worker_flags=flags, router_flags=("--worker-timeout-s", "15")) as cluster:
        cluster.signal("decode-0", signal.SIGSTOP)
        prompts = [prompt(700 + index, 1 + index) for index in range(3)]
        asked = [asyncio.create_task(cluster.ask(request(tokens, 8))) for tokens in prompts]
        await cluster.until(lambda view: worker(view, "prefill-0").load.held_handoffs == 3)
        await cluster.until(lambda view: worker(view, "prefill-0").load.held_handoffs == 0)
        cluster.signal("decode-0", signal.SIGCONT)
        answers = await asyncio.gather(*asked)
        assert [each.token_ids for each in answers] == [oracle(tokens, 8) for tokens in prompts]
        assert all(each.last.timeline.attempts > 1 for each in answers), "the first one's KV is gone"


async def worker_load(cluster: Cluster, name: str, condition: Callable[[WatchLoadResponse], bool]) -> WatchLoadResponse:
    """The first load report of a worker, asked without a router, that the condition holds for."""
    channel = connect(f"127.0.0.1:{cluster.ports[name]}", RpcSettings())
    try:
        async for load in WorkerServiceStub(channel).WatchLoad(WatchLoadRequest(), timeout=20):
            if condition(load):
                return load
        raise AssertionError(f"{name} ended its reports")
    finally:
        await channel.close()


async def test_a_router_that_dies_leaves_nothing_on_its_workers() -> None:
    """Long before a lease ends. What waits for room in the router is not on a worker yet; test_routers.py has a prompt
    that is held."""
    decode = ("--reference-blocks", "150", "--max-model-len-tokens", "2400")
    flags = ("--kv-lease-s", "60", "--reference-step-ms", "4")
    async with running(worker_flags=flags, own_flags={"decode-0": decode}) as cluster:
        asked = [asyncio.create_task(cluster.ask(request(prompt(1900, 0), 400)))]
        await cluster.until(lambda view: worker(view, "decode-0").load.running_requests == 1)
        asked += [asyncio.create_task(cluster.ask(request(prompt(900 + index, index), 8))) for index in range(4)]
        await cluster.until(lambda view: view.requests == 5)
        cluster.kill("router")
        await asyncio.gather(*asked, return_exceptions=True)
        for name in ("prefill-0", "decode-0"):
            load = await worker_load(cluster, name, lambda load: not load.used_blocks)
            assert (load.held_handoffs, load.held_blocks, load.running_requests, load.waiting_requests) == (0, 0, 0, 0)


async def test_an_engine_that_offers_no_kv_early_is_served_as_before() -> None:
    """As vLLM's stock connector: decode hears of a request when its prompt is done."""
    async with running(worker_flags=(*SLOW, "--reference-late", "--max-sequences", "4")) as cluster:
        tokens = prompt(1500, 1)
        asked = asyncio.create_task(cluster.ask(request(tokens, 10)))
        view = await cluster.until(lambda view: worker(view, "prefill-0").load.pending_prompt_tokens > 0)
        assert (decode_blocks(view), view.handoffs.offered) == (0, 1)
        assert (await asked).token_ids == oracle(tokens, 10)
        for index in range(40):
            async with aclosing(cluster.stream(request(prompt(50, index), 1000))) as stream:
                await anext(stream)
        await cluster.empty()


async def _abort(cluster: Cluster, chance: random.Random) -> str:
    """One request that is given up somewhere; what it said until then is right."""
    tokens = prompt(chance.choice([1, 15, 40, 200, 600]), chance.randrange(50))
    answer: list[int] = []
    pieces = chance.choice([0, 0, 0, 1, 1, 2, 5])
    task = asyncio.current_task()
    assert task is not None
    timer = None if pieces else asyncio.get_running_loop().call_later(chance.uniform(0, 0.2), task.cancel)
    try:
        async with aclosing(cluster.stream(request(tokens, chance.choice([2, 5, 1000])))) as stream:
            async for piece in stream:
                answer.extend(piece.token_ids)
                pieces -= 1
                if not pieces:
                    break
    except asyncio.CancelledError:
        task.uncancel()
    finally:
        if timer is not None:
            timer.cancel()
    assert answer == oracle(tokens, len(answer))
    return "silent" if not answer else "spoke"


async def test_two_thousand_aborts_at_random_phases_leave_nothing_behind() -> None:
    """O-25, O-28, O-29, O-30, O-63: free blocks return to the start on both sides, and the next answer is right."""
    chance = random.Random(1)
    flags = ("--reference-token-us", "50", "--reference-blocks", "1024")
    async with running(prefill=1, decode=2, worker_flags=flags) as cluster:
        left, ends = iter(range(ABORTS)), []

        async def client() -> None:
            ends.extend([await _abort(cluster, chance) for _ in left])

        await asyncio.gather(*(client() for _ in range(AT_ONCE)))
        assert len(ends) == ABORTS
        assert min(ends.count("silent"), ends.count("spoke")) > ABORTS / 10
        view = await cluster.empty()
        counts = view.handoffs
        assert (counts.offered, counts.receiving, counts.received, counts.lost) == (0, 0, 0, 0)
        assert [link.failures for link in view.links] == [0, 0]
        assert view.recomputed_prompts == 0
        tokens = prompt(500, 77)
        assert (await cluster.ask(request(tokens, 9))).token_ids == oracle(tokens, 9)
        logs = "".join(cluster.log(name) for name in ("router", "prefill-0", "decode-0", "decode-1"))
        assert "Traceback" not in logs
