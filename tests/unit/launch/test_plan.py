from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from twostroke.config import RouterSettings, WorkerSettings
from twostroke.errors import ConfigError
from twostroke.flags import read
from twostroke.launch.devices import Devices
from twostroke.launch.plan import UpOptions, make
from twostroke.launch.processes import ProcessSpec

CPU = Devices(gpus=(), cores=(2, 5), preload=("/lib/a.so", "/lib/b.so"))
OPTIONS = UpOptions(
    engine="vllm",
    model="org/name",
    served_model_name="",
    prefill=1,
    decode=2,
    host="127.0.0.1",
    http_port=0,
    grpc_port=0,
    dtype="",
)


def worker_settings(spec: ProcessSpec) -> WorkerSettings:
    assert spec.command[:3] == (sys.executable, "-m", "twostroke.worker")
    return read(WorkerSettings, spec.command[3:])


def router_settings(spec: ProcessSpec) -> RouterSettings:
    assert spec.command[:3] == (sys.executable, "-m", "twostroke.router")
    return read(RouterSettings, spec.command[3:])


def test_workers_are_named_placed_and_known_to_the_router() -> None:
    plan = make(OPTIONS, CPU, {"HOME": "/root"})
    assert [spec.name for spec in plan.processes] == ["router", "prefill-0", "decode-0", "decode-1"]
    workers = [worker_settings(spec) for spec in plan.workers]
    assert [(worker.worker_id, worker.role) for worker in workers] == [
        ("prefill-0", "prefill"),
        ("decode-0", "decode"),
        ("decode-1", "decode"),
    ]
    assert [(worker.cores, worker.spare_cores) for worker in workers] == [("2", "5"), ("5", "2"), ("2", "5")]
    assert {worker.model for worker in workers} == {"org/name"}
    router = router_settings(plan.router)
    assert router.worker_targets() == tuple(f"127.0.0.1:{worker.port}" for worker in workers)
    assert router.worker_targets() == tuple(spec.address for spec in plan.workers)
    ports = {router.http_port, router.grpc_port, *(worker.port for worker in workers)}
    assert len(ports) == 5
    assert 0 not in ports
    assert plan.grpc == f"127.0.0.1:{router.grpc_port}"
    assert plan.http == f"http://127.0.0.1:{router.http_port}/v1"


def test_workers_on_cpu_get_their_libraries_and_the_router_does_not() -> None:
    plan = make(OPTIONS, CPU, {"LD_PRELOAD": "/lib/mine.so", "HOME": "/root"})
    environment = plan.workers[0].environment
    assert environment["LD_PRELOAD"] == "/lib/a.so /lib/b.so /lib/mine.so"
    assert environment["TORCHDYNAMO_DISABLE"] == "1"
    assert environment["HOME"] == "/root"
    assert plan.router.environment == {"LD_PRELOAD": "/lib/mine.so", "HOME": "/root"}


def test_several_cores_per_worker_do_not_overlap_while_there_are_enough() -> None:
    four = replace(CPU, cores=(0, 1, 2, 3))
    plan = make(replace(OPTIONS, decode=1, cores_per_worker=2), four, {})
    workers = [worker_settings(spec) for spec in plan.workers]
    assert [(worker.cores, worker.spare_cores) for worker in workers] == [("0,1", "2,3"), ("2,3", "0,1")]
    alone = make(replace(OPTIONS, prefill=1, decode=1), replace(CPU, cores=(4,)), {})
    assert {worker_settings(spec).spare_cores for spec in alone.workers} == {""}, "no core is another worker's alone"
    for flag in ("--cores=0,1", "--tensor-parallel=2"):
        chosen = make(replace(OPTIONS, worker_args=(flag,)), four, {})
        assert {worker_settings(spec).spare_cores for spec in chosen.workers} == {""}, flag
    with pytest.raises(ConfigError, match="--cores-per-worker must be between 1 and 4"):
        make(replace(OPTIONS, cores_per_worker=5), four, {})


