"""What vLLM's configuration says of the engine, in our terms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twostroke.engine.base import EngineInfo
from twostroke.engine.vllm.codec import layout_order
from twostroke.kv.layout import model_digest
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


def engine_info(
    config: Any, layout: KvLayout, version: str, phases: list[tuple[str, float]], endpoint: KvEndpoint
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
        start_phases=tuple(phases),
        kv_endpoint=endpoint,
    )
