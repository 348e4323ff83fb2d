"""How fast this machine is, so that arrivals and limits ask the same of every one."""

from __future__ import annotations

import math

from twostroke.bench.command import log_folder
from twostroke.bench.running import Say, running
from twostroke.bench.serve.play import play
from twostroke.bench.serve.traffic import DOCUMENT, Arrival, bodies
from twostroke.bench.stacks import Stack
from twostroke.errors import UnavailableError

TOKENS = 4096
REFERENCE_S = 10.0
"""What one server on both cores took to read such a document on the machine that the arrivals were made for."""
_READS = (Arrival(0.0, DOCUMENT, 600, 1), Arrival(0.0, DOCUMENT, TOKENS, 1), Arrival(0.0, DOCUMENT, TOKENS, 1))


async def speed(one: Stack, say: Say) -> float:
    """How many times as fast as that machine this one is, to two digits; one: the server that is to read.

    Raises UnavailableError. Cancellation takes it down.
    """
    say("how fast is this machine? starting one server; --speed N is how to leave this out")
    async with running([one], log_folder("serve/speed"), say) as ((served, _),):
        took_s = math.inf
        for number, read in enumerate(_READS):
            (seen,) = await play(served.stack.address, [read], bodies([read], f"speed {number}"), lambda: None)
            if seen.error:
                raise UnavailableError(f"the machine's speed could not be measured: {seen.error}")
            if read.prompt_tokens == TOKENS:
                took_s = min(took_s, seen.ttft_s)
    found = float(f"{REFERENCE_S / took_s:.2g}")
    say(f"it reads {TOKENS:,} tokens in {took_s:.1f} s: arrivals and limits are {found:g} times as fast as in the file")
    return found
