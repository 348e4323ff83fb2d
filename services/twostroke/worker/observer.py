"""Who watches the requests of a worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from twostroke.engine.base import EngineLoad, EngineOutput, Stroke
from twostroke.errors import TwostrokeError
from twostroke.v1.engine_pb2 import EngineRequest


class Observer(Protocol):
    """Called from the event loop; must not block or raise."""

    def admitted(self, request: EngineRequest, stroke: Stroke) -> None:
        """The engine is about to get a request."""

    def stepped(self, outputs: Sequence[EngineOutput], load: EngineLoad) -> None:
        """A step is over."""

    def cancelled(self, request_ids: Sequence[str]) -> None:
        """Requests end without an output; unknown ids are among them."""

    def lost(self, error: TwostrokeError) -> None:
        """The engine is gone, and all requests with it."""
