import asyncio
import json
from collections.abc import Mapping
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from twostroke.bench.record import Record
from twostroke.bench.serve import __main__ as command
from twostroke.bench.serve import report
from twostroke.bench.serve.page import report as html
from twostroke.bench.serve.play import Seen
from twostroke.bench.serve.report import Numbers
from twostroke.bench.serve.stats import ALL, DURING, Played
from twostroke.bench.serve.systems import System, chosen, router_args, stack
from twostroke.bench.serve.traffic import CHAT, DOCUMENT, Arrival
from twostroke.errors import ConfigError
from twostroke.launch.devices import Devices
from twostroke.measures import SloLimits

SLOS = {CHAT: SloLimits(ttft_s=1.5, itl_s=0.25), DOCUMENT: SloLimits(ttft_s=40.0)}
MEASURED = [System(name, 128) for name in ("one", "chunked", "vllm-router", "all")]


def system(document_s: float, during_ms: float, chat_s: float, goodput: float) -> Mapping[str, Mapping[str, float]]:
    return {
        ALL: {"goodput": goodput, "failed": 0.0, "sent_late_s": 0.01, "cpu_s": 9.0, "other_cpu_s": 0.1},
        CHAT: {"ttft_p99_s": chat_s},
        DURING: {"itl_p99_ms": during_ms},
        DOCUMENT: {"ttft_p50_s": document_s},
    }


def numbers(own: Mapping[str, Mapping[str, float]]) -> Numbers:
    by_system = {
        "one": system(16.0, 10_000, 9.0, 0.4),
        "chunk-128": system(18.0, 1_000, 2.0, 0.5),
        "vllm-router": system(32.0, 160, 25.0, 0.3),
        "all": own,
    }
    return dict.fromkeys(("chat", "documents", "mixed", "streams"), by_system)


def checked(own: Mapping[str, Mapping[str, float]]) -> dict[str, bool]:
    record = Record("serve", "command")
    report.checks(record, numbers(own), MEASURED)
    return {check.name: check.ok for check in record.checks}


def test_all_checks_are_ok_when_all_is_met() -> None:
    found = checked(system(20.0, 150, 1.4, 0.65))
    assert len(found) == 2 + 2 * 3 + 1 + 1 + 4
    assert all(found.values()), found


@pytest.mark.parametrize(
    ("own", "missed"),
    [
        (system(21.0, 150, 1.4, 0.65), ["TTFT p50 of documents against one server on both cores"] * 2),
        (
            system(20.0, 170, 1.4, 0.65),
            ["ITL p99 of chats while documents are read: how much lower than with vllm-router"] * 2,
        ),
        (system(20.0, 150, 1.6, 0.65), ["TTFT p99 of chats beside documents"]),
        (system(20.0, 150, 1.4, 0.64), ["goodput against the best that is not twostroke, chunk-128"]),
    ],
)
def test_a_figure_that_misses_its_goal_is_seen(own: Mapping[str, Mapping[str, float]], missed: list[str]) -> None:
    names = [name for name, ok in checked(own).items() if not ok]
    assert len(names) == len(missed)
    assert all(name.startswith(text) for name, text in zip(names, missed, strict=True)), names


def test_what_was_not_measured_is_not_ok() -> None:
    record = Record("serve", "command")
    report.checks(record, {"chat": {"strict": system(1, 1, 1, 1)}}, [System("strict", 512)])
    assert not any(check.ok for check in record.checks)
    assert all("(strict, " in check.name or "(strict; " in check.name for check in record.checks)


def test_of_several_chunk_sizes_the_best_is_compared() -> None:
    sizes = [System("chunked", 64), System("chunked", 128), System("chunked", 256)]
    by_system = {
        "chunk-64": system(1, 500, 1, 0.4),
        "chunk-128": system(1, 900, 1, 0.5),
        "chunk-256": system(1, 800, 1, 0.5),
    }
    assert report.best_chunk({"mixed": by_system}, sizes) == sizes[2]
    assert report.best_chunk({}, []) is None


def test_a_run_rests_on_answers_that_are_equal_and_all_there() -> None:
    record = Record("serve", "command")
    report.validity(record, numbers(system(1, 1, 1, 1)), {"one": "a", "all": "b"}, ["round 1, one: died"])
    assert [check.ok for check in record.checks] == [False, True, False, True, True]


