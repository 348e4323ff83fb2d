import random
from collections.abc import Sequence

import pytest

from twostroke.policy.kv_events import Applied, Cleared, KvEvents, Removed, Stored
from twostroke.policy.prefix_index import RUN_BLOCKS, PrefixIndex, key


class Feeder:
    """Sends a worker's changes in sequence, and knows what the worker holds."""

    def __init__(self, index: PrefixIndex, worker: str) -> None:
        self.index = index
        self.worker = worker
        self.epoch = f"{worker}-1"
        self.sequence = 0
        self.held: set[int] = set()

    def send(self, *changes: Stored | Removed | Cleared, snapshot: bool = False) -> Applied:
        applied = self.index.apply(self.worker, KvEvents(self.epoch, self.sequence, changes, snapshot))
        self.sequence += 1
        return applied

    def store(self, chain: Sequence[int], start: int, end: int) -> None:
        self.held.update(chain[start:end])
        self.send(Stored(chain[start:end], chain[start - 1] if start else None))

    def remove(self, block: int) -> None:
        self.held.discard(block)
        self.send(Removed([block]))


def hits_of(feeders: Sequence[Feeder], chain: Sequence[int]) -> dict[str, int]:
    """The slow truth: blocks from the start of the chain until the first that a worker lacks."""
    found = {}
    for feeder in feeders:
        count = next((i for i, block in enumerate(chain) if block not in feeder.held), len(chain))
        if count:
            found[feeder.worker] = count
    return found


def chains(rng: random.Random, count: int, most: int) -> list[list[int]]:
    """Prompts that share prefixes, as sequences of chained hashes."""
    made = [[rng.getrandbits(64) for _ in range(rng.randrange(1, most))]]
    for _ in range(count - 1):
        parent = rng.choice(made)
        kept = parent[: rng.randrange(len(parent) + 1)]
        made.append(kept + [rng.getrandbits(64) for _ in range(rng.randrange(1, most))])
    return made


@pytest.mark.parametrize("seed", range(40))
def test_hits_equal_the_slow_truth_whatever_is_stored_and_dropped(seed: int) -> None:
    rng = random.Random(seed)
    index = PrefixIndex()
    feeders = [Feeder(index, f"w{number}") for number in range(rng.choice((1, 2, 5)))]
    prompts = chains(rng, 12, rng.choice((4, 40, 3 * RUN_BLOCKS)))
    for _ in range(300):
        feeder, chain = rng.choice(feeders), rng.choice(prompts)
        have = next((i for i, block in enumerate(chain) if block not in feeder.held), len(chain))
        match rng.choices(("extend", "tail", "any", "gap", "restart", "clear"), (40, 30, 15, 5, 1, 1))[0]:
            case "extend" if have < len(chain):
                feeder.store(chain, have, rng.randrange(have + 1, len(chain) + 1))
            case "tail" if have:
                for block in chain[have - rng.randrange(1, have + 1) : have][::-1]:
                    feeder.remove(block)
            case "any" if feeder.held:
                feeder.remove(rng.choice(sorted(feeder.held)))
            case "gap":
                start = rng.randrange(len(chain))
                feeder.store(chain, start, rng.randrange(start, len(chain)) + 1)
            case "restart":
                feeder.epoch, feeder.sequence, feeder.held = f"{feeder.epoch}+", 0, set()
                feeder.send()
            case "clear":
                feeder.held = set()
                feeder.send(Cleared())
        for prompt in rng.sample(prompts, 3):
            assert index.hits(prompt) == hits_of(feeders, prompt)
        assert len(index) >= len(set().union(*(each.held for each in feeders)))
    for feeder in feeders:
        index.remove_worker(feeder.worker)
    assert (len(index), index.cost_bytes) == (0, 0)
    assert index.hits(prompts[0]) == {}


def test_bytes_and_the_engines_own_integers_of_them_are_one_key() -> None:
    digest = bytes(range(32))
    index = PrefixIndex()
    Feeder(index, "w").send(Stored([digest]))
    assert index.hits([int.from_bytes(digest, "big") & (2**64 - 1)]) == {"w": 1}
    assert key(digest) == key(int.from_bytes(digest[-8:], "big"))
    assert index.hits([digest[::-1]]) == {}


def test_a_gap_asks_once_for_a_snapshot_and_until_then_the_worker_has_nothing() -> None:
    index = PrefixIndex()
    feeder = Feeder(index, "w")
    assert feeder.send(Stored([1, 2])) is Applied.YES
    assert feeder.send(Stored([3], 2)) is Applied.YES
    feeder.sequence -= 1
    assert feeder.send(Removed([1])) is Applied.OLD
    assert index.hits([1, 2, 3]) == {"w": 3}
    feeder.sequence += 1
    assert feeder.send(Stored([4], 3)) is Applied.RESYNC
    assert feeder.send(Stored([5], 4)) is Applied.WAITING
    assert index.hits([1, 2, 3]) == {}
    assert feeder.send(Stored([1, 2]), snapshot=True) is Applied.YES
    assert index.hits([1, 2, 3]) == {"w": 2}
    assert feeder.send(Stored([3], 2)) is Applied.YES
    assert index.hits([1, 2, 3]) == {"w": 3}


def test_a_worker_first_heard_of_in_the_middle_of_its_life_is_asked_for_a_snapshot() -> None:
    index = PrefixIndex()
    feeder = Feeder(index, "w")
    feeder.sequence = 7
    assert feeder.send(Stored([1])) is Applied.RESYNC
    assert index.hits([1]) == {}


def test_another_epoch_forgets_the_old_one() -> None:
    index = PrefixIndex()
    feeder = Feeder(index, "w")
    feeder.send(Stored([1, 2]))
    feeder.epoch, feeder.sequence = "w-2", 0
    assert feeder.send(Stored([9])) is Applied.YES
    assert (index.hits([1, 2]), index.hits([9])) == ({}, {"w": 1})
    feeder.epoch, feeder.sequence = "w-3", 5
    assert feeder.send() is Applied.RESYNC
    assert index.hits([9]) == {}


def test_memory_is_bounded_and_what_is_used_stays() -> None:
    index = PrefixIndex(max_bytes=200_000)
    feeder = Feeder(index, "w")
    system_prompt = list(range(1, 33))
    feeder.store(system_prompt, 0, 32)
    for number in range(500):
        chain = [*system_prompt, *range(1000 + 100 * number, 1000 + 100 * number + 20)]
        feeder.store(chain, 32, len(chain))
        assert index.cost_bytes <= 200_000
        assert index.hits(chain) == {"w": 52}, "the newest is kept"
        assert index.hits(system_prompt) == {"w": 32}
    early = [*system_prompt, *range(1100, 1120)]
    assert index.hits(early) == {"w": 32}, "what no prompt asked for is gone, and a hit is never longer than the truth"
