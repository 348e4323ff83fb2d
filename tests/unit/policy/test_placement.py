import random
from dataclasses import replace

import pytest

from twostroke.errors import NoWorkerError
from twostroke.policy.explain import explain, summary
from twostroke.policy.placement import place
from twostroke.policy.plan import ALL_WAYS, ONE_POOL, STRICT, Limits, Option, Options, Plan
from twostroke.policy.snapshot import ClusterSnapshot, LinkSnapshot, PlacementRequest, Slo, WorkerSnapshot
from twostroke.policy.step_model import LinearStepModel

GPU = LinearStepModel(0.02, 2e-4, 1e-7, 2e-4, 1e-8)
CPU = LinearStepModel(0.06, 4e-3, 2e-6, 4e-3, 8e-7)
"""The machine of the baseline: 64 ms a token at batch 1, a 4k prompt in half a minute."""


def worker(name: str, reads: bool, writes: bool, **loads: object) -> WorkerSnapshot:
    made = WorkerSnapshot(
        name, reads, writes, free_blocks=1000, block_size_tokens=16, total_blocks=1000, step_model=GPU
    )
    return replace(made, **loads)  # type: ignore[arg-type]


def reader(name: str, pending: int = 0, **loads: object) -> WorkerSnapshot:
    return worker(name, True, False, **{"pending_prompt_tokens": pending, "pending_prompts": bool(pending), **loads})


def writer(name: str, running: int = 0, **loads: object) -> WorkerSnapshot:
    return worker(name, False, True, **{"running_sequences": running, "context_tokens": running * 1000, **loads})


def both(name: str, **loads: object) -> WorkerSnapshot:
    return worker(name, True, True, **loads)


def cluster(*workers: WorkerSnapshot, **more: object) -> ClusterSnapshot:
    return ClusterSnapshot(workers, **more)  # type: ignore[arg-type]


def chosen(plan: Plan) -> tuple[str | None, str]:
    return plan.prefill, plan.decode


SHORT = PlacementRequest(prompt_tokens=10, expected_output_tokens=1)
LONG = PlacementRequest(prompt_tokens=8000)
TIGHT = Slo(ttft_s=2.0, itl_s=0.05)
"""Shorter than a step of GPU with a chunk of 512."""

STRICT_CASES = {
    "the only pair": (SHORT, [reader("p"), writer("d")], ("p", "d")),
    "fewest prompt tokens ahead": (SHORT, [reader("p1", 500), reader("p2", 20), writer("d")], ("p2", "d")),
    "fewest answers": (LONG, [reader("p"), writer("d1", 3), writer("d2", 1)], ("p", "d2")),
    "room before load": (
        PlacementRequest(prompt_tokens=160, expected_output_tokens=2),
        [reader("p"), writer("d1", 0, free_blocks=10), writer("d2", 9, free_blocks=11)],
        ("p", "d2"),
    ),
    "a place before load": (LONG, [reader("p"), writer("d1", 4, max_sequences=4), writer("d2", 9)], ("p", "d2")),
    "no hop for the only worker": (SHORT, [both("w")], (None, "w")),
    "two workers rather than one": (SHORT, [both("w1"), both("w2")], ("w1", "w2")),
    "not where it failed": (
        replace(SHORT, avoid=frozenset({"d1"})),
        [reader("p"), writer("d1"), writer("d2", 9)],
        ("p", "d2"),
    ),
    "where it failed rather than nowhere": (
        replace(SHORT, avoid=frozenset({"d1"})),
        [reader("p"), writer("d1")],
        ("p", "d1"),
    ),
    "warm prefix": (
        replace(LONG, cached_tokens={"p1": 7984}),
        [reader("p1", 2000), reader("p2"), writer("d")],
        ("p1", "d"),
    ),
    "warm prefix behind a queue that costs more than it saves": (
        replace(LONG, cached_tokens={"p1": 2000}),
        [reader("p1", 9000), reader("p2"), writer("d")],
        ("p2", "d"),
    ),
    "the faster of two idle ones": (
        LONG,
        [reader("p1", step_model=replace(GPU, per_prefill_token_s=4e-4)), reader("p2"), writer("d")],
        ("p2", "d"),
    ),
}


