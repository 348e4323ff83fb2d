import random
from dataclasses import replace

import pytest

from twostroke.policy.attainment import Demand, Member, Predictor, Role, Split, split_of
from twostroke.policy.ratio import Decision, Do, Mode, RatioSettings, RoleController, best_split
from twostroke.policy.snapshot import Slo
from twostroke.policy.step_model import LinearStepModel

MODEL = LinearStepModel(0.02, 2e-4, 1e-7, 2e-4, 1e-8)
SLO = Slo(ttft_s=2.0, itl_s=0.05)
LONG = Demand(4.0, prompt_tokens=8000, answer_tokens=100, slo=Slo(ttft_s=6.0, itl_s=0.05))
"""2 s of prompt a request: eight workers' work, where one or two write the answers."""
CHATTY = Demand(8.0, prompt_tokens=300, answer_tokens=800, slo=SLO)
ON = RatioSettings(mode=Mode.ON)


def members(prefill: int, decode: int, both: int = 0) -> list[Member]:
    roles = [Role.PREFILL] * prefill + [Role.DECODE] * decode + [Role.BOTH] * both
    return [Member(f"w{i:02}", role, MODEL, kv_tokens=400_000, step_budget_tokens=2048) for i, role in enumerate(roles)]


def attainment(split: Split, like: Member, demand: Demand) -> float:
    return Predictor(like, demand).share(split)


def best_of(made: list[Member], demand: Demand) -> tuple[Split, float]:
    return best_split(split_of(made), Predictor(made[0], demand))


class Cluster:
    """Carries out decisions; a worker is empty `drain_s` after its drain began."""

    def __init__(self, made: list[Member], settings: RatioSettings, drain_s: float = 20.0) -> None:
        self.members = {member.worker: member for member in made}
        self.controller = RoleController(settings)
        self.drain_s = drain_s
        self.draining: dict[str, float] = {}
        self.flips: list[tuple[float, str, Role, Role]] = []

    def tick(self, demand: Demand, now_s: float) -> Decision:
        seen = [
            replace(each, idle=now_s - self.draining.get(each.worker, 1e9) >= self.drain_s)
            for each in self.members.values()
        ]
        decision = self.controller.decide(seen, demand, now_s)
        match decision.do:
            case Do.DRAIN:
                self.draining[decision.worker] = now_s
            case Do.KEEP_ROLE:
                self.draining.pop(decision.worker, None)
            case Do.SET_ROLE:
                assert decision.role is not None
                self.draining.pop(decision.worker, None)
                old = self.members[decision.worker]
                self.flips.append((now_s, old.worker, old.role, decision.role))
                self.members[old.worker] = replace(old, role=decision.role)
        return decision

    def run(self, demand: Demand, until_s: int, *, since_s: int = 0, every_s: int = 5, noise: float = 0.0) -> None:
        rng = random.Random(until_s)
        for now_s in range(since_s, until_s, every_s):
            factor = rng.lognormvariate(0, noise)
            self.tick(replace(demand, requests_per_s=demand.requests_per_s * factor), now_s)

    @property
    def split(self) -> Split:
        return split_of(list(self.members.values()))


def test_long_prompts_want_readers_and_long_answers_writers() -> None:
    like = members(2, 2)[0]
    assert attainment(Split(9, 3, 0), like, LONG) > attainment(Split(3, 9, 0), like, LONG) + 0.1
    assert attainment(Split(2, 6, 0), like, CHATTY) > attainment(Split(6, 2, 0), like, CHATTY) + 0.1
    assert attainment(Split(2, 2, 0), like, replace(CHATTY, requests_per_s=0.1)) > 0.99
    assert attainment(Split(4, 0, 0), like, CHATTY) == 0
    assert attainment(Split(1, 3, 0), like, replace(CHATTY, requests_per_s=0)) == 1


def test_attainment_falls_with_the_rate_and_rises_with_workers() -> None:
    like = members(1, 1)[0]
    for demand in (LONG, CHATTY):
        rates = [attainment(Split(4, 4, 0), like, replace(demand, requests_per_s=rate)) for rate in range(1, 80, 4)]
        assert rates == sorted(rates, reverse=True)
        assert rates[0] > 3 * rates[-1]
        sizes = [attainment(Split(size, size, 0), like, demand) for size in range(1, 12)]
        assert sizes == sorted(sizes)


def test_one_pool_wins_where_whole_steps_fit_between_tokens_and_loses_where_answers_stall() -> None:
    patient = replace(CHATTY, slo=Slo(2.0, 1.0))
    assert best_of(members(1, 1), replace(patient, requests_per_s=20.0))[0] == Split(0, 0, 2)
    assert best_of(members(0, 0, 8), LONG)[0].both < 4


