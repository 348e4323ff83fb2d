"""What a process logs."""

import contextvars
import json
import logging
import subprocess
import sys

import pytest

from twostroke.config import RouterSettings, load
from twostroke.errors import ConfigError
from twostroke.router.edge import Edge
from twostroke.router.observer import RequestObserver
from twostroke.router.output import Trail
from twostroke.telemetry.logs import JsonFormatter, RequestIds, TextFormatter, fields, request_ids


def record(message: str, *arguments: object, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("twostroke.x", logging.WARNING, __file__, 1, message, arguments, None)
    made.__dict__.update(extra)
    return made


def within(ids: RequestIds, formatter: logging.Formatter, made: logging.LogRecord) -> str:
    context = contextvars.copy_context()
    context.run(request_ids.set, ids)
    return context.run(formatter.format, made)


def test_json_has_the_ids_of_the_request_at_hand() -> None:
    line = json.loads(within(RequestIds("r-1", "t-1"), JsonFormatter(), record("lost %s", "decode-0")))
    assert line["message"] == "lost decode-0"
    assert (line["request_id"], line["trace_id"]) == ("r-1", "t-1")
    assert (line["level"], line["logger"]) == ("WARNING", "twostroke.x")
    outside = json.loads(JsonFormatter().format(record("lost")))
    assert not {"request_id", "trace_id"} & set(outside)


def test_an_exception_is_one_line_of_json() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        made = record("failed")
        made.exc_info = sys.exc_info()
    text = JsonFormatter().format(made)
    assert "\n" not in text
    assert "ValueError: broken" in json.loads(text)["exception"]


def test_text_has_fields_and_trace_behind_the_message() -> None:
    made = record("request is over", **fields({"finish": "stop", "error": "went away"}))
    line = within(RequestIds("r-1", "t-1"), TextFormatter(), made)
    assert line.endswith("twostroke.x: request is over finish=stop error='went away' trace_id=t-1")


def over(caplog: pytest.LogCaptureFixture, *, log_prompts: bool, **more: object) -> dict[str, object]:
    trail = Trail(
        received_s=10.0, placed_s=10.01, first_token_s=10.1, prefill_ended_s=10.1, handoff_begun_s=10.02,
        handoff_ready_s=10.15, finished_s=10.5, prefill_worker_id="prefill-0", decode_worker_id="decode-0",
        transferred_bytes=4096, attempts=1, prompt_tokens=3, completion_tokens=9, finish="stop", option="p_then_d",
    )  # fmt: skip
    for name, value in more.items():
        setattr(trail, name, value)
    edge = Edge(None, "chat", "m", {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"})
    edge.request_id = "chatcmpl-1"
    with caplog.at_level(logging.INFO, "twostroke.requests"):
        RequestObserver(None, None, log_prompts=log_prompts).over("r-1", [7, 8, 9], trail, edge, recomputed=False)
    assert len(caplog.records) == 1, "one line per request"
    return json.loads(JsonFormatter().format(caplog.records[0]))


def test_the_line_of_a_request(caplog: pytest.LogCaptureFixture) -> None:
    line = over(caplog, log_prompts=False)
    assert line == line | {
        "request_id": "r-1",
        "public_id": "chatcmpl-1",
        "trace_id": "a" * 32,
        "operation": "chat",
        "finish": "stop",
        "prefill_worker": "prefill-0",
        "decode_worker": "decode-0",
        "option": "p_then_d",
        "attempts": 1,
        "prompt_tokens": 3,
        "completion_tokens": 9,
        "ttft_ms": 100.0,
        "handoff_ms": 130.0,
        "handoff_exposed_ms": 50.0,
        "handoff_bytes": 4096,
        "duration_ms": 500.0,
    }
    assert "prompt_token_ids" not in line
    assert "error" not in line


def test_prompts_are_written_only_when_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    assert over(caplog, log_prompts=True)["prompt_token_ids"] == [7, 8, 9]


def test_the_line_of_a_request_that_failed(caplog: pytest.LogCaptureFixture) -> None:
    line = over(caplog, log_prompts=False, finish="", failure="nobody", error_type="NO_WORKER", first_token_s=None)
    assert (line["finish"], line["error"], line["error_type"]) == ("error", "nobody", "NO_WORKER")
    assert "ttft_ms" not in line


def test_a_wrong_format_is_one_line() -> None:
    with pytest.raises(ConfigError, match="--log-format"):
        load(RouterSettings, log_format="xml")


def test_set_up_writes_json_lines() -> None:
    script = (
        "import logging; from twostroke.telemetry.logs import set_up\n"
        "set_up('INFO', 'json'); logging.getLogger('twostroke.a').info('hello'); logging.getLogger('b').info('no')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["message"] for line in lines] == ["hello"]
