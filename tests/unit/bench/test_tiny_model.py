import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("safetensors")

from safetensors.numpy import load_file

from twostroke.bench import tiny_model
from twostroke.errors import ConfigError


@pytest.fixture
def bundled(tmp_path: Path) -> Path:
    folder = tmp_path / "bundled"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 500, "hidden_size": 576, "eos_token_id": 2}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("hello")
    return folder


def test_it_has_the_shape_that_its_config_says_and_the_tokenizer_of_the_other(bundled: Path, tmp_path: Path) -> None:
    made = tiny_model.make(tmp_path / "tiny", bundled)
    config = json.loads((made / "config.json").read_text())
    assert (config["vocab_size"], config["eos_token_id"]) == (500, 2)
    assert (made / "chat_template.jinja").read_text() == "hello"
    weights = load_file(made / "model.safetensors")
    hidden, size = config["hidden_size"], config["head_dim"]
    assert weights["model.embed_tokens.weight"].shape == (500, hidden)
    assert sum(name.endswith("q_proj.weight") for name in weights) == config["num_hidden_layers"]
    assert weights["model.layers.0.self_attn.q_proj.weight"].shape == (config["num_attention_heads"] * size, hidden)
    assert weights["model.layers.1.self_attn.v_proj.weight"].shape == (config["num_key_value_heads"] * size, hidden)
    assert all(np.isfinite(values).all() for values in weights.values())


def test_it_is_the_same_each_time_and_made_once(bundled: Path, tmp_path: Path) -> None:
    first = tiny_model.make(tmp_path / "first", bundled) / "model.safetensors"
    second = tiny_model.make(tmp_path / "second", bundled) / "model.safetensors"
    assert first.read_bytes() == second.read_bytes()
    first.write_bytes(b"kept")
    tiny_model.make(tmp_path / "first", bundled)
    assert first.read_bytes() == b"kept"


def test_a_half_made_one_is_made_again(bundled: Path, tmp_path: Path) -> None:
    folder = tiny_model.make(tmp_path / "tiny", bundled)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"half")
    tiny_model.make(folder, bundled)
    assert "model.norm.weight" in load_file(folder / "model.safetensors")


def test_a_folder_without_a_tokenizer_is_refused(bundled: Path, tmp_path: Path) -> None:
    (bundled / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        tiny_model.make(tmp_path / "tiny", bundled)
