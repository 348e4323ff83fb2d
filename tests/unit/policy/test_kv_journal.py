"""What a worker tells, and what a listener's index makes of it."""

import random

from twostroke.policy.block_hash import block_hashes
from twostroke.policy.kv_events import Applied, Cleared, KvEvents, Removed, Stored
from twostroke.policy.kv_journal import KvJournal
from twostroke.policy.prefix_index import PrefixIndex, key


def hashes(first: int, blocks: int) -> list[bytes]:
    return block_hashes(list(range(first, first + 16 * blocks)), 16)


def test_numbers_count_what_was_told() -> None:
    journal = KvJournal("e")
    a = hashes(0, 3)
    assert journal.snapshot() == KvEvents("e", 0, [], snapshot=True)
    told = journal.record([Stored(a[:2], None), Stored(a[2:], a[1])])
    assert told == KvEvents("e", 1, [Stored([key(each) for each in a])]), "one run"
    assert journal.record([]) is None
    assert journal.record([Removed([b"unknown!"])]) is None
    assert journal.record([Removed(a[2:])]) == KvEvents("e", 2, [Removed([key(a[2])])])
    assert journal.snapshot() == KvEvents("e", 2, [Stored([key(a[0]), key(a[1])])], snapshot=True)
    assert journal.record([Cleared()]) == KvEvents("e", 3, [Cleared()])
    assert len(journal) == 0


def test_a_block_that_is_there_twice_goes_with_its_last_copy() -> None:
    journal = KvJournal("e")
    a = hashes(0, 2)
    journal.record([Stored(a, None)])
    assert journal.record([Stored(a, None), Stored(a, None)]) is None
    assert journal.record([Removed(a)]) is None
    assert journal.record([Removed(a)]) is None
    assert journal.record([Removed(a)]) == KvEvents("e", 1 + 1, [Removed([key(each) for each in a])])
    assert len(journal) == 0


def test_an_index_that_joins_at_any_time_finds_what_the_worker_has() -> None:
    """Chains that fork, evicted from their ends or anywhere, told in batches of any size."""
    chance = random.Random(11)
    chains = []
    for number in range(12):
        stem = list(range(16 * chance.randrange(1, 4)))
        chains.append(block_hashes([*stem, *range(1000 * (number + 1), 1000 * (number + 1) + 96)], 16))
    journal, held = KvJournal("e"), set()
    late = PrefixIndex()
    always = PrefixIndex()
    always.apply("w", journal.snapshot())
    for step in range(300):
        changes = []
        for _ in range(chance.randrange(1, 4)):
            chain = chance.choice(chains)
            if chance.random() < 0.6:
                have = next((i for i, each in enumerate(chain) if each not in held), len(chain))
                new = chain[have : have + chance.randrange(1, 4)]
                new = new[: next((i for i, each in enumerate(new) if each in held), len(new))]
                if new:
                    changes.append(Stored(new, chain[have - 1] if have else None))
                    held.update(new)
            elif held:
                gone = chance.sample(sorted(held), min(len(held), chance.randrange(1, 3)))
                changes.append(Removed(gone))
                held.difference_update(gone)
        if batch := journal.record(changes):
            assert always.apply("w", batch) is Applied.YES
        if step % 50 == 49:
            late.apply("w", journal.snapshot())
            for chain in chains:
                expected = next((i for i, each in enumerate(chain) if each not in held), len(chain))
                for index in (always, late):
                    assert index.hits(chain).get("w", 0) == expected
            late.remove_worker("w")
    assert len(journal) == len(held)
