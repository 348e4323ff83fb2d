"""Rows of completions: grammars, characters, log probabilities, several choices, caches, refusals."""

from __future__ import annotations

import json
from collections.abc import Mapping

from twostroke.bench.parity.row import (
    COUNT,
    FRANCE,
    Json,
    Row,
    Shows,
    cached,
    chat,
    choice,
    completion,
    seeded,
    story,
    streamed,
    text_of,
    tokens_of,
)

# Texts with tokens of their first bytes in SmolLM2's vocabulary: (what, text, bytes before the cut).
CUTS = (
    ("emoji", "😀", 1),
    ("emoji", "🚀", 2),
    ("CJK", "漢", 1),
    ("CJK", "字", 2),
    ("Thai", "ไทย", 1),
    ("Thai", "ไทย", 2),
)


def form_rows(vocabulary: Mapping[str, int]) -> list[Row]:
    """vocabulary: byte-level tokens and their ids."""
    return [*_grammars(), *_characters(vocabulary), *_log_probabilities(), *_many(), *_caches()]


def _grammars() -> list[Row]:
    def constrained(name: str, shows: Shows, **grammar: object) -> Row:
        return completion(name, "Answer: ", shows, structured_outputs=grammar, max_tokens=40)

    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "large": {"type": "boolean"}},
        "required": ["city", "large"],
        "additionalProperties": False,
    }

    def is_json(answer: Json) -> bool:
        return {*json.loads(text_of(answer))} == {"city", "large"}

    named = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    made = [
        constrained("JSON schema", is_json, json=schema),
        constrained("regex", lambda answer: text_of(answer).isdigit() and len(text_of(answer)) == 5, regex="[0-9]{5}"),
        constrained("choice", lambda answer: text_of(answer) in ("red", "blue"), choice=["red", "blue"]),
        constrained("grammar", lambda answer: {*text_of(answer)} <= {"a", "b"}, grammar='root ::= "a" root "b" | "ab"'),
        # Grammars whose first token is another one each.
        constrained(
            "JSON array",
            lambda answer: len(json.loads(text_of(answer))) <= 3,
            json={"type": "array", "items": {"type": "integer", "maximum": 9}, "maxItems": 3},
        ),
        constrained(
            "JSON string",
            lambda answer: isinstance(json.loads(text_of(answer)), str),
            json={"type": "string", "maxLength": 8},
        ),
        constrained("JSON number", lambda answer: json.loads(text_of(answer)) in (7, 42), json={"enum": [7, 42]}),
        constrained("any JSON object", lambda answer: text_of(answer).lstrip().startswith("{"), json_object=True),
    ]
    in_chat = chat("response_format", "Name a city as JSON.", is_json, response_format=named, max_tokens=60)
    return [*made, seeded(made[0]), seeded(made[1]), streamed(made[1]), in_chat, streamed(in_chat)]


def _characters(vocabulary: Mapping[str, int]) -> list[Row]:
    made = []
    for what, text, cut in CUTS:
        raw = text.encode()
        first = vocabulary["".join(byte_letters()[byte] for byte in raw[:cut])]
        row = completion(
            f"{what} {text} cut after {cut} of its bytes",
            "Repeat: ",
            _says(first, text * 2),
            structured_outputs={"choice": [text * 2]},
            logit_bias={str(first): 100},
            max_tokens=30,
        )
        made += [row, streamed(row)]
    *begun, last = (vocabulary[byte_letters()[byte]] for byte in "😀".encode())
    # No token of this vocabulary has three bytes of an emoji, so the prompt ends there.
    ends_within = completion(
        "emoji cut after 3 of its bytes, the prompt ending within it",
        {"prompt": [198, *begun]},
        lambda answer: tokens_of(answer)[0] == last,
        allowed_token_ids=[last],
        max_tokens=2,
    )
    return [*made, ends_within]


def _says(first: int, text: str) -> Shows:
    return lambda answer: tokens_of(answer)[0] == first and text_of(answer) == text


def byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) if byte in plain else chr(256 + others.index(byte)) for byte in range(256)]


