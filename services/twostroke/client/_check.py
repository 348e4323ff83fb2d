"""Type checks of single options. Each takes the option's name and value, and returns what goes on the wire.

All raise InvalidRequestError naming the option, what it must be and what it was.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, TypeAlias

from twostroke.errors import InvalidRequestError
from twostroke.v1.engine_pb2 import TokenSequence

Check: TypeAlias = Callable[[str, object], Any]

_FLOAT32_MAX = 3.4028234663852886e38


def wrong(name: str, must_be: str, value: object) -> InvalidRequestError:
    """The error for a value of the wrong type."""
    shown = repr(value)
    return InvalidRequestError(f"{name} must be {must_be}, got {shown if len(shown) <= 80 else shown[:77] + '...'}")


def _integer(low: int, high: int) -> Check:
    def check(name: str, value: object) -> int:
        must_be = f"an integer from {low} to {high}"
        try:
            number = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            raise wrong(name, must_be, value) from None
        if isinstance(value, bool) or not low <= number <= high:
            raise wrong(name, must_be, value)
        return number

    return check


UINT32 = _integer(0, 2**32 - 1)
SINT32 = _integer(-(2**31), 2**31 - 1)
SINT64 = _integer(-(2**63), 2**63 - 1)


def number(name: str, value: object) -> float:
    """A finite number that a 32-bit float can hold."""
    try:
        result = float(value) if not isinstance(value, bool) and isinstance(value, Real) else math.nan
    except OverflowError:
        result = math.nan
    if not -_FLOAT32_MAX <= result <= _FLOAT32_MAX:
        raise wrong(name, "a finite number", value)
    return result


def flag(name: str, value: object) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise wrong(name, "True or False", value)
    return value


def string(name: str, value: object) -> str:
    """A string of valid Unicode; half a surrogate pair cannot be sent."""
    if not isinstance(value, str):
        raise wrong(name, "a string", value)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise wrong(name, "valid Unicode", value) from None
    return value


def strings(name: str, value: object) -> tuple[str, ...]:
    """Several strings; one string stands for itself."""
    if isinstance(value, str):
        return (string(name, value),)
    if not isinstance(value, Sequence):
        raise wrong(name, "a string or a list of strings", value)
    return tuple(string(f"{name}[{index}]", item) for index, item in enumerate(value))


def token_ids(name: str, value: object) -> Sequence[int]:
    """Token ids, in any sequence of integers."""
    must_be = "a list of token ids, integers from 0"
    if isinstance(value, (str, bytes, Mapping)):
        raise wrong(name, must_be, value)
    try:
        # Checks a long prompt in C.
        return TokenSequence(token_ids=value).token_ids  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise wrong(name, f"{must_be} ({error})", value) from None


def bias(name: str, value: object) -> dict[int, float]:
    """A number for each of some token ids."""
    if not isinstance(value, Mapping):
        raise wrong(name, "a mapping from token ids to numbers", value)
    return {UINT32(f"{name} key", key): number(f"{name}[{key!r}]", item) for key, item in value.items()}
