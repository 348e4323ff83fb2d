"""What must be equal before two workers exchange KV, and how a model is identified."""

from __future__ import annotations

import hashlib
from pathlib import Path

from twostroke.v1.kv_pb2 import KvLayout

# Holds a safetensors header with every tensor's name, shape and offset, and the first weights.
_HEAD_BYTES = 1 << 20
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt")

CUTTING_CONNECTOR = "twostroke"
CUTTABLE_BLOCKS, CUTTABLE_HEADS = frozenset({"LBHNC"}), frozenset({"LBHNC", "LBH"})
"""Orders in which the tokens of a head follow each other, and in which the heads of a block do."""

_FIELDS = tuple(field.name for field in KvLayout.DESCRIPTOR.fields)


def model_digest(folder: Path) -> str:
    """16 hex digits that differ when the configuration or the weights differ.

    Reads config.json whole and of each weight file its name, size, first and last MiB, so that it takes milliseconds
    for any model; two files that differ only in the middle are not told apart.
    """
    digest = hashlib.sha256()
    digest.update((folder / "config.json").read_bytes())
    for path in sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern)):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(_HEAD_BYTES))
            file.seek(max(0, size - _HEAD_BYTES))
            digest.update(file.read(_HEAD_BYTES))
    return digest.hexdigest()[:16]


def difference(prefill: KvLayout, decode: KvLayout) -> str | None:
    """Why `decode` cannot read what `prefill` computes, both values named; None when it can.

    Our connector cuts blocks of different sizes, and of different shares of the heads, where that is a matter of
    addresses only.
    """
    pairs = [
        f"{name} is {getattr(prefill, name)} on prefill and {getattr(decode, name)} on decode"
        for name in _FIELDS
        if getattr(prefill, name) != getattr(decode, name) and not _can_be_cut(name, prefill, decode)
    ]
    return "; ".join(pairs) or None


def _can_be_cut(name: str, prefill: KvLayout, decode: KvLayout) -> bool:
    if not prefill.connector.startswith(CUTTING_CONNECTOR) or prefill.order != decode.order:
        return False
    if name == "block_size_tokens":
        small, large = sorted((prefill.block_size_tokens, decode.block_size_tokens))
        return prefill.order in CUTTABLE_BLOCKS and small > 0 and large % small == 0
    # Each rank has whole heads, or a copy of one.
    return name == "tensor_parallel" and prefill.order in CUTTABLE_HEADS


def block_bytes(layout: KvLayout, element_bytes: int) -> int:
    """Bytes of one block over all layers and heads: K and V of every token of the block."""
    per_token = 2 * layout.layers * layout.kv_heads * layout.head_size * element_bytes
    return per_token * layout.block_size_tokens
