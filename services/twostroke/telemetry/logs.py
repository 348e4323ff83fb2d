"""Logging of a process."""

from __future__ import annotations

import logging
import sys

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def set_up(level: str) -> None:
    """Writes our own records from `level` on, and those of libraries from WARNING on, to standard error.

    The level is set on our own logger, because libraries that vLLM imports set the root logger's.
    """
    logging.basicConfig(level=logging.WARNING, format=FORMAT, stream=sys.stderr)
    logging.getLogger("twostroke").setLevel(level)
