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


def direct(**values: int | str) -> KvLayout:
    layout = KvLayout()
    layout.CopyFrom(LAYOUT)
    for name, value in {"connector": "twostroke/ucx", "order": "LBHNC", **values}.items():
        setattr(layout, name, value)
    return layout


def test_our_connector_cuts_blocks_and_heads_where_it_can() -> None:
    """O-06, O-07: what is a matter of addresses is converted, the rest is refused with both values named."""
    here = direct(block_size_tokens=32)
    assert difference(here, direct(block_size_tokens=128, tensor_parallel=2)) is None
    assert difference(direct(block_size_tokens=128), here) is None
    assert difference(here, direct(block_size_tokens=48)) == "block_size_tokens is 32 on prefill and 48 on decode"
    assert difference(direct(order="LBH"), direct(order="LBH", tensor_parallel=2)) is None
    assert difference(direct(order="LBH"), direct(order="LBH", block_size_tokens=32)) is not None
    assert difference(direct(order="backend"), direct(order="backend", tensor_parallel=2)) is not None
    assert difference(here, direct(block_size_tokens=32, dtype="bfloat16")) is not None
    assert "connector" in str(difference(here, direct(block_size_tokens=32, connector="twostroke/nixl")))


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
