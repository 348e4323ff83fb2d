"""Random LoRA adapters for a Llama model, written by hand in PEFT's layout."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

RANK = 4
_SCALE = 0.2
_MODULES = ("q_proj", "v_proj")


def write_adapter(folder: Path, model: Path, seed: int) -> Path:
    """Writes an adapter that visibly changes answers; another seed gives another one. Returns the folder."""
    config = json.loads((model / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_size = config.get("head_dim") or hidden // heads
    outputs = {"q_proj": heads * head_size, "v_proj": config["num_key_value_heads"] * head_size}
    source = np.random.default_rng(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for module in _MODULES:
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = source.normal(0, _SCALE, (RANK, hidden))
            tensors[f"{name}.lora_B.weight"] = source.normal(0, _SCALE, (outputs[module], RANK))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(_safetensors(tensors))
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(_MODULES),
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder


def _safetensors(tensors: dict[str, np.ndarray]) -> bytes:
    header, at = {}, 0
    parts = [np.ascontiguousarray(tensor, dtype="<f4").tobytes() for tensor in tensors.values()]
    for (name, tensor), part in zip(tensors.items(), parts, strict=True):
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [at, at + len(part)]}
        at += len(part)
    head = json.dumps(header).encode()
    return len(head).to_bytes(8, "little") + head + b"".join(parts)
