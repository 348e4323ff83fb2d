from __future__ import annotations

from pathlib import Path

import pytest

from twostroke.config import RouterSettings, load
from twostroke.errors import ConfigError, PermissionDeniedError, RateLimitedError, UnauthenticatedError
from twostroke.router.access import Access, Need, bearer


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def check(access: Access, need: Need, key: str = "", address: str = "10.0.0.1", *, counted: bool = False) -> None:
    access.check(need, key, address, counted=counted)


def test_without_keys_everybody_may_do_everything() -> None:
    access = Access()
    check(access, Need.USE)
    check(access, Need.ADMIN)
    assert not access.closed


def test_with_keys_only_who_has_one_may_use_it() -> None:
    access = Access(["one", "two"], "boss")
    for key in ("one", "two", "boss"):
        check(access, Need.USE, key)
    check(access, Need.NOTHING)
    with pytest.raises(UnauthenticatedError, match="a key is needed"):
        check(access, Need.USE)
    with pytest.raises(UnauthenticatedError, match="not known here") as caught:
        check(access, Need.USE, "three")
    assert "three" not in caught.value.message


def test_changes_need_the_admin_key_where_there_is_one() -> None:
    for access in (Access(["one"], "boss"), Access(admin="boss")):
        check(access, Need.ADMIN, "boss")
        with pytest.raises((PermissionDeniedError, UnauthenticatedError)):
            check(access, Need.ADMIN, "one")
    with pytest.raises(PermissionDeniedError, match="no admin key"):
        check(Access(["one"]), Need.ADMIN, "one")


def test_a_share_is_used_up_and_comes_back() -> None:
    clock = Clock()
    access = Access(rate_per_s=2.0, burst=3, clock=clock)
    for _ in range(3):
        check(access, Need.USE, counted=True)
    check(access, Need.USE, address="10.0.0.2", counted=True)
    check(access, Need.USE)  # a look does not count
    with pytest.raises(RateLimitedError) as caught:
        check(access, Need.USE, counted=True)
    assert caught.value.retry_after_s == pytest.approx(0.5)
    clock.now_s += 0.5
    check(access, Need.USE, counted=True)
    with pytest.raises(RateLimitedError):
        check(access, Need.USE, counted=True)


def test_a_share_belongs_to_a_key_wherever_it_is_used_and_no_invented_key_has_one() -> None:
    access = Access(["one"], rate_per_s=1.0, burst=1, clock=Clock())
    check(access, Need.USE, "one", "10.0.0.1", counted=True)
    with pytest.raises(RateLimitedError):
        check(access, Need.USE, "one", "10.0.0.2", counted=True)
    free = Access(rate_per_s=1.0, burst=1, clock=Clock())
    check(free, Need.USE, "invented-1", counted=True)
    with pytest.raises(RateLimitedError):
        check(free, Need.USE, "invented-2", counted=True)


def test_the_memory_of_shares_is_bounded() -> None:
    access = Access(rate_per_s=1.0, burst=1, clock=Clock())
    for number in range(10_500):
        check(access, Need.USE, address=str(number), counted=True)
    assert len(access._shares) == 10_000


def test_keys_come_from_the_environment_and_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text("# of the team\nfile-key\n\n")
    (tmp_path / "admin").write_text("boss\n")
    monkeypatch.setenv("TWOSTROKE_API_KEYS", "first-key, two")
    settings = load(RouterSettings, api_keys_file=str(tmp_path / "keys"), admin_key_file=str(tmp_path / "admin"))
    access = Access.of(settings)
    for key in ("first-key", "two", "file-key"):
        check(access, Need.USE, key)
    check(access, Need.ADMIN, "boss")
    assert "first-key" not in repr(settings)


@pytest.mark.parametrize("content", [None, "# nothing\n"])
def test_a_key_file_that_is_not_there_or_holds_none_is_named(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match="--api-keys-file"):
        Access.of(load(RouterSettings, api_keys_file=str(path)))


def test_an_open_router_that_others_reach_says_so(caplog: pytest.LogCaptureFixture) -> None:
    Access.of(load(RouterSettings, host="127.0.0.1"))
    assert not caplog.messages
    Access.of(load(RouterSettings, host="0.0.0.0"))
    assert "anybody who reaches 0.0.0.0" in caplog.messages[0]


def test_a_bearer_is_read_as_http_has_it() -> None:
    assert bearer("Bearer one") == bearer("bearer  one ") == "one"
    assert bearer("Basic one") == bearer("") == ""


@pytest.mark.parametrize(
    ("method", "key", "error"),
    [
        ("InferenceService/Generate", "", UnauthenticatedError),
        ("InferenceService/ListModels", "one", None),
        ("ClusterService/Watch", "", UnauthenticatedError),
        ("ClusterService/Drain", "one", PermissionDeniedError),
        ("ClusterService/SetRole", "one", PermissionDeniedError),
        ("ClusterService/Drain", "boss", None),
    ],
)
def test_what_each_rpc_needs(method: str, key: str, error: type[Exception] | None) -> None:
    access, full = Access(["one"], "boss"), f"/twostroke.v1.{method}"
    if error is None:
        access.guard(full, f"Bearer {key}", "ipv4:10.0.0.1:5")
    else:
        with pytest.raises(error):
            access.guard(full, f"Bearer {key}" if key else "", "ipv4:10.0.0.1:5")


def test_connections_of_one_address_share() -> None:
    access = Access(rate_per_s=1.0, burst=1, clock=Clock())
    generate = "/twostroke.v1.InferenceService/Generate"
    access.guard(generate, "", "ipv4:10.0.0.1:5")
    with pytest.raises(RateLimitedError):
        access.guard(generate, "", "ipv4:10.0.0.1:6")
    access.guard(generate, "", "ipv6:%5B::1%5D:6")


def test_a_tenant_is_its_key_and_where_none_is_asked_for_its_header() -> None:
    closed, open_ = Access(["k", "other"]), Access()
    assert closed.tenant("k", "any") == closed.tenant("k", "") != closed.tenant("other", "any")
    assert open_.tenant("k", "team") == "team"
    assert open_.tenant("k", "") == closed.tenant("k", "")
    assert open_.tenant("", "") == ""
    assert len(open_.tenant("", "x" * 5000)) == 64
