"""What a client leaves behind in its process: no thread of ours, and no word at the end."""

import subprocess
import sys

import pytest

from rpc.fake_inference import Answering, FakeInference, piece, serving_in_thread, within

ASYNC = """
import asyncio, sys, threading
from twostroke.client import AsyncClient

client = AsyncClient(sys.argv[1])
kept = []

async def main():
    # A slow machine is no warning of ours.
    asyncio.get_running_loop().slow_callback_duration = 60
    kept.append(client.generate("p", request_id="r-1"))
    client.generate("never iterated")
    async for chunk in kept[0]:
        print(chunk.text, [t.name for t in threading.enumerate() if isinstance(t, threading.Thread) and not t.daemon])
        {leave}

asyncio.run(main())
"""
BLOCKING = """
import sys
from twostroke.client import Client

client = Client(sys.argv[1])
kept = client.generate("p", request_id="r-1")
client.generate("never iterated")
for chunk in kept:
    print(chunk.text)
    {leave}
"""


@pytest.mark.parametrize("leave", ["break", "await client.close(); break", "return", "sys.exit()"])
def test_an_asynchronous_client_ends_quietly(leave):
    check(ASYNC.format(leave=leave), "a ['MainThread']\n")


@pytest.mark.parametrize("leave", ["break", "client.close(); break", "sys.exit()"])
def test_a_blocking_client_ends_quietly(leave):
    check(BLOCKING.format(leave=leave), "a\n")


def test_a_stream_kept_to_the_end_of_the_process_is_cancelled():
    script = ASYNC[: ASYNC.index("    async for")] + "    print((await anext(kept[0])).text)\n\nasyncio.run(main())\n"
    check(script, "a\n")


def test_importing_the_client_imports_no_engine():
    code = "import sys, twostroke.client; print({'vllm', 'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout == "set()\n"


def check(script: str, output: str) -> None:
    router = FakeInference("router")
    router.script = [answering := Answering([piece("a", 1)], hang=True)]
    with serving_in_thread(router):
        command = [sys.executable, "-X", "dev", "-W", "error", "-c", script, router.target]
        done = subprocess.run(command, capture_output=True, text=True, timeout=50)
        assert (done.returncode, done.stdout, done.stderr) == (0, output, "")
        assert within(answering.left) == "r-1"
    assert [received.request.request_id for received in router.received] == ["r-1"]
