from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

from twostroke.errors import ConfigError
from twostroke.launch.state import ProcessId, ProcessRecord, RunDir, RunState

GONE = ProcessId(os.getpid(), 1)


def state(process: ProcessId) -> RunState:
    record = ProcessRecord("decode-0", process, "127.0.0.1:2", ("python", "-m", "x"), "/tmp/decode-0.log")
    return RunState("127.0.0.1:1", "http://127.0.0.1:8000/v1", "m", ProcessId.of(os.getpid()), (record,))


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.create()
    return made


def test_survives_the_file(run_dir: RunDir) -> None:
    saved = state(ProcessId.of(os.getpid())).with_exit("decode-0", "exited with code 3")
    run_dir.save(saved)
    assert run_dir.load() == saved
    assert [path.name for path in run_dir.path.iterdir()] == ["state.json"]


def test_nothing_saved_is_none(run_dir: RunDir) -> None:
    assert run_dir.load() is None


def test_a_broken_file_is_named(run_dir: RunDir) -> None:
    run_dir.state_path.write_text('{"grpc": 1')
    with pytest.raises(ConfigError, match=r"state\.json cannot be read"):
        run_dir.load()


def test_a_reused_pid_is_not_the_process() -> None:
    assert ProcessId.of(os.getpid()).alive()
    assert not GONE.alive()


def test_a_second_up_is_told_what_runs(run_dir: RunDir) -> None:
    run_dir.save(state(ProcessId.of(os.getpid())))
    with pytest.raises(ConfigError) as raised, run_dir.claim():
        pass
    assert f"already runs: decode-0 (pid {os.getpid()})" in str(raised.value)
    assert "`twostroke down`" in str(raised.value)
    assert run_dir.load() is not None


def test_a_second_up_at_the_same_time_is_refused(run_dir: RunDir) -> None:
    # A lock belongs to the open file, so a second claim of the same process is refused like another's.
    with run_dir.claim(), pytest.raises(ConfigError, match="already runs; `twostroke down`"), run_dir.claim():
        pass
    with run_dir.claim():
        pass


def test_the_state_of_a_dead_cluster_is_removed(run_dir: RunDir) -> None:
    run_dir.save(state(GONE))
    with run_dir.claim():
        assert run_dir.load() is None


def test_a_zombie_is_not_alive() -> None:
    child = multiprocessing.get_context("spawn").Process(target=os.getpid)
    child.start()
    assert child.pid is not None
    process = ProcessId.of(child.pid)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not process.alive()
    child.join()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"TWOSTROKE_RUN_DIR=.*file/run"):
        RunDir(tmp_path / "file" / "run").create()


def test_the_folder_is_for_this_user_only(run_dir: RunDir) -> None:
    assert run_dir.path.stat().st_mode & 0o777 == 0o700
