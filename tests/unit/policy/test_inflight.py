import random
from dataclasses import replace

from twostroke.policy.inflight import REPORT_LAG_S, InFlight, Report
from twostroke.policy.placement import place
from twostroke.policy.plan import STRICT, Limits, Option, Plan
from twostroke.policy.snapshot import ClusterSnapshot, PlacementRequest, Slo, WorkerSnapshot

REQUEST = PlacementRequest(prompt_tokens=1000, expected_output_tokens=100)
PAIR = Plan("p", "d")


def facts(name: str, reads: bool, writes: bool) -> WorkerSnapshot:
    return WorkerSnapshot(name, reads, writes, free_blocks=1000, block_size_tokens=16, total_blocks=1000)


def pair() -> InFlight:
    made = InFlight()
    made.describe(facts("p", True, False))
    made.describe(facts("d", False, True))
    return made


def seen(inflight: InFlight, name: str) -> WorkerSnapshot:
    return inflight.snapshots([name])[0]


def report(pending: int = 0, prompts: int = 0, used: int = 0, running: int = 0) -> Report:
    return Report(pending, prompts, used, running)


def test_requests_of_one_millisecond_do_not_pick_the_same_idle_workers() -> None:
    inflight, names = InFlight(), [f"p{i}" for i in range(5)] + [f"d{i}" for i in range(5)]
    for name in names:
        inflight.describe(facts(name, name[0] == "p", name[0] == "d"))
    plans = []
    for number in range(5):
        plan = place(REQUEST, ClusterSnapshot(inflight.snapshots(names)), STRICT)
        inflight.placed(f"r{number}", REQUEST, plan, 0.0)
        plans.append(plan)
    assert {plan.prefill for plan in plans} == set(names[:5])
    assert {plan.decode for plan in plans} == set(names[5:])


def test_a_request_is_counted_from_plan_to_end_and_never_twice() -> None:
    inflight = pair()
    inflight.placed("r", REQUEST, PAIR, 10.0)
    assert (seen(inflight, "p").pending_prompt_tokens, seen(inflight, "p").pending_prompts) == (1000, 1)
    assert seen(inflight, "p").free_blocks == 1000 - 63
    d = seen(inflight, "d")
    assert (d.running_sequences, d.context_tokens, d.free_blocks) == (1, 1000, 1000 - 69)

    inflight.reported("p", report(pending=1000, prompts=1, used=63), 10.0 + REPORT_LAG_S / 2)
    assert seen(inflight, "p").pending_prompt_tokens == 2000, "the report may be of before it came"
    inflight.reported("p", report(pending=488, prompts=1, used=63), 10.0 + REPORT_LAG_S)
    assert (seen(inflight, "p").pending_prompt_tokens, seen(inflight, "p").free_blocks) == (488, 937)

    inflight.prompt_done("r")
    assert seen(inflight, "p").pending_prompts == 1, "the report still has it"
    inflight.reported("p", report(), 11.0)
    assert seen(inflight, "p").pending_prompts == 0

    inflight.arrived("r", 11.0)
    inflight.reported("d", report(used=63, running=1), 11.0)
    assert seen(inflight, "d").free_blocks == 1000 - 63 - 69, "it may be in the report and may not"
    inflight.reported("d", report(used=63, running=1), 11.0 + REPORT_LAG_S)
    assert seen(inflight, "d").free_blocks == 1000 - 63 - 6, "its growth is still promised"
    inflight.wrote("r", 68)
    inflight.reported("d", report(used=67, running=1), 12.0)
    assert (seen(inflight, "d").free_blocks, seen(inflight, "d").context_tokens) == (1000 - 67 - 2, 1068)

    inflight.ended("r")
    inflight.reported("d", report(), 13.0)
    d = seen(inflight, "d")
    assert (d.running_sequences, d.context_tokens, d.free_blocks) == (0, 0, 1000)


def test_an_answer_whose_prompt_takes_long_weighs_on_its_writer_when_it_begins() -> None:
    inflight = pair()
    plan = place(PlacementRequest(30_000), ClusterSnapshot([seen(inflight, "p"), seen(inflight, "d")]), STRICT)
    assert plan.chosen is not None
    assert plan.chosen.ttft_s > Limits().long_prompt_s
    inflight.placed("r", PlacementRequest(9_000, expected_output_tokens=100), plan, 10.0)
    d = seen(inflight, "d")
    assert (d.running_sequences, d.context_tokens, d.awaited_sequences) == (0, 0, 1)
    assert d.free_blocks == 1000 - 569, "its room is promised all the same"
    inflight.prompt_done("r")
    d = seen(inflight, "d")
    assert (d.running_sequences, d.context_tokens, d.awaited_sequences) == (1, 9_000, 0)
    inflight.wrote("r", 3)
    inflight.ended("r")
    d = seen(inflight, "d")
    assert (d.running_sequences, d.context_tokens, d.awaited_sequences) == (0, 0, 0)


def test_what_is_cached_is_not_pending() -> None:
    inflight = pair()
    request = replace(REQUEST, cached_tokens={"p": 960})
    plan = place(request, ClusterSnapshot(inflight.snapshots(["p", "d"])), STRICT)
    inflight.placed("r", request, plan, 0.0)
    assert seen(inflight, "p").pending_prompt_tokens == 40


def test_other_routers_work_counts_too() -> None:
    inflight = pair()
    inflight.reported("d", report(used=400, running=7), 0.0)
    inflight.reported("p", report(pending=5000, prompts=3, used=100), 0.0)
    assert (seen(inflight, "d").running_sequences, seen(inflight, "d").free_blocks) == (7, 600)
    inflight.placed("r", REQUEST, PAIR, 1.0)
    assert seen(inflight, "p").pending_prompt_tokens == 6000
    assert seen(inflight, "p").pending_prompts == 4


