"""What happened to every request, as columns of times."""

from __future__ import annotations

from array import array

from twostroke.sim.gaps import Gaps

UNSET = -1.0


class Recorder:
    """Times in seconds of virtual time, UNSET where the request did not get so far; the first of several attempts.

    started_s: prefill's first chunk begins. prefilled_s: the prompt is computed. kv_s: its KV is on decode. decode_s:
    decode's first step begins. first_s, end_s: first and last token. over: gaps longer than the limit.
    """

    PARTS = ("queue", "prefill", "handoff", "decode_wait", "decode")

    def __init__(self, requests: int, gap_limit_s: float) -> None:
        self.gaps = Gaps(gap_limit_s)
        self.arrival_s = array("d", [UNSET]) * requests
        self.started_s = array("d", [UNSET]) * requests
        self.prefilled_s = array("d", [UNSET]) * requests
        self.kv_s = array("d", [UNSET]) * requests
        self.decode_s = array("d", [UNSET]) * requests
        self.first_s = array("d", [UNSET]) * requests
        self.end_s = array("d", [UNSET]) * requests
        self.over = array("l", [0]) * requests
        self.attempts = array("H", [0]) * requests
        self.cached_tokens = 0
        self.preemptions = 0
        self.handoffs = 0
        self.refused = 0
        self.failed = 0
        """Requests that can never be served: too long for every worker."""
        self.finished = 0

    def fill(self, request: int, at_s: float) -> None:
        """Sets the marks up to decode's first step that are not set yet."""
        for column in (self.prefilled_s, self.first_s, self.kv_s, self.decode_s):
            if column[request] == UNSET:
                column[request] = at_s

    def marks(self) -> tuple[array[float], ...]:
        """The columns between which PARTS lie, in order."""
        return self.arrival_s, self.started_s, self.prefilled_s, self.kv_s, self.decode_s, self.end_s

    def parts_s(self, request: int) -> dict[str, float]:
        """Where a finished request's time went; the parts add up to end_s - arrival_s."""
        marks = [column[request] for column in self.marks()]
        return {name: after - before for name, before, after in zip(self.PARTS, marks, marks[1:], strict=False)}
