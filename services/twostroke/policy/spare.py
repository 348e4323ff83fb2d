"""Workers of one machine whose prompts also use each other's cores, while those who own them compute nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from twostroke.policy.snapshot import WorkerSnapshot
from twostroke.policy.terms import terms_of


@dataclass(frozen=True)
class Cores:
    """A worker's CPU cores. machine: alike for all workers of one; own: none where it was given none; spare: those of
    others that its prompts use as well."""

    machine: str = ""
    own: Sequence[int] = ()
    spare: Sequence[int] = ()


NO_CORES = Cores()
"""Of a worker that computes elsewhere, or anywhere."""
Lenders = Mapping[str, Collection[str]]
"""By worker, those whose cores its prompts use as well while they are idle."""
NO_LENDERS: Lenders = MappingProxyType({})


def share_cores(workers: Sequence[WorkerSnapshot], lenders: Lenders) -> Sequence[WorkerSnapshot]:
    """Workers as placement should see them: those that have a lender which computes, or of which nothing is known, have
    their own cores alone; those that lend know to whom."""
    if not lenders:
        return workers
    idle = {each.worker for each in workers if not each.computes}
    seen = [
        replace(each, spare_share=1.0)
        if each.spare_share < 1 and not idle.issuperset(lenders.get(each.worker, ()))
        else each
        for each in workers
    ]
    borrowers = [each for each in seen if each.spare_share < 1 and each.pending_prompt_tokens]
    return [
        replace(each, lends_to=lent) if (lent := _borrow_from(each.worker, borrowers, lenders)) else each
        for each in seen
    ]


def _borrow_from(lender: str, borrowers: Sequence[WorkerSnapshot], lenders: Lenders) -> tuple[WorkerSnapshot, ...]:
    return tuple(each for each in borrowers if lender in lenders.get(each.worker, ()))


def backlogs_s(borrower: WorkerSnapshot, busy_s: float) -> tuple[float, float]:
    """Until the prompts pending on a worker are computed: as it is, and where one that lends to it computes for
    busy_s."""
    now_s, share = terms_of(borrower).backlog_s, borrower.spare_share
    return now_s, now_s + min(busy_s * (1 - share), now_s * (1 / share - 1))
