"""How a worker divides its steps among prompts, played out step by step."""

import math
import random
from dataclasses import replace

from twostroke.policy.step_model import LinearStepModel, chunk_pairs
from twostroke.policy.turns import (
    CERTAIN,
    LEAST_ROOM,
    SHORT_S,
    Prompt,
    ShortPrompts,
    divide,
    passes,
    room_within,
    size_class,
)

ROOM = 512


class Worker:
    """Computes nothing but prompts. They need a block for 16 tokens from their first step to their end."""

    def __init__(self, places: int = 64, blocks: int = 10_000) -> None:
        self.left: dict[str, Prompt] = {}
        self.done: dict[str, int] = {}
        self.places, self.blocks = places, blocks
        self.sizes: dict[str, int] = {}
        self.steps = 0

    def add(self, name: str, tokens: int, **more: int) -> None:
        self.sizes[name] = -(-tokens // 16)
        self.left[name] = Prompt(tokens, blocks=self.sizes[name], **more)

    def step(self) -> dict[str, int]:
        """One step; returns who got how many tokens."""
        self.steps += 1
        names = list(self.left)
        got = {}
        for index, tokens in divide([*self.left.values()], ROOM, self.places, self.blocks):
            name, prompt = names[index], self.left[names[index]]
            got[name] = tokens
            if tokens == 0:
                continue
            if prompt.blocks is not None:
                self.places, self.blocks = self.places - 1, self.blocks - prompt.blocks
            self.left[name] = replace(prompt, left_tokens=prompt.left_tokens - tokens, blocks=None)
            if not self.left[name].left_tokens:
                del self.left[name]
                self.done[name] = self.steps
                self.places, self.blocks = self.places + 1, self.blocks + self.sizes[name]
        assert sum(got.values()) <= ROOM
        assert self.places >= 0
        assert self.blocks >= 0
        return got


def test_a_short_prompt_is_in_the_next_step_and_the_long_one_has_a_part_of_that() -> None:
    for begun in range(7):
        worker = Worker()
        worker.add("long", 4096)
        for _ in range(begun):
            assert worker.step() == {"long": ROOM}
        worker.add("short", 32)
        assert worker.step() == {"long": ROOM // CERTAIN, "short": 32}
        assert worker.step() == {"long": ROOM}
        while worker.left:
            worker.step()
        assert worker.done["long"] == 9


def test_a_step_in_which_prompts_end_is_kept_short() -> None:
    """A first token waits for it. Those that go on share a part of it; those that end have all the room they want."""
    ending = [Prompt(30), Prompt(40), Prompt(3000), Prompt(2000), Prompt(1000)]
    assert dict(divide(ending, ROOM, 0, 0)) == {0: 30, 1: 40, 4: ROOM // CERTAIN, 3: 0, 2: 0}
    oldest = [Prompt(3000), Prompt(30), Prompt(2000)]
    assert dict(divide(oldest, ROOM, 0, 0)) == {0: ROOM // CERTAIN, 1: 30, 2: 0}
    assert dict(divide(oldest[:1] + oldest[2:], ROOM, 0, 0)) == {0: ROOM, 1: 0}, "of one class"
    nearly = [Prompt(3000), Prompt(ROOM - 20)]
    assert dict(divide(nearly, ROOM, 0, 0)) == {0: ROOM // CERTAIN, 1: ROOM - ROOM // CERTAIN}, "it does not end"
    assert dict(divide([Prompt(200), Prompt(30)], ROOM, 0, 0)) == {0: 200, 1: 30}, "both end"


def test_only_one_that_is_much_shorter_passes() -> None:
    """Of two documents the second would win a second, and the first, which waited longer, be late."""
    assert [size_class(tokens) for tokens in (1, 3, 4, 63, 64, 1023, 1024, 4095, 4096)] == [1, 1, 2, 3, 4, 5, 6, 6, 7]
    for length, first in ((2048, "document"), (1024, "document"), (1023, "second"), (60, "second")):
        worker = Worker()
        worker.add("document", 4096)
        worker.step()
        worker.add("second", length)
        while worker.left:
            worker.step()
        assert min(worker.done, key=worker.done.__getitem__) == first, length
    for tokens in range(1, 5000):
        assert size_class(tokens) < size_class(CERTAIN * tokens), "what passes (passes) is of a lower class"


def test_of_equal_ones_the_older_is_first_and_done_first() -> None:
    worker = Worker()
    for name in "abc":
        worker.add(name, 2048)
    while worker.left:
        worker.step()
    assert worker.done == {"a": 4, "b": 8, "c": 12}


def test_the_oldest_gets_its_part_under_a_flood_of_shorter_ones() -> None:
    """A worker that is asked for more than it can do."""
    worker = Worker()
    worker.add("long", 4096)
    while "long" not in worker.done:
        worker.add(f"{worker.steps}", 510)
        got = worker.step()
        assert got["long"] >= ROOM // CERTAIN
    assert worker.done["long"] <= CERTAIN * 4096 // ROOM


def test_nobody_starves_and_nobody_short_waits_at_85_percent() -> None:
    chance = random.Random(5)
    worker = Worker()
    born = {}
    for number in range(400):
        if chance.random() < 0.5:
            born[f"{number}"] = worker.steps
            worker.add(f"{number}", chance.choice([16, 32, 300, 2000, 6000]) if chance.random() < 0.5 else 64)
        worker.step()
    while worker.left:
        worker.step()
    assert worker.done.keys() == born.keys()
    shorts = [worker.done[name] - begun for name, begun in born.items() if worker.sizes[name] <= 4]
    assert len(shorts) > 100
    assert max(shorts) == 1


def test_memory_that_the_oldest_waits_for_is_not_taken_by_those_behind() -> None:
    """All of it: whoever came later waits until it is done, which takes its own steps and those of who was before."""
    worker = Worker(blocks=100)
    worker.add("before", 160)
    worker.step()
    worker.add("runs", 1000)
    worker.step()
    worker.add("all", 1600)
    for _ in range(10):
        worker.add(f"{worker.steps}", 160)
        worker.step()
    assert worker.done["all"] == 2 + 2 + 5
    assert min(steps for name, steps in worker.done.items() if name.isdigit() and int(name) > 4) > 8


def test_no_more_are_let_in_than_there_is_room_for() -> None:
    prompts = [Prompt(100, blocks=4), Prompt(10), Prompt(90, blocks=3), Prompt(20, blocks=3)]
    assert divide(prompts, ROOM, places=2, free_blocks=99) == [(0, 100), (1, 10), (3, 20)]
    assert divide(prompts, ROOM, places=9, free_blocks=7) == [(0, 100), (1, 10), (3, 20)]
    assert divide(prompts, ROOM, places=9, free_blocks=3) == [(1, 10)], "nobody is let in before the oldest"
    assert divide(prompts, 20, places=9, free_blocks=99) == [(0, 5), (1, 10), (3, 0), (2, 0)]
    assert divide(prompts, 0, places=9, free_blocks=99) == [(0, 0), (1, 0), (3, 0), (2, 0)]
    assert divide([], ROOM, 1, 1) == []


def test_a_chunk_limit_holds() -> None:
    worker = Worker()
    worker.add("lent", 200, chunk_tokens=48)
    worker.add("other", 2000)
    assert worker.step() == {"lent": 48, "other": ROOM - 48}
    while worker.left:
        assert worker.step().get("lent", 0) <= 48
    assert worker.done["lent"] == 5


def test_several_with_a_chunk_limit_share_it() -> None:
    """A lent decoder's steps grow no longer by a second prompt."""
    worker = Worker()
    worker.add("document", 2000, chunk_tokens=24)
    assert worker.step() == {"document": 24}
    worker.add("chat", 40, chunk_tokens=24)
    assert worker.step() == {"document": 6, "chat": 18}
    assert worker.step() == {"document": 6, "chat": 18}
    assert worker.step() == {"document": 20, "chat": 4}
    worker.add("whole", 40)
    assert worker.step() == {"document": 6, "whole": 40}, "one without a limit does not take what is certain"


def test_priority_goes_before_length_and_who_has_tokens_before_who_has_none() -> None:
    worker = Worker()
    worker.add("short", 32)
    worker.add("urgent", 1000, priority=-1)
    assert worker.step() == {"urgent": ROOM, "short": 0}
    assert worker.step() == {"urgent": 1000 - ROOM, "short": 2 * ROOM - 1000}
    again = [Prompt(32), Prompt(2000, resumed=True)]
    assert divide(again, ROOM, 0, 0) == [(0, 32), (1, ROOM - 32)]
    assert divide([Prompt(500), *again], ROOM, 0, 0) == [(0, ROOM // CERTAIN), (2, ROOM - ROOM // CERTAIN), (1, 0)]


def test_a_step_is_kept_within_its_time() -> None:
    chance = random.Random(6)
    for _ in range(300):
        terms = (0.06, 4e-3, 2e-6, 4e-3, 8e-7)
        model = LinearStepModel(*(chance.uniform(0, 2) * term for term in terms))
        room, answers, depth = chance.choice((8, 32, 100, 512, 8192)), chance.randrange(20), chance.randrange(9000)
        most_s = chance.choice((0.01, 0.2, 1.0, 5.0))

        def step_s(tokens: int) -> float:
            return model.batch_s(answers, 500 * answers, tokens, chunk_pairs(depth, tokens))  # noqa: B023

        found = room_within(most_s, room, model, answers, 500 * answers, depth)
        assert min(room, LEAST_ROOM) <= found <= room
        assert step_s(found) <= most_s or found == min(room, LEAST_ROOM)
        assert found == room or found % LEAST_ROOM == 0
        assert found == room or step_s(room) > most_s


def test_what_passes_is_shorter_than_what_is_pending() -> None:
    assert passes(100, 400, 1)
    assert not passes(101, 400, 1)
    assert passes(100, 1200, 3)
    assert not passes(100, 1199, 3)
    assert not passes(100, 0, 0)


def test_short_prompts_come_while_the_last_one_is_not_long_ago() -> None:
    shorts = ShortPrompts()
    assert not shorts.come(-math.inf, None, 512)
    assert not shorts.come(0.0, None, 512)
    assert not shorts.come(1.0, 129, 512), "little of a step is a quarter"
    assert shorts.come(2.0, 128, 512)
    assert shorts.come(2.0 + SHORT_S - 0.1, 4000, 512)
    assert not shorts.come(2.0 + SHORT_S, None, 512)
