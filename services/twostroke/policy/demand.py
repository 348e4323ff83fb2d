"""What arrives at a router, as means over a window."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from twostroke.policy.attainment import Demand
from twostroke.policy.snapshot import Slo

WINDOW_S, BUCKET_S = 120.0, 5.0


@dataclass(slots=True)
class _Bucket:
    began_s: float
    arrived: Counter[Slo] = field(default_factory=Counter)
    served: int = 0
    computed: int = 0
    computed_squares: int = 0
    cached: int = 0
    answered: int = 0


class ObservedDemand:
    """Of one router. All moments are of one monotonic clock, and never go back."""

    def __init__(self) -> None:
        self._buckets: deque[_Bucket] = deque()
        self._began_s: float | None = None

    def arrived(self, now_s: float, slo: Slo) -> None:
        """A request came, of such a class."""
        self._bucket(now_s).arrived[slo] += 1

    def served(self, now_s: float, computed_tokens: int, cached_tokens: int, answer_tokens: int) -> None:
        """A request was answered; so many tokens of its prompt had to be computed."""
        bucket = self._bucket(now_s)
        bucket.served += 1
        bucket.computed += computed_tokens
        bucket.computed_squares += computed_tokens * computed_tokens
        bucket.cached += cached_tokens
        bucket.answered += answer_tokens

    def mean(self, now_s: float) -> Demand | None:
        """The rate of what arrived, the sizes of what was answered, the class of most; None before the first answer."""
        self._bucket(now_s)
        buckets, began_s = self._buckets, self._began_s
        served = sum(each.served for each in buckets)
        if not served or began_s is None:
            return None
        arrived: Counter[Slo] = sum((each.arrived for each in buckets), Counter())
        if not arrived:
            return None
        computed = sum(each.computed for each in buckets) / served
        squares = sum(each.computed_squares for each in buckets) / served
        return Demand(
            requests_per_s=arrived.total() / min(WINDOW_S, max(BUCKET_S, now_s - began_s)),
            prompt_tokens=computed,
            answer_tokens=sum(each.answered for each in buckets) / served,
            slo=arrived.most_common(1)[0][0],
            cached_tokens=sum(each.cached for each in buckets) / served,
            prompt_cv2=max(0.0, squares / computed**2 - 1) if computed else 0.0,
        )

    def _bucket(self, now_s: float) -> _Bucket:
        if self._began_s is None:
            self._began_s = now_s
        if not self._buckets or now_s - self._buckets[-1].began_s >= BUCKET_S:
            self._buckets.append(_Bucket(now_s))
            while now_s - self._buckets[0].began_s >= WINDOW_S:
                self._buckets.popleft()
        return self._buckets[-1]
