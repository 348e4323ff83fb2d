from __future__ import annotations

from pathlib import Path

import pytest

from twostroke.errors import ConfigError
from twostroke.launch.logs import choose, follow, recent
from twostroke.launch.state import RunDir


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    (tmp_path / "router.log").write_text("r1\nr2\nr3\n")
    (tmp_path / "decode-0.log").write_text("d1\n")
    return RunDir(tmp_path)


def test_one_log_is_shown_bare_and_several_are_marked(run_dir: RunDir) -> None:
    assert list(recent(choose(run_dir, "router"), 2)) == ["r2", "r3"]
    assert list(recent(choose(run_dir, ""), 1)) == ["decode-0 | d1", "router | r3"]
    assert list(recent(choose(run_dir, "router"), 0)) == []


def test_an_unknown_name_is_told_what_there_is(run_dir: RunDir, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no log of 'decode'; there are decode-0, router"):
        choose(run_dir, "decode")
    with pytest.raises(ConfigError, match="no logs in"):
        choose(RunDir(tmp_path / "none"), "")


def test_following_shows_whole_lines_once_and_starts_over_with_the_log(run_dir: RunDir) -> None:
    path = run_dir.log_path("router")
    writes = iter(
        [
            lambda: path.write_text("r1\nr2\nr3\nr4\nhalf"),
            lambda: path.write_text("r1\nr2\nr3\nr4\nhalf a line\n"),
            lambda: path.write_text("new\n"),
            path.unlink,
        ]
    )
    shown: list[str] = []

    def wait(seconds: float) -> None:
        write = next(writes, None)
        if write is None:
            raise KeyboardInterrupt
        write()

    with pytest.raises(KeyboardInterrupt):
        follow(choose(run_dir, "router"), 1, shown.append, wait)
    assert shown == ["r3", "r4", "half a line", "new"]
