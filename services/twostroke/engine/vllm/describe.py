"""What vLLM's configuration says of the engine, in our terms."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twostroke.config import WorkerSettings
from twostroke.engine.base import EngineInfo
from twostroke.engine.vllm.affinity import core_list, machine_id
from twostroke.engine.vllm.codec import layout_order
from twostroke.kv.layout import block_bytes, model_digest
from twostroke.policy.block_hash import BlockHashing
from twostroke.policy.prior import ModelCosts, accelerators, cpu, prior
from twostroke.policy.spare import Cores
from twostroke.policy.step_model import LinearStepModel
from twostroke.v1.kv_pb2 import KvEndpoint, KvLayout


def kv_layout(config: Any, connector: str, version: str) -> KvLayout:
    """What the engine's KV looks like. connector: as set; version: vLLM's."""
    model, cache = config.model_config, config.cache_config
    folder = Path(model.model)
    return KvLayout(
        model_digest=model_digest(folder) if folder.is_dir() else f"{model.model}@{model.revision or 'main'}",
        dtype=str(model.dtype).removeprefix("torch.") if cache.cache_dtype == "auto" else cache.cache_dtype,
        block_size_tokens=cache.block_size,
        layers=model.get_num_layers(config.parallel_config),
        kv_heads=model.get_total_num_kv_heads(),
        head_size=model.get_head_size(),
        tensor_parallel=config.parallel_config.tensor_parallel_size,
        order=layout_order(),
        connector=connector,
        connector_version=f"vllm {version}",
    )


def step_prior(config: Any, layout: KvLayout, weights: list[tuple[int, int, int, int]]) -> LinearStepModel:
    """What steps are expected to take. weights: of every rank, see WorkerExtension.twostroke_weights."""
    from vllm.platforms import current_platform

    model, text = config.model_config, config.model_config.hf_text_config
    nbytes, experts, others, threads = (sum(column) for column in zip(*weights, strict=True))
    shape = text.to_dict()
    choice = shape.get("num_experts") or shape.get("n_routed_experts") or shape.get("num_local_experts") or 1
    chosen = experts * (shape.get("num_experts_per_tok") or choice) / choice
    heads = model.get_num_attention_heads(config.parallel_config) * layout.tensor_parallel
    costs = ModelCosts(
        weight_bytes=nbytes,
        token_flops=2 * (others + chosen),
        head_flops=2 * model.get_hidden_size() * model.get_vocab_size(),
        pair_flops=4 * layout.layers * heads * layout.head_size,
        kv_bytes=block_bytes(layout, model.dtype.itemsize) / layout.block_size_tokens,
    )
    if current_platform.is_cpu():
        return prior(costs, cpu(threads))
    return prior(costs, accelerators(current_platform.get_device_name(), layout.tensor_parallel))


def block_hashing(said: Sequence[Any] | None) -> BlockHashing | None:
    """What scheduling.block_hashing said."""
    if said is None:
        return None
    algorithm, root, block_size_tokens = said
    return BlockHashing(block_size_tokens, bytes(root), algorithm)


def engine_info(
    config: Any,
    layout: KvLayout,
    version: str,
    phases: list[tuple[str, float]],
    endpoint: KvEndpoint,
    prior: LinearStepModel,
    block_hashing: BlockHashing | None,
    settings: WorkerSettings,
) -> EngineInfo:
    """What the engine is, once it has started."""
    return EngineInfo(
        engine="vllm",
        engine_version=version,
        model=config.model_config.model,
        max_model_len_tokens=config.model_config.max_model_len,
        vocab_size=config.model_config.get_vocab_size(),
        total_blocks=config.cache_config.num_gpu_blocks,
        step_budget_tokens=config.scheduler_config.max_num_batched_tokens,
        max_sequences=config.scheduler_config.max_num_seqs,
        layout=layout,
        prior=prior,
        block_hashing=block_hashing,
        start_phases=tuple(phases),
        kv_endpoint=endpoint,
        most_step_s=settings.most_step_s,
        cores=Cores(machine_id(), core_list(settings.cores), core_list(settings.spare_cores)),
    )
