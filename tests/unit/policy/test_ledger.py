"""The books: a hand-off's source hears of its end once, whatever happens, and the peers of a life hear of its end."""

from __future__ import annotations

import random

import pytest

from twostroke.policy.ledger import Action, DropPeer, HandoffState, Ledger, Life, Release

P, P_AGAIN = Life("p:1", "prefill-0", "e1"), Life("p:1", "prefill-0", "e2")
D, E = Life("d:1", "decode-0", "e3"), Life("e:1", "decode-1", "e4")


def counts(ledger: Ledger) -> dict[str, int]:
    return {state.value: count for state, count in ledger.counts().items() if count}


def test_the_usual_way() -> None:
    ledger = Ledger()
    ledger.offer("h", P)
    assert counts(ledger) == {"offered": 1}
    ledger.receive("h", D)
    assert counts(ledger) == {"receiving": 1}
    assert ledger.received("h") == (Release(P, "h"),)
    assert counts(ledger) == {"received": 1}
    assert ledger.close("h") == (), "it was released when it had been read"
    assert counts(ledger) == {"released": 1}
    assert ledger.state("h") is None


@pytest.mark.parametrize("received", [False, True])
def test_a_handoff_is_released_once_whenever_it_ends(received: bool) -> None:
    """O-25: nobody waits for a time-out that the router can spare."""
    ledger = Ledger()
    ledger.offer("h", P)
    ledger.receive("h", D)
    said = [*(ledger.received("h") if received else ()), *ledger.close("h"), *ledger.close("h"), *ledger.received("h")]
    assert said == [Release(P, "h")]


def test_another_decode_worker_may_take_it_while_the_source_holds_it() -> None:
    ledger = Ledger()
    ledger.offer("h", P)
    ledger.receive("h", D)
    ledger.refused("h")
    assert counts(ledger) == {"offered": 1}
    ledger.receive("h", E)
    ledger.refused("unknown")
    assert ledger.state("h") is HandoffState.RECEIVING
    assert ledger.received("h") == (Release(P, "h"),)
    ledger.refused("h")
    assert ledger.state("h") is HandoffState.RECEIVED, "a cancel after it was read brings nothing back"


def test_an_answer_that_ended_with_its_first_token_leaves_nothing() -> None:
    ledger = Ledger()
    ledger.offer("h", P)
    ledger.absent("h")
    assert ledger.close("h") == ()
    assert counts(ledger) == {}


def test_the_end_of_a_source_loses_what_was_not_read() -> None:
    ledger = Ledger()
    for name in ("offered", "receiving", "received", "of another"):
        ledger.offer(name, P_AGAIN if name == "of another" else P)
    for name in ("receiving", "received", "of another"):
        ledger.receive(name, D)
    ledger.received("received")
    assert ledger.ended(P) == [DropPeer(D, P)]
    assert counts(ledger) == {"lost": 2, "received": 1, "receiving": 1}
    ledger.receive("offered", E)
    assert ledger.state("offered") is HandoffState.LOST, "nothing can be fetched of it any more"
    assert ledger.received("receiving") == ()
    assert ledger.close("received") == ()
    assert ledger.close("receiving") == (Release(P, "receiving"),), "should the life not be over, it holds it still"
    assert counts(ledger) == {"lost": 2, "released": 1, "receiving": 1}


def test_the_end_of_a_destination_puts_it_on_offer_again() -> None:
    ledger = Ledger()
    ledger.offer("h", P)
    ledger.receive("h", D)
    assert ledger.ended(D) == [DropPeer(P, D)]
    assert counts(ledger) == {"offered": 1}
    ledger.receive("h", E)
    assert ledger.ended(P) == [DropPeer(E, P)], "the peer that ended before is not told"


def test_every_peer_is_told_once() -> None:
    ledger = Ledger()
    for number, destination in enumerate((D, E, D)):
        ledger.offer(f"h{number}", P)
        ledger.receive(f"h{number}", destination)
        ledger.close(f"h{number}")
    assert ledger.ended(P) == [DropPeer(D, P), DropPeer(E, P)], "also after the hand-offs are over"
    assert ledger.ended(P) == []
    assert ledger.ended(P_AGAIN) == []


@pytest.mark.parametrize("seed", range(20))
def test_at_random_every_offer_is_released_exactly_once(seed: int) -> None:
    chance = random.Random(seed)
    ledger, offered, said = Ledger(), [], []
    for number in range(300):
        handoff_id = f"h{chance.randrange(number + 1)}"
        step = chance.randrange(7)
        actions: list[Action] = []
        match step:
            case 0 | 1:
                offered.append(f"h{number}")
                ledger.offer(f"h{number}", chance.choice([P, P_AGAIN]))
            case 2:
                ledger.receive(handoff_id, chance.choice([D, E]))
            case 3:
                actions = list(ledger.received(handoff_id))
            case 4:
                ledger.refused(handoff_id)
            case 5:
                actions = list(ledger.close(handoff_id))
            case 6 if chance.random() < 0.1:
                ledger.ended(chance.choice([P, D]))
        said += [action for action in actions if isinstance(action, Release)]
    for handoff_id in offered:
        said += [action for action in ledger.close(handoff_id) if isinstance(action, Release)]
    assert sorted(release.handoff_id for release in said) == sorted(offered)
    assert set(counts(ledger)) <= {"released", "lost"}
    assert sum(counts(ledger).values()) == len(offered)
