import json
from pathlib import Path

import pytest

from twostroke.bench.serve.traffic import (
    CHAT,
    COMMITTED,
    DOCUMENT,
    Arrival,
    bodies,
    lines,
    make,
    paced,
    read,
    shortened,
)
from twostroke.errors import ConfigError
from twostroke.measures import SloLimits

GOOD = '{"mix": "m", "arrival_s": 1.5, "kind": "chat", "prompt_tokens": 3, "output_tokens": 2}'


def test_the_committed_arrivals_are_what_the_seed_makes() -> None:
    assert COMMITTED.read_text() == "".join(lines(make())), "run python -m twostroke.bench.serve.traffic FILE"
    mixes = read(COMMITTED)
    assert list(mixes) == ["chat", "documents", "mixed", "long", "streams"]
    assert {each.kind for each in mixes["streams"]} == {CHAT, DOCUMENT}
    assert {each.kind for each in mixes["chat"]} == {CHAT}
    assert {each.kind for each in mixes["documents"]} == {DOCUMENT}
    assert {each.kind for each in mixes["mixed"]} == {CHAT, DOCUMENT}


def test_arrivals_are_read_in_order_of_time(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f"{GOOD}\n{GOOD.replace('1.5', '0.5')}\n")
    assert read(path) == {"m": [Arrival(0.5, "chat", 3, 2), Arrival(1.5, "chat", 3, 2)]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (GOOD.replace('"chat"', '"essay"'), "a.jsonl:2: kind 'essay' is none of chat, document"),
        (GOOD.replace('"prompt_tokens": 3, ', ""), "a.jsonl:2: field 'prompt_tokens' is missing"),
        (GOOD.replace("1.5", "-1"), "a.jsonl:2: arrival_s must not be negative"),
        ("not json", "a.jsonl:2: "),
    ],
    ids=["kind", "missing", "negative", "no json"],
)
def test_a_line_that_is_none_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f"{GOOD}\n{line}\n")
    with pytest.raises(ConfigError, match=message):
        read(path)


def test_an_empty_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with pytest.raises(ConfigError, match="cannot be read"):
        read(path)
    path.write_text("")
    with pytest.raises(ConfigError, match="no requests"):
        read(path)


def test_a_shortened_mix_has_shorter_documents_and_ends_sooner() -> None:
    mix = [Arrival(0, CHAT, 5000, 2), Arrival(1, DOCUMENT, 5000, 2), Arrival(9, CHAT, 3, 2)]
    assert shortened(mix, 9, 2048) == [Arrival(0, CHAT, 5000, 2), Arrival(1, DOCUMENT, 2048, 2)]


def test_bodies_ask_for_the_lengths_of_the_arrivals_and_repeat_with_the_seed() -> None:
    mix = [Arrival(0, CHAT, 5, 2), Arrival(1, CHAT, 5, 3)]
    asked = [json.loads(body) for body in bodies(mix, "x 0")]
    assert [len(each["prompt"]) for each in asked] == [5, 5]
    assert [each["max_tokens"] for each in asked] == [2, 3]
    assert asked[0]["prompt"] != asked[1]["prompt"]
    assert bodies(mix, "x 0") == bodies(mix, "x 0") != bodies(mix, "x 1")


def test_a_faster_machine_is_asked_faster() -> None:
    arrivals = [Arrival(0.0, CHAT, 3, 2), Arrival(3.0, DOCUMENT, 9, 2)]
    assert paced(arrivals, 1.5) == [Arrival(0.0, CHAT, 3, 2), Arrival(2.0, DOCUMENT, 9, 2)]
    assert SloLimits(1.5, 0.2, 0.0).faster(2.0) == SloLimits(0.75, 0.1, 0.0)
