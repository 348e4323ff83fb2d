import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from edge.http_cluster import Edge, http_edge


@pytest.fixture(scope="session")
def model() -> str:
    """Folder of the bundled model, whose tokenizer and chat template the front end uses."""
    command = [sys.executable, "-m", "twostroke", "model", "fetch"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def edge(model: str) -> AsyncIterator[Edge]:
    """Fast workers, and a comment line after 0.2 s of silence."""
    async with http_edge(model, router_flags=("--sse-comment-s", "0.2")) as edge:
        yield edge
