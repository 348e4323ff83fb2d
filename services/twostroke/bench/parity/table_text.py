"""Rows of completions: lengths, sampling, limits, stops."""

from __future__ import annotations

from collections.abc import Mapping

from twostroke.bench.parity.row import (
    BLOCK_TOKENS,
    COUNT,
    END_OF_TEXT,
    FRANCE,
    Row,
    Shows,
    chat,
    completion,
    ends,
    seeded,
    story,
    streamed,
    text_of,
    tokens_of,
)


def text_rows(vocabulary: Mapping[str, int]) -> list[Row]:
    """vocabulary: byte-level tokens and their ids."""
    return [*_lengths(), *_sampling(), *_limits(), *_stops(vocabulary)]


def _prompt_tokens(count: int) -> Shows:
    return lambda answer: answer["usage"]["prompt_tokens"] == count


def _lengths() -> list[Row]:
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
    ids = completion(
        "prompt of token ids", {"prompt": [(i * 37) % 30000 + 200 for i in range(140)]}, _prompt_tokens(140)
    )
    return [*made, ids, completion("answer into the next block", story(120, 6), max_tokens=20, ignore_eos=True)]


def _sampling() -> list[Row]:
    hot = {"max_tokens": 12}
    sampled = [
        completion("sampled", FRANCE, **hot),
        completion("top_p", FRANCE, top_p=0.8, **hot),
        completion("top_k", FRANCE, top_k=5, **hot),
        completion("min_p", FRANCE, min_p=0.05, **hot),
        completion(
            "presence, frequency and repetition penalty",
            story(90, 7),
            presence_penalty=0.7,
            frequency_penalty=0.4,
            repetition_penalty=1.2,
            **hot,
        ),
        completion("a stop string", COUNT, stop=["9"], **hot),
        chat("in a chat", "Tell me of a river.", top_p=0.9),
    ]
    penalised = story(90, 8)
    return [
        completion("greedy", FRANCE, lambda answer: " Paris" in text_of(answer)),
        streamed(completion("greedy", FRANCE, lambda answer: " Paris" in text_of(answer))),
        *(seeded(row) for row in sampled),
        streamed(seeded(sampled[-2])),
        completion("presence_penalty", penalised, presence_penalty=1.5, max_tokens=16),
        completion("frequency_penalty", penalised, frequency_penalty=1.5, max_tokens=16),
        completion("repetition_penalty", penalised, repetition_penalty=1.3, max_tokens=16),
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
            max_tokens=30,
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
