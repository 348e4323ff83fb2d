"""Shapes of well-known models, so that they can be planned for without their files.

The numbers are those of the models' public config.json files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twostroke.errors import ConfigError
from twostroke.sim.perf.model_shape import ModelShape, from_config


def _dense(
    layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        **more,
    }


def _experts(count: int, per_token: int, intermediate: int, shared: int = 0, dense_layers: int = 0) -> dict[str, Any]:
    return {
        "num_experts": count,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": intermediate,
        "n_shared_experts": shared,
        "first_k_dense_replace": dense_layers,
    }


_MLA = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
_DEEPSEEK_V3 = _dense(61, 7168, 128, 128, 18432, 129280, **_MLA, **_experts(256, 8, 2048, 1, 3))
_KIMI_K2 = _dense(61, 7168, 64, 64, 18432, 163840, **_MLA, **_experts(384, 8, 2048, 1, 1))
_GLM_5 = _dense(
    78, 6144, 64, 64, 12288, 154880,
    **{**_MLA, "q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256},
    **_experts(256, 8, 2048, 1, 3),
    index_topk=2048,
    index_head_dim=128,
)  # fmt: skip
_QWEN_3_5 = _dense(
    60, 4096, 32, 2, 0, 248320,
    head_dim=256,
    **_experts(512, 10, 1024, 1),
    layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 15,
    linear_num_key_heads=16,
    linear_num_value_heads=64,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
)  # fmt: skip


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return _dense(
        layers, 2880, 64, 8, 2880, 201088,
        head_dim=64,
        **_experts(experts, 4, 2880),
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2),
    )  # fmt: skip


_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama-2-7b": _dense(32, 4096, 32, 32, 11008, 32000),
    "llama-2-13b": _dense(40, 5120, 40, 40, 13824, 32000),
    "llama-2-70b": _dense(80, 8192, 64, 8, 28672, 32000),
    "llama-3.1-8b": _dense(32, 4096, 32, 8, 14336, 128256),
    "llama-3.1-70b": _dense(80, 8192, 64, 8, 28672, 128256),
    "llama-3.3-70b": _dense(80, 8192, 64, 8, 28672, 128256),
    "llama-3.1-405b": _dense(126, 16384, 128, 8, 53248, 128256),
    "opt-13b": _dense(40, 5120, 40, 40, 20480, 50272, hidden_act="relu", tie_word_embeddings=True),
    "opt-66b": _dense(64, 9216, 72, 72, 36864, 50272, hidden_act="relu", tie_word_embeddings=True),
    "bloom-176b": _dense(70, 14336, 112, 112, 57344, 250880, hidden_act="gelu", tie_word_embeddings=True),
    "qwen2.5-7b": _dense(28, 3584, 28, 4, 18944, 152064),
    "qwen2.5-72b": _dense(80, 8192, 64, 8, 29568, 152064),
    "qwen3-8b": _dense(36, 4096, 32, 8, 12288, 151936, head_dim=128),
    "qwen3-32b": _dense(64, 5120, 64, 8, 25600, 151936, head_dim=128),
    "qwen3-30b-a3b": _dense(48, 2048, 32, 4, 6144, 151936, head_dim=128, **_experts(128, 8, 768)),
    "qwen3-235b-a22b": _dense(94, 4096, 64, 4, 12288, 151936, head_dim=128, **_experts(128, 8, 1536)),
    "qwen3.5-397b-a17b": _QWEN_3_5,
    "mixtral-8x7b": _dense(32, 4096, 32, 8, 14336, 32000, **_experts(8, 2, 14336)),
    "mixtral-8x22b": _dense(56, 6144, 48, 8, 16384, 32768, **_experts(8, 2, 16384)),
    "minimax-m2": _dense(62, 3072, 48, 8, 1536, 200064, head_dim=128, **_experts(256, 8, 1536)),
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-r1": _DEEPSEEK_V3,
    "kimi-k2": _KIMI_K2,
    "glm-5": _GLM_5,
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
}


def names() -> tuple[str, ...]:
    """Models that are built in."""
    return tuple(_CONFIGS)


def key_of(name: str) -> str | None:
    """The catalogue's key for a model's name or hub id: the longest key that the name holds; None when none fits."""
    plain = name.lower().rsplit("/", 1)[-1].replace("meta-", "").replace("llama2", "llama-2")
    fitting = [key for key in _CONFIGS if key in plain]
    return max(fitting, key=len) if fitting else None


def find(name: str) -> ModelShape:
    """The shape of a model: a folder with a config.json, such a file, or a catalogue name. Raises ConfigError."""
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        try:
            return from_config(json.loads(path.read_text()), path.parent.name or path.stem)
        except ValueError as error:
            raise ConfigError(f"{path} is no config.json: {error}") from error
    key = key_of(name)
    if key is None:
        raise ConfigError(f"no model {name}; built in are {', '.join(names())}, or give a folder with a config.json")
    return from_config(_CONFIGS[key], key)
