from twostroke.engine.base import StepSample
from twostroke.policy.step_model import StepBatch
from twostroke.worker.step_samples import KEPT, StepSamples


def sample(number: int, *, prompt: bool = False) -> StepSample:
    return StepSample(StepBatch(1, 10, 5 if prompt else 0, 12.5, int(prompt)), float(number))


def test_every_listener_gets_each_sample_once_and_the_oldest_first() -> None:
    samples = StepSamples()
    assert samples.since(0) == (0, [])
    samples.took([sample(1), sample(2, prompt=True), sample(3)])
    told, found = samples.since(0)
    assert (told, [each.duration_s for each in found]) == (3, [1, 2, 3])
    assert samples.since(told) == (3, [])
    samples.took([sample(4)])
    assert samples.since(told) == (4, [sample(4)])
    assert samples.since(0) == (4, [sample(1), sample(2, prompt=True), sample(3), sample(4)])


def test_many_steps_without_a_prompt_do_not_push_out_the_one_with_one() -> None:
    samples = StepSamples()
    samples.took([sample(0, prompt=True)])
    samples.took([sample(number) for number in range(1, 101)])
    told, found = samples.since(0)
    assert told == 101
    assert [each.duration_s for each in found] == [0, *range(101 - KEPT, 101)]