def _log_probabilities() -> list[Row]:
    def entries(count: int) -> Shows:
        return lambda answer: (
            [len(entry["top_logprobs"]) for entry in choice(answer)["logprobs"]["content"]] == [count] * 6
        )

    tops = [
        chat(
            f"top_logprobs {count}", "Name a river.", entries(count), top_logprobs=count, max_tokens=6, ignore_eos=True
        )
        for count in (0, 5, 20)
    ]
    echo = {"echo": True, "max_tokens": 4}
    # With token ids vLLM's server leaves the prompt's text out of the answer's.
    in_text = {**echo, "logprobs": None, "return_token_ids": None}
    without = completion("echo without logprobs", FRANCE, lambda answer: text_of(answer).startswith(FRANCE), **in_text)
    long = story(600, 9)
    return [
        *tops,
        streamed(tops[1]),
        completion("logprob_token_ids", FRANCE, logprob_token_ids=[7042, 28, 216]),
        completion(
            "prompt_logprobs", FRANCE, lambda answer: len(choice(answer)["prompt_logprobs"]) == 5, prompt_logprobs=3
        ),
        completion(
            "prompt_logprobs of a prompt in two chunks",
            long,
            lambda answer: len(choice(answer)["prompt_logprobs"]) == 600,
            prompt_logprobs=1,
        ),
        completion("echo with logprobs", FRANCE, lambda answer: len(choice(answer)["logprobs"]["tokens"]) == 9, **echo),
        without,
        streamed(without),
        completion("echo alone", FRANCE, lambda answer: text_of(answer) == FRANCE, **{**in_text, "max_tokens": 0}),
    ]


def _many() -> list[Row]:
    three = completion("n = 3", FRANCE, lambda answer: len({choice(answer, i)["text"] for i in range(3)}) == 3, n=3)
    batch = {"prompt": [FRANCE, COUNT, "Once upon a time"]}
    return [
        seeded(three),
        streamed(seeded(three)),
        seeded(completion("best_of, which vLLM's server takes and ignores", FRANCE, n=2, best_of=3)),
        completion(
            "beam search",
            FRANCE,
            lambda answer: len(answer["choices"]) == 3,
            use_beam_search=True,
            n=3,
            max_tokens=6,
            logprobs=None,
            return_token_ids=None,
        ),
        completion("batch of prompts", batch, lambda answer: len(answer["choices"]) == 3),
        streamed(completion("batch of prompts", batch, lambda answer: len(answer["choices"]) == 3)),
        completion(
            "batch of token-id prompts",
            {"prompt": [[504, 3575], [28, 216, 28]]},
            lambda answer: len(answer["choices"]) == 2,
        ),
    ]


def _caches() -> list[Row]:
    def hits(count: int) -> Shows:
        return lambda answer: cached(answer) == count

    def turn(name: str, tokens: int, seed: int, hit: int, **body: object) -> Row:
        return completion(name, story(tokens, seed), hits(hit), **{"max_tokens": 4} | body)

    return [
        turn("first turn", 300, 20, 0),
        turn("second turn that hits both caches", 420, 20, 256),
        turn("the same prompt again", 420, 20, 384),
        streamed(turn("the same prompt again", 420, 20, 384)),
        turn("first turn of one token", 300, 21, 0, max_tokens=1),
        turn("second turn that hits the prefill cache", 420, 21, 256),
        turn("first turn, both cache it", 300, 22, 0),
        turn("second turn that hits the decode cache", 420, 22, 0, prompt_logprobs=0),
        turn("whole blocks again: first", 256, 23, 0),
        turn("whole blocks again: second", 256, 23, 128),
        turn("cache_salt a", 300, 24, 0, cache_salt="a"),
        turn("cache_salt a again", 300, 24, 256, cache_salt="a"),
        turn("cache_salt b", 300, 24, 0, cache_salt="b"),
        turn("no cache_salt", 300, 24, 0),
        completion("priority", FRANCE, priority=5),
        completion("negative priority", FRANCE, priority=-1),
    ]


def refused_rows() -> list[Row]:
    """What one engine takes and two pools refuse."""

    def refused(name: str, says: str, **body: object) -> Row:
        row = completion(name, FRANCE, **body)
        return Row(row.name, row.path, row.body, refused=says)

    return [
        refused("vllm_xargs", "vllm_xargs", vllm_xargs={"anything": 1}),
        refused("vllm_xargs, streamed", "vllm_xargs", vllm_xargs={"anything": 1}, stream=True),
        refused("kv_transfer_params", "vllm_xargs", kv_transfer_params={"do_remote_decode": False}),
    ]
