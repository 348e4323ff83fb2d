"""When a worker's steps take cores of others, and when they give them back."""

from __future__ import annotations

import pytest

from twostroke.config import WorkerSettings
from twostroke.engine.vllm.launch import prepare_environment
from twostroke.engine.vllm.spare_cores import CoreUse, SpareCores
from twostroke.errors import ConfigError
from twostroke.policy.turns import SPARE_TOKENS


class Machine:
    """Cores 0 to 2, of which 1 and 2 are spare. Times are told in hundredths of a second, as the kernel does."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.others_s = self.ours_s = 0.0
        self.threads: list[int] = []
        self.use = CoreUse([1, 2], lambda: self.ours_s, self.stat)
        self.cores = SpareCores(1, 2, self.use, self.threads.append)

    def stat(self) -> str:
        ticks = round((self.others_s + self.ours_s) * 100)
        one = ticks // 3
        return (
            f"cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 {10 * ticks} 0 0 7 0 0 0 0 0 0\n"
            f"cpu1 {one} 5 0 7 3 0 0 9 0 0\ncpu2 0 {ticks - one} 0 7 3 0 0 9 0 0\n"
            f"cpu10 {ticks} 0 0 7 0 0 0 0 0 0\nintr 5\n"
        )

    def layers(self, count: int, others: float, ours: float = 0.0) -> list[bool]:
        """Layers of 0.1 s. others, ours: shares of the spare cores' time."""
        changes = []
        for _ in range(count):
            self.now_s += 0.1
            self.others_s += 0.1 * 2 * others
            self.ours_s += 0.1 * 2 * ours
            changes.append(self.cores.look(self.now_s))
        return changes


def test_a_long_prompt_takes_idle_cores_and_gives_them_back_when_others_come() -> None:
    machine = Machine()
    machine.cores.begin(SPARE_TOKENS)
    assert machine.layers(3, others=0.1) == [False, True, False], "the first look has nothing to compare with"
    assert machine.threads == [3]
    assert machine.layers(2, others=0.4, ours=0.5) == [False, False], "our own threads there are no others"
    assert machine.layers(2, others=0.9) == [True, False]
    assert machine.threads == [3, 1]
    machine.layers(2, others=0.5)
    assert machine.threads == [3, 1], "between the two shares everything stays as it is"
    machine.layers(1, others=0.0)
    machine.cores.end()
    assert machine.threads == [3, 1, 3, 1], "what comes after the layers is computed on own cores"


def test_steps_without_a_long_prompt_stay_on_own_cores() -> None:
    machine = Machine()
    for tokens in (0, SPARE_TOKENS - 1):
        machine.cores.begin(tokens)
        assert not any(machine.layers(5, others=0.0))
        machine.cores.end()
    assert machine.threads == []


def test_what_was_long_ago_says_nothing_of_now() -> None:
    machine = Machine()
    machine.cores.begin(512)
    machine.layers(2, others=0.0)
    machine.cores.end()
    machine.threads.clear()
    machine.now_s += 60
    machine.cores.begin(512)
    assert machine.layers(1, others=0.9) == [False], "a minute that was idle on average"
    assert machine.layers(1, others=0.9) == [False]
    assert machine.threads == []


def test_a_look_that_comes_too_soon_says_nothing() -> None:
    machine = Machine()
    assert machine.use.share(machine.now_s) is None
    assert machine.use.share(machine.now_s + 0.02) is None
    machine.others_s += 0.1
    assert machine.use.share(machine.now_s + 0.1) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("cores", "spare", "more", "says"),
    [
        ("", "1", {}, "--spare-cores needs --cores"),
        ("0-2", "3,2", {}, "--spare-cores names core 2, which is in --cores"),
        ("0,1", "2,3", {"tensor_parallel": 2}, "leave it out with --tensor-parallel"),
    ],
)
def test_cores_that_are_not_another_workers_are_refused(
    cores: str, spare: str, more: dict[str, int], says: str
) -> None:
    settings = WorkerSettings(model="x", cores=cores, spare_cores=spare, **more)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=says):
        prepare_environment(settings)
