"""Placement skips what cannot be the best, and keeps what it worked out for a worker: neither may change a plan."""

import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from twostroke.policy.cost import Costing
from twostroke.policy.placement import COST_DIGITS, place
from twostroke.policy.plan import Estimate, Limits, Option, Options, Weights
from twostroke.policy.snapshot import ClusterSnapshot, LinkSnapshot, PlacementRequest, Slo, WorkerSnapshot
from twostroke.policy.spare import share_cores
from twostroke.policy.step_model import LinearStepModel
from twostroke.policy.terms import Kv, Reading

MODELS = (
    LinearStepModel(0.0146, 3e-5, 3.1e-8, 6.15e-5, 2.2e-9, 4e-3),
    LinearStepModel(0.06, 4e-3, 2e-6, 4e-3, 8e-7),
)
SLOS = (Slo(), Slo(2.0, 0.05), Slo(10.0, 0.05), Slo(0.3, 0.02))
EVERYBODY = Limits(shortlist=64)
"""Nobody is left out by the quick look."""
SETTINGS = {
    "as it comes": (Weights(), EVERYBODY),
    "no answer is lost": (Weights(breach=2.0, lost=0.0, tail=0.05), EVERYBODY),
    "short windows": (Weights(prompt_share=0.1), replace(EVERYBODY, prefill_window_tokens=4000, long_prompt_s=0.5)),
}


class Dice(random.Random):
    """Clusters and requests, many of them at the edges."""

    def worker(self, number: int, kind: str, model: LinearStepModel) -> WorkerSnapshot:
        running = self.choice((0, 0, 1, 3, 30, 100)) if kind != "p" else self.choice((0, 0, 0, 5))
        pending = self.choice((0, 0, 10, 700, 5000, 60_000)) if kind != "d" else self.choice((0, 0, 0, 900))
        return WorkerSnapshot(
            f"w{number}",
            kind in "pb",
            kind in "db",
            pending_prompt_tokens=pending,
            pending_prompts=self.choice((0, 1, 2)) if pending else 0,
            running_sequences=running,
            context_tokens=running * self.choice((1000, 1000, self.randrange(1, 8000))),
            free_blocks=self.choice((0, 5, 500, 20_000, 20_000)),
            block_size_tokens=16,
            total_blocks=self.choice((0, 1000, 20_000)),
            promised_long_blocks=self.choice((0, 0, 100)),
            step_budget_tokens=self.choice((512, 2048, 8192)),
            max_sequences=self.choice((0, 0, 30, 256)),
            slo=self.choice(SLOS),
            step_model=model,
            spare_share=self.choice((1.0, 1.0, 0.6)),
            computes=self.random() < 0.5,
        )

    def cluster(self, writers: int) -> ClusterSnapshot:
        kinds = ["p"] * self.randrange(1, 6) + [self.choice("db") for _ in range(writers)]
        model = self.choice(MODELS)
        workers = [self.worker(n, k, model if self.random() < 0.8 else MODELS[0]) for n, k in enumerate(kinds)]
        pairs = [(one.worker, other.worker) for one in workers for other in workers]
        lenders = {one: {other} for one, other in pairs if self.random() < 0.2}
        few = self.choice((0.0, 0.0, 0.3))
        links = {pair: LinkSnapshot(self.choice((1e8, 1e11)), 0.001, self.random() < 0.9) for pair in pairs}
        return ClusterSnapshot(
            share_cores(workers, lenders if self.random() < 0.3 else {}),
            frozenset(pair for pair in pairs if self.random() < few),
            links if self.random() < 0.2 else {},
            LinkSnapshot(self.choice((1e8, 1e10)), self.choice((0.0, 0.005))),
            kv_bytes_per_token=self.choice((0, 131_072)),
            streams_kv=self.random() < 0.5,
        )

    def request(self, names: list[str]) -> PlacementRequest:
        return PlacementRequest(
            self.choice((1, 10, 300, 5000, 60_000)),
            frozenset(self.sample(names, min(len(names), self.choice((0, 0, 0, 1, 3))))),
            expected_output_tokens=self.choice((1, 2, 3, 50, 128, 1000)),
            cached_tokens={name: self.choice((0, 16, 512, 5000)) for name in names if self.random() < 0.3},
            slo=self.choice(SLOS),
            deadline_s=self.choice((None, None, 1.0, 30.0)),
        )


