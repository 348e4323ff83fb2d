"""A decision in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from twostroke.policy.plan import Estimate, Option, Plan


def explain(plan: Plan, names: Mapping[str, str] | None = None) -> str:
    """What was decided, and the numbers of every way that was looked at, cheapest first. One line a way and one more
    for its times. names: of workers, by their keys."""
    names = names or {}
    return "\n".join([_decision(plan, names), *(line for each in plan.why for line in _way(each, plan, names))])


def summary(plan: Plan) -> str:
    """The costs of all ways in one line, cheapest first, such as "d_alone 0.52, p_then_d 1.38"."""
    return ", ".join(f"{estimate.option.value} {estimate.cost:.3g}" for estimate in plan.why)


def _decision(plan: Plan, names: Mapping[str, str]) -> str:
    if plan.option is Option.WAIT:
        return "wait: nobody has room"
    if plan.option is Option.REFUSE:
        when = "waiting does not help" if plan.retry_after_s is None else f"retry after {plan.retry_after_s:.1f} s"
        return f"refuse: no way meets the deadline; {when}"
    decode = names.get(plan.decode, plan.decode)
    if plan.prefill is None:
        return f"{plan.option.value}: {decode} reads and writes"
    return f"{plan.option.value}: {names.get(plan.prefill, plan.prefill)} reads, {decode} writes"


def _way(estimate: Estimate, plan: Plan, names: Mapping[str, str]) -> Iterator[str]:
    prefill, decode = (names.get(each, each) for each in (estimate.prefill, estimate.decode))
    who = decode if estimate.prefill == estimate.decode else f"{prefill} -> {decode}"
    notes = ", no room" * (not estimate.fits) + ", failed there before" * estimate.avoided
    yield (
        f"{'*' if estimate is plan.chosen else ' '} {estimate.option.value:<12} {who:<24} cost {estimate.cost:.3f} = "
        f"own {estimate.own_cost:.3f} + disturbed {estimate.disturbed_cost:.3f}{notes}"
    )
    yield (
        f"    first token {estimate.ttft_s:.3f} s (queue {estimate.queue_s:.3f}, prefill {estimate.prefill_s:.3f} in "
        f"chunks of {estimate.chunk_tokens}, {estimate.cached_tokens} tokens cached), between tokens "
        f"{estimate.itl_s * 1e3:.1f} ms, hand-off {estimate.handoff_s * 1e3:.1f} ms for "
        f"{estimate.transferred_tokens} tokens, end {estimate.finish_s:.1f} s"
    )
