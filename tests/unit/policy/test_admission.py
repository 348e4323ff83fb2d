import heapq
import random
from collections import Counter
from dataclasses import replace

import pytest

from twostroke.errors import DeadlineError, OverloadedError
from twostroke.policy.admission import AdmissionQueue, Entry, QueueSettings, Servers
from twostroke.policy.inflight import InFlight
from twostroke.policy.placement import place
from twostroke.policy.plan import STRICT, Limits, Option
from twostroke.policy.snapshot import ClusterSnapshot, PlacementRequest, WorkerSnapshot

ONE = Servers(1)


def entry(
    name: str,
    arrived_s: float = 0.0,
    prefill_s: float = 1.0,
    *,
    priority: int = 0,
    tenant: str = "",
    deadline_s: float | None = None,
    answer_s: float = 0.0,
) -> Entry:
    request = PlacementRequest(100, priority=priority, tenant=tenant, deadline_s=deadline_s)
    return Entry(name, request, arrived_s, prefill_s, answer_s)


def order(queue: AdmissionQueue, now_s: float = 0.0) -> list[str]:
    return [each.request_id for each in queue.start(now_s, lambda _: True)]


def filled(*entries: Entry, settings: QueueSettings | None = None) -> AdmissionQueue:
    queue = AdmissionQueue(settings)
    for each in entries:
        queue.offer(each, ONE)
    return queue


def test_short_prompts_pass_long_ones_but_only_for_so_long() -> None:
    assert order(filled(entry("long", 0.0, 10.0), entry("short", 1.0, 0.1))) == ["short", "long"]
    assert order(filled(entry("long", 0.0, 10.0), entry("short", 21.0, 0.1))) == ["long", "short"]


def test_what_is_given_up_instead_of_started_is_gone_and_holds_nobody_up() -> None:
    queue = filled(entry("hopeless", 0.0), entry("next", 1.0), settings=QueueSettings(patience_s=0.5))

    def start(each: Entry) -> bool:
        if each.request_id == "hopeless":
            queue.cancel("hopeless")
        return each.request_id == "next"

    assert [each.request_id for each in queue.start(10.0, start)] == ["next"]
    assert len(queue) == 0


def run_one_server(arrivals: list[Entry], settings: QueueSettings) -> dict[str, float]:
    """One prefill server, non-preemptive; returns the moment each prompt starts."""
    queue, started, now_s = AdmissionQueue(settings), {}, 0.0
    pending = [(each.arrived_s, number, each) for number, each in enumerate(arrivals)]
    heapq.heapify(pending)
    while pending or len(queue):
        if not len(queue):
            now_s = max(now_s, pending[0][0])
        while pending and pending[0][0] <= now_s:
            queue.offer(heapq.heappop(pending)[2], ONE)
        taken: list[Entry] = []

        def one(each: Entry, taken: list[Entry] = taken) -> bool:
            if taken:
                return False
            taken.append(each)
            return True

        queue.start(now_s, one)
        started[taken[0].request_id] = now_s
        now_s += taken[0].prefill_s
        queue.ended(taken[0].request_id)
    return started


def test_no_prompt_starves_under_a_stream_of_short_ones() -> None:
    """A prompt of 8 s in a full stream of 0.5 s ones: it waits for at most 16 s of them, then for its turn."""
    shorts = [entry(f"s{number}", number * 0.5, 0.5) for number in range(400)]
    started = run_one_server([entry("long", 3.0, 8.0), *shorts], QueueSettings(tries=1))
    assert 3.0 + 14.5 <= started["long"] <= 3.0 + 17.5
    waits = [started[f"s{number}"] - number * 0.5 for number in range(30)]
    assert max(waits) < 3, "short ones that came before its turn do not wait behind it"


def test_a_near_deadline_goes_first() -> None:
    queue = filled(entry("a", 0.0), entry("b", 0.1, deadline_s=3.0), entry("c", 0.2))
    assert order(queue) == ["b", "a", "c"]


def test_priorities_and_their_aging() -> None:
    settings = QueueSettings(priority_step_s=10.0)
    low, high = entry("low", 0.0, priority=2, tenant="x"), entry("high", 1.0, priority=0, tenant="y")
    assert order(filled(low, high, settings=settings), 1.0) == ["high", "low"]
    same = [replace(each, request=replace(each.request, tenant="")) for each in (low, high)]
    assert order(filled(*same, settings=settings), 1.0) == ["high", "low"]
    late = entry("high", 31.0, priority=0, tenant="y")
    assert order(filled(low, late, settings=settings), 31.0) == ["low", "high"], "half a minute makes up for two levels"


