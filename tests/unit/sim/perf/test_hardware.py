"""Hardware sheets."""

import json
from pathlib import Path

import pytest

from twostroke.errors import ConfigError
from twostroke.sim.perf import hardware


def test_short_names() -> None:
    assert hardware.find("H100") is hardware.find("h100_sxm")


def test_missing_units_fall_back_to_wider_ones() -> None:
    assert hardware.find("h100").flops("fp4") == hardware.find("h100").flops("fp8") == 1979e12
    assert hardware.find("a100").flops("fp8") == 312e12


def test_a_file_changes_what_it_names(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"base": "h200", "name": "mine", "dollars_per_hour": 9.0}))
    found = hardware.find(str(path))
    assert (found.dollars_per_hour, found.memory_bytes_per_s) == (9.0, 4.8e12)


@pytest.mark.parametrize("text", ["{", '{"base": "h200", "speed": 1}', '{"name": "x"}', "[]"])
def test_a_bad_file_is_a_mistake_of_its_user(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.json"):
        hardware.find(str(path))


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="h100_sxm"):
        hardware.find("h1000")
