"""The table: every feature of the exactness contract as a request. Rows are asked in this order."""

from __future__ import annotations

from collections.abc import Mapping

from twostroke.bench.parity.row import Row, completion, ends, story
from twostroke.bench.parity.table_api import api_rows
from twostroke.bench.parity.table_chat import chat_rows, reasoning_rows
from twostroke.bench.parity.table_forms import form_rows, refused_rows
from twostroke.bench.parity.table_lora import lora_rows
from twostroke.bench.parity.table_text import text_rows


def rows(vocabulary: Mapping[str, int]) -> list[Row]:
    """The rows for both systems as they are. vocabulary: byte-level tokens and their ids."""
    return [*text_rows(vocabulary), *form_rows(vocabulary), *chat_rows(), *api_rows(), *refused_rows()]


def second_rows(max_model_len_tokens: int) -> list[Row]:
    """The rows for both systems with adapters and a reasoning parser, and for a model of this length."""
    near = completion(
        "prompt near the model's limit, no max_tokens",
        story(max_model_len_tokens - 6, 5),
        lambda answer: ends(answer, "length") and answer["usage"]["total_tokens"] == max_model_len_tokens,
        max_tokens=None,
        ignore_eos=True,
    )
    return [near, *lora_rows(), *reasoning_rows()]