def test_a_flood_of_one_tenant_does_not_delay_another() -> None:
    arrivals = [entry(f"a{number}", 0.0, 1.0, tenant="a") for number in range(100)]
    arrivals += [entry(f"b{number}", 20.0 + number, 1.0, tenant="b") for number in range(10)]
    started = run_one_server(arrivals, QueueSettings(tries=1, priority_step_s=1000))
    assert max(started[f"b{number}"] - 20.0 - number for number in range(10)) <= 10.5
    assert started["b0"] <= 22.0
    between = sum(1 for name, at in started.items() if name[0] == "a" and 20 <= at < 40)
    assert between == 10, "and the flood gets its half"


@pytest.mark.parametrize("seed", range(3))
def test_backlogged_tenants_share_by_weight_whatever_their_prompts(seed: int) -> None:
    rng = random.Random(seed)
    weights, sizes = {"a": 1.0, "b": 2.0, "c": 1.0}, {"a": (0.2, 1.0), "b": (0.2, 1.0), "c": (2.0, 6.0)}
    queue = AdmissionQueue(QueueSettings(weights=weights, most_queued=10_000, priority_step_s=1e9, tries=1))
    work: Counter[str] = Counter()
    for tenant in weights:
        for number in range(2000):
            queue.offer(entry(f"{tenant}{number}", 0.0, rng.uniform(*sizes[tenant]), tenant=tenant), ONE)
    for _ in range(600):
        taken: list[Entry] = []
        queue.start(0.0, lambda each, taken=taken: not taken and not taken.append(each))  # type: ignore[misc]
        work[taken[0].request.tenant] += taken[0].prefill_s  # type: ignore[assignment]
        queue.ended(taken[0].request_id)
    total = sum(work.values())
    assert work["b"] / total == pytest.approx(0.5, abs=0.03)
    assert work["a"] / total == pytest.approx(0.25, abs=0.03)


def test_a_tenant_that_asks_one_at_a_time_does_not_get_more_than_its_share() -> None:
    """Its debt outlives the moments in which it has nothing queued."""
    queue = AdmissionQueue(QueueSettings(priority_step_s=1e9, tries=1))
    for number in range(200):
        queue.offer(entry(f"small{number}", prefill_s=1.0, tenant="small"), ONE)
    work = {"small": 0.0, "big": 0.0}
    for number in range(110):
        if not any(tenant.queued for name, tenant in queue._tenants.items() if name == "big"):
            queue.offer(entry(f"big{number}", prefill_s=10.0, tenant="big"), ONE)
        taken: list[Entry] = []
        queue.start(0.0, lambda each, taken=taken: not taken and not taken.append(each))  # type: ignore[misc]
        work[taken[0].request.tenant] += taken[0].prefill_s
        queue.ended(taken[0].request_id)
    assert abs(work["big"] - work["small"]) <= 10.0
    assert work["small"] >= 95.0


def test_a_tenant_has_only_so_many_requests_in_flight() -> None:
    settings = QueueSettings(most_in_flight=2)
    names = [entry(f"a{number}", tenant="a") for number in range(4)]
    queue = filled(*names, entry("b", 9.0, tenant="b"), settings=settings)
    assert sorted(order(queue)) == ["a0", "a1", "b"]
    assert order(queue) == []
    queue.ended("a0")
    queue.ended("a0")
    assert order(queue) == ["a2"]


def test_a_full_priority_refuses_with_the_time_it_takes_to_drain_and_others_do_not() -> None:
    queue = filled(
        *(entry(f"r{number}", prefill_s=2.0) for number in range(10)), settings=QueueSettings(most_queued=10)
    )
    with pytest.raises(OverloadedError) as refused:
        queue.offer(entry("late"), Servers(2, busy_s=1.0))
    assert refused.value.retry_after_s == pytest.approx((1.0 + 10 * 2.0 / 2) / 2)
    assert "10 requests of priority 0 wait" in refused.value.message
    queue.offer(entry("urgent", priority=-1), ONE)
    queue.cancel("r0")
    queue.offer(entry("again"), ONE)


