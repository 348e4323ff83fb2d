"""`twostroke profile` against a real worker process."""

from dataclasses import replace
from pathlib import Path

import pytest

from cluster.reference_cluster import running
from twostroke.config import RpcSettings
from twostroke.errors import UnavailableError
from twostroke.policy.step_model import StepBatch
from twostroke.sim.profile import Effort, find_worker, measure, profile
from twostroke.sim.replica import ReplicaSpec, load_profile, replica
from twostroke.sim.scenario import FleetSpec
from twostroke.sim.traffic import Traffic

STEP_MS, TOKEN_US = 10.0, 50.0
EFFORT = Effort(prompts=(64, 256, 512), batches=(1, 4), contexts=(16, 64), steps=12, repeats=1)


async def test_profile_finds_the_worker_s_times(tmp_path: Path) -> None:
    flags = ("--reference-step-ms", str(STEP_MS), "--reference-token-us", str(TOKEN_US))
    lines: list[str] = []
    async with running(worker_flags=flags) as cluster:
        address = await find_worker(f"127.0.0.1:{cluster.ports['router']}", RpcSettings())
        assert address.endswith(str(cluster.ports["decode-0"]))
        found = profile([await measure(address, EFFORT, lines.append, RpcSettings())])
        await cluster.empty()
    assert len(lines) == 3 + 4
    # The engine sleeps that long; a loaded machine sleeps longer.
    step_s = found.step_model.step_s(StepBatch(1, 64, 0, 0.0))
    assert STEP_MS / 1e3 <= step_s * 1.05 <= 2 * STEP_MS / 1e3
    prompt_s = found.step_model.step_s(StepBatch(0, 0, 512, 512 * 512 / 2, 1))
    assert (STEP_MS + 0.512 * TOKEN_US) / 1e3 <= prompt_s * 1.1 <= 2 * (STEP_MS + 0.512 * TOKEN_US) / 1e3
    path = tmp_path / "worker.json"
    found.save(path)
    assert load_profile(path) == found
    spec = FleetSpec(ReplicaSpec(str(path)), both=1)
    assert found.hop_s > 0
    assert (spec.make(Traffic()).hop_s, replace(spec, hop_s=0.5).make(Traffic()).hop_s) == (found.hop_s, 0.5)
    kind = replica(spec.spec).kind
    assert kind.limits.budget_tokens == found.step_budget_tokens
    assert kind.limits.decode_terms(1)[0] == pytest.approx(found.step_model.decode_terms(1)[0], rel=1e-6)


async def test_a_router_that_is_not_there() -> None:
    with pytest.raises(UnavailableError):
        await find_worker("127.0.0.1:9", RpcSettings())
