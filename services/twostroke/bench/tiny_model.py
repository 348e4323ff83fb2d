"""A model so small that the time of its engine hardly hides the time of what is around it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from twostroke.errors import ConfigError

_LAYERS = 2
_HIDDEN = 64
_INTERMEDIATE = 128
_HEADS = 2
_KV_HEADS = 1
_HEAD_SIZE = 32
_POSITIONS = 2048
_SEED = 20
_SPREAD = 0.05
"""Standard deviation of the weights: small enough to stay finite, large enough to have no two best tokens."""

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def make(target: Path, bundled: Path) -> Path:
    """Writes a Llama of random weights, always the same, with the tokenizer of the model in `bundled`.

    Returns `target`, which is left as it is when it is complete. Raises ConfigError for a `bundled` that has no
    tokenizer.
    """
    config_path = target / "config.json"
    config = _config(json.loads((bundled / "config.json").read_text()))
    if config_path.is_file() and json.loads(config_path.read_text()) == config:
        return target
    target.mkdir(parents=True, exist_ok=True)
    copied = [name for name in _TOKENIZER if (bundled / name).is_file()]
    if "tokenizer.json" not in copied:
        raise ConfigError(f"{bundled} has no tokenizer.json; remove the folder and run `twostroke model fetch`")
    for name in copied:
        shutil.copyfile(bundled / name, target / name)
    save_file(_weights(config["vocab_size"]), target / "model.safetensors", metadata={"format": "pt"})
    # Last, because it says that the rest is there.
    config_path.write_text(json.dumps(config, indent=2) + "\n")
    return target


def _config(bundled: dict[str, Any]) -> dict[str, Any]:
    return bundled | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "num_hidden_layers": _LAYERS,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_SIZE,
        "max_position_embeddings": _POSITIONS,
        "tie_word_embeddings": True,
        "_name_or_path": "tiny",
    }


def _weights(vocabulary: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(_SEED)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return random.normal(0, _SPREAD, (rows, columns)).astype(np.float32)

    ones = np.ones(_HIDDEN, np.float32)
    weights = {"model.embed_tokens.weight": matrix(vocabulary, _HIDDEN), "model.norm.weight": ones}
    for layer in range(_LAYERS):
        at = f"model.layers.{layer}"
        weights |= {
            f"{at}.input_layernorm.weight": ones,
            f"{at}.post_attention_layernorm.weight": ones,
            f"{at}.self_attn.q_proj.weight": matrix(_HEADS * _HEAD_SIZE, _HIDDEN),
            f"{at}.self_attn.k_proj.weight": matrix(_KV_HEADS * _HEAD_SIZE, _HIDDEN),
            f"{at}.self_attn.v_proj.weight": matrix(_KV_HEADS * _HEAD_SIZE, _HIDDEN),
            f"{at}.self_attn.o_proj.weight": matrix(_HIDDEN, _HEADS * _HEAD_SIZE),
            f"{at}.mlp.gate_proj.weight": matrix(_INTERMEDIATE, _HIDDEN),
            f"{at}.mlp.up_proj.weight": matrix(_INTERMEDIATE, _HIDDEN),
            f"{at}.mlp.down_proj.weight": matrix(_HIDDEN, _INTERMEDIATE),
        }
    return weights
