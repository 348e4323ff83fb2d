"""How the settings of HTTP's certificates reach vLLM's server."""

from __future__ import annotations

from pathlib import Path

import pytest

from twostroke.config import RouterSettings, load
from twostroke.errors import ConfigError
from twostroke.router.vllm.http_edge import _tls


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    for name in ("cert", "key", "ca"):
        (tmp_path / name).write_text("pem")
    return {f"http_tls_{name}": str(tmp_path / name) for name in ("cert", "key", "ca")}


def test_certificate_and_key_make_tls_and_a_ca_makes_it_mutual(files: dict[str, str]) -> None:
    assert _tls(load(RouterSettings)) == []
    mutual = _tls(load(RouterSettings, **files))
    assert mutual == [
        *("--ssl-certfile", files["http_tls_cert"], "--ssl-keyfile", files["http_tls_key"]),
        *("--ssl-ca-certs", files["http_tls_ca"], "--ssl-cert-reqs", "2"),
    ]
    del files["http_tls_ca"]
    assert "--ssl-cert-reqs" not in _tls(load(RouterSettings, **files))


@pytest.mark.parametrize("left", ["http_tls_cert", "http_tls_key", "http_tls_ca"])
def test_half_of_it_is_refused(files: dict[str, str], left: str) -> None:
    with pytest.raises(ConfigError, match="both --http-tls-cert and --http-tls-key"):
        _tls(load(RouterSettings, **{left: files[left]}))


def test_a_file_that_is_not_there_is_named(files: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="--http-tls-key /nowhere: No such file"):
        _tls(load(RouterSettings, **{**files, "http_tls_key": "/nowhere"}))
