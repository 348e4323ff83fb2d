"""The prefix cache of a worker against one that keeps its units in the order of their release."""

from __future__ import annotations

import random

import pytest

from twostroke.sim.blocks import BlockStore, Holding

UNIT = 4


class Obvious:
    """Which units are cached, and the order in which those that nobody holds are to go."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self.idle: list[int] = []

    def hits(self, hashes: list[int]) -> int:
        there = [key in self.held or key in self.idle for key in hashes]
        return [*there, False].index(False)

    def take(self, keys: list[int]) -> None:
        for key in keys:
            self.held[key] = self.held.get(key, 0) + 1
            if key in self.idle:
                self.idle.remove(key)

    def drop(self, keys: list[int]) -> None:
        for key in reversed(keys):
            self.held[key] -= 1
            if not self.held[key]:
                del self.held[key]
                self.idle.append(key)


@pytest.mark.parametrize("seed", range(20))
def test_the_least_recently_released_unit_is_evicted_first(seed: int) -> None:
    rng = random.Random(seed)
    store, plain = BlockStore(rng.choice((200, 4000)), UNIT), Obvious()
    holdings: list[tuple[Holding, list[int]]] = []
    evictions = 0
    for _ in range(1500):
        if holdings and (len(holdings) > 8 or rng.random() < 0.45):
            holding, keys = holdings.pop(rng.randrange(len(holdings)))
            plain.drop(keys)
            store.drop(holding)
        else:
            family = 1000 * rng.randrange(12)
            hashes = [family + depth for depth in range(rng.randrange(1, 12))]
            hits, blocks = store.hits(hashes), UNIT * len(hashes) + 3
            assert hits == plain.hits(hashes)
            if not store.fits(hashes, hits, blocks):
                continue
            holding = store.take(hashes, hits, blocks)
            plain.take(hashes[:hits])
            over = -(-(store.used + UNIT * len(plain.idle) - store.total) // UNIT)
            if over > 0:
                evictions += over
                del plain.idle[:over]
            fresh = plain.hits(hashes) == hits
            store.publish(holding, hashes)
            assert fresh == (len(holding.shared) > hits or hits == len(hashes))
            plain.take(hashes[hits : len(holding.shared)])
            holdings.append((holding, hashes[: len(holding.shared)]))
        assert store.spare == store.total - store.used - UNIT * len(plain.idle)
    assert evictions > 50 or store.total > 200
