"""Known cases with known answers."""

from collections.abc import Sequence

import pytest

from twostroke.measures import SloLimits
from twostroke.policy.plan import ALL_WAYS, ONE_POOL, STRICT
from twostroke.policy.snapshot import Slo
from twostroke.policy.step_model import LinearStepModel
from twostroke.sim.fleet import BOTH, DECODE, PREFILL, Failure, LinkKind
from twostroke.sim.placer import Placed, Placer, PolicyPlacer, TurnsPlacer
from twostroke.sim.traffic import Asked
from twostroke.sim.traffic_files import columns
from twostroke.sim.worker import Worker
from unit.sim.scenarios import PLAIN, fleet, kind, run, traffic

HOP_S = 0.001
SLACK_S = 1e-6


class Watched:
    """Another placer's decisions, but decode computes prompts of 1,900 tokens; remembers with what they were made."""

    shortest_first = True

    def __init__(self, placer: Placer) -> None:
        self._placer = placer
        self.left = placer.left
        self.asked: list[Asked | None] = []
        self.slos: list[Slo] = []
        self.placed: list[Placed] = []
        self._workers: list[Worker] = []

    def added(self, worker: Worker) -> None:
        self._placer.added(worker)
        self._workers.append(worker)

    def place(
        self, prompt_tokens: int, hashes: Sequence[int], avoid: frozenset[str], now_s: float, asked: Asked | None
    ) -> Placed:
        self.asked.append(asked)
        self.slos.append(self._workers[0].snapshot(now_s).slo)
        placed = self._placer.place(prompt_tokens, hashes, avoid, now_s, asked)
        self.placed.append(placed)
        return placed._replace(prefill=None) if prompt_tokens == 1900 else placed


def test_first_token_from_decode_counts_transfer_and_step() -> None:
    """100 ms prefill, 40 ms transfer, 10 ms first decode step: 150 ms, not 100."""
    prefill = kind(PLAIN, budget_tokens=4096)  # 900 tokens: 10 + 90 ms
    chosen = fleet(
        (prefill, PREFILL, 1),
        (prefill, DECODE, 1),
        kv_bytes_per_token=1e5,
        link=LinkKind(bytes_per_s=900 * 1e5 / 0.038, start_s=0.002),
        hop_s=0.0,
        decode_first_token=True,
    )
    cluster, summary = run(chosen, traffic([(0.0, 900, 5)]))
    assert summary.ttft.p50 == pytest.approx(0.150, abs=SLACK_S)
    assert cluster.records.parts_s(0)["handoff"] == pytest.approx(0.040, abs=SLACK_S)
    assert summary.e2e.p50 == pytest.approx(0.190, abs=SLACK_S)


def test_first_token_from_prefill_does_not_wait_for_kv() -> None:
    prefill = kind(PLAIN, budget_tokens=4096)
    chosen = fleet(
        (prefill, PREFILL, 1),
        (prefill, DECODE, 1),
        link=LinkKind(bytes_per_s=900 * 1e5 / 0.038, start_s=0.002),
        hop_s=0.0,
    )
    cluster, summary = run(chosen, traffic([(0.0, 900, 5)]))
    assert summary.ttft.p50 == pytest.approx(0.100, abs=SLACK_S)
    # The first gap holds the hand-off of 40 ms and one step.
    assert summary.itl.largest == pytest.approx(0.050, abs=SLACK_S)
    assert cluster.records.gaps.bins()[1].sum() == 4


def test_waiting_for_a_busy_decode_worker_is_a_part_of_the_time() -> None:
    """Decode is in a step of 200 ms when the KV arrives."""
    busy = kind(PLAIN, budget_tokens=4096)
    chosen = fleet((busy, PREFILL, 1), (busy, DECODE, 1), hop_s=0.0, link=LinkKind(bytes_per_s=1e15, start_s=0.0))
    # A prompt of 1,900 tokens on decode itself: 10 + 190 ms from 0 to 200 ms.
    placer = Watched(PolicyPlacer(chosen, STRICT))
    cluster, _ = run(chosen, traffic([(0.0, 1900, 2), (0.0, 400, 3)]), placer)
    parts = cluster.records.parts_s(1)
    assert parts["prefill"] == pytest.approx(0.050, abs=SLACK_S)
    assert parts["decode_wait"] == pytest.approx(0.150, abs=SLACK_S)
    assert sum(parts.values()) == pytest.approx(cluster.records.end_s[1] - cluster.records.arrival_s[1], abs=1e-12)


def test_chunks_bound_the_gap_of_a_running_answer() -> None:
    for budget, gap_s in ((2049, 0.01 + 0.2048), (129, 0.01 + 0.0128)):
        chosen = fleet((kind(PLAIN, budget_tokens=budget), BOTH, 1), hop_s=0.0)
        _, summary = run(chosen, traffic([(0.0, 16, 200), (0.5, 2048, 1)]))
        assert summary.itl.largest == pytest.approx(gap_s, abs=SLACK_S)


