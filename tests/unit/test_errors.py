from pathlib import Path

import pytest

from twostroke import errors
from twostroke.rpc.status import from_failure, to_failure, to_status


def tree(root: type[errors.TwostrokeError]) -> list[type[errors.TwostrokeError]]:
    return [root, *(found for child in root.__subclasses__() for found in tree(child))]


ALL = tree(errors.TwostrokeError)


def test_reasons_are_unique() -> None:
    assert len({kind.reason for kind in ALL}) == len(ALL)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_error_survives_the_wire(kind: type[errors.TwostrokeError]) -> None:
    failure = to_failure(kind("what happened", retry_after_s=1.5))
    again = from_failure(failure)
    assert type(again) is kind
    assert again.message == "what happened"
    assert again.retry_after_s == 1.5
    assert (again.code, again.reason) == (kind.code, kind.reason)


def test_no_retry_is_kept_apart_from_retry_at_once() -> None:
    assert from_failure(to_failure(errors.InvalidRequestError("no"))).retry_after_s is None
    assert from_failure(to_failure(errors.StaleEpochError("at once"))).retry_after_s == 0.0


def test_a_reason_of_a_newer_version_falls_back_on_the_code() -> None:
    failure = to_failure(errors.UnavailableError("gone"))
    failure.reason = "SOMETHING_NEW"
    assert type(from_failure(failure)) is errors.UnavailableError


def test_a_status_has_one_error_info_and_retry_info_only_with_a_retry() -> None:
    kinds = [detail.type_url.rsplit(".", 1)[-1] for detail in to_status(errors.OverloadedError("full")).details]
    assert kinds == ["ErrorInfo", "RetryInfo"]
    kinds = [detail.type_url.rsplit(".", 1)[-1] for detail in to_status(errors.InvalidRequestError("no")).details]
    assert kinds == ["ErrorInfo"]


def test_every_reason_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()
    documented = {line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")} - {"reason"}
    assert documented == {kind.reason for kind in ALL}