@pytest.mark.parametrize(("demand", "start"), [(LONG, (2, 10)), (CHATTY, (6, 2)), (CHATTY, (11, 1))], ids=str)
def test_it_walks_to_the_best_split_and_stays(demand: Demand, start: tuple[int, int]) -> None:
    cluster = Cluster(members(*start), ON)
    before = attainment(cluster.split, members(1, 0)[0], demand)
    cluster.run(demand, 3600, every_s=10)
    best, share = best_of(members(*start), demand)
    assert attainment(cluster.split, members(1, 0)[0], demand) > max(share - ON.gain, before), (cluster.split, best)
    done = len(cluster.flips)
    assert 1 <= done <= 2 * sum(start)
    cluster.run(demand, 90_000, since_s=3600, every_s=120)
    assert len(cluster.flips) == done, "at constant load nothing moves any more"


@pytest.mark.parametrize("noise", [0.05, 0.1, 0.2])
@pytest.mark.parametrize("demand", [LONG, CHATTY], ids=["long", "chatty"])
def test_no_flip_is_taken_back_in_a_day_of_noisy_constant_load(demand: Demand, noise: float) -> None:
    cluster = Cluster(members(6, 6), ON)
    cluster.run(demand, 86_400, every_s=40, noise=noise)
    directions = {(old, new) for _, _, old, new in cluster.flips}
    assert not any((new, old) in directions for old, new in directions), cluster.flips


def test_dwell_and_drain_are_kept() -> None:
    cluster = Cluster(members(2, 10), ON, drain_s=30)
    decisions = [(tick * 5.0, cluster.tick(LONG, tick * 5.0)) for tick in range(200)]
    drains = [now_s for now_s, decision in decisions if decision.do is Do.DRAIN]
    sets = [now_s for now_s, decision in decisions if decision.do is Do.SET_ROLE]
    assert drains[0] == ON.hold_s
    assert len(sets) >= 2
    assert sets[0] - drains[0] == 30, "it waited until the worker was empty"
    assert drains[1] - sets[0] >= ON.dwell_s
    stuck = Cluster(members(2, 10), ON, drain_s=1e9)
    stuck.run(LONG, 1000)
    first = stuck.flips[0][0]
    assert first == ON.hold_s + ON.drain_s, "one that never becomes empty is not waited for without end"


def test_the_least_loaded_worker_is_taken() -> None:
    made = [replace(each, load=float(20 - i)) for i, each in enumerate(members(2, 10))]
    cluster = Cluster(made, ON)
    cluster.run(LONG, 100)
    assert cluster.flips[0][1] == "w11"


def test_it_can_only_advise_or_be_off() -> None:
    advising = RoleController(RatioSettings(mode=Mode.ADVISE))
    decisions = [advising.decide(members(2, 10), LONG, now_s) for now_s in range(0, 100, 5)]
    assert {decision.do for decision in decisions} == {Do.NOTHING}
    assert decisions[-1].worker == "w02"
    assert decisions[-1].role is Role.PREFILL
    assert "2 P + 10 D meets the SLO for" in decisions[-1].why
    assert "w02 should become prefill" in decisions[-1].why
    off = RoleController(RatioSettings(mode=Mode.OFF))
    assert off.decide(members(2, 10), LONG, 1000) == Decision(Do.NOTHING)


def test_silence_and_an_empty_cluster_move_nothing() -> None:
    cluster = Cluster(members(2, 10), ON)
    cluster.run(replace(LONG, requests_per_s=0), 5000)
    assert not cluster.flips
    assert RoleController(ON).decide([], LONG, 0) == Decision(Do.NOTHING)


def test_the_last_of_a_role_is_never_drained() -> None:
    cluster = Cluster(members(1, 1), ON)
    for tick in range(1000):
        decision = cluster.tick(replace(LONG, requests_per_s=1.0), tick * 5.0)
        assert decision.do is not Do.DRAIN, "nobody could serve meanwhile"


def test_a_flip_is_called_off_when_the_worker_is_needed() -> None:
    cluster = Cluster(members(3, 2), ON, drain_s=1000)
    demand = replace(CHATTY, requests_per_s=12.0)
    tick = next(tick for tick in range(100) if cluster.tick(demand, tick * 5.0).do is Do.DRAIN)
    drained = next(iter(cluster.draining))
    for member in list(cluster.members.values()):
        if member.role is Role.PREFILL and member.worker != drained:
            del cluster.members[member.worker]
    decision = cluster.tick(demand, tick * 5.0 + 5)
    assert (decision.do, decision.worker) == (Do.KEEP_ROLE, drained)


def test_nobody_becomes_both_where_no_worker_may_serve_a_whole_request() -> None:
    made = members(1, 3)
    demand = Demand(4.5, prompt_tokens=4000, answer_tokens=4, slo=Slo(ttft_s=4.0, itl_s=2.0), prompt_cv2=0.0)
    now, predictor = split_of(made), Predictor(made[0], demand)
    assert best_split(now, predictor)[0].both > 0
    assert best_split(now, predictor, both=False)[0] in (Split(2, 2, 0), Split(3, 1, 0))
    kept = split_of(members(1, 2, 1))
    assert best_split(kept, predictor, both=False)[0].both == 1
