"""Fault plans are parsed strictly, and faults fire when they say."""

import json

import pytest

from twostroke.engine.fault_plan import Corrupt, Crash, FaultPlan, Refuse, Slow, Stall, parse_faults
from twostroke.errors import ConfigError


def plan_of(*faults: dict[str, object]) -> FaultPlan:
    return FaultPlan(parse_faults(json.dumps(faults)))


def test_no_text_is_no_faults():
    assert parse_faults("") == parse_faults("  ") == parse_faults("[]") == ()


def test_all_parameters_are_read():
    text = """[{"at_step": 3, "fault": "stall", "duration_s": 0.5}, {"at_request": 2, "fault": "crash"},
               {"at_step": 1, "fault": "slow", "factor": 4, "count": 2},
               {"at_request": 5, "fault": "corrupt", "block": 1, "byte": 9, "count": 3},
               {"at_request": 1, "fault": "refuse"}]"""
    assert parse_faults(text) == (
        Stall(at_step=3, fault="stall", duration_s=0.5),
        Crash(at_request=2, fault="crash"),
        Slow(at_step=1, fault="slow", factor=4, count=2),
        Corrupt(at_request=5, fault="corrupt", block=1, byte=9, count=3),
        Refuse(at_request=1, fault="refuse", count=1),
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is not JSON"),
        ('{"fault": "crash"}', "a list is needed"),
        ('[{"at_step": 1, "fault": "explode"}]', "entry 0: .*'stall', 'crash', 'exit', 'slow', 'corrupt', 'refuse'"),
        ('[{"at_step": 1}]', "entry 0: .*fault"),
        ('[{"at_step": 1, "fault": "crash"}, {"fault": "crash"}]', "entry 1: give either at_step or at_request"),
        ('[{"at_step": 1, "at_request": 1, "fault": "stall"}]', "entry 0: give either at_step or at_request"),
        ('[{"at_step": 0, "fault": "crash"}]', "entry 0: at_step: .*greater than or equal to 1"),
        ('[{"at_step": "1", "fault": "crash"}]', "entry 0: at_step: .*integer"),
        ('[{"at_step": 1, "fault": "slow"}]', "entry 0: factor: Field required"),
        ('[{"at_step": 1, "fault": "slow", "factor": 0}]', "entry 0: factor: "),
        ('[{"at_step": 1, "fault": "refuse", "at_request": 1}]', "entry 0: at_step: Extra inputs"),
        ('[{"at_step": 1, "fault": "crash", "duration_s": 1}]', "entry 0: duration_s: Extra inputs"),
    ],
)
def test_a_mistake_is_named(text, reason):
    with pytest.raises(ConfigError, match=f"^--reference-faults.*{reason}"):
        parse_faults(text)


def test_faults_fire_once_at_their_step_or_request():
    plan = plan_of({"at_step": 2, "fault": "stall"}, {"at_request": 7, "fault": "crash"})
    assert plan.due(1, {1}) == []
    assert [fault.fault for fault in plan.due(2, {2})] == ["stall"]
    assert plan.due(2, {2}) == []
    assert [fault.fault for fault in plan.due(3, {6, 7})] == ["crash"]
    assert plan.due(4, {7}) == []


def test_slow_lasts_for_its_steps():
    plan = plan_of(
        {"at_step": 1, "fault": "slow", "factor": 3, "count": 2}, {"at_step": 2, "fault": "slow", "factor": 5}
    )
    factors = []
    for step in range(1, 5):
        assert plan.due(step, ()) == []
        factors.append(plan.slowness())
    assert factors == [3, 15, 5, 5]


def test_refuse_and_corrupt_count_from_their_request():
    plan = plan_of({"at_request": 2, "fault": "refuse", "count": 2}, {"at_request": 3, "fault": "corrupt", "block": 4})
    assert [number for number in range(1, 6) if plan.refuses(number)] == [2, 3]
    assert [(number, fault.block) for number in range(1, 6) for fault in plan.corruptions(number)] == [(3, 4)]
