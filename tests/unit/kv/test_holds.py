"""The hold table says whether blocks are still held."""

from pathlib import Path

import pytest

from twostroke.errors import OverloadedError
from twostroke.kv.holds import SLOTS, TABLE_BYTES, Holds, HoldTable


def test_a_hold_stands_in_the_table_until_it_is_given_back(tmp_path: Path) -> None:
    """O-03."""
    table = HoldTable(tmp_path / "holds")
    holds = Holds(table)
    slot, generation = holds.take()
    assert table.word(slot) == generation != 0
    holds.give_back([slot])
    assert table.word(slot) == 0


def test_a_slot_taken_again_has_another_generation(tmp_path: Path) -> None:
    """O-03: who comes late to a slot that is in use again is not fooled."""
    table = HoldTable(tmp_path / "holds")
    holds = Holds(table)
    seen: dict[int, set[int]] = {}
    for _ in range(50):
        slot, generation = holds.take()
        assert generation not in seen.setdefault(slot, set())
        seen[slot].add(generation)
        holds.give_back([slot])
    assert sum(map(len, seen.values())) == 50


def test_the_generations_of_another_start_are_others(tmp_path: Path) -> None:
    """O-79."""
    taken = [Holds(HoldTable(tmp_path / f"holds-{start}")).take()[1] for start in range(4)]
    assert len({generation >> 8 for generation in taken}) == 4


def test_processes_that_map_the_file_see_each_others_words(tmp_path: Path) -> None:
    path = tmp_path / "holds"
    writer, reader = HoldTable(path), HoldTable(path)
    path.unlink()
    assert path.exists() is False
    slot, generation = Holds(writer).take()
    assert reader.word(slot) == generation
    assert reader.address != writer.address


def test_the_table_can_be_full(tmp_path: Path) -> None:
    path = tmp_path / "holds"
    holds = Holds(HoldTable(path))
    assert path.stat().st_size == TABLE_BYTES
    slots = [holds.take()[0] for _ in range(SLOTS)]
    assert len(set(slots)) == SLOTS
    with pytest.raises(OverloadedError, match=str(SLOTS)):
        holds.take()
    holds.give_back(slots[5:6])
    assert holds.take()[0] == slots[5]
