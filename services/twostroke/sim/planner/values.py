"""The chosen fleet as values for Docker Compose and for Kubernetes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from twostroke.sim.planner.space import Config
from twostroke.sim.replica import ReplicaSpec


def write(folder: Path, config: Config) -> list[Path]:
    """Writes compose.env and kubernetes-values.yaml into a folder; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    env, values = folder / "compose.env", folder / "kubernetes-values.yaml"
    env.write_text("\n".join(_env(config)) + "\n")
    values.write_text("\n".join(_yaml(config)) + "\n")
    return [env, values]


def _pools(config: Config) -> list[tuple[str, int, ReplicaSpec]]:
    if config.two_pools:
        return [("prefill", config.prefill, config.prefill_spec), ("decode", config.decode, config.decode_spec)]
    return [("worker", config.both, config.decode_spec)]


def _env(config: Config) -> Iterator[str]:
    yield f"# {config.text()}"
    yield f"TWOSTROKE_MODEL={config.decode_spec.model}"
    for name, count, spec in _pools(config):
        prefix = name.upper()
        yield f"{prefix}_REPLICAS={count}"
        yield f"{prefix}_GPUS={spec.tp * spec.pp * spec.dp}"
        yield f"{prefix}_TENSOR_PARALLEL={spec.tp}"
        yield f"{prefix}_PIPELINE_PARALLEL={spec.pp}"
        yield f"{prefix}_STEP_BUDGET_TOKENS={spec.budget_tokens}"
        yield f"{prefix}_MAX_SEQUENCES={spec.sequences}"


def _yaml(config: Config) -> Iterator[str]:
    yield f"# {config.text()}"
    yield f"model: {config.decode_spec.model}"
    yield f"precision: {config.decode_spec.precision}"
    yield "pools:"
    for name, count, spec in _pools(config):
        yield f"  {name}:"
        yield f"    role: {'both' if name == 'worker' else name}"
        yield f"    replicas: {count}"
        yield f"    gpuType: {spec.gpu}"
        yield f"    gpus: {spec.tp * spec.pp * spec.dp}"
        yield f"    tensorParallel: {spec.tp}"
        yield f"    pipelineParallel: {spec.pp}"
        yield f"    expertParallel: {spec.ep}"
        yield f"    stepBudgetTokens: {spec.budget_tokens}"
        yield f"    maxSequences: {spec.sequences}"