@pytest.mark.parametrize(
    ("dtype", "gpus", "expected"), [("", (), "float32"), ("", ("0",), "auto"), ("bfloat16", (), "bfloat16")]
)
def test_dtype_is_float32_on_cpus_and_alike_everywhere(dtype: str, gpus: tuple[str, ...], expected: str) -> None:
    plan = make(replace(OPTIONS, dtype=dtype), replace(CPU, gpus=gpus), {})
    assert router_settings(plan.router).dtype == expected
    assert {worker_settings(spec).dtype for spec in plan.workers} == {expected}


def test_each_worker_gets_its_own_gpus() -> None:
    gpus = Devices(gpus=("0", "1", "4", "7"), cores=(0,))
    options = replace(OPTIONS, decode=1, worker_args=("--tensor-parallel=2",))
    plan = make(options, gpus, {})
    assert [spec.environment["CUDA_VISIBLE_DEVICES"] for spec in plan.workers] == ["0,1", "4,7"]
    workers = [worker_settings(spec) for spec in plan.workers]
    assert [(worker.tensor_parallel, worker.gpu_memory_fraction, worker.cores) for worker in workers] == [
        (2, 0.9, ""),
        (2, 0.9, ""),
    ]
    assert "LD_PRELOAD" not in plan.workers[0].environment


def test_workers_that_share_a_gpu_share_its_memory() -> None:
    gpus = Devices(gpus=("0", "1"), cores=(0,))
    plan = make(OPTIONS, gpus, {})
    assert [spec.environment["CUDA_VISIBLE_DEVICES"] for spec in plan.workers] == ["0", "1", "0"]
    assert [worker_settings(spec).gpu_memory_fraction for spec in plan.workers] == [0.45, 0.9, 0.45]
    plan = make(replace(OPTIONS, worker_args=("--gpu-memory-fraction=0.3",)), gpus, {})
    assert [worker_settings(spec).gpu_memory_fraction for spec in plan.workers] == [0.3, 0.3, 0.3]


def test_too_few_gpus_are_named() -> None:
    gpus = Devices(gpus=("0",), cores=(0,))
    with pytest.raises(ConfigError, match="--tensor-parallel 2 needs as many GPUs; this machine shows 1"):
        make(replace(OPTIONS, worker_args=("--tensor-parallel", "2")), gpus, {})


def test_the_reference_engine_needs_neither_model_nor_http() -> None:
    options = replace(OPTIONS, engine="reference", model="")
    plan = make(options, CPU, {})
    assert plan.http == ""
    assert router_settings(plan.router).front_end == "plain"
    worker = worker_settings(plan.workers[0])
    assert (worker.engine, worker.model, worker.cores) == ("reference", "", "")
    assert "LD_PRELOAD" not in plan.workers[0].environment


def test_clients_ask_for_a_folder_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "Tiny").mkdir()
    folder = str(tmp_path / "Tiny")
    assert make(replace(OPTIONS, model=folder), CPU, {}).model == "Tiny"
    assert make(OPTIONS, CPU, {}).model == "org/name"
    plan = make(replace(OPTIONS, model=folder, served_model_name="mine"), CPU, {})
    assert plan.model == router_settings(plan.router).served_model_name == "mine"


def test_further_arguments_come_last_and_are_checked() -> None:
    options = replace(OPTIONS, worker_args=("--kv-lease-s=9",), router_args=("--front-end=plain",))
    plan = make(options, CPU, {})
    assert worker_settings(plan.workers[0]).kv_lease_s == 9
    assert plan.http == ""
    with pytest.raises(ConfigError, match="--router-args: --frontend: no such flag; did you mean --front-end"):
        make(replace(OPTIONS, router_args=("--frontend=plain",)), CPU, {})


def test_a_wildcard_host_is_reached_over_loopback() -> None:
    plan = make(replace(OPTIONS, host="0.0.0.0"), CPU, {})
    assert plan.grpc.startswith("127.0.0.1:")
    assert router_settings(plan.router).host == "0.0.0.0"
    assert all(spec.address.startswith("127.0.0.1:") for spec in plan.workers)


def test_each_pool_needs_a_worker() -> None:
    with pytest.raises(ConfigError, match="--prefill and --decode must be at least 1"):
        make(replace(OPTIONS, decode=0), CPU, {})
