"""Where bench-sim-serve measures a worker."""

from twostroke.bench import sim_profiles
from twostroke.bench.stacks import Stack
from twostroke.launch.processes import ProcessSpec


def test_a_worker_alone_does_both_strokes_on_all_cores() -> None:
    def spec(name: str, *flags: str) -> ProcessSpec:
        return ProcessSpec(name, ("python", *flags), f"127.0.0.1:{len(name)}", {})

    workers = (spec("prefill-0", "--role=prefill"), spec("decode-0", "--role=decode", "--cores=1"))
    router = spec("router", "--workers=a,b", "--dtype=float32")
    pair = Stack("twostroke", ((router, *workers),), ("127.0.0.1", 1), ("router",), ("prefill-0", "decode-0"))
    ((made_router, only),) = sim_profiles.alone(pair, (0, 1)).stages
    assert only.command == ("python", "--role=both", "--cores=0,1")
    assert made_router.command == ("python", f"--workers={only.address}", "--dtype=float32")
