"""What a source tells whom, and when it is over."""

import math
from collections.abc import Callable

import pytest

from twostroke.kv.digest import digest
from twostroke.kv.memory import Blocks, pieces
from twostroke.kv.source import CHUNK_TOKENS, DEVICE_POLL_S, Source
from twostroke.kv.transport import MAX_SIGNAL_BYTES
from twostroke.v1.transfer_pb2 import KvSlice, TransferSignal, TransferTicket
from unit.kv.kv_fakes import FakeRank


class Listening:
    """A source, and what it says."""

    def __init__(self, rank: FakeRank | None = None, *, verify: int = 0) -> None:
        self.rank = rank or FakeRank()
        self.sent: list[tuple[str, TransferSignal]] = []
        self.renewed: list[str] = []
        self.done: list[str] = []
        self.source = Source(
            self.rank.memory,
            lambda name, signal: self.sent.append((name, signal)),
            self.renewed.append,
            self.done.append,
            verify=verify,
        )

    def ticket(self, reader: str = "d", handoff_id: str = "h", readers: int = 1, cut: KvSlice | None = None) -> None:
        self.source.ticket(reader, TransferTicket(handoff_id=handoff_id, readers=readers, slice=cut))

    def heard(self, reader: str = "d") -> list[str]:
        """What a reader was told since the last look, in short."""
        told = [short(signal) for name, signal in self.sent if name == reader]
        self.sent = [(name, signal) for name, signal in self.sent if name != reader]
        return told

    def digests(self) -> list[list[bytes]]:
        """Those sent, after all work is done."""
        while self.source.work() == 0.0:
            pass
        found = [list(signal.digest.digests) for _, signal in self.sent if signal.HasField("digest")]
        self.sent.clear()
        return found


def short(signal: TransferSignal) -> str:
    match signal.WhichOneof("message"):
        case "ready":
            ready = signal.ready
            return f"ready {ready.chunk}: {ready.first_block} {list(ready.block_ids)}"
        case "final":
            return f"final {signal.final.blocks} {signal.final.first_token_id}"
        case "gone":
            return f"gone: {signal.gone.reason}"
        case "digest":
            return f"digest {signal.digest.chunk}"
        case kind:
            return str(kind)


@pytest.fixture
def listening() -> Listening:
    return Listening()


def test_chunks_are_told_in_order_as_they_come(listening: Listening) -> None:
    source = listening.source
    source.offer("h")
    listening.ticket()
    assert listening.heard() == ["held"]
    source.announce("h", Blocks(0, [7, 3]))
    assert listening.heard() == ["ready 0: 0 [7, 3]"]
    source.announce("h", Blocks(2, [9]))
    source.finish("h", 3, 42)
    assert listening.heard() == ["ready 1: 2 [9]", "final 3 42"]


def test_a_late_ticket_is_told_everything(listening: Listening) -> None:
    source = listening.source
    source.offer("h")
    source.announce("h", Blocks(0, [7]))
    source.announce("h", Blocks(1, [8]))
    source.finish("h", 2, 5)
    assert not listening.sent
    listening.ticket()
    assert listening.heard() == ["held", "ready 0: 0 [7]", "ready 1: 1 [8]", "final 2 5"]


def test_an_early_ticket_is_answered_and_served_when_the_offer_comes(listening: Listening) -> None:
    """The reader hears of a hand-off sooner than this thread does."""
    listening.ticket()
    listening.ticket()
    assert listening.heard() == ["held", "held"]
    assert listening.renewed == []
    listening.source.offer("h")
    listening.source.announce("h", Blocks(0, [4]))
    assert listening.heard() == ["held", "ready 0: 0 [4]"]
    assert listening.renewed == ["h"]


def test_a_ticket_sent_again_renews_and_is_told_anew(listening: Listening) -> None:
    """A signal may have been lost; the reader passes over what it knows."""
    listening.source.offer("h")
    listening.ticket()
    listening.source.announce("h", Blocks(0, [4]))
    listening.heard()
    listening.ticket()
    assert listening.heard() == ["held", "ready 0: 0 [4]"]
    assert listening.renewed == ["h", "h"]


def test_all_readers_are_told_and_the_last_one_ends_it(listening: Listening) -> None:
    source = listening.source
    source.offer("h")
    for reader in ("d/0", "d/1"):
        listening.ticket(reader, readers=2)
    source.announce("h", Blocks(0, [4]))
    source.finish("h", 1, 5)
    told = ["held", "ready 0: 0 [4]", "final 1 5"]
    assert listening.heard("d/0") == told
    assert listening.heard("d/1") == told
    source.read("d/0", "h")
    source.read("d/0", "h")
    assert listening.done == []
    source.read("d/1", "h")
    source.read("d/1", "h")
    assert listening.done == ["h"]


