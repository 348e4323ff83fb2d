"""Which workers stay known when their name no longer stands for them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from twostroke.config import RouterSettings, load
from twostroke.router.member import MemberState
from twostroke.router.pool import WorkerPool


def known(state: MemberState) -> tuple[WorkerPool, Any]:
    pool = WorkerPool(load(RouterSettings), "router", step_done=lambda: None)
    member = SimpleNamespace(state=state, info=None, address="10.0.0.1:1", ended=False)
    member.end_life = lambda: setattr(member, "ended", True)
    pool._members["10.0.0.1:1"] = member  # type: ignore[assignment]
    pool._tasks["10.0.0.1:1"] = SimpleNamespace(cancel=lambda: None)  # type: ignore[assignment]
    return pool, member


@pytest.mark.parametrize("state", MemberState)
async def test_a_worker_that_may_have_requests_is_not_forgotten_before_they_are_told(state: MemberState) -> None:
    """A network that is cut takes the name away at once, and the requests would wait for ever."""
    pool, member = known(state)
    async with asyncio.TaskGroup() as group:
        pool._follow(group, frozenset(), keep=False)
    in_use = state in (MemberState.READY, MemberState.QUIET, MemberState.DRAINING)
    assert ("10.0.0.1:1" in pool._members) is in_use
    assert member.ended is not in_use


async def test_a_resolver_that_fails_makes_nobody_forgotten() -> None:
    pool, member = known(MemberState.UNREACHABLE)
    async with asyncio.TaskGroup() as group:
        pool._follow(group, frozenset(), keep=True)
    assert pool._members
    assert not member.ended