def test_what_cannot_be_in_time_is_refused_before_it_waits() -> None:
    queue = filled(*(entry(f"r{number}", prefill_s=1.0) for number in range(20)))
    hurried = entry("late", 5.0, 1.0, deadline_s=10.0, answer_s=2.0)
    with pytest.raises(OverloadedError) as refused:
        queue.offer(replace(hurried, request=replace(hurried.request, priority=1)), ONE)
    assert refused.value.retry_after_s == pytest.approx(20 + 1 + 2 - 11)
    assert "12.0 s after its deadline: 20.0 s of queue" in refused.value.message
    assert len(queue) == 20
    queue.offer(replace(hurried, request=replace(hurried.request, priority=1)), Servers(3))
    with pytest.raises(DeadlineError):
        queue.offer(entry("never", 0.0, 5.0, deadline_s=1.0), Servers(100))


def test_overdue_and_cancelled_requests_leave() -> None:
    queue = filled(entry("a", 0.0, 0.1, deadline_s=5.0), entry("b"), entry("c", tenant="t"))
    assert [each.request_id for each in queue.overdue(4.9)] == []
    assert [each.request_id for each in queue.overdue(5.0)] == ["a"]
    queue.cancel("b")
    queue.cancel("b")
    assert (len(queue), queue.prefill_s) == (1, 1.0)
    assert order(queue, 6.0) == ["c"]


def test_without_room_small_ones_pass_until_patience_ends() -> None:
    settings = QueueSettings(patience_s=5.0)
    queue = filled(entry("big", 0.0, 0.1), entry("small", 1.0, 1.0), settings=settings)
    fits = lambda each: each.request_id == "small"  # noqa: E731
    assert [each.request_id for each in queue.start(2.0, fits)] == ["small"]
    queue.offer(entry("small", 3.0, 1.0), ONE)
    assert queue.start(6.0, fits) == [], "room is kept for it now"
    assert order(queue, 6.0) == ["big", "small"]


def test_the_queue_asks_only_so_often_in_vain() -> None:
    asked: list[str] = []
    queue = filled(*(entry(f"r{number}") for number in range(50)), settings=QueueSettings(tries=4))
    queue.start(0.0, lambda each: bool(asked.append(each.request_id)))  # type: ignore[func-returns-value]
    assert asked == ["r0", "r1", "r2", "r3"]


def test_tenants_that_are_gone_are_not_remembered_for_ever() -> None:
    queue = AdmissionQueue()
    for number in range(5000):
        queue.offer(entry(f"r{number}", tenant=f"t{number}"), ONE)
        order(queue)
        queue.ended(f"r{number}")
    assert len(queue._tenants) < 2100


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_long_prompts_do_not_keep_ready_ones_from_decode(share: float) -> None:
    """O-49: 4 prompts of 10 s and 50 of 50 ms on a decode worker with room for 4 long ones. With a bound on what long
    prompts reserve, short ones start at once; without it they wait for seconds."""
    limits = Limits(long_prompt_s=2.0, long_share=share)
    inflight, queue = InFlight(limits), AdmissionQueue(QueueSettings(patience_s=100.0))
    names = ["p1", "p2", "p3", "d"]
    for name in names[:3]:
        inflight.describe(WorkerSnapshot(name, True, False, free_blocks=9000, block_size_tokens=16, total_blocks=9000))
    inflight.describe(WorkerSnapshot("d", False, True, free_blocks=2100, block_size_tokens=16, total_blocks=2100))
    long = PlacementRequest(8220, expected_output_tokens=100)
    short = PlacementRequest(160, expected_output_tokens=20)
    started: dict[str, float] = {}

    def try_start(each: Entry) -> bool:
        plan = place(each.request, ClusterSnapshot(inflight.snapshots(names)), options, limits=limits)
        if plan.option is Option.WAIT:
            return False
        inflight.placed(each.request_id, each.request, plan, 0.0)
        started[each.request_id] = 0.0
        return True

    options = replace(STRICT, wait=True)
    for number in range(4):
        queue.offer(Entry(f"long{number}", long, 0.0, 0.0), ONE)
    for number in range(50):
        queue.offer(Entry(f"short{number}", short, 0.1, 0.05), ONE)
    queue.start(0.2, try_start)
    shorts = sum(1 for name in started if name.startswith("short"))
    assert shorts == (50 if share == 0.5 else 1)