def test_the_tightest_class_present_is_known() -> None:
    inflight = pair()
    tight, loose = Slo(1.0, 0.03), Slo(5.0, 1.0)
    inflight.placed("loose", replace(REQUEST, slo=loose), PAIR, 0.0)
    assert seen(inflight, "d").slo == loose
    inflight.placed("tight", replace(REQUEST, slo=tight), PAIR, 0.0)
    assert seen(inflight, "d").slo == tight
    inflight.ended("tight")
    assert seen(inflight, "d").slo == loose


def test_another_attempt_replaces_the_first() -> None:
    inflight = pair()
    inflight.describe(facts("d2", False, True))
    inflight.placed("r", REQUEST, PAIR, 0.0)
    inflight.placed("r", REQUEST, Plan("p", "d2"), 1.0)
    assert seen(inflight, "d").running_sequences == 0
    assert seen(inflight, "d2").running_sequences == 1
    assert seen(inflight, "p").pending_prompt_tokens == 1000


def test_a_worker_that_restarts_owes_nothing_of_its_former_life() -> None:
    inflight = pair()
    inflight.placed("r", REQUEST, PAIR, 0.0)
    inflight.forget("d")
    assert inflight.snapshots(["p", "d"])[0].worker == "p"
    inflight.describe(facts("d", False, True))
    inflight.ended("r")
    assert (seen(inflight, "d").running_sequences, seen(inflight, "d").free_blocks) == (0, 1000)


def test_only_what_changed_is_made_anew() -> None:
    inflight = pair()
    first = inflight.snapshots(["p", "d"])
    inflight.reported("p", report(pending=5), 0.0)
    second = inflight.snapshots(["p", "d"])
    assert second[1] is first[1]
    assert second[0] is not first[0]


def test_whatever_happens_in_whatever_order_it_ends_at_nothing() -> None:
    far = ClusterSnapshot([facts("p", True, False), facts("d", False, True)])
    for seed in range(30):
        rng, inflight, now_s = random.Random(seed), pair(), 0.0
        inflight.describe(facts("w", True, True))
        plans = [PAIR, Plan("p", "w"), Plan(None, "w"), Plan("w", "d")]
        plans += [replace(plan, chosen=place(PlacementRequest(50_000), far, STRICT).chosen) for plan in plans]
        for _ in range(300):
            now_s += rng.random() * 0.1
            name = f"r{rng.randrange(12)}"
            match rng.randrange(7):
                case 0 | 1:
                    request = PlacementRequest(rng.randrange(1, 3000), expected_output_tokens=rng.randrange(1, 200))
                    inflight.placed(name, request, rng.choice(plans), now_s)
                case 2:
                    inflight.prompt_done(name)
                case 3:
                    inflight.arrived(name, now_s)
                case 4:
                    inflight.wrote(name, rng.randrange(50))
                case 5:
                    inflight.ended(name)
                case 6:
                    inflight.reported(rng.choice("pdw"), report(), now_s)
            for each in inflight.snapshots(["p", "d", "w"]):
                assert 0 <= each.free_blocks <= 1000
                assert min(each.pending_prompt_tokens, each.running_sequences, each.context_tokens) >= 0
                assert each.awaited_sequences >= 0
                assert each.promised_long_blocks >= 0
        for number in range(12):
            inflight.ended(f"r{number}")
        for name in "pdw":
            inflight.reported(name, report(), now_s + 1)
        for each in inflight.snapshots(["p", "d", "w"]):
            assert (each.free_blocks, each.pending_prompt_tokens, each.pending_prompts) == (1000, 0, 0)
            assert (each.running_sequences, each.context_tokens, each.promised_long_blocks) == (0, 0, 0)
            assert each.awaited_sequences == 0


def test_decode_room_is_promised_when_prefill_starts_so_nothing_is_computed_in_vain() -> None:
    """Room for 14 answers: the fifteenth waits until one has ended."""
    limits, inflight, queued = Limits(), pair(), replace(STRICT, wait=True)
    placed = []
    for number in range(20):
        plan = place(REQUEST, ClusterSnapshot(inflight.snapshots(["p", "d"])), queued, limits=limits)
        if plan.option is not Option.WAIT:
            inflight.placed(f"r{number}", REQUEST, plan, 0.0)
            inflight.reported("p", report(), 1.0)
            placed.append(number)
    assert placed == list(range(1000 // 69))
    inflight.ended("r3")
    assert place(REQUEST, ClusterSnapshot(inflight.snapshots(["p", "d"])), queued).option is Option.P_THEN_D


def test_a_worker_computes_as_soon_as_it_has_something_to_compute() -> None:
    """An answer whose prompt is read elsewhere is none yet, however it is counted otherwise."""
    inflight = pair()
    assert not seen(inflight, "p").computes
    inflight.placed("r", REQUEST, PAIR, 0.0)
    assert [seen(inflight, name).computes for name in "pd"] == [True, False]
    assert seen(inflight, "d").running_sequences == 1
    inflight.reported("p", report(), 1.0)
    inflight.prompt_done("r")
    assert [seen(inflight, name).computes for name in "pd"] == [False, True]
    inflight.ended("r")
    assert not seen(inflight, "d").computes
    inflight.reported("d", report(running=1), 2.0)
    assert seen(inflight, "d").computes, "another router's"
    inflight.reported("d", report(), 3.0)
    inflight.placed("alone", REQUEST, Plan(None, "d"), 3.0)
    assert seen(inflight, "d").computes
    inflight.reported("d", report(), 4.0)
    assert seen(inflight, "d").computes, "it reads what it will write"
    inflight.ended("alone")
    assert not seen(inflight, "d").computes
