import os
import subprocess
import sys

import psutil
import pytest

from twostroke.bench.meter import Meter, cpu_s, descendants

BUSY = "import sys, time\nwhile time.process_time() < 0.2: pass\nprint('done', flush=True)\nsys.stdin.read()"


@pytest.fixture
def busy() -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_cpu_time_of_another_process_is_that_of_psutil_but_finer(busy: subprocess.Popen[str]) -> None:
    with busy:
        assert busy.stdout is not None
        assert busy.stdout.readline() == "done\n"
        times = psutil.Process(busy.pid).cpu_times()
        assert cpu_s(busy.pid) == pytest.approx(times.user + times.system, abs=0.03)
        assert cpu_s(busy.pid) >= 0.2
        assert descendants(os.getpid()).count(busy.pid) == 1
    assert cpu_s(busy.pid) == 0.0
    assert descendants(busy.pid) == []


def test_a_meter_counts_each_group_from_its_start() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as idle:
        meter = Meter({"own": [os.getpid()], "idle": [idle.pid], "none": []})
        own_s = cpu_s(os.getpid())
        meter.start()
        until_s = own_s + 0.1
        while cpu_s(os.getpid()) < until_s:
            pass
        used = meter.used_s()
        assert idle.stdin is not None
        idle.stdin.write(b"\n")
    assert used["own"] == pytest.approx(0.1, abs=0.05)
    assert used["none"] == 0.0
    assert used.keys() == {"own", "idle", "none"}
