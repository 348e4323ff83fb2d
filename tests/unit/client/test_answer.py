"""Folding pieces into an answer."""

import dataclasses

import pytest

from twostroke.client import (
    Chunk,
    Completion,
    Finish,
    InvalidRequestError,
    Model,
    PositionLogprobs,
    Timeline,
    TokenLogprob,
    Usage,
)
from twostroke.client._answer import Answer, models
from twostroke.v1 import engine_pb2, inference_pb2
from twostroke.v1.engine_pb2 import Logprobs
from twostroke.v1.inference_pb2 import GenerateResponse, ListModelsResponse

TIMELINE = Timeline("p-1", "d-1", 0.5, 1.0, 2.0, 2.5, 3.0, 9.0, 1, 16, 4096, 2)


def last(text="", token_ids=(), **finish):
    return GenerateResponse(
        text=text,
        token_ids=token_ids,
        finish=engine_pb2.Finish(**{"reason": engine_pb2.FINISH_REASON_STOP, **finish}),
        usage=inference_pb2.Usage(prompt_tokens=5, completion_tokens=3, cached_tokens=4),
        timeline=inference_pb2.Timeline(**dataclasses.asdict(TIMELINE)),
    )


def test_pieces_in_order_are_the_answer():
    answer = Answer("r-1")
    assert (answer.text, answer.token_ids, answer.logprobs) == ("", (), None)
    assert answer._fold(GenerateResponse(text="Hel", token_ids=[1, 2])) == Chunk("Hel", (1, 2))
    assert answer.text == "Hel"
    assert answer._fold(GenerateResponse(token_ids=[3])) == Chunk("", (3,))
    assert answer._fold(GenerateResponse()) is None
    assert answer._fold(last("lo")) == Chunk("lo", ())
    assert answer.completion == Completion(
        request_id="r-1",
        text="Hello",
        token_ids=(1, 2, 3),
        logprobs=None,
        finish=Finish("stop"),
        usage=Usage(prompt_tokens=5, completion_tokens=3, cached_tokens=4),
        timeline=TIMELINE,
    )


def test_a_last_piece_without_text_is_no_chunk():
    answer = Answer("r-1")
    assert answer._fold(last()) is None
    assert answer.finish == Finish("stop")


@pytest.mark.parametrize("name", ["finish", "usage", "timeline", "completion"])
def test_the_end_cannot_be_read_before_it_is_there(name):
    answer = Answer("r-1")
    answer._fold(GenerateResponse(text="a"))
    with pytest.raises(InvalidRequestError, match="answer to request r-1 has not ended"):
        getattr(answer, name)


@pytest.mark.parametrize(
    ("finish", "expected"),
    [
        ({"reason": engine_pb2.FINISH_REASON_LENGTH}, Finish("length")),
        ({"stop_token_id": 0}, Finish("stop", stop_token_id=0)),
        ({"stop_string": "END"}, Finish("stop", stop_string="END")),
        ({"reason": engine_pb2.FINISH_REASON_REPETITION}, Finish("repetition")),
        ({"reason": 99}, Finish("99")),
    ],
)
def test_reasons(finish, expected):
    answer = Answer("r-1")
    answer._fold(last(**finish))
    assert answer.finish == expected


def test_log_probabilities_are_rows():
    answer = Answer("r-1")
    logprobs = Logprobs(
        columns=3,
        token_ids=[7, 8, 9, 4, 5, -1],
        logprobs=[-0.5, -0.25, -1.0, -2.0, -0.125, 0.0],
        ranks=[2, 6],
    )
    rows = (
        PositionLogprobs(7, -0.5, 2, (TokenLogprob(8, -0.25), TokenLogprob(9, -1.0))),
        PositionLogprobs(4, -2.0, 6, (TokenLogprob(5, -0.125),)),
    )
    chunk = answer._fold(GenerateResponse(text="ab", token_ids=[7, 4], logprobs=logprobs))
    assert chunk.logprobs == rows
    one = Logprobs(columns=1, token_ids=[3], logprobs=[-0.5], ranks=[1])
    answer._fold(GenerateResponse(text="c", token_ids=[3], logprobs=one))
    assert answer.logprobs == (*rows, PositionLogprobs(3, -0.5, 1, ()))


def test_models_keep_their_order():
    response = ListModelsResponse()
    response.models.add(name="b", max_model_len_tokens=2048)
    response.models.add(name="a", max_model_len_tokens=512)
    assert models(response) == (Model("b", 2048), Model("a", 512))


@pytest.mark.parametrize(
    ("kind", "message"),
    [(Usage, inference_pb2.Usage), (Timeline, inference_pb2.Timeline), (Model, inference_pb2.Model)],
)
def test_values_mirror_their_messages(kind, message):
    assert [field.name for field in dataclasses.fields(kind)] == [field.name for field in message.DESCRIPTOR.fields]
