"""The table: every feature of the exactness contract as a request. Rows are asked in this order."""

from __future__ import annotations

import json
from collections.abc import Mapping

from twostroke.bench.parity.row import (
    BLOCK_TOKENS,
    END_OF_TEXT,
    Json,
    Row,
    Shows,
    cached,
    chat,
    choice,
    completion,
    ends,
    seeded,
    story,
    streamed,
    text_of,
    tokens_of,
)
from twostroke.bench.parity.table_api import api_rows
from twostroke.bench.parity.table_chat import chat_rows

FRANCE = "The capital of France is"
COUNT = "Count: 1, 2, 3, 4,"

# Texts with tokens of their first bytes in SmolLM2's vocabulary: (what, text, bytes before the cut).
CUTS = (
    ("emoji", "😀", 1),
    ("emoji", "🚀", 2),
    ("CJK", "漢", 1),
    ("CJK", "字", 2),
    ("Thai", "ไทย", 1),
    ("Thai", "ไทย", 2),
)


def rows(max_model_len_tokens: int, vocabulary: Mapping[str, int]) -> list[Row]:
    """All rows for a model of this length. vocabulary: byte-level tokens and their ids."""
    return [
        *_lengths(max_model_len_tokens),
        *_sampling(),
        *_limits(),
        *_stops(vocabulary),
        *_grammars(),
        *_characters(vocabulary),
        *_log_probabilities(),
        *_many(),
        *_caches(),
        *chat_rows(),
        *api_rows(),
        *_refused(),
    ]


def _prompt_tokens(count: int) -> Shows:
    return lambda answer: answer["usage"]["prompt_tokens"] == count


def _lengths(limit: int) -> list[Row]:
    block = BLOCK_TOKENS
    counts = {
        "1 token": 1,
        "2 tokens": 2,
        "one block minus one": block - 1,
        "exactly one block": block,
        "one block plus one": block + 1,
        "two blocks": 2 * block,
        "a step's budget minus one": 511,
        "a step's budget": 512,
        "a step's budget plus one": 513,
        "seven blocks and a bit": 7 * block + 4,
    }
    made = [
        completion(f"prompt of {name}", story(count, count), _prompt_tokens(count)) for name, count in counts.items()
    ]
    near = completion(
        "prompt near the model's limit, no max_tokens",
        story(limit - 6, 5),
        lambda answer: ends(answer, "length") and answer["usage"]["total_tokens"] == limit,
        max_tokens=None,
        ignore_eos=True,
    )
    ids = completion(
        "prompt of token ids", {"prompt": [(i * 37) % 30000 + 200 for i in range(140)]}, _prompt_tokens(140)
    )
    return [*made, near, ids, completion("long answer", FRANCE, max_tokens=140, ignore_eos=True, logprobs=None)]


def _sampling() -> list[Row]:
    hot = {"max_tokens": 20}
    sampled = [
        completion("seed", FRANCE, **hot),
        completion("top_p", FRANCE, top_p=0.8, **hot),
        completion("top_k", FRANCE, top_k=5, **hot),
        completion("min_p", FRANCE, min_p=0.05, **hot),
        completion(
            "presence, frequency and repetition penalty, seed",
            story(90, 7),
            presence_penalty=0.7,
            frequency_penalty=0.4,
            repetition_penalty=1.2,
            **hot,
        ),
        streamed(completion("seed with a stop string", COUNT, stop=["9"], **hot)),
        chat("seed in a chat", "Tell me of a river.", top_p=0.9),
    ]
    penalised = story(90, 8)
    return [
        completion("greedy", FRANCE, lambda answer: " Paris" in text_of(answer)),
        streamed(completion("greedy", FRANCE, lambda answer: " Paris" in text_of(answer))),
        *(seeded(row) for row in sampled),
        completion("presence_penalty", penalised, presence_penalty=1.5, max_tokens=24),
        completion("frequency_penalty", penalised, frequency_penalty=1.5, max_tokens=24),
        completion("repetition_penalty", penalised, repetition_penalty=1.3, max_tokens=24),
        completion("logit_bias", FRANCE, lambda answer: tokens_of(answer)[:3] == [500] * 3, logit_bias={"500": 100}),
        completion(
            "allowed_token_ids",
            FRANCE,
            lambda answer: {*tokens_of(answer)} <= {300, 301, 302},
            allowed_token_ids=[300, 301, 302],
        ),
        completion("bad_words", FRANCE, lambda answer: "Paris" not in text_of(answer), bad_words=["Paris", " Paris"]),
        completion(
            "bad word that begins on the first stroke",
            COUNT,
            lambda answer: "5, 6" not in text_of(answer),
            bad_words=["5, 6", " 5, 6"],
        ),
        completion(
            "repetition_detection",
            story(40, 3),
            max_tokens=60,
            ignore_eos=True,
            repetition_detection={"max_pattern_size": 4, "min_pattern_size": 1, "min_count": 3},
        ),
    ]


