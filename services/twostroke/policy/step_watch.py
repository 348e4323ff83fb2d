"""When an engine that should step has not for too long."""

from __future__ import annotations

from collections import deque

REMEMBERED_STEPS = 64
FACTOR = 20.0
"""How many times longer than the longest step of late a step may take."""


class StepWatch:
    """Follows one engine's steps. floor_s: no step is overdue before that. Times are monotonic seconds."""

    def __init__(self, floor_s: float) -> None:
        self._floor_s = floor_s
        self._durations_s: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._since_s: float | None = None
        """When the step that is awaited could have begun; None while there is nothing to compute."""

    def stepped(self, now_s: float, *, busy: bool) -> None:
        """A step is over. busy: there is more to compute."""
        if self._since_s is not None:
            self._durations_s.append(now_s - self._since_s)
        self._since_s = now_s if busy else None

    def given(self, now_s: float) -> None:
        """There is something to compute now."""
        if self._since_s is None:
            self._since_s = now_s

    def idle(self) -> None:
        """There is nothing to compute any more."""
        self._since_s = None

    @property
    def limit_s(self) -> float:
        """How long a step may take."""
        return max(self._floor_s, FACTOR * max(self._durations_s, default=0.0))

    def overdue_s(self, now_s: float) -> float:
        """How long the awaited step has been overdue; 0 when it is not."""
        return 0.0 if self._since_s is None else max(0.0, now_s - self._since_s - self.limit_s)
