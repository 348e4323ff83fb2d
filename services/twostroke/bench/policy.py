"""What does a decision cost? `python -m twostroke.bench.policy`; writes build/bench/policy.json.

A cluster of 256 workers under load and prompts of 32k tokens: CPU time of a decision with its lookup in the prefix
index, and of the lookup alone; memory of a process that indexes a million blocks. No two decisions look up the same
prompt, and the index is far larger than a cache. Where index memory is measured the process has just begun.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import psutil

from twostroke.bench.command import command_line, finish, make_console
from twostroke.bench.record import Record
from twostroke.config import child_environment
from twostroke.policy.block_hash import block_hashes
from twostroke.policy.inflight import InFlight, Report
from twostroke.policy.kv_events import KvEvents, Stored
from twostroke.policy.perf_model import WorkerModel
from twostroke.policy.placement import place
from twostroke.policy.plan import ALL_WAYS, STRICT, Options
from twostroke.policy.prefix_index import PrefixIndex
from twostroke.policy.snapshot import ClusterSnapshot, LinkSnapshot, PlacementRequest, WorkerSnapshot
from twostroke.policy.step_model import LinearStepModel, StepBatch

WORKERS, READERS = 256, 96
BLOCK_TOKENS, PROMPT_TOKENS = 16, 32_768
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
BLOCKS = 1_000_000
SHARED_BLOCKS = 64
"""A system prompt of 1,024 tokens, which every worker holds."""
TURN_BLOCKS = 100
"""Blocks that a conversation adds, on average."""
MODEL = LinearStepModel(0.008, 1e-4, 3e-8, 6e-5, 2e-9)


class Filled:
    """An index of at least so many blocks, and prompts of which it knows the beginning."""

    def __init__(self, seed: int, long_prompts: int, blocks: int) -> None:
        self._rng = rng = random.Random(seed)  # noqa: S311
        self.index = PrefixIndex()
        self._sequences = [0] * WORKERS
        shared = self._blocks(SHARED_BLOCKS)
        for worker in range(WORKERS):
            self._store(worker, shared, None)
        self.prompts: list[list[int]] = []
        for _ in range(long_prompts):
            chain = self._blocks(PROMPT_BLOCKS - SHARED_BLOCKS)
            for worker in rng.sample(range(WORKERS), rng.randrange(1, 5)):
                self._store(worker, chain[: rng.randrange(len(chain))], shared[-1])
            self.prompts.append([*shared, *chain])
        while len(self.index) < blocks:
            self._store(rng.randrange(WORKERS), self._blocks(rng.randrange(1, 2 * TURN_BLOCKS)), shared[-1])

    def _blocks(self, count: int) -> list[int]:
        return [self._rng.getrandbits(64) for _ in range(count)]

    def _store(self, worker: int, blocks: list[int], parent: int | None) -> None:
        events = KvEvents("epoch", self._sequences[worker], (Stored(blocks, parent),))
        self.index.apply(f"w{worker}", events)
        self._sequences[worker] += 1


def loaded_cluster(rng: random.Random) -> InFlight:
    """256 workers, each with a step model of its own, all but idle."""
    inflight = InFlight()
    for number in range(WORKERS):
        name, reads = f"w{number}", number < READERS
        model = WorkerModel(replace(MODEL, per_prefill_token_s=MODEL.per_prefill_token_s * rng.uniform(0.9, 1.1)))
        facts = WorkerSnapshot(
            name,
            reads,
            not reads,
            block_size_tokens=BLOCK_TOKENS,
            total_blocks=20_000,
            step_budget_tokens=2048,
            max_sequences=256,
            step_model=model.model,
            prefill_token_s=model.prefill_token_s,
        )
        inflight.describe(facts)
        prompts, running = (rng.randrange(4), 0) if reads else (0, rng.randrange(60))
        inflight.reported(name, Report(prompts * 9000, prompts, 200 * (running + prompts), running), 0.0)
    return inflight


def times_us(work: Callable[[int], object], count: int) -> list[float]:
    """CPU time of every call, shortest first."""
    found = []
    gc.collect()
    gc.disable()
    try:
        for number in range(count):
            began_s = time.process_time()
            work(number)
            found.append(1e6 * (time.process_time() - began_s))
    finally:
        gc.enable()
    return sorted(found)


def decisions_us(filled: Filled, options: Options) -> list[float]:
    """Lookup, snapshots and decision, each request placed in flight before the next one comes."""
    rng = random.Random(5)  # noqa: S311
    inflight, names = loaded_cluster(rng), [f"w{number}" for number in range(WORKERS)]
    link = LinkSnapshot(bytes_per_s=40e9, latency_s=0.01)

    def decide(number: int) -> None:
        hits = filled.index.hits(filled.prompts[number])
        request = PlacementRequest(
            PROMPT_TOKENS,
            expected_output_tokens=300,
            cached_tokens={name: blocks * BLOCK_TOKENS for name, blocks in hits.items()},
            deadline_s=120.0,
        )
        snapshot = ClusterSnapshot(
            inflight.snapshots(names), default_link=link, kv_bytes_per_token=131_072, streams_kv=True
        )
        plan = place(request, snapshot, options)
        inflight.placed(f"r{number}", request, plan, number * 1e-3)
        if number >= 50:
            inflight.ended(f"r{number - 50}")

    return times_us(decide, len(filled.prompts))


def memory(blocks: int) -> None:
    """In a process of its own: prints what the index added to its resident memory."""
    gc.collect()
    before = psutil.Process().memory_info().rss
    filled = Filled(3, 0, blocks)
    gc.collect()
    added = psutil.Process().memory_info().rss - before
    print(json.dumps({"blocks": len(filled.index), "bytes": added, "estimate": filled.index.cost_bytes}))  # noqa: T201


def run(prompts: int, blocks: int, command: str) -> Record:
    """The whole benchmark."""
    record = Record("policy", command)
    filled = Filled(1, prompts, blocks)
    lookups = times_us(lambda number: filled.index.hits(filled.prompts[number]), prompts)
    _times(record, f"lookup of a prompt of {PROMPT_BLOCKS} blocks among {len(filled.index):,}", lookups)
    _goal(record, "lookup of a 32k-token prompt, CPU median", lookups, 200)
    for name, options in (("all ways open", ALL_WAYS), ("strict", STRICT)):
        found = decisions_us(filled, options)
        _times(record, f"decision among {WORKERS} workers with its lookup, {name}", found)
        if options is ALL_WAYS:
            _goal(record, "decision for 256 workers and a 32k-token prompt, CPU median", found, 1000)
            tail_us = found[int(0.99 * len(found))]
            record.check("the same, CPU p99", tail_us, "us", "< 1000", tail_us < 1000)
    rng = random.Random(2)  # noqa: S311
    tokens = [rng.randrange(100_000) for _ in range(PROMPT_TOKENS)]
    _times(record, "vLLM's block hashes of a 32k-token prompt", times_us(lambda _: block_hashes(tokens, 16), 20))
    model = WorkerModel(MODEL)
    batch = StepBatch(32, 60_000, 512, 1e6, 1)
    learned = times_us(lambda _: model.observe(batch, 0.05), 500)
    _times(record, "learning from a step", learned)
    done = subprocess.run(
        [sys.executable, "-m", "twostroke.bench.policy", "--memory", str(blocks)],
        capture_output=True,
        text=True,
        check=True,
        env=child_environment(),
    )
    found_memory = json.loads(done.stdout)
    mb = found_memory["bytes"] / 1e6
    record.row(what=f"memory of an index of {found_memory['blocks']:,} blocks", mb=mb)
    record.check("memory of an index of a million blocks", mb, "MB", "< 200", mb < 200)
    return record


def _times(record: Record, what: str, found_us: list[float]) -> None:
    record.row(what=what, median_us=found_us[len(found_us) // 2], p99_us=found_us[int(0.99 * len(found_us))])


def _goal(record: Record, name: str, found_us: list[float], goal_us: float) -> None:
    median_us = found_us[len(found_us) // 2]
    record.check(name, median_us, "us", f"< {goal_us:g}", median_us < goal_us)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=400, help="long prompts, each looked up and placed")
    parser.add_argument("--memory", type=int, default=0, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.memory:
        memory(flags.memory)
        return 0
    finish(run(flags.prompts, BLOCKS, command_line("policy")), make_console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