def test_a_reader_that_never_asked_ends_nothing(listening: Listening) -> None:
    listening.source.offer("h")
    listening.source.read("stranger", "h")
    listening.source.read("d", "unknown")
    assert listening.done == []


def test_withdrawing_tells_those_that_still_read(listening: Listening) -> None:
    """O-25, O-26: nobody waits for what will not come."""
    source = listening.source
    source.offer("h")
    for reader in ("d/0", "d/1"):
        listening.ticket(reader, readers=2)
        listening.heard(reader)
    source.read("d/0", "h")
    source.withdraw("h", "the client left")
    assert listening.heard("d/0") == []
    assert listening.heard("d/1") == ["gone: the client left"]
    source.announce("h", Blocks(0, [1]))
    source.finish("h", 1, 1)
    source.withdraw("h", "again")
    assert not listening.sent


def test_a_ticket_for_what_is_over_is_told_so(listening: Listening) -> None:
    """O-26, O-31: also after it was read, and where it was withdrawn before the ticket came."""
    source = listening.source
    source.offer("h")
    source.withdraw("h", "expired")
    listening.ticket()
    assert listening.heard() == ["gone: it is not held any more"]
    assert listening.renewed == []
    source.offer("read")
    listening.ticket(handoff_id="read")
    source.read("d", "read")
    listening.heard()
    listening.ticket(handoff_id="read")
    assert listening.heard() == ["gone: it is not held any more"]


def test_a_reader_that_connects_anew_is_told_from_the_beginning(listening: Listening) -> None:
    source = listening.source
    source.offer("h")
    listening.ticket("d")
    listening.ticket("other")
    source.announce("h", Blocks(0, [4]))
    source.finish("h", 1, 5)
    listening.heard("d")
    listening.heard("other")
    source.hello("d")
    assert not listening.sent
    listening.ticket("d")
    assert listening.heard("d") == ["held", "ready 0: 0 [4]", "final 1 5"]
    assert listening.heard("other") == []


def test_a_reader_that_is_gone_has_no_early_tickets(listening: Listening) -> None:
    """O-79: nothing is left of an earlier life."""
    listening.ticket("d")
    listening.ticket("other")
    listening.heard("d")
    source = listening.source
    source.hello("d")
    source.offer("h")
    assert listening.heard("d") == []
    assert listening.heard("other") == ["held", "held"]


def test_a_chunk_that_the_device_still_writes_waits_and_those_behind_it_too(listening: Listening) -> None:
    source = listening.source
    written: list[bool] = []
    source.offer("h")
    listening.ticket()
    listening.heard()
    source.announce("h", Blocks(0, [4]), lambda: bool(written))
    source.announce("h", Blocks(1, [5]))
    source.finish("h", 2, 5)
    assert source.work() == DEVICE_POLL_S
    assert listening.heard() == []
    written.append(True)
    source.work()
    assert listening.heard() == ["ready 0: 0 [4]", "ready 1: 1 [5]", "final 2 5"]
    assert source.work() == math.inf


def test_digests_follow_for_each_way_of_cutting() -> None:
    """O-06, O-07: a digest per piece of the reader's, taken once for all readers that cut alike."""
    rank = FakeRank(heads=4, block_tokens=8)
    blocks = Blocks(0, [3, 1])
    rank.write(blocks)
    listening = Listening(rank, verify=1)
    listening.source.offer("h")
    cuts = (None, KvSlice(piece_tokens=4, first_head=0, heads=2), KvSlice(piece_tokens=4, first_head=2, heads=2))
    listening.source.announce("h", blocks)
    found = []
    for number, cut in enumerate(cuts):
        listening.ticket(f"d/{number}", readers=3, cut=cut)
        found += listening.digests()
        assert found[number] == [digest(piece) for piece in pieces(rank.memory, blocks, cut, (0, 16))]
    assert [len(digests) for digests in found] == [2, 4, 4]
    assert found[1] != found[2]
    rank.write(Blocks(5, [3]))
    listening.ticket("d/3", readers=3, cut=cuts[1])
    assert listening.digests() == [found[1]]


def test_a_sample_of_the_pieces_has_digests() -> None:
    rank = FakeRank()
    blocks = Blocks(0, [3, 1, 5, 7, 2])
    rank.write(blocks)
    listening = Listening(rank, verify=3)
    listening.source.offer("h")
    listening.ticket()
    listening.source.announce("h", blocks)
    found = [digest(piece) for piece in pieces(rank.memory, blocks, None, (0, 20))]
    assert listening.digests() == [[found[0], b"", b"", found[3], b""]]


