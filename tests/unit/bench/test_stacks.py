import json
from dataclasses import replace
from pathlib import Path

from twostroke.bench.stacks import Builder, Served, Stack
from twostroke.launch.devices import Devices

SERVED = Served("/models/tiny", 64 << 20, 2048)


def built(cores: tuple[int, ...] = (0, 1)) -> dict[str, Stack]:
    devices = Devices(gpus=(), cores=cores, preload=("/lib/a.so",))
    builder = Builder(SERVED, devices, {"PATH": "/bin", "LD_PRELOAD": "/lib/b.so"})
    ours = builder.twostroke()
    return {stack.name: stack for stack in (builder.direct(), builder.vllm_router(), ours)}


def flag(command: tuple[str, ...], name: str) -> str:
    """A flag's value, however it is written."""
    for index, part in enumerate(command):
        if part == name:
            return command[index + 1]
        if part.startswith(f"{name}="):
            return part.partition("=")[2]
    raise AssertionError(f"{name} is not in {command}")


def test_all_engines_get_the_same_settings() -> None:
    stacks = built()
    engines = [spec for stack in stacks.values() for spec in stack.processes if spec.name in stack.front_ends]
    assert [spec.name for spec in engines] == ["direct", "vllm-prefill", "vllm-decode", "prefill-0", "decode-0"]
    for ours, theirs in (
        ("--model", "--model"),
        ("--dtype", "--dtype"),
        ("--kv-bytes", "--kv-cache-memory-bytes"),
        ("--step-budget-tokens", "--max-num-batched-tokens"),
        ("--max-sequences", "--max-num-seqs"),
        ("--max-model-len-tokens", "--max-model-len"),
    ):
        values = {flag(spec.command, ours if spec.name.endswith("-0") else theirs) for spec in engines}
        assert len(values) == 1, (ours, values)


def test_prefill_and_decode_have_a_core_each_and_the_direct_engine_that_of_decode() -> None:
    stacks = built()
    cores = {}
    for stack in stacks.values():
        for spec in stack.processes:
            if spec.name.endswith("-0"):
                cores[spec.name] = flag(spec.command, "--cores")
            elif spec.name in stack.front_ends:
                cores[spec.name] = spec.environment["VLLM_CPU_OMP_THREADS_BIND"]
    assert cores == {"direct": "1", "vllm-prefill": "0", "vllm-decode": "1", "prefill-0": "0", "decode-0": "1"}
    preloads = {
        spec.environment["LD_PRELOAD"]
        for stack in stacks.values()
        for spec in stack.processes
        if spec.name in stack.front_ends
    }
    assert preloads == {"/lib/a.so /lib/b.so"}


def test_one_core_is_enough() -> None:
    assert built((3,))["direct"].processes[0].environment["VLLM_CPU_OMP_THREADS_BIND"] == "3"


def test_no_two_processes_get_the_same_port() -> None:
    stacks = built()
    ports = [spec.address for stack in stacks.values() for spec in stack.processes]
    ports += [f"{host}:{port}" for host, port in (stacks["twostroke"].address,)]
    assert len(set(ports)) == len(ports) == 8


def test_the_api_servers_hand_kv_over_with_the_connector_of_our_workers() -> None:
    stacks = built()
    prefill, decode = stacks["vllm-router"].stages[0]
    transfers = [json.loads(flag(spec.command, "--kv-transfer-config")) for spec in (prefill, decode)]
    assert [transfer["kv_role"] for transfer in transfers] == ["kv_producer", "kv_consumer"]
    assert {transfer["kv_connector_module_path"] for transfer in transfers} == {"twostroke.engine.vllm.nixl"}
    assert "--kv-transfer-config" not in stacks["direct"].processes[0].command
    (router,) = stacks["vllm-router"].stages[1]
    assert flag(router.command, "--prefill") == f"http://{prefill.address}"
    assert flag(router.command, "--decode") == f"http://{decode.address}"
    assert "--vllm-pd-disaggregation" in router.command


def test_every_process_has_a_full_path_and_a_part_in_its_stack() -> None:
    for stack in built().values():
        names = {spec.name for spec in stack.processes}
        assert names == {*stack.routers, *stack.front_ends}
        assert all(Path(spec.command[0]).is_absolute() for spec in stack.processes)


def test_one_server_computes_on_all_cores_and_two_on_one_each() -> None:
    builder = Builder(SERVED, Devices(gpus=(), cores=(0, 1)), {})
    (alone,) = builder.one().processes
    assert alone.environment["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"
    two = builder.round_robin()
    servers, (router,) = two.stages
    assert [server.environment["VLLM_CPU_OMP_THREADS_BIND"] for server in servers] == ["0", "1"]
    assert flag(router.command, "--worker-urls") == f"http://{servers[0].address}"
    assert f"http://{servers[1].address}" in router.command
    assert flag(router.command, "--policy") == "round_robin"
    assert not any("--kv-transfer-config" in server.command for server in (alone, *servers))
    assert {spec.name for spec in two.processes} == {*two.routers, *two.front_ends}


def test_chunked_prefill_takes_the_step_that_is_asked_for() -> None:
    builder = Builder(replace(SERVED, step_budget_tokens=128), Devices(gpus=(), cores=(0, 1)), {})
    commands = [spec.command for stack in (builder.one(), builder.vllm_router()) for spec in stack.stages[0]]
    assert {flag(command, "--max-num-batched-tokens") for command in commands} == {"128"}
    worker = builder.twostroke().processes[1]
    assert worker.name == "prefill-0"
    assert flag(worker.command, "--step-budget-tokens") == "128"
