from pathlib import Path

import pytest

from twostroke.kv.layout import block_bytes, difference, model_digest
from twostroke.v1.kv_pb2 import KvLayout

LAYOUT = KvLayout(
    model_digest="abc",
    dtype="float32",
    block_size_tokens=16,
    layers=30,
    kv_heads=3,
    head_size=64,
    tensor_parallel=1,
    order="LBHNC",
    connector="nixl",
    connector_version="vllm 0.32.0",
)


def test_equal_layouts_can_exchange() -> None:
    assert difference(LAYOUT, LAYOUT) is None


@pytest.mark.parametrize("field", [field.name for field in KvLayout.DESCRIPTOR.fields])
def test_every_field_matters_and_both_values_are_named(field: str) -> None:
    other = KvLayout()
    other.CopyFrom(LAYOUT)
    value = getattr(LAYOUT, field)
    setattr(other, field, value + 1 if isinstance(value, int) else value + "x")
    assert difference(LAYOUT, other) == f"{field} is {value} on prefill and {getattr(other, field)} on decode"


def test_block_bytes_of_smollm2() -> None:
    # 2 x 30 layers x 3 heads x 64 elements x 4 bytes = 45 KiB a token.
    assert block_bytes(LAYOUT, 4) == 45 * 1024 * 16


def test_the_digest_tells_models_apart(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"layers": 1}')
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(3 << 20))
    digests = {model_digest(tmp_path)}
    weights.write_bytes(bytes((3 << 20) - 1) + b"x")
    digests.add(model_digest(tmp_path))
    weights.write_bytes(bytes((3 << 20) + 1))
    digests.add(model_digest(tmp_path))
    (tmp_path / "config.json").write_text('{"layers": 2}')
    digests.add(model_digest(tmp_path))
    assert len(digests) == 4
    assert model_digest(tmp_path) in digests
