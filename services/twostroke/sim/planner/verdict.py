"""One pool or two? How sure is that, and what would turn it round?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from twostroke.measures import SloLimits
from twostroke.sim.planner.errors import Interval
from twostroke.sim.planner.search import Candidate, Found, Lab, Trial
from twostroke.sim.summary import Summary

NEAR = 0.05
"""Capacities that differ by less are equal: then the simpler fleet, one pool, is the answer."""
MOST_WORTH = 10.0
"""By how much one shape is said to be better at most; a pool that holds no load at all would give infinity."""
FACTORS = (1.25, 1.5, 2.0, 3.0, 4.0)


@dataclass(frozen=True, slots=True)
class Flip:
    """The nearest change of one thing that reverses the answer. None: none within a factor of 4 does."""

    what: str
    value: str | None
    winner: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer. answer: "two pools", "one pool" or "undecided".

    ratio: the two-pool fleet's requests per second and dollar over the one pool's, each at its capacity; ratio_low,
    ratio_high: over the corners of the prediction's 90 % interval. capacity: highest rate that meets the target, as a
    factor of the asked one.
    """

    answer: str
    chosen: Candidate
    two: Candidate | None
    one: Candidate | None
    two_capacity: float
    one_capacity: float
    ratio: float
    ratio_low: float
    ratio_high: float
    meets: bool
    corners: tuple[Summary, ...] = ()
    """The chosen fleet's own results at those corners."""
    flips: tuple[Flip, ...] = ()


def judge(
    lab: Lab, found: Found, prefill: Interval, decode: Interval, *, most: int, with_flips: bool = True
) -> Verdict:
    """Compares the best two-pool fleet with the best one-pool fleet, tuned alike, over errors and changes."""
    two, one = found.first(two_pools=True), found.first(two_pools=False)
    target = lab.question.target
    if two is None or one is None:
        chosen = found.candidates[0]
        answer = "two pools" if chosen.config.two_pools else "one pool"
        capacity = capacities(lab, [chosen], most)[0]
        alone = (capacity, 0.0) if two else (0.0, capacity)
        return Verdict(answer, chosen, two, one, *alone, 0.0, 0.0, 0.0, chosen.found.attainment >= target)
    pair = [two, one]
    two_capacity, one_capacity = capacities(lab, pair, most)
    speeds = [(p, d) for p in (prefill.low, prefill.high) for d in (decode.low, decode.high)]
    ratios = [_worth(pair, two_capacity, one_capacity)]
    ratios += [_worth(pair, *capacities(lab, pair, most, speed)) for speed in speeds]
    ratio, low, high = ratios[0], min(ratios), max(ratios)
    if low > 1 + NEAR:
        answer = "two pools"
    elif high < 1 + NEAR:
        answer = "one pool"
    else:
        answer = "undecided"
    better = two if ratio > 1 + NEAR else one
    meets = {id(each): each.found.attainment >= target for each in pair}
    if answer == "undecided" and meets[id(two)] != meets[id(one)]:
        better = two if meets[id(two)] else one
    corners = lab.run([Trial(better.config, lab.question.slo, most=most, speed=speed) for speed in speeds])
    flips = find_flips(lab, two, _equal(two, one), most) if with_flips else ()
    return Verdict(
        answer, better, two, one, two_capacity, one_capacity, ratio, low, high, meets[id(better)], tuple(corners), flips
    )


def _worth(pair: Sequence[Candidate], two: float, one: float) -> float:
    """Two pools' capacity per dollar over one pool's; both at no capacity are equal."""
    two_cost, one_cost = (each.config.dollars_per_hour or each.config.gpus for each in pair)
    if one <= 0:
        return 1.0 if two <= 0 else MOST_WORTH
    return min(MOST_WORTH, two / two_cost / (one / one_cost))


