"""What shapes cost, against published figures."""

import json
from pathlib import Path

import pytest

from twostroke.errors import ConfigError
from twostroke.sim.perf import catalogue
from twostroke.sim.perf.model_shape import from_config

KIB = 1024


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("llama-3.1-8b", 8.03, 7.5),
        ("llama-3.1-70b", 70.6, 69.5),
        ("llama-3.1-405b", 405.9, 403.8),
        ("qwen3-235b-a22b", 235.1, 21.6),
        ("mixtral-8x7b", 46.7, 12.7),
        ("deepseek-v3", 671.0, 36.6),
        ("kimi-k2", 1026.4, 31.7),
        ("gpt-oss-120b", 116.8, 5.1),
        ("bloom-176b", 176.2, 176.2),
        ("opt-66b", 65.7, 65.7),
    ],
)
def test_parameters(name: str, total: float, active: float) -> None:
    shape = catalogue.find(name)
    assert shape.total_parameters / 1e9 == pytest.approx(total, rel=0.005)
    assert shape.active_parameters / 1e9 == pytest.approx(active, rel=0.01)


@pytest.mark.parametrize(
    ("name", "kib"),
    [
        ("llama-3.1-8b", 128),
        ("llama-3.1-70b", 320),
        ("llama-3.1-405b", 504),
        ("qwen3-32b", 256),
        ("qwen3-235b-a22b", 188),
        ("gpt-oss-120b", 36),
        ("deepseek-v3", 68.6),
    ],
)
def test_kv_bytes_of_a_token(name: str, kib: float) -> None:
    assert catalogue.find(name).kv_bytes_per_token(2) / KIB == pytest.approx(kib, rel=0.002)


def test_a_windows_kv_does_not_grow() -> None:
    shape = catalogue.find("gpt-oss-120b")
    assert shape.window_layers == 18
    assert shape.kv_bytes_per_sequence(2) == 18 * 128 * 2 * 8 * 64 * 2


@pytest.mark.parametrize(("tokens", "petaflop"), [(8192, 1.21), (50_000, 10.1), (65_536, 14.6)])
def test_prefill_flops(tokens: int, petaflop: float) -> None:
    assert catalogue.find("llama-3.1-70b").prefill_flops(tokens) / 1e15 == pytest.approx(petaflop, rel=0.01)


def test_a_folder_with_a_config(tmp_path: Path) -> None:
    config = {
        "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1,
        "intermediate_size": 16, "vocab_size": 10, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = catalogue.find(str(tmp_path))
    assert shape.total_parameters == 2 * (8 * 4 * (2 + 2) + 8 * 8 + 3 * 8 * 16) + 80
    assert shape.name == tmp_path.name


def test_a_multimodal_config_keeps_its_text_part() -> None:
    text = {"num_hidden_layers": 1, "hidden_size": 4, "num_attention_heads": 1, "vocab_size": 3}
    assert from_config({"text_config": text}).layers == 1


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ConfigError, match="vocab_size"):
        from_config({"num_hidden_layers": 1, "hidden_size": 4, "num_attention_heads": 1})


def test_an_unknown_model_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"llama-3\.1-70b"):
        catalogue.find("no-such-model")


def test_hub_ids_are_found() -> None:
    assert catalogue.key_of("meta-llama/Llama-3.1-8B-Instruct") == "llama-3.1-8b"
    assert catalogue.key_of("nvidia/DeepSeek-R1-NVFP4") == "deepseek-r1"
    assert catalogue.key_of("someone/else") is None
