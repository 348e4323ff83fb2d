"""Memory gets its pages ahead of use."""

import mmap
import resource

import numpy as np

from twostroke.kv.pages import populate

NBYTES = 24 << 20


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def test_memory_that_was_populated_is_written_without_faults_and_keeps_its_content() -> None:
    with mmap.mmap(-1, NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapped:
        memory = np.frombuffer(mapped, np.uint8)
        memory[[0, 5_000_000, -1]] = 7, 8, 9
        before = faults()
        assert populate(memory.ctypes.data, NBYTES) == NBYTES
        populated = faults()
        memory[10 :: mmap.PAGESIZE] = 1
        assert faults() - populated < 20
        assert populated - before < NBYTES // mmap.PAGESIZE * 1.1
        assert memory[[0, 5_000_000, -1]].tolist() == [7, 8, 9]
        del memory


def test_only_whole_pages_within_are_touched() -> None:
    with mmap.mmap(-1, 4 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapped:
        memory = np.frombuffer(mapped, np.uint8)
        assert populate(memory.ctypes.data + 10, 3 * mmap.PAGESIZE) == 2 * mmap.PAGESIZE
        assert populate(memory.ctypes.data + 10, 20) == 0
        del memory


def test_memory_that_is_not_there_is_left_alone() -> None:
    assert populate(mmap.PAGESIZE, 8 * mmap.PAGESIZE) == 0
