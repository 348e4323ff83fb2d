"""What the settings say about placement."""

from __future__ import annotations

from dataclasses import replace

import pytest

from twostroke.config import RouterSettings, load
from twostroke.errors import ConfigError, InvalidRequestError
from twostroke.flags import read
from twostroke.policy.plan import ALL_WAYS, ONE_POOL, STRICT, Options
from twostroke.policy.snapshot import DEFAULT_SLO, Slo
from twostroke.router.ways import SloClasses, open_ways, options_of


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ((), STRICT),
        (("--placement=strict",), STRICT),
        (("--placement=all",), ALL_WAYS),
        (("--placement=one_pool",), ONE_POOL),
        (("--placement=all", "--no-lent-decoder"), replace(ALL_WAYS, lent_decoder=False)),
        (("--placement=all", "--no-refuse", "--no-p-alone"), replace(ALL_WAYS, refuse=False, p_alone=False)),
        (("--d-alone",), replace(STRICT, d_alone=True)),
        (("--no-p-then-d", "--p-alone"), replace(STRICT, p_then_d=False, p_alone=True)),
    ],
)
def test_flags_open_and_close_ways(flags: tuple[str, ...], options: Options) -> None:
    assert options_of(read(RouterSettings, flags)) == replace(options, wait=True)


def test_a_router_without_any_way_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match="every way"):
        options_of(load(RouterSettings, p_then_d=False))


def test_open_ways_have_the_names_of_their_flags() -> None:
    assert open_ways(STRICT) == ["p_then_d"]
    assert open_ways(ALL_WAYS) == ["p_then_d", "d_alone", "p_alone", "lent_decoder"]


def test_classes_have_names_and_there_is_always_a_default() -> None:
    classes = SloClasses(" chat=500/50, batch = 60000/1000.5,")
    assert classes.of("chat") == Slo(0.5, 0.05)
    assert classes.of("batch") == Slo(60.0, 1.0005)
    assert classes.of("") == classes.of("default") == DEFAULT_SLO
    assert SloClasses("default=100/10").of("") == Slo(0.1, 0.01)
    assert SloClasses(load(RouterSettings).slo).of("") == DEFAULT_SLO
    with pytest.raises(InvalidRequestError, match="'gold'; the classes of this router are batch, chat, default"):
        classes.of("gold")


@pytest.mark.parametrize(
    "text", ["chat", "chat=", "chat=500", "chat=500/", "chat=/50", "chat=0/50", "=500/50", "c=x/1"]
)
def test_wrong_classes_are_named(text: str) -> None:
    with pytest.raises(ConfigError, match="--slo has") as caught:
        SloClasses(f"good=1/1,{text}")
    assert repr(text) in caught.value.message
