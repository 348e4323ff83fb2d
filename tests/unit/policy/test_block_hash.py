import hashlib
import pickle
import random
import subprocess
import sys

import pytest

from twostroke.policy.block_hash import DEFAULT_ROOT, KvIdentity, Media, block_hashes

TOKENS = [random.Random(3).randrange(50_000) for _ in range(70)]

IDENTITIES = {
    "plain": KvIdentity(),
    "salt": KvIdentity(salt="tenant-7"),
    "adapter": KvIdentity(lora=("sql", "/adapters/sql/2")),
    "images": KvIdentity(media=(Media("a" * 64, 3, 20), Media("b" * 64, 30, 1), Media("c" * 64, 31, 33))),
    "all": KvIdentity("s", ("sql", "/adapters/sql/2"), (Media("a" * 64, 20, 8),)),
}


def test_a_block_covers_everything_before_it() -> None:
    first = hashlib.sha256(
        pickle.dumps((hashlib.sha256(pickle.dumps("vllm-none-hash", 5)).digest(), (1, 2), None), 5)
    ).digest()
    assert block_hashes([1, 2, 3], 2) == [first]
    assert block_hashes([1, 2, 3, 4], 2)[0] == first
    changed = list(TOKENS)
    changed[0] += 1
    assert not set(block_hashes(TOKENS, 16)) & set(block_hashes(changed, 16))
    assert len(block_hashes(TOKENS, 16)) == 4
    assert block_hashes(TOKENS[:15], 16) == []


def test_everything_that_changes_kv_changes_every_hash_behind_it() -> None:
    plain, *others = (block_hashes(TOKENS, 16, identity) for identity in IDENTITIES.values())
    for other in others[:2]:
        assert not set(plain) & set(other)
    images = others[2]
    assert not set(plain) & set(images)
    late = block_hashes(TOKENS, 16, KvIdentity(media=(Media("a" * 64, 40, 4),)))
    assert [a == b for a, b in zip(plain, late, strict=True)] == [True, True, False, False]
    assert block_hashes(TOKENS, 16, root=bytes(32))[0] != plain[0]


def test_what_is_known_is_not_computed_again() -> None:
    for identity in IDENTITIES.values():
        whole = block_hashes(TOKENS, 16, identity)
        for known in range(len(whole) + 1):
            assert block_hashes(TOKENS, 16, identity, known=whole[:known]) == whole
    assert block_hashes(TOKENS, 16, known=[b"x" * 32])[0] == b"x" * 32


def test_two_images_with_equal_ends_of_their_digests_do_not_meet() -> None:
    seen = {
        block_hashes(TOKENS, 16, KvIdentity(media=(Media(f"{number:060x}beef", 0, 16),)))[0] for number in range(2000)
    }
    assert len(seen) == 2000


PROBE = """
import pickle, sys
from types import SimpleNamespace as Names
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils as utils
tokens, cases = pickle.load(sys.stdin.buffer)
utils.init_none_hash(sha256)
hasher = utils.get_request_block_hasher(16, sha256)
found = []
for salt, lora, media in cases:
    features = [Names(identifier=d, mm_position=Names(offset=o, length=n)) for d, o, n in media]
    adapter = Names(lora_name=lora[0], lora_path=lora[1]) if lora else None
    request = Names(block_hashes=[], num_tokens=len(tokens), all_token_ids=tokens, mm_features=features,
                    lora_request=adapter, cache_salt=salt, prompt_embeds=None)
    found.append(hasher(request))
sys.stdout.buffer.write(pickle.dumps((bytes(utils.NONE_HASH), found)))
"""


@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_the_hashes_are_vllms_own() -> None:
    """O-82. In a process of its own: vLLM's imports set signal handlers and log."""
    pytest.importorskip("vllm")
    cases = [
        (each.salt, each.lora, [(one.digest, one.offset_tokens, one.length_tokens) for one in each.media])
        for each in IDENTITIES.values()
    ]
    done = subprocess.run(
        [sys.executable, "-c", PROBE], input=pickle.dumps((TOKENS, cases)), capture_output=True, timeout=280, check=True
    )
    root, theirs = pickle.loads(done.stdout)
    assert root == DEFAULT_ROOT
    for identity, expected in zip(IDENTITIES.values(), theirs, strict=True):
        assert block_hashes(TOKENS, 16, identity) == expected
