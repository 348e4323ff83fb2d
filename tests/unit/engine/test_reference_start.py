"""What a reference engine says of itself, and what keeps it from starting."""

import pytest

from twostroke.engine.base import Stroke
from twostroke.errors import ConfigError, EngineError
from twostroke.kv.shm import segment_bytes
from unit.engine.reference_rig import Rig, request


async def test_the_defaults(tmp_path):
    async with Rig(tmp_path) as rig:
        info = await rig.new(reference_blocks=4096).start()
    assert (info.engine, info.model, info.vocab_size, info.max_model_len_tokens) == (
        "reference",
        "reference",
        49152,
        32768,
    )
    assert (info.total_blocks, info.step_budget_tokens, info.max_sequences) == (4096, 512, 64)
    layout = info.layout
    assert (layout.block_size_tokens, layout.layers, layout.kv_heads, layout.head_size) == (16, 2, 1, 1)
    assert (layout.dtype, layout.order, layout.connector, layout.connector_version) == ("uint64", "BLTNHC", "shm", "2")
    assert len(layout.model_digest) == 16
    assert [address.decode().split("-")[0] for address in info.kv_endpoint.addresses] == ["twostroke"]
    assert [name for name, _ in info.start_phases] == ["segment"]


async def test_settings_are_obeyed(tmp_path):
    async with Rig(tmp_path) as rig:
        info = await rig.new(model="some/model", block_size_tokens=8, reference_blocks=10, vocab_size=100).start()
        other = await rig.new().start()
    assert (info.model, info.layout.block_size_tokens, info.vocab_size) == ("some/model", 8, 100)
    assert info.max_model_len_tokens == 80, "no longer than the blocks"
    assert info.layout.model_digest != other.layout.model_digest, "another vocabulary is another model"


async def test_a_length_beyond_the_blocks_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"--max-model-len-tokens 161 .*--reference-blocks 10, 160 tokens"):
        Rig(tmp_path).new(reference_blocks=10, max_model_len_tokens=161)


@pytest.mark.parametrize("blocks", [1 << 36, 1 << 50])
async def test_too_little_shared_memory_names_the_bytes_and_the_setting(tmp_path, blocks):
    engine = Rig(tmp_path).new(reference_blocks=blocks)
    with pytest.raises(ConfigError, match=rf"--reference-blocks {blocks} needs {segment_bytes(blocks, 64)} bytes"):
        await engine.start()
    assert list(tmp_path.iterdir()) == []
    await engine.close()


async def test_a_missing_folder_is_named(tmp_path):
    engine = Rig(tmp_path / "missing").new()
    with pytest.raises(ConfigError, match="missing: No such file"):
        await engine.start()


async def test_an_engine_starts_once_and_before_it_is_used(tmp_path):
    async with Rig(tmp_path) as rig:
        engine = rig.new()
        with pytest.raises(EngineError, match="has not been started"):
            await engine.admit(request("r", [1]), Stroke.WHOLE)
        with pytest.raises(EngineError, match="has not been started"):
            await engine.next_step()
        await engine.cancel(["r"])
        assert await engine.release(["r"]) == 0
        await engine.start()
        with pytest.raises(EngineError, match="starts once"):
            await engine.start()
        await engine.close()
        with pytest.raises(EngineError, match="starts once"):
            await engine.start()
