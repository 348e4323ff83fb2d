#!/bin/sh
# uv's `pip install` in a build, into VENV (/opt/venv): install.sh ARGUMENTS. The stage `tools` is mounted under /tools.
set -eu
export SSL_CERT_FILE=/tools/etc/ssl/certs/ca-certificates.crt UV_NO_CACHE=1 UV_INDEX_STRATEGY=unsafe-best-match
# shellcheck disable=SC2086  PIP_ARGS are several.
exec /tools/opt/build/bin/uv pip install --python "${VENV:-/opt/venv}/bin/python" --find-links /wheels ${PIP_ARGS:-} "$@"
