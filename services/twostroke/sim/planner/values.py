"""The chosen fleet as values for Docker Compose and for Kubernetes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from twostroke.sim.planner.space import Config
from twostroke.sim.replica import ReplicaSpec


def write(folder: Path, config: Config) -> list[Path]:
    """Writes compose.plan.yaml and kubernetes-values.yaml into a folder; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    compose, values = folder / "compose.plan.yaml", folder / "kubernetes-values.yaml"
    compose.write_text("\n".join(_compose(config)) + "\n")
    values.write_text("\n".join(_yaml(config)) + "\n")
    return [compose, values]


def _pools(config: Config) -> list[tuple[str, int, ReplicaSpec]]:
    if config.two_pools:
        return [("prefill", config.prefill, config.prefill_spec), ("decode", config.decode, config.decode_spec)]
    return [("worker", config.both, config.decode_spec)]


def _compose(config: Config) -> Iterator[str]:
    yield f"# {config.text()}"
    if config.two_pools:
        yield "# docker compose -f compose.yaml -f docker/compose.gpu.yaml -f compose.plan.yaml up"
    else:
        yield "# compose.yaml has two pools; for one, start `twostroke worker` with these settings so many times."
    yield "services:"
    for name, count, spec in _pools(config):
        yield f"  {name}:"
        yield f"    deploy: {{ replicas: {count} }}"
        yield "    environment:"
        yield f'      TWOSTROKE_STEP_BUDGET_TOKENS: "{spec.budget_tokens}"'
        yield f'      TWOSTROKE_MAX_SEQUENCES: "{spec.sequences}"'
        yield f'      TWOSTROKE_TENSOR_PARALLEL: "{spec.tp}"'


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
