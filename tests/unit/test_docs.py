"""Documents that are made from the code are current, and what they point to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from twostroke import reference
from twostroke.config import RouterSettings
from twostroke.errors import ConfigError

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize(("name", "mark"), list(reference.tables()))
def test_tables_are_current(name: str, mark: str) -> None:
    text = (ROOT / "docs" / name).read_text()
    assert reference.insert(text, mark, reference.tables()[name, mark]) == text, "run `make docs`"


def test_no_setting_is_missing() -> None:
    table = reference.settings(RouterSettings)
    for name in RouterSettings.model_fields.keys() - {"rpc"}:
        assert f"`TWOSTROKE_{name.upper()}`" in table


CASES = re.findall(r"^\| (O-\d+) \| [^|]+ \| `([^`]+)` \|$", (ROOT / "docs" / "failures.md").read_text(), re.M)


@pytest.mark.parametrize(("case", "test"), CASES, ids=str)
def test_a_known_case_has_the_test_that_the_page_names(case: str, test: str) -> None:
    assert re.search(rf"{case}\b", (ROOT / "tests" / test).read_text())


def test_every_case_of_held_memory_hangs_crashes_latency_apis_grpc_and_hosts_is_listed() -> None:
    listed = [int(case.removeprefix("O-")) for case, _ in CASES]
    assert listed == [number for number in range(25, 84) if number != 60]


def test_every_error_has_a_remedy() -> None:
    assert "see the message" not in reference.errors()


def test_a_document_without_marks_is_named() -> None:
    with pytest.raises(ConfigError, match="begin errors"):
        reference.insert("# Errors", "errors", "")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_documents_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)|<img src=\"([^\"]+)\"", page.read_text()):
        path = target[0] or target[1]
        if "://" not in path:
            assert (page.parent / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_that_are_named_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for named in re.findall(r"(?:`|^ {4})make ([a-z][a-z-]+)", page.read_text(), re.M):
        assert named in targets, named
