"""A prompt computes on the cores of a worker that has nothing to do, and not on those of one that has."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from openai import OpenAI

from engine.conftest import TwoPools

pytest.importorskip("vllm", reason="the engine is not installed")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
TOKENS = 1800


def borrowed_s() -> dict[int, float]:
    """Seconds that threads which give way to all others have run, by the worker process whose they are."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/task/[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            if fields[38] == str(os.SCHED_IDLE):
                found[int(stat.parts[2])] = int((stat.parent / "schedstat").read_text().split()[0]) / 1e9
        except OSError:  # it ended meanwhile
            continue
    return found


@contextmanager
def busy(cores: set[int]) -> Iterator[None]:
    """Something else computes on these cores."""
    program = f"import os; os.sched_setaffinity(0, {cores}); print(flush=True)\nwhile True: pass"
    burners = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) for _ in cores]
    try:
        for burner in burners:
            assert burner.stdout is not None
            burner.stdout.readline()
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.communicate()


def test_a_prompt_uses_idle_cores_of_others_and_gives_them_back(two_pools: TwoPools) -> None:
    client = OpenAI(base_url=f"{two_pools.http}/v1", api_key="none", max_retries=0)

    def ask(first: int) -> float:
        """Returns how long other workers' cores were used for it."""
        before = borrowed_s()
        prompt = [first, *((i * 7919) % 40000 + 100 for i in range(TOKENS - 1))]
        client.completions.create(model=two_pools.model, prompt=prompt, max_tokens=1, temperature=0)
        return sum(used - before[process] for process, used in borrowed_s().items() if process in before)

    if len(os.sched_getaffinity(0)) < 2:
        assert not borrowed_s(), "no core is another worker's alone"
        return
    assert len(borrowed_s()) >= 2, "each worker has such threads"
    alone = ask(101)
    assert alone > 0.3, "all but the beginning of some seconds of work, in two halves"
    with busy(set(os.sched_getaffinity(0))):
        ask(102)
        assert ask(103) < alone / 2
