"""A quick look at a configuration: queueing formulas instead of events, microseconds instead of seconds.

Prefill is a queue of several servers with general service times, decode a batch that Little's law sizes. Good enough to
throw away what cannot be good; what is left is simulated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from twostroke.measures import TAIL, SloLimits
from twostroke.policy.step_model import StepBatch
from twostroke.sim.fleet import WorkerKind
from twostroke.sim.planner.space import Config, kind
from twostroke.sim.replica import label
from twostroke.sim.traffic import Traffic

_SAMPLES = 24
_ROUNDS = 12
_ALIKE = 2


@dataclass(frozen=True, slots=True)
class Load:
    """What traffic comes down to. prompts: sampled prompt tokens that no cache has, in order of size.

    rate: requests per second in a busy minute (the 90th percentile of minutes). arrival_scv: squared coefficient of
    variation of the gaps between arrivals.
    """

    rate: float
    arrival_scv: float
    prompts: tuple[float, ...]
    context_tokens: float
    output_tokens: float

    @classmethod
    def of(cls, traffic: Traffic) -> Load:
        """Of an open loop; of a closed one the rate is unknown and taken as its concurrency per 10 s."""
        prompts = np.asarray(traffic.prompt_tokens, dtype=float)
        outputs = np.asarray(traffic.output_tokens, dtype=float)
        seen = _unseen_share(traffic)
        sampled = np.quantile(prompts, (np.arange(_SAMPLES) + 0.5) / _SAMPLES) * seen
        weighted = float((prompts * outputs).sum() / outputs.sum()) + float(outputs.mean()) / 2
        if traffic.concurrency or traffic.span_s <= 0:
            rate, scv = max(traffic.concurrency, 1) / 10, 1.0
        else:
            times = np.asarray(traffic.arrival_s)
            width_s = min(60.0, max(traffic.span_s / 10, 1.0))
            counts = np.bincount((times / width_s).astype(int))
            whole = counts[:-1] if len(counts) > 1 else counts
            rate = float(np.quantile(whole, 0.9)) / width_s
            gaps = np.diff(times)
            scv = min(4.0, float(gaps.var() / gaps.mean() ** 2)) if len(gaps) > 2 and gaps.mean() > 0 else 1.0
        return cls(rate, scv, tuple(np.maximum(sampled, 1.0)), weighted, float(outputs.mean()))


def _unseen_share(traffic: Traffic) -> float:
    """Of prompt tokens, those that no endless shared prefix cache would have."""
    if not traffic.hashes:
        return 1.0
    seen: set[int] = set()
    hits = total = 0
    for prompt, keys in zip(traffic.prompt_tokens, traffic.hashes, strict=True):
        total += prompt
        for key in keys:
            if key not in seen:
                break
            hits += traffic.unit_tokens
        seen.update(keys)
    return 1 - hits / total


@dataclass(frozen=True, slots=True)
class Screened:
    """What the formulas say. attainment: share of requests that meet the SLO; load: busiest pool's utilisation."""

    config: Config
    attainment: float
    load: float
    ttft_s: float
    tpot_s: float
    strain: float
    """The worst of mean times over their limits."""

    @property
    def dollars_per_hour(self) -> float:
        """Of the configuration."""
        return self.config.dollars_per_hour