@pytest.mark.parametrize("case", STRICT_CASES, ids=str)
def test_strict(case: str) -> None:
    request, workers, expected = STRICT_CASES[case]
    assert chosen(place(request, ClusterSnapshot(workers), STRICT)) == expected
    assert chosen(place(request, ClusterSnapshot(workers[::-1]))) == expected, "order must not matter; strict is usual"


def test_a_refused_pair_and_an_unhealthy_link_are_never_placed() -> None:
    workers = [reader("p1"), reader("p2", 900), writer("d")]
    assert chosen(place(SHORT, cluster(*workers, refused_pairs=frozenset({("p1", "d")})))) == ("p2", "d")
    sick = {("p1", "d"): LinkSnapshot(healthy=False)}
    assert chosen(place(SHORT, cluster(*workers, links=sick))) == ("p2", "d")
    with pytest.raises(NoWorkerError):
        place(SHORT, cluster(*workers, links=sick, refused_pairs=frozenset({("p2", "d")})))


def test_the_only_good_link_is_found_however_far_down_the_lists() -> None:
    """40 x 40 workers of which one pair, the most loaded one, can exchange KV."""
    readers = [reader(f"p{i:02}", 1000 * i) for i in range(40)]
    writers = [writer(f"d{i:02}", i) for i in range(40)]
    plan = place(
        LONG,
        cluster(
            *readers,
            *writers,
            default_link=LinkSnapshot(healthy=False),
            links={("p39", "d39"): LinkSnapshot()},
        ),
    )
    assert chosen(plan) == ("p39", "d39")


@pytest.mark.parametrize("workers", [[], [reader("p")], [writer("d")]], ids=["none", "no decode", "no prefill"])
def test_no_pair_is_an_error_where_pairs_are_asked_for(workers: list[WorkerSnapshot]) -> None:
    with pytest.raises(NoWorkerError):
        place(SHORT, ClusterSnapshot(workers), STRICT)


def test_with_a_pool_lost_the_other_one_serves_alone_if_that_is_open() -> None:
    assert chosen(place(LONG, cluster(writer("d")), ALL_WAYS)) == (None, "d")
    assert place(LONG, cluster(reader("p")), ALL_WAYS).option is Option.P_ALONE
    with pytest.raises(NoWorkerError):
        place(LONG, cluster(reader("p")), replace(ALL_WAYS, p_alone=False))
    with pytest.raises(NoWorkerError):
        place(LONG, cluster(writer("d")), replace(ALL_WAYS, d_alone=False, lent_decoder=False))


SLOW_KV = {"kv_bytes_per_token": 131_072, "default_link": LinkSnapshot(bytes_per_s=1e9, latency_s=0.01)}


def test_a_short_or_mostly_cached_prompt_is_not_worth_a_hop() -> None:
    link = LinkSnapshot(bytes_per_s=10e9, latency_s=0.05)
    busy = cluster(reader("p"), writer("d", 4, slo=TIGHT), kv_bytes_per_token=131_072, default_link=link)
    long = replace(LONG, slo=TIGHT)
    assert place(long, busy, ALL_WAYS).option is Option.P_THEN_D
    assert place(replace(long, prompt_tokens=30), busy, ALL_WAYS).option is Option.D_ALONE
    warm = replace(long, cached_tokens={"d": 7968})
    assert place(warm, busy, ALL_WAYS).option is Option.D_ALONE
    assert place(warm, busy, STRICT).option is Option.P_THEN_D, "a switch is a switch"


def test_a_long_prompt_does_not_stall_answers_that_run() -> None:
    slow_steps = {"step_model": CPU, "step_budget_tokens": 512}
    plan = place(PlacementRequest(4096), cluster(reader("p", **slow_steps), writer("d", 4, **slow_steps)), ALL_WAYS)
    assert chosen(plan) == ("p", "d")
    alone = next(each for each in plan.why if each.option is Option.D_ALONE)
    assert alone.disturbed_cost > 100 * plan.why[0].disturbed_cost, "four streams would stall for seconds"


