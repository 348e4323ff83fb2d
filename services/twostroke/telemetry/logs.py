"""Logging of a process: lines for people, or a JSON object per line, with the ids of the request at hand."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
FIELDS = "twostroke_fields"
"""Attribute of a record that holds its fields, for JSON."""


@dataclass(frozen=True, slots=True)
class RequestIds:
    """Whose record it is."""

    request_id: str
    trace_id: str = ""


request_ids: ContextVar[RequestIds | None] = ContextVar("request_ids", default=None)
"""Set within the task of a request; every record that is made there carries it."""


def fields(values: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """What to give a logging call as `extra`, so that the record has these fields in JSON."""
    return {FIELDS: values}


class JsonFormatter(logging.Formatter):
    """One object per line: time, level, logger, message, the ids of the request, and the record's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        """See the class."""
        line: dict[str, Any] = {
            "time": f"{self.formatTime(record, '%Y-%m-%dT%H:%M:%S')}.{int(record.msecs):03d}",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if ids := request_ids.get():
            line["request_id"] = ids.request_id
            if ids.trace_id:
                line["trace_id"] = ids.trace_id
        line |= getattr(record, FIELDS, {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """A line for people: the message, its fields as key=value, and within a request's task the trace's id."""

    def __init__(self) -> None:
        super().__init__(FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 logging names it
        """See the class."""
        line, values = super().formatMessage(record), getattr(record, FIELDS, {})
        pairs = [f"{key}={value!r}" if " " in str(value) else f"{key}={value}" for key, value in values.items()]
        ids = request_ids.get()
        if ids and ids.trace_id and "trace_id" not in values:
            pairs.append(f"trace_id={ids.trace_id}")
        return " ".join([line, *pairs])


def set_up(level: str, style: str = "text") -> None:
    """Writes our own records from `level` on, and those of libraries from WARNING on, to standard error.

    style: text or json. The level is set on our own logger, because libraries that vLLM imports set the root logger's.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("twostroke").setLevel(level)