def test_a_prefix_is_computed_once() -> None:
    one = kind(PLAIN, budget_tokens=8192, unit_tokens=16)
    what = columns([(0.0, 320, 1, range(20)), (5.0, 320, 1, range(20)), (6.0, 320, 1, range(100, 120))], 16, "shared")
    cluster, summary = run(fleet((one, BOTH, 1), hop_s=0.0), what)
    times = [cluster.records.first_s[i] - cluster.records.arrival_s[i] for i in range(3)]
    # All but the last block: one block of 16 tokens is computed, so that there is a token to choose from.
    assert times == pytest.approx([0.042, 0.0116, 0.042], abs=SLACK_S)
    assert summary.cached_share == pytest.approx(304 / 960)


def test_the_oldest_prefixes_are_evicted() -> None:
    one = kind(PLAIN, budget_tokens=8192, unit_tokens=16, blocks=45)
    rows = [(float(5 * i), 320, 1, tuple(range(100 * i, 100 * i + 20))) for i in range(3)]
    what = columns([*rows, (20.0, 320, 1, rows[2][3]), (25.0, 320, 1, rows[0][3])], 16, "evicted")
    cluster, _ = run(fleet((one, BOTH, 1), hop_s=0.0), what)
    times = [cluster.records.first_s[i] - cluster.records.arrival_s[i] for i in range(5)]
    assert times[3] == pytest.approx(0.0116, abs=SLACK_S)
    # Of the first prefix only its head is left: tails go first.
    assert times[4] == pytest.approx(0.01 + 1e-4 * (320 - 4 * 16), abs=SLACK_S)


def test_blocks_run_out_and_the_youngest_starts_over() -> None:
    one = kind(PLAIN, budget_tokens=512, blocks=20, block_tokens=16)
    _, summary = run(fleet((one, BOTH, 1)), traffic([(0.0, 100, 150), (0.0, 100, 150)]))
    assert summary.preemptions > 0
    assert summary.finished == 2
    assert summary.itl.largest > 0.5


def test_what_never_fits_is_refused_at_once() -> None:
    _, summary = run(fleet((kind(blocks=20), BOTH, 1)), traffic([(0.0, 400, 10), (0.0, 100, 10)]))
    assert (summary.failed, summary.finished) == (1, 1)


def test_transfers_over_one_port_take_turns() -> None:
    one = kind(PLAIN, budget_tokens=8192)
    link = LinkKind(bytes_per_s=1e9, start_s=0.0)
    rows = [(0.0, 1000, 2), (0.0, 1000, 2)]
    apart, _ = run(fleet((one, PREFILL, 2), (one, DECODE, 2), link=link), traffic(rows))
    shared = LinkKind(bytes_per_s=1e9, start_s=0.0, workers_per_port=2)
    together, _ = run(fleet((one, PREFILL, 2), (one, DECODE, 2), link=shared), traffic(rows))
    handoffs = [sorted(each.records.parts_s(i)["handoff"] for i in range(2)) for each in (apart, together)]
    assert handoffs[0] == pytest.approx([0.1, 0.1], abs=2 * HOP_S)
    assert handoffs[1] == pytest.approx([0.1, 0.2], abs=2 * HOP_S)


def test_descriptors_cost_time() -> None:
    one = kind(PLAIN, budget_tokens=8192)
    link = LinkKind(bytes_per_s=1e12, start_s=0.0, descriptor_s=1e-5, descriptors_per_block=80)
    cluster, _ = run(fleet((one, PREFILL, 1), (one, DECODE, 1), link=link), traffic([(0.0, 1600, 2)]))
    assert cluster.records.parts_s(0)["handoff"] == pytest.approx(0.08, rel=0.01)


def test_chunks_move_while_prefill_runs() -> None:
    one = kind(PLAIN, budget_tokens=500)
    link = LinkKind(bytes_per_s=2e9, start_s=0.0)  # 25 ms for a chunk of 500 tokens, computed in 60 ms
    handoffs = []
    for overlap in (True, False):
        chosen = fleet((one, PREFILL, 1), (one, DECODE, 1), link=link, overlap=overlap)
        cluster, _ = run(chosen, traffic([(0.0, 4000, 2)]))
        handoffs.append(cluster.records.parts_s(0)["handoff"])
    assert handoffs == pytest.approx([0.025, 0.200 + HOP_S], abs=HOP_S)


@pytest.mark.parametrize("worker", [0, 1])
def test_a_lost_worker_costs_time_and_no_answer(worker: int) -> None:
    one = kind(PLAIN, start_s=1.0)
    rows = [(0.1 * i, 300, 50) for i in range(20)]
    chosen = fleet((one, PREFILL, 1), (one, DECODE, 1), failures=[Failure(1.02, worker, 0.0)])
    cluster, summary = run(chosen, traffic(rows))
    assert summary.finished == 20
    assert max(cluster.records.attempts) == 2
    _, calm = run(fleet((one, PREFILL, 1), (one, DECODE, 1)), traffic(rows))
    assert summary.e2e.largest > calm.e2e.largest + 0.1