def test_a_run_that_others_disturbed_is_seen() -> None:
    record = Record("serve", "command")
    made = numbers(system(1, 1, 1, 1))
    disturbed = {**made["chat"]["one"][ALL], "other_cpu_s": 1.0, "sent_late_s": 0.2}
    report.validity(record, {"chat": {"one": {ALL: disturbed}}}, {"one": "a"}, [])
    assert [check.name for check in record.checks if not check.ok] == [
        "CPU time of others, in shares of the system's",
        "latest request, behind its time",
    ]


def test_systems_are_chosen_by_name_and_chunk_size() -> None:
    assert [each.label for each in chosen(["one", "chunked"], [64, 128])] == ["one", "chunk-64", "chunk-128"]
    assert [each.chunk_tokens for each in chosen(["one", "strict"], [64])] == [2048, 512]
    with pytest.raises(ConfigError, match="--systems two: choose among one,"):
        chosen(["one", "two"], [64])
    assert router_args("all", SLOS) == ("--placement=all", "--slo=chat=1500/162.5,document=40000/1e+06")


def test_every_system_has_the_same_kv_memory_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostroke.bench.serve.systems.vllm_router_installed", lambda: True)
    devices = Devices(gpus=(), cores=(0, 1))
    sums = set()
    for each in chosen(["one", "chunked", "round-robin", "vllm-router", "strict"], [128]):
        made = stack(each, "/models/m", devices, {}, SLOS)
        assert made.name == each.label
        flags = [part for spec in made.processes if spec.name in made.front_ends for part in spec.command]
        theirs = [int(size) for name, size in pairwise(flags) if name == "--kv-cache-memory-bytes"]
        mine = [int(part.partition("=")[2]) for part in flags if part.startswith("--kv-bytes=")]
        sums.add(sum(theirs + mine))
    assert sums == {2 << 30}


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag != "meta" and tag != "br":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_asks_no_other_host() -> None:
    chats = [Seen(Arrival(at_s, CHAT, 4, 3), at_s, (at_s + 0.5, at_s + 0.6, at_s + 1.9)) for at_s in (0.0, 1.0)]
    requests = (*chats, Seen(Arrival(0.2, DOCUMENT, 9, 1), 0.2, (2.0,)), Seen(Arrival(2.0, CHAT, 4, 3), 2.0, error="x"))
    played = [Played(name, "mixed", 0, requests, 2.0, 0.1, 0.0) for name in ("one", "a<b")]
    made = report.numbers(played, SLOS)
    record = Record("serve", "python -m twostroke.bench.serve --chat-slo 'a<b'")
    report.checks(record, made, MEASURED)
    text = html(record, made, played, SLOS)
    reader = _Reader()
    reader.feed(text)
    assert not reader.open
    assert reader.tags.count("svg") == 4 + 2
    assert "script" not in reader.tags
    assert "http" not in text
    assert "a&lt;b" in text
    assert "a<b" not in text
    assert "nan" not in text


def test_tables_show_only_columns_that_have_figures() -> None:
    (shown,) = report.tables({"chat": {"one": {CHAT: {"ttft_p50_s": 0.5}, ALL: {"goodput": 2.0, "cpu_s": 9.0}}}})
    assert list(shown.columns) == ["system", "of", "TTFT p50 s", "goodput/s", "CPU s"]
    assert shown.rows == [("one", "chat", "0.50", "2.000", "9.0")]


def test_where_there_are_chats_and_documents_each_has_its_row() -> None:
    (shown,) = report.tables({"mixed": {"one": {ALL: {"goodput": 2.0}, CHAT: {"goodput": 1.0}, DOCUMENT: {}}}})
    assert shown.rows == [("one", "all", "2.000"), ("one", "chat", "1.000"), ("one", "document", "")]


async def test_what_was_measured_is_kept_when_it_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    chats = tuple(Seen(Arrival(at_s, CHAT, 4, 3), at_s, (at_s + 0.5, at_s + 0.6, at_s + 0.7)) for at_s in (0.0, 1.0))

    async def interrupted(place: object, options: object, results: command.Results, say: object) -> None:
        results.played.append(Played("one", "chat", 0, chats, 2.0, 0.1, 0.0))
        raise asyncio.CancelledError

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "measure", interrupted)
    monkeypatch.setattr(command, "obtain", lambda *args: "/models/m")
    with pytest.raises(asyncio.CancelledError):
        await command.compare(command.Options(2, {}, [System("one", 2048)], SLOS), 1.0)
    written = json.loads((tmp_path / "build" / "bench" / "serve.json").read_text())
    assert {row["system"] for row in written["rows"]} == {"one"}
    assert [each["value"] for each in written["checks"] if each["name"] == "runs of a system that broke off"] == [1]
    assert (tmp_path / "build" / "bench" / "serve.html").stat().st_size > 1000