def _limits() -> list[Row]:
    end = {str(END_OF_TEXT): 100.0}

    def counts(count: int) -> Shows:
        return lambda answer: len(tokens_of(answer)) == count

    made = [completion(f"max_tokens {count}", FRANCE, counts(count), max_tokens=count) for count in (1, 2, 3)]
    return [
        *made,
        *(streamed(row) for row in made[:2]),
        chat(
            "max_tokens absent", "What is the capital of France?", lambda answer: ends(answer, "stop"), max_tokens=None
        ),
        completion("min_tokens", FRANCE, lambda answer: len(tokens_of(answer)) == 6, min_tokens=5, logit_bias=end),
        completion("min_tokens 1", FRANCE, lambda answer: len(tokens_of(answer)) == 2, min_tokens=1, logit_bias=end),
        completion(
            "ignore_eos",
            FRANCE,
            lambda answer: tokens_of(answer) == [END_OF_TEXT] * 8,
            ignore_eos=True,
            logit_bias=end,
            max_tokens=8,
        ),
        completion(
            "first token is end of text",
            FRANCE,
            lambda answer: len(tokens_of(answer)) == 1 and ends(answer, "stop"),
            logit_bias=end,
        ),
        streamed(completion("first token is end of text", FRANCE, lambda answer: ends(answer, "stop"), logit_bias=end)),
    ]


def _stops(vocabulary: Mapping[str, int]) -> list[Row]:
    comma = vocabulary[","]
    straddles = completion(
        "stop string from the first stroke into the second",
        COUNT,
        lambda answer: ends(answer, "stop", "5, 6") and "5, 6" not in text_of(answer),
        stop=["5, 6"],
    )
    kept = completion(
        "stop string kept",
        COUNT,
        lambda answer: text_of(answer).endswith("5, 6"),
        stop=["5, 6"],
        include_stop_str_in_output=True,
    )
    return [
        straddles,
        streamed(straddles),
        kept,
        streamed(kept),
        completion(
            "stop string within the first token", FRANCE, lambda answer: ends(answer, "stop", "ari"), stop=["ari"]
        ),
        completion(
            "stop string later", COUNT, lambda answer: ends(answer, "stop", "7,"), stop=["zebra", "7,"], max_tokens=40
        ),
        completion("stop_token_ids", COUNT, lambda answer: ends(answer, "stop", comma), stop_token_ids=[comma]),
        completion(
            "first token is a stop token",
            FRANCE,
            lambda answer: ends(answer, "stop", 7042) and len(tokens_of(answer)) == 1,
            stop_token_ids=[vocabulary["ĠParis"]],
        ),
        completion(
            "min_tokens with a stop token",
            COUNT,
            lambda answer: len(tokens_of(answer)) > 6,
            stop_token_ids=[comma],
            min_tokens=6,
        ),
    ]


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
        seeded(streamed(three)),
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


def _refused() -> list[Row]:
    def refused(name: str, says: str, **body: object) -> Row:
        row = completion(name, FRANCE, **body)
        return Row(row.name, row.path, row.body, refused=says)

    return [
        refused("vllm_xargs", "vllm_xargs", vllm_xargs={"anything": 1}),
        refused("vllm_xargs, streamed", "vllm_xargs", vllm_xargs={"anything": 1}, stream=True),
        refused("kv_transfer_params", "vllm_xargs", kv_transfer_params={"do_remote_decode": False}),
    ]
