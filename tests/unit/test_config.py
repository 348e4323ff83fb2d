import pytest

from twostroke.config import RouterSettings, WorkerSettings, load
from twostroke.errors import ConfigError


def test_a_flag_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_PORT", "7001")
    assert load(WorkerSettings).port == 7001
    assert load(WorkerSettings, port=7002).port == 7002


def test_every_wrong_setting_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load(WorkerSettings, role="cook", port=99999)
    assert "--role" in caught.value.message
    assert "'prefill', 'decode' or 'both'" in caught.value.message
    assert "--port" in caught.value.message
    assert "99999" in caught.value.message


@pytest.mark.parametrize(
    ("workers", "named"), [("", "empty"), ("host", "'host'"), ("a:1,b:x", "'b:x'"), ("a:0", "'a:0'"), (":80", "':80'")]
)
def test_wrong_workers_are_named(workers: str, named: str) -> None:
    with pytest.raises(ConfigError, match="--workers") as caught:
        RouterSettings.model_construct(workers=workers).worker_targets()
    assert named in caught.value.message


def test_workers_may_be_ipv6() -> None:
    assert load(RouterSettings, workers="[::1]:7001, host:7002").worker_targets() == ("[::1]:7001", "host:7002")


def test_adapters_have_a_name_and_a_folder() -> None:
    found = load(RouterSettings, lora="a=/adapters/a, b=/adapters/b").adapters()
    assert found == {"a": "/adapters/a", "b": "/adapters/b"}
    assert load(RouterSettings).adapters() == {}


@pytest.mark.parametrize(("lora", "named"), [("a", "'a'"), ("=x", "'=x'"), ("a=", "'a='"), ("a=x,a=y", "'a=y'")])
def test_wrong_adapters_are_named(lora: str, named: str) -> None:
    with pytest.raises(ConfigError, match="--lora") as caught:
        load(RouterSettings, lora=lora).adapters()
    assert named in caught.value.message
