"""How many workers: known complaints about other autoscalers, as tests."""

from __future__ import annotations

import math
import random
from itertools import pairwise

from twostroke.policy.attainment import Demand, Member, Role
from twostroke.policy.forecast import Forecast
from twostroke.policy.replicas import Have, ReplicaController, ReplicaSettings, Seen
from twostroke.policy.snapshot import Slo
from twostroke.policy.step_model import LinearStepModel

MODEL = LinearStepModel(const_s=0.01, per_sequence_s=1e-4, per_context_token_s=1e-8, per_prefill_token_s=1e-4)
DEMAND = Demand(1.0, prompt_tokens=1000, answer_tokens=100, slo=Slo(3.0, 0.2))
INTERVAL_S = 10.0
SETTINGS = ReplicaSettings(start_s=60.0)


class World:
    """Workers that start when told to, after their time, and drain at once."""

    def __init__(self, roles: dict[Role, int], settings: ReplicaSettings = SETTINGS, *, starts: bool = True) -> None:
        like = {role: Member("like", role, MODEL, step_budget_tokens=2048) for role in roles}
        self.controller = ReplicaController(like, DEMAND, settings)
        self.ready = dict(roles)
        self.starting: dict[Role, list[float]] = {role: [] for role in roles}
        self.settings = settings
        self.starts = starts
        self.now_s = 0.0
        self.changes: list[tuple[float, Role, int]] = []

    def step(self, arrivals: int, waiting: int = 0) -> None:
        self.now_s += INTERVAL_S
        if self.starts:
            for role, since in self.starting.items():
                done = [at_s for at_s in since if self.now_s - at_s >= self.settings.start_s]
                self.ready[role] += len(done)
                self.starting[role] = [at_s for at_s in since if at_s not in done]
        have = {
            role: Have(count, [self.now_s - at_s for at_s in self.starting[role]]) for role, count in self.ready.items()
        }
        for role, change in self.controller.decide(
            Seen(self.now_s, INTERVAL_S, arrivals, waiting, have)
        ).change.items():
            self.changes.append((self.now_s, role, change))
            if change > 0:
                self.starting[role] += [self.now_s] * change
            else:
                self.ready[role] += change

    def total(self, role: Role) -> int:
        return self.ready[role] + len(self.starting[role])


def test_silence_scales_to_the_minimum() -> None:
    """Nothing arriving is a demand of zero, not a missing metric (ai-dynamo/dynamo#6985)."""
    world = World({Role.PREFILL: 4, Role.DECODE: 4})
    for _ in range(30):
        world.step(arrivals=200)
    assert world.total(Role.PREFILL) >= 3
    for _ in range(60):
        world.step(arrivals=0)
    assert {role: world.total(role) for role in world.ready} == {Role.PREFILL: 1, Role.DECODE: 1}


def test_two_workers_at_70_percent_stay_two() -> None:
    """One could not take the load of both (ai-dynamo/dynamo#9294)."""
    world = World({Role.BOTH: 2})
    # A prompt takes 0.11 s of a worker: 12.7 requests/s keep two of them 70 % busy.
    for _ in range(30):
        world.step(arrivals=127)
    assert world.changes == []


def test_goes_down_only_where_the_others_can_take_over() -> None:
    for arrivals, left in ((100, 2), (40, 1)):
        world = World({Role.BOTH: 2})
        for _ in range(60):
            world.step(arrivals=arrivals)
        assert world.total(Role.BOTH) == left, arrivals


def test_a_constant_load_never_changes_direction() -> None:
    """24 hours of Poisson arrivals, at rates all over the distance from one worker to the next."""
    for load in (5.0, 6.5, 7.0, 7.5, 8.0, 9.0):
        source = random.Random(round(10 * load))
        world = World({Role.BOTH: 1})
        for _ in range(8640):
            mean = load * INTERVAL_S
            world.step(arrivals=max(0, round(source.gauss(mean, math.sqrt(mean)))))
        directions = [change > 0 for _, _, change in world.changes]
        turns = sum(a != b for a, b in pairwise(directions))
        assert turns == 0, (load, world.changes)


def test_a_worker_that_cannot_start_does_not_block() -> None:
    """It is not waited for for ever, nor does it keep the other role from growing (ai-dynamo/dynamo#14251)."""
    world = World({Role.PREFILL: 1, Role.DECODE: 1}, starts=False)
    for _ in range(40):
        world.step(arrivals=200)
    first = [change for _, role, change in world.changes if role is Role.PREFILL]
    assert len(first) >= 2, "stuck workers are replaced"
    again_s = [at_s for at_s, role, _ in world.changes if role is Role.PREFILL]
    assert again_s[-1] >= SETTINGS.stuck * SETTINGS.start_s


def test_a_queue_is_demand() -> None:
    """Arrivals that fit and a queue that does not drain: more workers (ai-dynamo/dynamo#10528)."""
    world = World({Role.BOTH: 1})
    for _ in range(12):
        world.step(arrivals=50, waiting=2000)
    assert world.total(Role.BOTH) > 1


def test_a_rise_is_met_before_it_comes() -> None:
    world = World({Role.BOTH: 1})
    for step in range(60):
        world.step(arrivals=round(INTERVAL_S * 0.5 * step))
    # 30 requests/s need four workers; they are there, not only ordered.
    assert world.ready[Role.BOTH] >= 4


def test_what_comes_back_is_foreseen() -> None:
    source = random.Random(3)
    forecast = Forecast()

    def rate(at_s: float) -> float:
        return 12.5 - 11.5 * math.cos(2 * math.pi * at_s / 900)

    for step in range(1, 1440):
        now_s = step * INTERVAL_S
        mean = INTERVAL_S * rate(now_s - INTERVAL_S / 2)
        forecast.add(now_s, max(0, round(source.gauss(mean, math.sqrt(mean)))), INTERVAL_S)
        if step >= 150:
            assert forecast.periodic, now_s
            for ahead_s in (0, 100, 200, 400):
                assert abs(forecast.at(now_s + ahead_s).per_s - rate(now_s + ahead_s)) < 2.5


def test_noise_is_no_period() -> None:
    source = random.Random(4)
    forecast = Forecast()
    for step in range(1, 700):
        forecast.add(step * INTERVAL_S, max(0, round(source.gauss(50, math.sqrt(50)))), INTERVAL_S)
        assert not forecast.periodic
    assert abs(forecast.at(7200.0).per_s - 5) < 0.5
