"""Cores that workers of one machine lend each other, as placement counts with them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from twostroke.policy.cost import Costing
from twostroke.policy.placement import place
from twostroke.policy.plan import ALL_WAYS, Limits, Option, Options, Weights
from twostroke.policy.snapshot import ClusterSnapshot, PlacementRequest, Slo, WorkerSnapshot
from twostroke.policy.spare import NO_LENDERS, backlogs_s, share_cores
from twostroke.policy.step_model import LinearStepModel
from twostroke.policy.terms import terms_of
from twostroke.policy.turns import SPARE_TOKENS

CPU = LinearStepModel(0.02, 1e-3, 1e-7, 1.7e-3, 1.5e-7)
SLO = Slo(ttft_s=7.4, itl_s=0.12)
LENDERS = {"p": frozenset({"d"}), "d": frozenset({"p"})}


def worker(name: str, **loads: object) -> WorkerSnapshot:
    made = WorkerSnapshot(
        name,
        name[0] == "p",
        name[0] == "d",
        free_blocks=1000,
        block_size_tokens=16,
        total_blocks=1000,
        step_model=CPU,
        spare_share=0.6,
        slo=SLO,
    )
    return replace(made, **loads)  # type: ignore[arg-type]


def reads(tokens: int, name: str = "p") -> WorkerSnapshot:
    return worker(name, pending_prompt_tokens=tokens, pending_prompts=1, computes=True)


def test_an_idle_lender_lends_and_a_busy_one_keeps_its_cores() -> None:
    p, d = share_cores([worker("p"), worker("d")], LENDERS)
    assert (p.spare_share, d.spare_share, d.lends_to) == (0.6, 0.6, ())
    p, d = share_cores([reads(4000), worker("d")], LENDERS)
    assert (p.spare_share, d.spare_share) == (0.6, 1.0)
    assert [each.worker for each in d.lends_to] == ["p"]
    p, d = share_cores([reads(4000), worker("d", computes=True)], LENDERS)
    assert (p.spare_share, d.spare_share, d.lends_to) == (1.0, 1.0, ())


def test_of_several_lenders_all_must_be_idle_and_known() -> None:
    lenders = {"p": frozenset({"d", "d2"})}
    p, d, d2 = share_cores([reads(4000), worker("d"), worker("d2", computes=True)], lenders)
    assert (p.spare_share, d.spare_share, d2.spare_share) == (1.0, 0.6, 0.6), "those without lenders are as they say"
    assert not d.lends_to
    assert share_cores([reads(4000), worker("d")], lenders)[0].spare_share == 1.0, "one that drains may compute"


def test_where_nobody_lends_nothing_is_made_anew() -> None:
    workers = [worker("p"), worker("d")]
    assert share_cores(workers, NO_LENDERS) is workers


def test_a_lender_that_computes_makes_what_is_pending_later() -> None:
    """While it does, a second of the borrower's takes a second; else 0.6."""
    borrower = reads(4096)
    pending_s = terms_of(borrower).backlog_s
    assert pending_s == pytest.approx(0.6 * terms_of(replace(borrower, spare_share=1.0)).backlog_s)
    assert backlogs_s(borrower, 2.0) == (pending_s, pytest.approx(pending_s + 2.0 * 0.4))
    assert backlogs_s(borrower, 99.0) == (pending_s, pytest.approx(pending_s / 0.6)), "not later than on own cores"
    assert backlogs_s(worker("p"), 2.0) == (0.0, 0.0)


@pytest.mark.parametrize("tokens", [SPARE_TOKENS - 1, SPARE_TOKENS, 4096])
def test_steps_with_many_prompt_tokens_take_the_time_of_all_cores(tokens: int) -> None:
    def run_s(share: float) -> float:
        costing = Costing(PlacementRequest(tokens, slo=SLO), Weights(), Limits(), ALL_WAYS)
        return costing.reading(worker("p", spare_share=share)).run_s

    assert run_s(0.6) == pytest.approx(run_s(1.0) * (0.6 if tokens >= SPARE_TOKENS else 1.0))


def test_a_bound_on_steps_is_one_on_the_time_that_they_take() -> None:
    chunks = [terms_of(worker("p", spare_share=share, most_step_s=0.5)).chunk_tokens for share in (1.0, 0.6)]
    assert 1.5 < chunks[1] / chunks[0] < 1.8


def test_a_second_document_waits_where_a_lent_decoder_would_make_both_late() -> None:
    """Its own cores alone would read it later than both workers' cores read one after the other."""
    second = PlacementRequest(2048, expected_output_tokens=16, slo=SLO)
    knows = ClusterSnapshot(share_cores([reads(3600), worker("d")], LENDERS), streams_kv=True, kv_bytes_per_token=1)
    plan = place(second, knows, ALL_WAYS)
    assert (plan.option, plan.prefill, plan.decode) == (Option.P_THEN_D, "p", "d")
    busy = ClusterSnapshot([replace(each, spare_share=1.0, lends_to=()) for each in knows.workers], streams_kv=True)
    assert place(second, busy, ALL_WAYS).option is not Option.P_THEN_D, "without spare cores it would be late there"


def test_what_the_borrower_loses_is_on_the_lenders_bill() -> None:
    request = PlacementRequest(2048, expected_output_tokens=16, slo=SLO)
    costing = Costing(request, Weights(), Limits(), Options())
    _, lender = share_cores([reads(3600), worker("d")], LENDERS)
    alone = replace(lender, worker="d2", lends_to=())
    now_s, then_s = backlogs_s(lender.lends_to[0], costing.reading(lender).run_s)
    more = costing.reading(lender).disturbed - costing.reading(alone).disturbed
    assert more == pytest.approx(costing.strain(then_s / 7.4) - costing.strain(now_s / 7.4))
    assert more > 0.1