@dataclass
class Screener:
    """Screens configurations for one load and SLO; what is common to many is computed once."""

    load: Load
    slo: SloLimits
    _prefill: dict[tuple[int, int], tuple[np.ndarray, float, float]] = field(default_factory=dict)

    @cached_property
    def _prompts(self) -> np.ndarray:
        return np.asarray(self.load.prompts)

    def screen(self, config: Config) -> Screened:
        """One configuration."""
        writer = kind(config.decode_spec)
        assert writer is not None
        if not config.two_pools:
            return self._one_pool(config, writer.kind)
        reader = kind(config.prefill_spec)
        assert reader is not None
        services, mean_s, scv = self._services(reader.kind)
        wait_s, chance, load = _queue(self.load.rate, mean_s, scv, self.load.arrival_scv, config.prefill)
        in_time = self._in_time(services, wait_s, chance)
        batch, tpot_s, decode_load = self._batch(writer.kind, config.decode, 0.0)
        fast = self._fast(writer.kind, batch, tpot_s) if decode_load < 1 else 0.0
        attainment = in_time * fast if load < 1 else 0.0
        ttft_s = float(services.mean()) + chance * wait_s
        strain = self._strain(ttft_s, tpot_s, tpot_s)
        return Screened(config, attainment, max(load, decode_load), ttft_s, tpot_s, strain)

    def _one_pool(self, config: Config, own: WorkerKind) -> Screened:
        services, mean_s, scv = self._services(own)
        busy = self.load.rate / config.both * mean_s
        if busy >= 0.98:
            return Screened(config, 0.0, busy, math.inf, math.inf, math.inf)
        batch, tpot_s, decode_load = self._batch(own, config.both, busy)
        alone_s = tpot_s * (1 - busy)
        chunks = np.ceil(self._prompts / own.limits.budget_tokens)
        mixed = services + chunks * alone_s
        wait_s, chance, load = _queue(self.load.rate, float(mixed.mean()), scv, self.load.arrival_scv, config.both)
        in_time = self._in_time(mixed, wait_s, chance)
        fast = self._fast(own, batch, tpot_s) if decode_load < 1 and load < 1 else 0.0
        if fast and self.slo.itl_s:
            fast *= self._unstalled(own, config.both, services, chunks, tpot_s, alone_s)
        ttft_s = float(mixed.mean()) + chance * wait_s
        strain = self._strain(ttft_s, tpot_s, float((services / chunks).mean()) + alone_s)
        return Screened(config, in_time * fast, max(load, decode_load), ttft_s, tpot_s, strain)

    def _strain(self, ttft_s: float, tpot_s: float, gap_s: float) -> float:
        slo = self.slo
        pairs = ((ttft_s, slo.ttft_s), (tpot_s, slo.tpot_s), (gap_s, slo.itl_s))
        return max((value / limit for value, limit in pairs if limit), default=0.0)

    def _services(self, own: WorkerKind) -> tuple[np.ndarray, float, float]:
        """(prefill times of the sampled prompts, their mean, their squared coefficient of variation)."""
        key = (id(own.limits.model), own.limits.budget_tokens)
        if key not in self._prefill:
            times = np.array([prefill_s(own, prompt) for prompt in self.load.prompts])
            mean_s = float(times.mean())
            self._prefill[key] = (times, mean_s, float(times.var()) / mean_s**2)
        return self._prefill[key]

    def _in_time(self, services: np.ndarray, wait_s: float, chance: float) -> float:
        if not self.slo.ttft_s:
            return 1.0
        left = self.slo.ttft_s - services
        late = chance * np.exp(-np.maximum(left, 0) / max(wait_s, 1e-9))
        return float(np.where(left > 0, 1 - late, 0.0).mean())

    def _batch(self, own: WorkerKind, workers: int, busy: float) -> tuple[float, float, float]:
        """(mean batch of a worker, time per token, utilisation): Little's law at a fixed point."""
        limits, load = own.limits, self.load
        tokens_per_s = load.rate / workers * load.output_tokens
        batch, tpot_s = 1.0, 0.0
        for _ in range(_ROUNDS):
            count = max(1, round(batch))
            base_s, slope_s = limits.terms.get(count) or limits.decode_terms(count)
            tpot_s = (base_s + slope_s * batch * load.context_tokens) / (1 - busy)
            following = tokens_per_s * tpot_s
            if following > 4 * limits.sequences:
                return following, tpot_s, math.inf
            batch = (batch + following) / 2
        room = min(limits.sequences, limits.blocks * limits.block_tokens / load.context_tokens)
        return batch, tpot_s, (batch + 2 * math.sqrt(batch)) / room

    def _fast(self, own: WorkerKind, batch: float, tpot_s: float) -> float:
        """Share of answers whose time per token meets the SLO, when batches are about Poisson."""
        limit_s = min(filter(None, (self.slo.tpot_s, self.slo.itl_s)), default=0.0)
        if not limit_s:
            return 1.0
        more = batch + math.sqrt(batch)
        base_s, slope_s = own.limits.decode_terms(max(1, round(batch)))
        high_s, high_slope_s = own.limits.decode_terms(max(1, round(more)))
        now_s = base_s + slope_s * batch * self.load.context_tokens
        spread_s = (high_s + high_slope_s * more * self.load.context_tokens - now_s) / now_s * tpot_s
        return 0.5 * (1 + math.erf((limit_s - tpot_s) / max(spread_s, 1e-9) / math.sqrt(2)))

    def _unstalled(
        self, own: WorkerKind, workers: int, services: np.ndarray, chunks: np.ndarray, tpot_s: float, alone_s: float
    ) -> float:
        """Share of answers of which few enough gaps hold a chunk that makes them too long."""
        long = services / chunks + alone_s > self.slo.itl_s
        if not long.any():
            return 1.0
        rate = self.load.rate / workers * float((chunks * long).mean())
        mean = rate * tpot_s * self.load.output_tokens
        allowed = max(1, math.floor(TAIL * (self.load.output_tokens - 1)))
        term = total = math.exp(-min(mean, 700))
        for count in range(1, allowed + 1):
            term *= mean / count
            total += term
        return min(1.0, total)