def rank(estimate: Estimate) -> tuple[object, ...]:
    cost = round(estimate.cost + estimate.crowding, COST_DIGITS)
    return estimate.avoided, not estimate.fits, cost, estimate.prefill, estimate.decode


def all_ways(costing: Costing, snapshot: ClusterSnapshot) -> Iterator[Estimate]:
    """Every one that could be taken, costed in full and from the beginning."""
    workers = [replace(worker) for worker in snapshot.workers]
    kv = Kv(snapshot.kv_bytes_per_token, snapshot.streams_kv)

    def pairs(option: Option, readings: list[Reading]) -> Iterator[Estimate]:
        for reading in readings:
            for writer in workers:
                pair = (reading.worker.worker, writer.worker)
                link = snapshot.links.get(pair, snapshot.default_link)
                allowed = writer.writes_answers and writer is not reading.worker and pair not in snapshot.refused_pairs
                if allowed and link.healthy:
                    yield costing.estimate(option, reading, costing.writing(writer), link, kv)

    yield from pairs(Option.P_THEN_D, [costing.reading(worker) for worker in workers if worker.reads_prompts])
    for worker in workers:
        option = Option.D_ALONE if worker.writes_answers else Option.P_ALONE
        yield costing.alone(option, costing.reading(worker), costing.writing(worker))
    lenders = [worker for worker in workers if worker.writes_answers and costing.lent_chunk_tokens(worker)]
    lent = [costing.reading(worker, costing.lent_chunk_tokens(worker)) for worker in lenders]
    for reading in lent:
        yield costing.alone(Option.LENT_DECODER, reading, costing.writing(reading.worker))
    yield from pairs(Option.LENT_DECODER, lent)


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("most_writers", [2, 7], ids=["also lent", "many"])
def test_the_best_of_every_way_is_the_best_of_all(setting: tuple[Weights, Limits], most_writers: int) -> None:
    weights, limits = setting
    dice = Dice(most_writers)
    # Of more than two decode workers not all are looked at for a lent decoder's answer.
    options = Options(lent_decoder=most_writers <= 2, wait=limits.prefill_window_tokens > 0, refuse=False)
    taken = set()
    for _ in range(300):
        snapshot = dice.cluster(dice.randrange(1, most_writers + 1))
        names = [worker.worker for worker in snapshot.workers]
        for _ in range(3):
            request = dice.request(names)
            best: dict[Option, Estimate] = {}
            for way in all_ways(Costing(request, weights, limits, options), snapshot):
                if way.option is not Option.LENT_DECODER or options.lent_decoder:
                    best[way.option] = min(best.get(way.option, way), way, key=rank)
            plan = place(request, snapshot, options, weights=weights, limits=limits)
            assert list(plan.why) == sorted(best.values(), key=rank)
            quick = place(request, snapshot, options, weights=weights, limits=limits, explain=False)
            assert (quick.option, quick.chosen, quick.chunk_tokens) == (plan.option, plan.chosen, plan.chunk_tokens)
            taken.add(plan.why[0].option)
    assert taken >= {Option.P_THEN_D, Option.D_ALONE, Option.P_ALONE}


def test_a_changed_worker_is_costed_anew() -> None:
    dice = Dice(3)
    workers = [dice.worker(0, "p", MODELS[0]), dice.worker(1, "d", MODELS[0])]
    request = PlacementRequest(5000)
    first = place(request, ClusterSnapshot(workers)).chosen
    busier = [replace(worker, pending_prompt_tokens=90_000, pending_prompts=30) for worker in workers]
    second = place(request, ClusterSnapshot(busier)).chosen
    assert first is not None
    assert second is not None
    assert second.queue_s > first.queue_s + 1


def test_placing_needs_no_numpy() -> None:
    code = (
        "import sys, twostroke.policy.placement, twostroke.policy.inflight, twostroke.policy.admission;"
        "sys.exit('numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0
