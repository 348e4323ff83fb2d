import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from twostroke.bench.record import Record


def record() -> Record:
    made = Record("example", "python -m twostroke.bench.example --rounds 3")
    made.row(system="direct", streams=8, ttft_ms=12.3456789, note=None)
    made.check("time to first token", 2.5, "ms", "<= 3 ms", True)
    made.check("CPU per token", 90.0, "us", "<= 80 us", False)
    return made


def test_a_record_names_machine_versions_command_rows_and_checks(tmp_path: Path) -> None:
    path = record().write(tmp_path / "bench")
    assert path == tmp_path / "bench" / "example.json"
    content = json.loads(path.read_text())
    assert content["command"] == "python -m twostroke.bench.example --rounds 3"
    assert content["machine"]["cores"] >= content["machine"]["usable_cores"] >= 1
    assert content["machine"]["memory_bytes"] > 1 << 20
    assert content["machine"]["cpu"]
    assert len(content["machine"]["load_average"]) == 3
    assert {"python", "twostroke", "grpcio"} <= content["versions"].keys()
    assert content["rows"] == [{"system": "direct", "streams": 8, "ttft_ms": 12.3457, "note": None}]
    assert content["checks"] == [
        {"name": "time to first token", "value": 2.5, "unit": "ms", "goal": "<= 3 ms", "ok": True},
        {"name": "CPU per token", "value": 90.0, "unit": "us", "goal": "<= 80 us", "ok": False},
    ]


def test_a_second_write_replaces_the_first(tmp_path: Path) -> None:
    made = record()
    made.write(tmp_path)
    made.row(system="twostroke", streams=8, ttft_ms=14.0)
    path = made.write(tmp_path)
    assert [row["system"] for row in json.loads(path.read_text())["rows"]] == ["direct", "twostroke"]
    assert [each.name for each in tmp_path.iterdir()] == ["example.json"]


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_a_check_without_a_value_is_never_ok(value: float | None, tmp_path: Path) -> None:
    made = Record("example", "command")
    made.check("not measured", value, "ms", "< 3 ms", True)
    assert made.checks[0].value is None
    assert not made.checks[0].ok
    assert json.loads(made.write(tmp_path).read_text())["checks"][0]["value"] is None


def test_a_record_is_ok_when_it_has_checks_and_all_are_met() -> None:
    made = Record("example", "command")
    assert not made.ok
    made.check("first", 1, "", "1", True)
    assert made.ok
    made.check("second", 2, "", "3", False)
    assert not made.ok


def test_the_tables_show_every_row_and_mark_what_missed_its_goal() -> None:
    out = io.StringIO()
    made = record()
    made.check("not run", None, "ms", "install it", False)
    made.print(Console(file=out, width=120))
    lines = out.getvalue().splitlines()
    assert any("ttft ms" in line and "streams" in line for line in lines)
    assert any("direct" in line and "12.3" in line for line in lines)
    by_check = {
        name: line for line in lines for name in ("time to first token", "CPU per token", "not run") if name in line
    }
    assert "2.5 ms" in by_check["time to first token"]
    assert "yes" in by_check["time to first token"]
    assert "<= 80 us" in by_check["CPU per token"]
    assert "NO" in by_check["CPU per token"]
    assert "not measured" in by_check["not run"]
    assert "NO" in by_check["not run"]


def test_rows_of_another_kind_have_a_table_of_their_own() -> None:
    made = Record("x", "x")
    made.row(connector="a", tokens=1, exposed_ms=2.0)
    made.row(connector="a", tokens=2, exposed_ms=3.0, why="slow")
    made.row(connector="a", aborts=7)
    made.row(failure="kill", way="cma", late_bytes=0)
    out = io.StringIO()
    made.print(Console(file=out, width=120))
    heads = [line for line in out.getvalue().splitlines() if line.startswith("┃")]
    assert [set(head.replace("┃", " ").split()) for head in heads] == [
        {"connector", "tokens", "exposed", "ms", "why"},
        {"connector", "aborts"},
        {"failure", "way", "late", "bytes"},
    ]
