"""Faults that the reference engine injects into itself; docs/reference_engine.md describes the plan."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from twostroke.errors import ConfigError

EXIT_STATUS = 70
"""Status of a process that the fault "exit" ends."""


class _Fault(BaseModel):
    model_config = {"frozen": True, "extra": "forbid", "strict": True}


class _StepFault(_Fault):
    at_step: int | None = Field(None, ge=1)
    at_request: int | None = Field(None, ge=1)

    def is_due(self, step: int, ordinals: Collection[int]) -> bool:
        """Whether the step, or one of the requests that begin with it, is the one."""
        return step == self.at_step or self.at_request in ordinals


class Stall(_StepFault):
    """Steps stop; everything else goes on."""

    fault: Literal["stall"]
    duration_s: float | None = Field(None, ge=0)
    """None is for ever."""


class Crash(_StepFault):
    """The engine fails for good."""

    fault: Literal["crash"]


class Exit(_StepFault):
    """The process ends on the spot."""

    fault: Literal["exit"]


class Slow(_StepFault):
    """Steps take longer."""

    fault: Literal["slow"]
    factor: float = Field(gt=0)
    count: int | None = Field(None, ge=1)
    """Steps; None is all from then on."""


class Corrupt(_Fault):
    """A bit of held KV flips."""

    fault: Literal["corrupt"]
    at_request: int = Field(ge=1)
    """Counts the engine's hand-offs."""
    count: int = Field(1, ge=1)
    """Hand-offs."""
    block: int = Field(0, ge=0)
    """Index in the hand-off; its last block when it has fewer."""
    byte: int = Field(0, ge=0)
    """Offset in the block, modulo its size."""


class Refuse(_Fault):
    """Requests find no room."""

    fault: Literal["refuse"]
    at_request: int = Field(ge=1)
    count: int = Field(1, ge=1)
    """Requests."""


class Cut(_Fault):
    """Nothing can be read from one other worker, by probes and hand-offs alike."""

    fault: Literal["cut"]
    worker: str
    at_read: int = Field(1, ge=1)
    """Counts the probes of that worker and the hand-offs from it."""
    count: int | None = Field(None, ge=1)
    """Probes and hand-offs; None is all from then on."""


StepFault = Stall | Crash | Exit | Slow
Fault = StepFault | Corrupt | Refuse | Cut

_PLAN = TypeAdapter(list[Annotated[Fault, Field(discriminator="fault")]])


def parse_faults(text: str) -> tuple[Fault, ...]:
    """A fault plan from JSON; empty text is no faults. Raises ConfigError naming the entry and its mistake."""
    if not text.strip():
        return ()
    try:
        json.loads(text)
        plan = _PLAN.validate_json(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--reference-faults is not JSON: {error}") from error
    except ValidationError as error:
        raise ConfigError(f"--reference-faults: {'; '.join(_problems(error))}") from error
    for index, fault in enumerate(plan):
        if isinstance(fault, _StepFault) and (fault.at_step is None) is (fault.at_request is None):
            raise ConfigError(f"--reference-faults: entry {index}: give either at_step or at_request")
    return tuple(plan)


def _problems(error: ValidationError) -> list[str]:
    lines = []
    for problem in error.errors(include_url=False):
        place = problem["loc"]
        # After the index, pydantic names the kind of fault, then the field.
        field = f" {place[2]}:" if len(place) > 2 else ""
        entry = f"entry {place[0]}:" if place else "a list is needed:"
        lines.append(f"{entry}{field} {problem['msg']}")
    return lines


class FaultPlan:
    """Tells an engine which faults are due; each fires once."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._faults = list(faults)
        self._slow: list[tuple[float, int | None]] = []
        self._reads: Counter[str] = Counter()

    def refuses(self, ordinal: int) -> bool:
        """Whether the request with this number is to be refused."""
        return any(
            isinstance(fault, Refuse) and fault.at_request <= ordinal < fault.at_request + fault.count
            for fault in self._faults
        )

    def corruptions(self, number: int) -> list[Corrupt]:
        """What is to be flipped in the hand-off with this number."""
        return [
            fault
            for fault in self._faults
            if isinstance(fault, Corrupt) and fault.at_request <= number < fault.at_request + fault.count
        ]

    def cuts(self, worker_id: str) -> bool:
        """Whether the next read from that worker is to fail; counts it as done."""
        self._reads[worker_id] += 1
        number = self._reads[worker_id]
        return any(
            isinstance(fault, Cut)
            and fault.worker == worker_id
            and fault.at_read <= number
            and (fault.count is None or number < fault.at_read + fault.count)
            for fault in self._faults
        )

    def due(self, step: int, ordinals: Collection[int]) -> list[Stall | Crash | Exit]:
        """What happens before the step with this number, whose new requests have these numbers."""
        now = [fault for fault in self._faults if isinstance(fault, _StepFault) and fault.is_due(step, ordinals)]
        self._faults = [fault for fault in self._faults if fault not in now]
        self._slow += [(fault.factor, fault.count) for fault in now if isinstance(fault, Slow)]
        return [fault for fault in now if not isinstance(fault, Slow)]

    def slowness(self) -> float:
        """The factor of the next step's time; counts the step as taken."""
        factor = 1.0
        for each, _ in self._slow:
            factor *= each
        left = [(each, None if count is None else count - 1) for each, count in self._slow]
        self._slow = [(each, count) for each, count in left if count != 0]
        return factor