def prefill_s(own: WorkerKind, prompt_tokens: float) -> float:
    """Seconds to compute a prompt alone, in chunks."""
    budget = own.limits.budget_tokens
    chunks = math.ceil(prompt_tokens / budget)
    each = prompt_tokens / chunks
    pairs = prompt_tokens * prompt_tokens / 2 / chunks
    return chunks * own.limits.model.step_s(StepBatch(0, 0, round(each), pairs, 1))


def _queue(rate: float, mean_s: float, scv: float, arrival_scv: float, servers: int) -> tuple[float, float, float]:
    """(mean wait of those that wait, chance to wait, utilisation): Erlang C, corrected for both variations."""
    offered = rate * mean_s
    load = offered / servers
    if load >= 1:
        return math.inf, 1.0, load
    blocked = 1.0
    for count in range(1, servers + 1):
        blocked = offered * blocked / (count + offered * blocked)
    chance = blocked / (1 - load + load * blocked)
    return mean_s / (servers * (1 - load)) * (arrival_scv + scv) / 2, chance, load


def best(found: Sequence[Screened], target: float, count: int, least: int) -> list[Screened]:
    """The most promising ones, no two that differ in caps alone more than _ALIKE times.

    least: how many of each shape, one pool and two, are kept as far as there are so many.
    """
    alike: dict[tuple[object, ...], int] = {}
    spread: list[Screened] = []
    for each in sorted(found, key=lambda each: rank(each, target)):
        config = each.config
        key = (config.prefill, config.decode, config.both, label(config.prefill_spec), label(config.decode_spec))
        alike[key] = alike.get(key, 0) + 1
        if alike[key] <= _ALIKE:
            spread.append(each)
    kept = [each for each in spread if each.config.two_pools][:least]
    kept += [each for each in spread if not each.config.two_pools][:least]
    chosen = {id(each) for each in kept}
    kept += [each for each in spread if id(each) not in chosen][: max(0, count - len(kept))]
    return kept[:count]


def rank(each: Screened, target: float) -> tuple[float, ...]:
    """Those that meet the target by cost, then the others by how near they come."""
    if each.attainment >= target:
        return 0.0, each.dollars_per_hour, -each.attainment
    return 1.0, -round(each.attainment, 1), each.strain
