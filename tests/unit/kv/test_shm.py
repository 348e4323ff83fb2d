"""Segments: right content, nothing stale, nothing left behind."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import twostroke
from twostroke.errors import ConfigError, InvalidRequestError, KvCorruptError, KvLostError, LayoutMismatchError
from twostroke.kv import shm
from twostroke.kv.shm import Hold, PeerSegment, Segment, remove_stale, segment_bytes

HOLD = Hold((3, 1), 10)


@pytest.fixture
def segment(tmp_path):
    """Eight blocks of four words that count up, the blocks 3 and 1 held."""
    made = Segment.create(epoch="e", blocks=8, block_words=4, folder=tmp_path)
    made.words[:] = np.arange(32, dtype=np.uint64).reshape(8, 4)
    made.generations[[3, 1]] = (4, 9)
    made.hold(HOLD)
    yield made
    made.close()


def attach(segment, tmp_path, *, epoch="e", block_words=4):
    return PeerSegment.attach(segment.name, epoch=epoch, block_words=block_words, folder=tmp_path)


def test_a_peer_reads_the_blocks_in_order(segment, tmp_path):
    peer = attach(segment, tmp_path)
    assert peer.read(HOLD).tolist() == [[12, 13, 14, 15], [4, 5, 6, 7]]
    assert peer.read(HOLD, start=1).tolist() == [[4, 5, 6, 7]]
    segment.words[1, 0] = 99
    assert peer.read(HOLD, start=1)[0, 0] == 99, "it is the same memory"
    peer.close()
    peer.close()


def test_the_owner_learns_that_a_hold_was_read(segment, tmp_path):
    peer = attach(segment, tmp_path)
    assert not segment.is_read(HOLD)
    peer.acknowledge(HOLD)
    assert segment.is_read(HOLD)
    assert not segment.is_read(Hold(HOLD.block_ids, 11)), "the next hold of the block is another one"
    peer.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda segment: segment.drop(HOLD),
        lambda segment: segment.hold(Hold(HOLD.block_ids, 12)),
        lambda segment: segment.generations.__setitem__(3, 11),
        lambda segment: segment.close(),
    ],
    ids=["released", "held again", "taken again", "closed"],
)
def test_a_copy_is_refused_when_the_hold_ends_meanwhile(segment, tmp_path, change):
    class Slow(PeerSegment):
        def copy(self, block_ids):
            copied = super().copy(block_ids)
            change(segment)
            return copied

    peer = Slow.attach(segment.name, epoch="e", block_words=4, folder=tmp_path)
    with pytest.raises(KvLostError):
        peer.read(HOLD)
    peer.close()


@pytest.mark.parametrize(
    ("hold", "reason"),
    [
        (Hold((3, 1), 9), "the hold of generation 9 .* is over"),
        (Hold((1, 3), 10), "is over"),
        (Hold((), 10), "has 8 blocks"),
        (Hold((8, 1), 10), "has 8 blocks"),
    ],
)
def test_only_a_live_hold_is_read(segment, tmp_path, hold, reason):
    peer = attach(segment, tmp_path)
    with pytest.raises(KvLostError, match=reason):
        peer.read(hold)
    peer.close()


def test_a_block_that_was_taken_again_is_named(segment, tmp_path):
    segment.generations[3] = 11
    peer = attach(segment, tmp_path)
    with pytest.raises(KvLostError, match=r"block 0 \(3 of segment .*generation 11, hold 10"):
        peer.read(HOLD)
    peer.close()


def test_another_epoch_reads_nothing(segment, tmp_path):
    peer = attach(segment, tmp_path, epoch="f")
    with pytest.raises(KvLostError, match="another epoch"):
        peer.read(HOLD)
    peer.close()


def test_closing_removes_the_segment_and_turns_readers_away(segment, tmp_path):
    peer = attach(segment, tmp_path)
    segment.close()
    segment.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KvLostError):
        peer.read(HOLD)
    peer.close()
    with pytest.raises(KvLostError, match="is gone"):
        attach(segment, tmp_path)


def test_another_layout_is_refused(segment, tmp_path):
    with pytest.raises(LayoutMismatchError, match=r"expected .* blocks, 5\]"):
        attach(segment, tmp_path, block_words=5)
    os.truncate(tmp_path / segment.name, segment_bytes(8, 4) - 8)
    with pytest.raises(LayoutMismatchError, match="bytes starts with"):
        attach(segment, tmp_path)


def test_a_reader_sees_how_far_the_owner_is(segment, tmp_path):
    peer = attach(segment, tmp_path)
    assert peer.progress(HOLD) == (0, None)
    segment.announce(HOLD, 1)
    assert peer.progress(HOLD) == (1, None)
    assert peer.read(HOLD, 0, 1).tolist() == [[12, 13, 14, 15]]
    segment.announce(HOLD, 2, first_token=0)
    assert peer.progress(HOLD) == (2, 0)
    following = Hold(HOLD.block_ids, 12)
    segment.hold(following)
    with pytest.raises(KvLostError, match="is over"):
        peer.progress(HOLD)
    assert peer.progress(following) == (0, None), "nothing is left of the hold before"
    peer.close()


def test_the_pattern_is_that_of_the_epoch(segment, tmp_path):
    peer = attach(segment, tmp_path)
    peer.probe("e")
    assert peer.pattern.nbytes == shm.PATTERN_BYTES
    with pytest.raises(KvCorruptError):
        peer.probe("f")
    segment.pattern[5] += 1
    with pytest.raises(KvCorruptError):
        peer.probe("e")
    peer.close()


def test_an_attached_reader_notices_that_the_owner_died(segment, tmp_path):
    peer = attach(segment, tmp_path)
    peer.check_owner()
    fcntl.flock(segment._fd, fcntl.LOCK_UN)  # what the kernel does when the process ends
    with pytest.raises(KvLostError, match="is dead"):
        peer.check_owner()
    with pytest.raises(KvLostError, match="is dead"):
        peer.check_owner()
    peer.close()


@pytest.mark.parametrize("name", ["", "../etc/passwd", "twostroke-1-2-zzzzzzzz", "twostroke-1-2-00000000/x"])
def test_a_name_is_not_a_path(tmp_path, name):
    with pytest.raises(InvalidRequestError, match="is not the name of a KV segment"):
        PeerSegment.attach(name, epoch="e", block_words=4, folder=tmp_path)


def test_a_segment_without_a_living_owner_is_lost_and_removed(segment, tmp_path):
    dead = tmp_path / f"twostroke-{os.getuid()}-1-0123abcd"
    dead.write_bytes((tmp_path / segment.name).read_bytes())
    foreign = tmp_path / f"twostroke-{os.getuid()}-notes"
    foreign.touch()
    with pytest.raises(KvLostError, match="is dead"):
        PeerSegment.attach(dead.name, epoch="e", block_words=4, folder=tmp_path)
    assert remove_stale(tmp_path) == [dead.name]
    assert {path.name for path in tmp_path.iterdir()} == {segment.name, foreign.name}


def test_memory_that_runs_out_is_a_config_error(tmp_path, monkeypatch):
    def full(fd, offset, length):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=rf"--reference-blocks 8 needs {segment_bytes(8, 4)} bytes in {tmp_path}"):
        Segment.create(epoch="e", blocks=8, block_words=4, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


READER = """
import sys
from twostroke.kv.shm import Hold, PeerSegment
peer = PeerSegment.attach(sys.argv[1], epoch="e", block_words=4)
hold = Hold((1, 0), 7)
print(peer.read(hold).tolist())
peer.acknowledge(hold)
peer.close()
"""


def test_another_process_reads_real_shared_memory():
    segment = Segment.create(epoch="e", blocks=2, block_words=4)
    try:
        segment.words[1] = 5
        hold = Hold((1, 0), 7)
        segment.hold(hold)
        process = subprocess.run(
            [sys.executable, "-W", "error", "-c", READER, segment.name],
            env={"PYTHONPATH": str(Path(twostroke.__file__).parent.parent)},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert (process.stdout, process.stderr) == ("[[5, 5, 5, 5], [0, 0, 0, 0]]\n", "")
        assert segment.is_read(hold)
        assert (shm.SHM_FOLDER / segment.name).exists()
    finally:
        segment.close()
    assert not (shm.SHM_FOLDER / segment.name).exists()
