"""Versions of LoRA adapters, without an engine."""

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="the engine is not installed")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(200), pytest.mark.filterwarnings("ignore")]


def make(folder: Path, weights: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text('{"r": 8}')
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


async def test_each_version_of_an_adapter_has_a_name_and_a_number_of_its_own(tmp_path: Path) -> None:
    """O-13."""
    from twostroke.engine.vllm.adapters import Adapters, adapter_digest
    from twostroke.v1.engine_pb2 import Adapter

    loaded = []

    async def load(request: object) -> bool:
        loaded.append(request)
        return True

    adapters = Adapters(load, 2, 16, "w")

    async def get(weights: bytes) -> tuple[str, int]:
        folder = make(tmp_path / "x", weights)
        found = await adapters.get(Adapter(name="x", path=str(folder), digest=adapter_digest(folder)))
        return found.lora_name, found.lora_int_id

    first, again, second = await get(b"1"), await get(b"1"), await get(b"2")
    assert first == again
    assert len({first[0], second[0]}) == len({first[1], second[1]}) == 2
    assert len(loaded) == 2


async def test_an_adapter_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path) -> None:
    from twostroke.engine.vllm.adapters import Adapters, adapter_digest
    from twostroke.errors import InvalidRequestError, UnavailableError
    from twostroke.v1.engine_pb2 import Adapter

    async def load(_: object) -> bool:
        raise ValueError("Call to add_lora failed:\nno such module: z_proj")

    folder = make(tmp_path / "x", b"1")
    good = Adapter(name="x", path=str(folder), digest=adapter_digest(folder))
    with pytest.raises(InvalidRequestError, match="w serves no LoRA adapters; start it with --max-loras"):
        await Adapters(load, 0, 16, "w").get(good)
    with pytest.raises(InvalidRequestError, match="w cannot load adapter 'x': no such module: z_proj"):
        await Adapters(load, 1, 16, "w").get(good)
    with pytest.raises(InvalidRequestError, match="'x' has rank 8, worker w takes 4; set --max-lora-rank"):
        await Adapters(load, 1, 4, "w").get(good)
    with pytest.raises(UnavailableError, match="on worker w and other on the router"):
        await Adapters(load, 1, 16, "w").get(Adapter(name="x", path=str(folder), digest="other"))
    with pytest.raises(UnavailableError, match="has no adapter 'x' at /nowhere"):
        await Adapters(load, 1, 16, "w").get(Adapter(name="x", path="/nowhere", digest="other"))