def test_nobody_left_is_a_failure_and_not_a_hang() -> None:
    one = kind(PLAIN)
    _, summary = run(fleet((one, BOTH, 1), failures=[Failure(1.0, 0)]), traffic([(0.0, 100, 500), (2.0, 100, 5)]))
    assert (summary.failed, summary.finished) == (2, 0)


def test_a_closed_loop_keeps_so_many_in_the_air() -> None:
    what = traffic([(0.0, 100, 10)] * 40)
    what.concurrency = 4
    cluster, summary = run(fleet((kind(PLAIN), BOTH, 1)), what, PolicyPlacer(fleet((kind(PLAIN), BOTH, 1)), ONE_POOL))
    assert summary.finished == 40
    ends = sorted(cluster.records.end_s)
    for request in range(40):
        arrival_s = cluster.records.arrival_s[request]
        ended = sum(end_s <= arrival_s for end_s in ends)
        assert request - ended < 4


def test_attainment_counts_each_limit() -> None:
    one = kind(PLAIN, budget_tokens=2049)
    rows = [(0.0, 16, 100), (0.2, 2048, 1), (0.6, 2048, 1), (1.0, 2048, 1)]
    # Three gaps of 215 ms in 99: more than one in a hundred.
    for slo, share in (
        (SloLimits(itl_s=0.1), 0.75),
        (SloLimits(itl_s=0.3), 1.0),
        (SloLimits(tpot_s=0.017), 1.0),
        (SloLimits(tpot_s=0.0105), 0.75),
        (SloLimits(ttft_s=0.1), 0.25),
    ):
        _, summary = run(fleet((one, BOTH, 1)), traffic(rows), slo=slo)
        assert summary.attainment == share, slo


def test_lost_request_of_the_dead_is_not_counted_twice() -> None:
    one = kind(PLAIN, start_s=0.5)
    chosen = fleet((one, BOTH, 2), failures=[Failure(0.3, 0, 0.2), Failure(0.6, 1, 0.2)])
    cluster, summary = run(chosen, traffic([(0.0, 100, 100), (0.0, 100, 100)]))
    assert summary.finished == 2
    sizes, counts = cluster.records.gaps.bins()
    # Every token but the first is the end of exactly one gap; the gap over a failure is not seen by the new worker.
    assert 190 <= counts.sum() <= 198
    assert sizes.min() == pytest.approx(0.01, rel=1e-3)


def test_workers_of_one_machine_are_slower_together() -> None:
    """A step takes 10 ms alone and 20 beside another; one answer of 40 tokens ends in the middle of one of 100."""
    slow = LinearStepModel(0.02, 0.0, 0.0, 2e-4)
    chosen = fleet((kind(PLAIN, busy_model=slow), BOTH, 2), hop_s=0.0)
    cluster, summary = run(chosen, traffic([(0.0, 1, 100), (0.0, 1, 40)]), TurnsPlacer(chosen))
    sizes, counts = cluster.records.gaps.bins()
    assert dict(zip(sizes.round(3).tolist(), counts.tolist(), strict=True)) == {
        0.01: pytest.approx(60, abs=1),
        0.02: pytest.approx(78, abs=1),
    }
    assert summary.e2e.largest == pytest.approx(0.010 + 39 * 0.020 + 60 * 0.010, abs=0.03)


@pytest.mark.parametrize("lent", [True, False])
def test_placement_counts_with_cores_that_are_lent(lent: bool) -> None:
    """The second prompt is in time behind the first one where both take half the time; else decode has to read it."""
    half = LinearStepModel(0.005, 0.0, 0.0, 0.5e-4)
    each = kind(PLAIN, spare_model=half if lent else None)
    chosen = fleet((each, PREFILL, 1), (each, DECODE, 1), hop_s=0.0, kv_bytes_per_token=1.0)
    placer = Watched(PolicyPlacer(chosen, ALL_WAYS, slo=Slo(0.4, 0.05)))
    run(chosen, traffic([(0.0, 3000, 2), (0.03, 2000, 2)]), placer)
    assert [where.prefill is not None for where in placer.placed] == [True, lent]


def test_a_worker_is_held_to_the_tightest_class_of_its_requests() -> None:
    chosen = fleet((kind(PLAIN), BOTH, 1), hop_s=0.0)
    chat, document = Asked(Slo(0.2, 0.02), 5), Asked(Slo(10.0, 1.0), 1)
    what = traffic([(0.0, 100, 50), (0.1, 100, 5), (1.0, 100, 5)])
    what.asked = [document, chat, document]
    placer = Watched(PolicyPlacer(chosen, ONE_POOL, slo=Slo(7.0, 7.0)))
    cluster, _ = run(chosen, what, placer)
    assert placer.asked == what.asked
    (worker,) = cluster.workers
    assert [slo for slo, count in worker.slos.items() if count] == []
    assert worker.snapshot(9.0).slo == Slo(7.0, 7.0)
    assert placer.slos == [Slo(7.0, 7.0), document.slo, Slo(7.0, 7.0)]
    worker.take(document.slo)
    worker.take(chat.slo)
    worker.engine.changed = True
    assert worker.snapshot(9.0).slo == chat.slo
