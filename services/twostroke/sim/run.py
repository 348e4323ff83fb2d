"""A run of engine steps that differ only in the growth of their contexts."""

from __future__ import annotations

from math import sqrt


class Run:
    """Step i of a run takes first_s + i * delta_s seconds. grown: steps whose KV blocks are booked."""

    __slots__ = ("delta_s", "first_s", "grown", "start_s", "steps")

    def __init__(self) -> None:
        self.start_s = 0.0
        self.first_s = 0.0
        self.delta_s = 0.0
        self.steps = 0
        self.grown = 0

    @property
    def end_s(self) -> float:
        """When the last step ends; exact, see clock.py."""
        steps = self.steps
        if steps == 1:
            return self.start_s + self.first_s
        return self.start_s + (steps * self.first_s + self.delta_s * (steps * (steps - 1) // 2))

    def ended(self, now_s: float) -> int:
        """Steps that ended before now, the last one left out."""
        left_s, first_s, delta_s = now_s - self.start_s, self.first_s, self.delta_s
        if left_s <= first_s or self.steps == 1:
            return 0
        if delta_s > 0:
            half = first_s - 0.5 * delta_s
            steps = int((sqrt(half * half + 2 * delta_s * left_s) - half) / delta_s)
        else:
            steps = int(left_s / first_s)
        # The root is rounded; the ends are not.
        while steps * first_s + delta_s * (steps * (steps - 1) // 2) >= left_s:
            steps -= 1
        while (steps + 1) * first_s + delta_s * ((steps + 1) * steps // 2) < left_s:
            steps += 1
        return min(steps, self.steps - 1)

    def truncate(self, now_s: float) -> bool:
        """Ends the run with the step that is under way. Whether that changed it."""
        steps = self.ended(now_s) + 1
        if steps >= self.steps:
            return False
        self.steps = steps
        return True

    def longer(self, limit_s: float, steps: int) -> int:
        """How many of the first `steps` steps take longer than the limit."""
        first_s, delta_s = self.first_s, self.delta_s
        if first_s > limit_s:
            return steps
        if first_s + (steps - 1) * delta_s <= limit_s:
            return 0
        index = int((limit_s - first_s) / delta_s)
        while first_s + index * delta_s > limit_s:
            index -= 1
        while first_s + (index + 1) * delta_s <= limit_s:
            index += 1
        return steps - 1 - index