def test_a_full_decode_pool_leaves_the_answer_on_prefill() -> None:
    full = writer("d", 50, free_blocks=3)
    assert place(LONG, cluster(reader("p"), full), ALL_WAYS).option is Option.P_ALONE
    assert chosen(place(LONG, cluster(reader("p"), full), replace(ALL_WAYS, p_alone=False))) == ("p", "d")


def test_a_decoder_is_lent_when_prefill_queues_breach_and_then_only_in_bounded_chunks() -> None:
    request = PlacementRequest(3000, slo=Slo(ttft_s=2.0, itl_s=0.1))
    writers = [writer("d", 20, slo=Slo(2.0, 0.1), step_budget_tokens=2048)]
    calm = place(request, cluster(reader("p", 1000), *writers), ALL_WAYS)
    assert calm.option is Option.P_THEN_D
    breached = place(request, cluster(reader("p", 100_000), *writers), ALL_WAYS)
    assert breached.option is Option.LENT_DECODER
    assert breached.chunk_tokens is not None
    assert 16 <= breached.chunk_tokens < 400, "a chunk of 400 tokens and 20 answers take more than 0.1 s"
    assert breached.chosen is not None
    assert breached.chosen.ttft_s < 3
    waiting = place(request, cluster(reader("p", 100_000), *writers), replace(ALL_WAYS, lent_decoder=False))
    assert waiting.option is not Option.LENT_DECODER


def test_the_lender_may_leave_the_writing_to_another() -> None:
    request = PlacementRequest(3000, slo=Slo(ttft_s=2.0, itl_s=0.1))
    small = writer("d1", 1, free_blocks=190, slo=Slo(2.0, 0.1))
    roomy = writer("d2", 60, slo=Slo(2.0, 0.1), context_tokens=300_000)
    plan = place(request, cluster(reader("p", 100_000), small, roomy), Options(d_alone=False, p_alone=False))
    assert (plan.option, plan.prefill, plan.decode) == (Option.LENT_DECODER, "d1", "d2")


def test_no_decoder_is_lent_that_could_not_take_a_small_chunk() -> None:
    request = PlacementRequest(3000, slo=Slo(ttft_s=2.0, itl_s=0.1))
    snapshot = cluster(reader("p", 100_000), writer("d", 20, slo=Slo(2.0, 0.1)))
    assert any(each.option is Option.LENT_DECODER for each in place(request, snapshot, ALL_WAYS).why)
    coarse = place(request, snapshot, ALL_WAYS, limits=Limits(min_chunk_tokens=400))
    assert not any(each.option is Option.LENT_DECODER for each in coarse.why)
    tight = cluster(reader("p", 100_000), writer("d", 20, slo=Slo(2.0, 0.02)))
    assert not any(each.option is Option.LENT_DECODER for each in place(request, tight, ALL_WAYS).why)


