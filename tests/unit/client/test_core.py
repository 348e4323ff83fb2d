"""A client's own arguments."""

import pytest

from twostroke.client import AsyncClient, Client, ConfigError, InvalidRequestError, RetryPolicy


@pytest.fixture(params=[AsyncClient, Client])
def kind(request):
    return request.param


@pytest.mark.parametrize(
    "targets", ["", "router", ":50051", "a:1,b:2", "a:0", "a:65536", "a:x", [], ["a:1", ""], ["a:1", 5], None, 5]
)
def test_a_target_that_is_no_address_is_named(kind, targets):
    with pytest.raises(ConfigError, match=r"^targets (is|has) .*host:port"):
        kind(targets)


@pytest.mark.parametrize("targets", ["a:1", "[::1]:50051", "dns:///router:50051", ("a:1", "b:2")])
def test_addresses(kind, targets):
    expected = (targets,) if isinstance(targets, str) else targets
    assert kind(targets)._core.routers.targets == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"timeout_s": 0}, "timeout_s must be a positive number of seconds, got 0"),
        ({"timeout_s": "5"}, "timeout_s must be a positive number of seconds, got '5'"),
        ({"retries": -1}, "retries is -1; it must be 0 or a positive integer"),
        ({"retries": "many"}, "retries is 'many'; it must be 0 or a positive integer"),
        ({"api_key": ""}, "api_key must be a non-empty string of printable ASCII"),
        ({"api_key": "geheim\n"}, "api_key must be a non-empty string of printable ASCII"),
        ({"api_key": 5}, "api_key must be a non-empty string of printable ASCII"),
    ],
)
def test_an_argument_that_cannot_work_is_named(kind, arguments, message):
    with pytest.raises(ConfigError) as caught:
        kind("a:1", **arguments)
    assert str(caught.value) == message


def test_retries_are_a_number_or_a_policy(kind):
    assert kind("a:1", retries=5)._core._policy == RetryPolicy(retries=5)
    policy = RetryPolicy(retries=1, backoff_s=2.0)
    assert kind("a:1", retries=policy)._core._policy is policy


def test_a_wrong_option_is_raised_where_it_is_written(kind):
    client = kind("a:1")
    with pytest.raises(InvalidRequestError, match="did you mean 'temperature'"):
        client.generate("p", temprature=1.0)
    with pytest.raises(InvalidRequestError, match="timeout_s must be"):
        client.generate("p", timeout_s=-1)
