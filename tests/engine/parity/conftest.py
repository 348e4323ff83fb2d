"""All rows, asked once."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.conftest import Engines, watch
from twostroke.bench.parity.run import Outcome, ask_all, vocabulary
from twostroke.bench.parity.table import rows
from twostroke.v1.worker_pb2 import WatchLoadResponse


class _AnyVocabulary(dict[str, int]):
    """Names of rows do not depend on ids."""

    def __missing__(self, token: str) -> int:
        return 0


NAMES = [row.name for row in rows(_AnyVocabulary())]


@dataclass(frozen=True)
class Judged:
    """What came of the table, and what the workers did for it."""

    outcomes: list[Outcome]
    prefill: WatchLoadResponse
    decode: WatchLoadResponse
    recomputed_prompts: int


@pytest.fixture(scope="session")
def judged(engines: Engines) -> Judged:
    """Every row's outcome."""

    async def work() -> Judged:
        table = rows(vocabulary(Path(engines.model)))
        outcomes = await ask_all(table, engines.one, engines.two, print)
        view = await watch(engines.grpc, lambda view: not view.requests)
        loads = {worker.info.worker_id: worker.load for worker in view.workers}
        return Judged(outcomes, loads["prefill-0"], loads["decode-0"], view.recomputed_prompts)

    return asyncio.run(work())


@pytest.fixture(scope="session")
def outcomes(judged: Judged) -> dict[str, Outcome]:
    """By the names of the rows."""
    return {outcome.row.name: outcome for outcome in judged.outcomes}