def test_digests_are_computed_one_chunk_at_a_time() -> None:
    """The thread goes on polling between them."""
    listening = Listening(verify=1)
    source = listening.source
    source.offer("h")
    listening.ticket()
    source.announce("h", Blocks(0, [1]))
    source.announce("h", Blocks(1, [2]))
    listening.heard()
    assert source.work() == 0.0
    assert listening.heard() == ["digest 0"]
    assert source.work() == 0.0
    assert listening.heard() == ["digest 1"]
    assert source.work() == math.inf


@pytest.mark.parametrize("block_tokens", [4, 8, 16, 128])
def test_every_signal_fits_however_long_the_prompt_and_small_the_pieces(block_tokens: int) -> None:
    """O-06: a reader with blocks of 4 tokens, a prompt of 100,000 tokens that was all cached."""
    count = 100_000 // block_tokens
    rank = FakeRank(layers=1, heads=1, block_tokens=block_tokens)
    listening = Listening(rank, verify=1)
    listening.source.offer("h")
    listening.ticket(cut=KvSlice(piece_tokens=4, first_head=0, heads=1))
    listening.source.announce("h", Blocks(0, [number % rank.blocks for number in range(count)]))
    while listening.source.work() == 0.0:
        pass
    ready = [signal.ready for _, signal in listening.sent if signal.HasField("ready")]
    assert [chunk.first_block for chunk in ready] == list(range(0, count, CHUNK_TOKENS // block_tokens))
    assert sum(len(chunk.block_ids) for chunk in ready) == count
    sizes = [len(signal.SerializeToString()) for _, signal in listening.sent]
    assert max(sizes) <= MAX_SIGNAL_BYTES
    digests = [len(signal.digest.digests) for _, signal in listening.sent if signal.HasField("digest")]
    assert sum(digests) == count * block_tokens // 4


@pytest.mark.parametrize(
    "cut",
    [
        KvSlice(piece_tokens=0, first_head=2, heads=2),
        KvSlice(piece_tokens=2, first_head=2, heads=2),
        KvSlice(piece_tokens=6, first_head=2, heads=2),
        KvSlice(piece_tokens=16, first_head=2, heads=2),
        KvSlice(piece_tokens=4, first_head=2, heads=0),
        KvSlice(piece_tokens=4, first_head=1, heads=2),
        KvSlice(piece_tokens=4, first_head=2, heads=3),
    ],
    ids=str,
)
def test_a_cut_that_the_blocks_do_not_have_is_refused(cut: KvSlice) -> None:
    """O-06, O-43: whatever a reader asks for, the thread goes on and looks at no memory but its own."""
    listening = Listening(FakeRank(first_head=2, heads=2, block_tokens=8), verify=1)
    listening.source.offer("h")
    listening.source.announce("h", Blocks(0, [1]))
    listening.ticket(cut=cut)
    (told,) = listening.heard()
    assert told.startswith("gone: its blocks cannot be cut so")
    assert listening.source.work() == math.inf
    listening.ticket(cut=KvSlice(piece_tokens=4, first_head=3, heads=1))
    assert len(listening.digests()) == 1


def test_what_is_said_of_unknown_handoffs_is_ignored(listening: Listening) -> None:
    """O-31."""
    calls: tuple[Callable[[], None], ...] = (
        lambda: listening.source.finish("h", 1, 1),
        lambda: listening.source.withdraw("h", "why not"),
        lambda: listening.source.hello("d"),
    )
    for call in calls:
        call()
    assert listening.sent == []
    assert listening.source.work() == math.inf


def test_blocks_that_come_before_the_news_of_their_handoff_are_not_lost(listening: Listening) -> None:
    """A step of a short prompt can be over before this thread has heard of the hand-off."""
    source = listening.source
    listening.ticket()
    source.announce("h", Blocks(0, [7]))
    source.offer("h")
    source.finish("h", 1, 42)
    assert listening.heard() == ["held", "held", "ready 0: 0 [7]", "final 1 42"]


def test_blocks_that_come_after_the_end_of_their_handoff_are_not_offered(listening: Listening) -> None:
    """An aborted prompt's last step may end after it was withdrawn."""
    source = listening.source
    source.offer("h")
    listening.ticket()
    source.withdraw("h", "aborted")
    assert listening.heard() == ["held", "gone: aborted"]
    source.announce("h", Blocks(0, [7]))
    source.offer("h")
    listening.ticket()
    assert listening.heard() == ["gone: it is not held any more"]