def test_a_lent_decoder_takes_short_prompts_besides() -> None:
    """A chat behind a document: lent the same small chunk, it is read at once; another document would wait."""
    slo = Slo(ttft_s=1.5, itl_s=0.25)
    read = {"step_model": CPU, "pending_prompt_tokens": 2000, "pending_prompts": 1}
    workers = reader("p", 4000, step_model=CPU), writer("d", 4, context_tokens=400, slo=slo, **read)
    plan = place(PlacementRequest(50, slo=slo), cluster(*workers), ALL_WAYS)
    assert (plan.option, chosen(plan)) == (Option.LENT_DECODER, (None, "d"))
    assert plan.chosen is not None
    assert plan.chunk_tokens is not None
    steps = -(-50 // (plan.chunk_tokens - plan.chunk_tokens // 4))
    assert plan.chosen.queue_s < 0.25
    assert plan.chosen.ttft_s == pytest.approx((1 + steps) * plan.chosen.queue_s)
    document = place(PlacementRequest(1000, slo=slo), cluster(*workers), ALL_WAYS)
    assert not any(each.option is Option.LENT_DECODER for each in document.why)
    nearly = replace(workers[1], pending_prompt_tokens=16)
    document = place(PlacementRequest(1000, slo=slo), cluster(workers[0], nearly), ALL_WAYS)
    assert any(each.option is Option.LENT_DECODER for each in document.why), "what is pending ends with the next step"


def test_awaited_answers_take_places() -> None:
    full = writer("d1", 1, max_sequences=3, awaited_sequences=2)
    plan = place(LONG, cluster(reader("p"), full, writer("d2", 2, max_sequences=3)))
    assert chosen(plan) == ("p", "d2")


def test_a_way_in_time_is_worth_much() -> None:
    """A decode worker alone is dearer for the answers on it, and the only way that ends in time."""
    snapshot = cluster(reader("p", 30_000, pending_prompts=6), writer("d", 8, slo=TIGHT))
    request = PlacementRequest(4000, expected_output_tokens=50, slo=Slo(ttft_s=20.0, itl_s=0.05))
    options = replace(ALL_WAYS, p_alone=False, lent_decoder=False)
    assert place(request, snapshot, options).option is Option.P_THEN_D
    hurried = place(replace(request, deadline_s=5.0), snapshot, options)
    assert hurried.option is Option.D_ALONE
    assert hurried.chosen is not None
    assert hurried.chosen.finish_s < 5.0


@pytest.mark.parametrize("budget", [512, 8192])
def test_a_short_prompt_waits_for_a_step_and_not_for_the_long_ones(budget: int) -> None:
    """A chat goes to prefill behind a document, unless its class cannot bear the step that is under way."""
    document = {"step_budget_tokens": budget, "slo": Slo(60.0, 1.0)}
    snapshot = cluster(reader("p", 30_000, **document), writer("d", 8, slo=TIGHT))
    chat = PlacementRequest(60, slo=Slo(5.0, 0.05))
    plan = place(chat, snapshot, replace(ALL_WAYS, d_alone=False, lent_decoder=False))
    assert chosen(plan) == ("p", "d")
    assert plan.chosen is not None
    step_s = GPU.batch_s(0, 0, budget, 0.0)
    assert step_s < plan.chosen.queue_s < 2 * step_s, "which also has the document's context"
    assert plan.chosen.ttft_s < 1.5 * plan.chosen.queue_s, "and the document has a part of its own step only"
    longest = place(replace(chat, prompt_tokens=7_500), snapshot, STRICT).chosen
    behind = place(replace(chat, prompt_tokens=7_501), snapshot, STRICT).chosen
    assert longest is not None
    assert behind is not None
    assert behind.queue_s > longest.queue_s + 3, "what is not much shorter may wait for all"
    hurried = place(replace(chat, slo=Slo(0.1, 0.05)), snapshot, replace(ALL_WAYS, p_alone=False))
    assert chosen(hurried) == (None, "d")


def test_a_decode_worker_that_computes_a_long_prompt_does_not_get_the_answer() -> None:
    """Its steps are full of that prompt for ten seconds; the other one has more answers."""
    lent = writer("d1", 2, pending_prompt_tokens=40_000, pending_prompts=1)
    plan = place(PlacementRequest(500, slo=TIGHT), cluster(reader("p"), lent, writer("d2", 12)), STRICT)
    assert chosen(plan) == ("p", "d2")
    idle = replace(lent, pending_prompt_tokens=0, pending_prompts=0)
    assert chosen(place(PlacementRequest(500, slo=TIGHT), cluster(reader("p"), idle, writer("d2", 12)))) == ("p", "d1")


def test_an_answer_on_prefill_expects_to_share_its_steps_with_prompts() -> None:
    quiet = cluster(reader("p"), writer("d", 2, free_blocks=3))
    request = PlacementRequest(100, expected_output_tokens=201, slo=TIGHT)
    plan = place(request, quiet, Options(p_then_d=False, d_alone=False, lent_decoder=False))
    assert plan.option is Option.P_ALONE
    assert plan.chosen is not None
    full_step_s = 0.02 + 2e-4 + 512 * 2e-4 + 512 * (512 + 256) * 1e-8
    own_step_s = 0.02 + 2e-4 + 200.5 * 1e-7
    assert plan.chosen.itl_s == pytest.approx((199 * (full_step_s + own_step_s) / 2 + own_step_s) / 200, rel=1e-3)


def test_one_pool_is_a_setting() -> None:
    plan = place(LONG, cluster(both("w1", pending_prompt_tokens=4000, pending_prompts=1), both("w2")), ONE_POOL)
    assert chosen(plan) == (None, "w2")


def test_the_kv_still_on_decode_makes_the_transfer_short() -> None:
    """A second turn: the first one's prompt and answer are on d2, its prompt on p2."""
    request = replace(LONG, cached_tokens={"p2": 6000, "d2": 7000})
    workers = [reader("p1"), reader("p2"), writer("d1"), writer("d2")]
    plan = place(request, cluster(*workers, **SLOW_KV), STRICT)
    assert chosen(plan) == ("p2", "d2")
    assert plan.chosen is not None
    assert plan.chosen.cached_tokens == 6000
    assert plan.chosen.transferred_tokens == 1000
    assert plan.chosen.handoff_s == pytest.approx(0.01 + 1000 * 131_072 / 1e9)


def test_a_stream_of_kv_leaves_only_the_last_chunk_to_wait_for() -> None:
    whole = place(LONG, cluster(reader("p"), writer("d"), **SLOW_KV)).chosen
    streamed = place(LONG, cluster(reader("p"), writer("d"), **SLOW_KV, streams_kv=True)).chosen
    assert whole is not None
    assert streamed is not None
    assert whole.handoff_s == pytest.approx(0.01 + 8000 * 131_072 / 1e9)
    assert streamed.handoff_s == pytest.approx(0.01 + 512 * 131_072 / 1e9)


def test_times_are_those_of_the_step_model() -> None:
    """One prompt of 1,000 tokens behind one of 512, in steps of 512, on an idle pair."""
    plan = place(PlacementRequest(1000, expected_output_tokens=11), cluster(reader("p", 512), writer("d")))
    assert plan.chosen is not None
    step_s = 0.02 + 512 * 2e-4 + 512 * 256 * 1e-8
    assert plan.chosen.queue_s == pytest.approx(step_s)
    assert plan.chosen.prefill_s == pytest.approx(2 * 0.02 + 1000 * 2e-4 + 1000 * 500 * 1e-8)
    itl_s = 0.02 + 2e-4 + (1000 + 5.5) * 1e-7
    assert plan.chosen.itl_s == pytest.approx(itl_s + 0.005 / 10)
    assert plan.chosen.finish_s == pytest.approx(plan.chosen.ttft_s + 10 * itl_s + 0.005)


def test_no_way_in_time_is_refused_with_the_time_in_which_the_queue_drains() -> None:
    queue = cluster(reader("p", 50_000, pending_prompts=5), writer("d"))
    tight = replace(LONG, deadline_s=9.0)
    plan = place(tight, queue, replace(ALL_WAYS, d_alone=False, lent_decoder=False))
    assert (plan.option, plan.decode) == (Option.REFUSE, "")
    soonest = min(plan.why, key=lambda each: each.finish_s)
    assert plan.retry_after_s == pytest.approx(soonest.finish_s - 9.0 * 1.1)
    assert soonest.queue_s > plan.retry_after_s > 1
    left = 50_000 - int(50_000 * (plan.retry_after_s + 0.5) / soonest.queue_s)
    later = reader("p", left, pending_prompts=5)
    after = place(tight, cluster(later, writer("d")), replace(ALL_WAYS, d_alone=False))
    assert after.option is not Option.REFUSE, "whoever comes back when told is served"
    assert place(tight, queue, replace(ALL_WAYS, d_alone=False, refuse=False)).option is not Option.REFUSE
    assert place(replace(tight, deadline_s=60.0), queue, ALL_WAYS).option is not Option.REFUSE


def test_what_no_empty_queue_could_serve_in_time_is_not_told_to_come_back() -> None:
    plan = place(replace(LONG, deadline_s=0.5), cluster(reader("p", 100), writer("d")), ALL_WAYS)
    assert (plan.option, plan.retry_after_s) == (Option.REFUSE, None)


def test_without_room_it_waits_where_there_is_a_queue() -> None:
    queued = replace(STRICT, wait=True)
    full = cluster(reader("p"), writer("d", free_blocks=100))
    assert place(LONG, full, queued).option is Option.WAIT
    assert place(LONG, full, STRICT).option is Option.P_THEN_D
    assert place(LONG, cluster(reader("p"), writer("d")), queued).option is Option.P_THEN_D
    never = cluster(reader("p"), writer("d", total_blocks=200, free_blocks=200), writer("e", total_blocks=200))
    assert place(LONG, cluster(reader("p", total_blocks=300), *never.workers[1:]), queued).option is not Option.WAIT


def test_a_reader_takes_only_so_many_tokens_before_the_queue_in_front_keeps_them() -> None:
    limits, queued = Limits(prefill_window_tokens=10_000), replace(STRICT, wait=True)
    assert place(LONG, cluster(reader("p", 3000), writer("d")), queued, limits=limits).option is Option.WAIT
    assert place(SHORT, cluster(reader("p", 3000), writer("d")), queued, limits=limits).option is Option.P_THEN_D
    huge = PlacementRequest(12_000)
    assert place(huge, cluster(reader("p"), writer("d")), queued, limits=limits).option is Option.P_THEN_D


def test_long_prompts_may_reserve_only_part_of_a_decode_worker() -> None:
    """O-49: room promised to prompts that take 10 s starves those that are ready."""
    queued, limits = replace(STRICT, wait=True), Limits(long_prompt_s=1.0, long_share=0.5)
    some = writer("d", free_blocks=600, promised_long_blocks=400)
    assert place(LONG, cluster(reader("p"), some), queued, limits=limits).option is Option.WAIT
    brief = PlacementRequest(2000)
    assert place(brief, cluster(reader("p"), some), queued, limits=limits).option is Option.P_THEN_D
    first = writer("d", total_blocks=520, free_blocks=520)
    assert place(LONG, cluster(reader("p"), first), queued, limits=limits).option is Option.P_THEN_D, "one may always"


def random_cluster(rng: random.Random) -> ClusterSnapshot:
    def one(number: int) -> WorkerSnapshot:
        reads, writes = rng.choice(((True, False), (False, True), (True, True)))
        running = rng.randrange(40) if writes else 0
        pending = rng.randrange(30_000) * (rng.random() < 0.6)
        return worker(
            f"w{number}",
            reads,
            writes,
            pending_prompt_tokens=pending,
            pending_prompts=bool(pending),
            running_sequences=running,
            context_tokens=running * 1000,
            free_blocks=rng.randrange(1000),
            step_model=rng.choice((GPU, CPU)),
        )

    workers = [one(number) for number in range(rng.randrange(1, 12))]
    names = [each.worker for each in workers]
    refused = frozenset((a, b) for a in names for b in names if rng.random() < 0.2)
    return ClusterSnapshot(workers, refused, kv_bytes_per_token=rng.choice((0, 131_072)))


@pytest.mark.parametrize("seed", range(60))
def test_whatever_the_cluster_the_plan_is_the_cheapest_of_what_is_open_and_possible(seed: int) -> None:
    rng = random.Random(seed)
    snapshot = random_cluster(rng)
    request = PlacementRequest(
        rng.randrange(1, 12_000),
        cached_tokens={each.worker: rng.randrange(12_000) for each in snapshot.workers if rng.random() < 0.3},
        deadline_s=rng.choice((None, 100.0)),
    )
    options = Options(*(rng.random() < 0.6 for _ in range(4)), refuse=False)
    by_name = {each.worker: each for each in snapshot.workers}
    try:
        plan = place(request, snapshot, options, limits=Limits(shortlist=20))
    except NoWorkerError:
        assert not any(each.reads_prompts and each.writes_answers for each in snapshot.workers)
        return
    assert plan.chosen is plan.why[0]
    ranks = [(each.avoided, not each.fits, each.cost) for each in plan.why]
    assert ranks == sorted(ranks)
    for way in plan.why:
        assert way.ttft_s >= way.prefill_s > 0
        assert way.finish_s >= way.ttft_s
        assert way.disturbed_cost >= 0
        if way.prefill != way.decode:
            assert (way.prefill, way.decode) not in snapshot.refused_pairs
        assert by_name[way.prefill].reads_prompts or way.option in (Option.D_ALONE, Option.LENT_DECODER)
        assert by_name[way.decode].writes_answers or way.option is Option.P_ALONE
        assert way.cached_tokens < request.prompt_tokens
    shortlisted = place(request, snapshot, options)
    assert shortlisted.chosen is not None
    assert shortlisted.chosen.cost <= 1.5 * plan.chosen.cost or not plan.chosen.fits, "a shortlist costs little"
    text = explain(plan)
    assert text.splitlines()[0].startswith(plan.option.value)
    assert text.count("cost ") == len(plan.why)


@pytest.mark.parametrize("seed", range(12))
def test_a_shortlist_of_a_large_cluster_misses_little(seed: int) -> None:
    """Of 120 workers with all kinds of load, prefixes and speeds, against costing every pair."""
    rng = random.Random(seed)
    workers = []
    for number in range(120):
        reads, running = number % 3 == 0, rng.randrange(60)
        model = replace(GPU, per_prefill_token_s=rng.choice((1e-4, 2e-4, 8e-4)), const_s=rng.choice((0.01, 0.02, 0.05)))
        if reads:
            made = reader(f"w{number}", rng.randrange(40_000), step_model=model)
        else:
            made = writer(f"w{number}", running, context_tokens=running * rng.randrange(300, 6000), step_model=model)
        workers.append(replace(made, free_blocks=rng.choice((100, 1000))))
    cached = {f"w{rng.randrange(120)}": rng.randrange(8000) for _ in range(30)}
    request = PlacementRequest(rng.choice((200, 8000)), cached_tokens=cached, slo=TIGHT)
    quick = place(request, ClusterSnapshot(workers), ALL_WAYS, limits=Limits(shortlist=4))
    full = {
        each.option: each
        for each in place(request, ClusterSnapshot(workers), ALL_WAYS, limits=Limits(shortlist=120)).why
    }
    for way in quick.why:
        assert way.fits == full[way.option].fits
        assert way.cost <= 1.25 * full[way.option].cost + 0.05, way.option


def test_room_may_come_on_workers_of_unknown_size() -> None:
    queued = replace(STRICT, wait=True)
    unknown = cluster(reader("p", total_blocks=0), writer("d", free_blocks=5, total_blocks=0))
    assert place(LONG, unknown, queued).option is Option.WAIT


def test_why_in_words() -> None:
    busy = cluster(reader("p", 512), writer("d", 3, slo=TIGHT), kv_bytes_per_token=131_072)
    text = explain(place(replace(LONG, slo=TIGHT), busy, ALL_WAYS)).splitlines()
    assert text[0] == "p_then_d: p reads, d writes"
    assert text[1].startswith("* p_then_d     p -> d                   cost ")
    assert "queue 0.124, prefill" in text[2]
    assert "in chunks of 512, 0 tokens cached" in text[2]
    assert "for 8000 tokens" in text[2]
    plan = place(replace(LONG, slo=TIGHT), busy, ALL_WAYS)
    named = explain(plan, {"p": "prefill-7", "d": "decode-3"}).splitlines()
    assert named[0] == "p_then_d: prefill-7 reads, decode-3 writes"
    assert named[1].startswith("* p_then_d     prefill-7 -> decode-3    cost ")
    assert [each.split()[0] for each in summary(plan).split(", ")] == [way.option.value for way in plan.why]
    assert summary(plan).startswith(f"p_then_d {plan.why[0].cost:.3g}, ")
    refused = place(replace(LONG, deadline_s=0.5), cluster(reader("p"), writer("d")), ALL_WAYS)
    assert explain(refused).splitlines()[0] == "refuse: no way meets the deadline; waiting does not help"