def capacities(
    lab: Lab, candidates: Sequence[Candidate], most: int, speed: tuple[float, float] = (1.0, 1.0), rounds: int = 6
) -> list[float]:
    """For each the highest factor of the rate at which it meets the target; 0 when not even an eighth does."""
    low = [0.0] * len(candidates)
    high = [0.0] * len(candidates)
    at = [1.0] * len(candidates)
    for _ in range(rounds):
        trials = [
            Trial(each.config, lab.question.slo, factor, most, speed)
            for each, factor in zip(candidates, at, strict=True)
        ]
        for index, summary in enumerate(lab.run(trials)):
            if summary.attainment >= lab.question.target:
                low[index] = at[index]
            else:
                high[index] = at[index]
            if not high[index]:
                at[index] = min(8.0, 2 * at[index])
            elif not low[index]:
                at[index] = max(0.125, at[index] / 2)
            else:
                at[index] = (low[index] * high[index]) ** 0.5
    return low


def _equal(two: Candidate, one: Candidate) -> Candidate:
    """The one pool with as many GPUs as the two have, as far as its replicas allow."""
    spec = one.config.decode_spec
    replicas = max(1, two.config.gpus // (spec.tp * spec.pp * spec.dp))
    return replace(one, config=replace(one.config, both=replicas))


def find_flips(lab: Lab, two: Candidate, one: Candidate, most: int) -> tuple[Flip, ...]:
    """The nearest change of each thing that turns round which of two fleets of equal size is better."""
    first, second = lab.run([Trial(each.config, lab.question.slo, most=most) for each in (two, one)])
    two_wins = _two_win(first, second, lab.question.target)
    slo = lab.question.slo
    traffic = lab.question.traffic
    rate = len(traffic) / traffic.span_s if traffic.span_s else 0.0
    prompt = sum(traffic.prompt_tokens) / len(traffic)
    kinds: list[tuple[str, float, str]] = [
        ("arrival rate", rate, "{:.3g} requests/s"),
        ("prompt length", prompt, "{:,.0f} tokens in the mean"),
        ("KV link", _link_gbps(lab, two), "{:,.0f} Gbit/s per worker"),
        ("step budget of one pool", float(one.config.decode_spec.budget_tokens), "{:,.0f} tokens"),
    ]
    kinds += [
        (f"{name} limit", value * 1e3, "{:,.0f} ms")
        for name, value in (("TTFT", slo.ttft_s), ("ITL", slo.itl_s), ("TPOT", slo.tpot_s))
        if value
    ]
    flips = []
    for what, now, text in kinds:
        flips.append(_flip(lab, two, one, two_wins, most, what, now, text))
    return tuple(flips)


def _link_gbps(lab: Lab, two: Candidate) -> float:
    fleet = two.config.fleet(lab.question.links).make(lab.question.traffic)
    return fleet.link.bytes_per_s * 8 / 1e9


def _flip(
    lab: Lab, two: Candidate, one: Candidate, two_wins: bool, most: int, what: str, now: float, text: str
) -> Flip:
    for factor in FACTORS:
        changes = (factor, 1 / factor)
        results = lab.run([_changed(each, what, by, lab.question.slo, most) for by in changes for each in (two, one)])
        for index, by in enumerate(changes):
            first, second = results[2 * index], results[2 * index + 1]
            if _two_win(first, second, lab.question.target) != two_wins:
                return Flip(what, text.format(now * by), "one pool" if two_wins else "two pools")
    return Flip(what, None)


def _changed(each: Candidate, what: str, by: float, slo: SloLimits, most: int) -> Trial:
    trial = Trial(each.config, slo, most=most)
    if what == "arrival rate":
        return replace(trial, factor=by)
    if what == "prompt length":
        return replace(trial, prompt_factor=by)
    if what == "KV link":
        return replace(trial, link_factor=by)
    if what.startswith("step budget"):
        if each.config.two_pools:
            return trial
        budget = max(16, round(each.config.decode_spec.budget_tokens * by))
        spec = replace(each.config.decode_spec, budget_tokens=budget)
        return replace(trial, config=replace(each.config, decode_spec=spec, prefill_spec=spec))
    name = what.split()[0].lower() + "_s"
    return replace(trial, slo=replace(slo, **{name: getattr(slo, name) * by}))


def _two_win(two: Summary, one: Summary, target: float) -> bool:
    """Whether two pools are the better of two fleets of equal size; where both are as good, one pool is simpler."""
    two_meets, one_meets = two.attainment >= target, one.attainment >= target
    if two_meets or one_meets:
        return two_meets and not one_meets
    return two.goodput > (1 + NEAR) * one.goodput
