"""What the settings say about placement: the ways that are open, and the classes of requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from twostroke.config import PlacementKind, RouterSettings
from twostroke.errors import ConfigError, InvalidRequestError
from twostroke.policy.plan import ALL_WAYS, ONE_POOL, STRICT, Option, Options
from twostroke.policy.snapshot import DEFAULT_SLO, Slo

SLO_HEADER = "x-twostroke-slo"
DEFAULT_CLASS = "default"

_KINDS: Mapping[PlacementKind, Options] = {"strict": STRICT, "all": ALL_WAYS, "one_pool": ONE_POOL}
SERVED = (Option.P_THEN_D, Option.D_ALONE, Option.P_ALONE, Option.LENT_DECODER)
"""The ways in which a request is served."""
_SINGLE = (*(way.value for way in SERVED), "refuse")


def options_of(settings: RouterSettings) -> Options:
    """The ways that are open; the router always has a queue in front. Raises ConfigError when all are closed."""
    given = {name: getattr(settings, name) for name in _SINGLE if getattr(settings, name) is not None}
    options = replace(_KINDS[settings.placement], wait=True, **given)
    if not open_ways(options):
        raise ConfigError("every way to serve a request is closed; open one, such as --p-then-d")
    return options


def open_ways(options: Options) -> list[str]:
    """Their names."""
    return [way.value for way in SERVED if getattr(options, way.value)]


class SloClasses:
    """The classes that requests may name. Raises ConfigError naming the entry of --slo that is wrong."""

    def __init__(self, text: str) -> None:
        self._classes = {DEFAULT_CLASS: DEFAULT_SLO}
        for entry in filter(None, (part.strip() for part in text.split(","))):
            name, _, times = entry.partition("=")
            self._classes[name.strip()] = _slo(entry, times)

    def of(self, name: str) -> Slo:
        """A class; the default one for no name. Raises InvalidRequestError for a class that there is not."""
        found = self._classes.get(name or DEFAULT_CLASS)
        if found is None:
            known = ", ".join(sorted(self._classes))
            raise InvalidRequestError(f"{SLO_HEADER} names {name!r}; the classes of this router are {known}")
        return found


def _slo(entry: str, times: str) -> Slo:
    ttft_ms, _, itl_ms = times.partition("/")
    try:
        slo = Slo(float(ttft_ms) / 1000, float(itl_ms) / 1000)
    except ValueError:
        slo = Slo(0.0, 0.0)
    if entry.startswith("=") or not (0 < slo.ttft_s < 1e6 and 0 < slo.itl_s < 1e6):
        raise ConfigError(f"--slo has {entry!r}; write name=ttft_ms/itl_ms, such as chat=500/50, both above 0")
    return slo
