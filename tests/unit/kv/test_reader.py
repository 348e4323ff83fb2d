"""What a reader asks for, fetches, believes and gives up."""

from collections.abc import Sequence

import numpy as np
import pytest

from twostroke.kv.digest import digest
from twostroke.kv.memory import Blocks, pieces, slice_between
from twostroke.kv.reader import SCRATCH_WORDS, SLOWEST_BYTES_PER_S
from twostroke.kv.receive import Part, Receive
from twostroke.kv.transport import Quarantine
from twostroke.v1.transfer_pb2 import TransferDigest, TransferFinal, TransferGone, TransferReady
from unit.kv.kv_fakes import FakeRank, Wire, cells

SLOT, GENERATION, TOKEN = 3, 0xABCD, 77
THERE = (4, 7, 1, 9, 2)
HERE = (8, 3, 11, 0, 6)


class Exchange:
    """A source whose prompt has five blocks, and a reader."""

    def __init__(self, *, timeout_s: float = 10.0, verify: bool = True, source: FakeRank | None = None) -> None:
        self.source = source or FakeRank()
        self.source.write(Blocks(0, THERE))
        self.source.table[SLOT] = GENERATION
        self.rank = FakeRank()
        self.verify = verify
        self.wire = Wire(self.rank, timeout_s, verify=verify)
        self.reader = self.wire.reader

    def expect(self, request_id: str = "r", handoff_id: str = "h", *, slot: int = SLOT) -> None:
        part = Part("s", self.source.memory, slice_between(self.source.memory, self.rank.memory))
        self.reader.expect(Receive(request_id, handoff_id, slot, GENERATION, [part], self.wire.now_s))

    def begin(self, first: int = 0, ids: Sequence[int] = HERE, request_id: str = "r") -> None:
        self.reader.begin(request_id, Blocks(first, list(ids)))

    def ready(self, chunk: int, first: int, count: int, handoff_id: str = "h") -> None:
        """Blocks are announced."""
        ids = THERE[first : first + count]
        message = TransferReady(
            handoff_id=handoff_id, chunk=chunk, first_block=first, block_ids=ids, digests_follow=self.verify
        )
        self.reader.ready("s", message)

    def digest(self, chunk: int, first: int, count: int) -> None:
        """And what they must look like."""
        tokens = first * self.source.block_tokens, (first + count) * self.source.block_tokens
        cut = slice_between(self.source.memory, self.rank.memory)
        found = pieces(self.source.memory, Blocks(0, THERE), cut, tokens)
        message = TransferDigest(handoff_id="h", chunk=chunk, digests=[digest(piece) for piece in found])
        self.reader.digests("s", message)

    def final(self, blocks: int = 5, handoff_id: str = "h") -> None:
        self.reader.final("s", TransferFinal(handoff_id=handoff_id, blocks=blocks, first_token_id=TOKEN))

    def chunks(self, *sizes: int) -> None:
        """Announces these, digests and all."""
        first = 0
        for chunk, size in enumerate(sizes):
            self.ready(chunk, first, size)
            if self.verify:
                self.digest(chunk, first, size)
            first += size

    def right(self, tokens: range = range(20)) -> bool:
        return np.array_equal(self.rank.of_prompt(Blocks(0, HERE))[:, :, tokens], cells(2, range(2), tokens))


@pytest.fixture
def exchange() -> Exchange:
    return Exchange()


def test_chunks_are_fetched_as_they_come_and_the_hold_last(exchange: Exchange) -> None:
    wire = exchange.wire
    exchange.expect()
    assert wire.connected == ["s"]
    assert wire.asked() == ["s"]
    exchange.begin()
    exchange.ready(0, 0, 3)
    assert len(wire.reads) == 1
    wire.complete()
    assert exchange.right(range(12))
    exchange.digest(0, 0, 3)
    exchange.ready(1, 3, 2)
    exchange.final()
    exchange.digest(1, 3, 2)
    (last,) = wire.take()
    assert not last.is_word
    last.complete()
    (word,) = wire.take()
    assert word.is_word
    assert wire.outcomes == []
    word.complete()
    (outcome,) = wire.outcomes
    assert (outcome.request_id, outcome.first_token_id, outcome.failure) == ("r", TOKEN, None)
    assert outcome.nbytes == exchange.rank.cells[:, :5].nbytes
    assert exchange.right()
    assert [(name, list(signal.done.handoff_ids)) for name, signal in wire.sent] == [("s", ["h"])]
    assert len(exchange.reader) == 0


def test_what_was_announced_before_there_was_room_is_fetched_then(exchange: Exchange) -> None:
    exchange.expect()
    exchange.chunks(5)
    exchange.final()
    assert exchange.wire.reads == []
    exchange.begin()
    exchange.wire.complete()
    assert exchange.wire.outcomes[0].failure is None
    assert exchange.right()


def test_only_the_missing_tail_is_fetched(exchange: Exchange) -> None:
    """O-05: the first two blocks are cached here."""
    exchange.expect()
    exchange.begin(2, HERE[2:])
    exchange.chunks(2, 3)
    exchange.final()
    reads = exchange.wire.take()
    assert len(reads) == 1
    block = exchange.rank.cells[0, 0].nbytes
    starts = {(local - exchange.rank.memory.layer_addresses[0]) // block for local, _, _ in reads[0].rows.tolist()}
    assert starts == {block + layer * exchange.rank.blocks for block in HERE[2:] for layer in range(2)}
    reads[0].complete()
    exchange.wire.complete()
    (outcome,) = exchange.wire.outcomes
    assert outcome.failure is None
    assert outcome.nbytes == exchange.rank.cells[:, :3].nbytes
    assert exchange.right(range(8, 20))
    assert (exchange.rank.of_prompt(Blocks(0, HERE[:2])) == -1).all()


def test_a_missing_tail_that_begins_within_a_block_of_the_source_is_checked_and_right() -> None:
    """O-05, O-06: the source's blocks are twice as long."""
    source = FakeRank(block_tokens=8)
    exchange = Exchange(source=source)
    exchange.expect()
    exchange.begin(3, HERE[3:])
    exchange.ready(0, 0, 3)
    exchange.digest(0, 0, 3)
    exchange.final(3)
    exchange.wire.complete()
    (outcome,) = exchange.wire.outcomes
    assert outcome.failure is None
    assert exchange.right(range(12, 20))


def test_a_full_hit_reads_nothing_and_still_says_that_it_is_done(exchange: Exchange) -> None:
    """O-27."""
    exchange.expect()
    exchange.begin(5, [])
    exchange.chunks(5)
    exchange.final()
    assert [read.is_word for read in exchange.wire.reads] == [True]
    exchange.wire.complete()
    assert exchange.wire.outcomes[0].failure is None
    assert exchange.wire.sent[-1][1].done.handoff_ids == ["h"]


def test_a_receive_that_is_skipped_says_that_it_is_done_and_nothing_more(exchange: Exchange) -> None:
    """O-27: the whole prompt is here, so the engine never makes room for it."""
    exchange.expect()
    exchange.chunks(2)
    exchange.wire.asked()
    exchange.reader.skip("r")
    exchange.reader.skip("r")
    assert [(name, list(signal.done.handoff_ids)) for name, signal in exchange.wire.sent] == [("s", ["h"])]
    exchange.ready(1, 2, 3)
    exchange.final()
    for _ in range(150):
        exchange.wire.now_s += 0.1
        assert exchange.reader.tick() == []
    assert exchange.wire.asked() == []
    assert exchange.wire.reads == []
    assert exchange.wire.outcomes == []


@pytest.mark.parametrize("order", ["read first", "digest first"])
def test_a_wrong_byte_fails_it_and_names_the_blocks(exchange: Exchange, order: str) -> None:
    """O-02, O-15: wrong bytes never count as received."""
    exchange.expect()
    exchange.begin()
    exchange.chunks(2)
    exchange.ready(1, 2, 3)
    if order == "digest first":
        exchange.digest(1, 2, 3)
        exchange.source.cells[1, THERE[3], 1, 2, 0] ^= 1
        exchange.wire.complete()
    else:
        exchange.wire.complete()
        exchange.source.cells[1, THERE[3], 1, 2, 0] ^= 1
        exchange.digest(1, 2, 3)
    exchange.final()
    (outcome,) = exchange.wire.outcomes
    assert outcome.corrupt
    assert outcome.failure == "what arrived from s is not what it has"
    assert outcome.missing == list(HERE[2:])
    assert exchange.wire.reads == []
    assert not any(signal.HasField("done") for _, signal in exchange.wire.sent)


def test_nothing_is_complete_before_the_digests_came(exchange: Exchange) -> None:
    exchange.expect()
    exchange.begin()
    exchange.ready(0, 0, 5)
    exchange.final()
    exchange.wire.complete()
    assert exchange.wire.outcomes == []
    exchange.digest(0, 0, 5)
    exchange.wire.complete()
    assert exchange.wire.outcomes[0].failure is None


@pytest.mark.parametrize("word", [0, GENERATION + 1])
@pytest.mark.parametrize("verify", [True, False])
def test_blocks_given_away_while_they_were_read_fail_it_and_none_is_kept(word: int, verify: bool) -> None:
    """O-03: even those whose digests were right."""
    exchange = Exchange(verify=verify)
    exchange.expect()
    exchange.begin()
    exchange.chunks(3, 2)
    exchange.final()
    for read in exchange.wire.take():
        read.complete()
    exchange.source.table[SLOT] = word
    exchange.wire.complete()
    (outcome,) = exchange.wire.outcomes
    assert outcome.failure == "s gave the blocks away while they were being read"
    assert outcome.missing == list(HERE)
    assert not outcome.corrupt


def test_a_source_that_gives_up_fails_it_and_no_block_is_kept(exchange: Exchange) -> None:
    """O-03, O-26: it may have given the blocks away before it said so."""
    exchange.expect()
    exchange.begin()
    exchange.chunks(3)
    exchange.wire.complete()
    exchange.reader.gone("s", TransferGone(handoff_id="h", reason="its lease ended"))
    (outcome,) = exchange.wire.outcomes
    assert outcome.failure == "s gave it up: its lease ended"
    assert outcome.missing == list(HERE)


def test_without_digests_no_block_of_a_failed_receive_is_believed() -> None:
    """O-02, O-03: nothing shows that they were still held."""
    exchange = Exchange(verify=False)
    exchange.expect()
    exchange.begin()
    exchange.chunks(4)
    exchange.wire.complete()
    exchange.wire.lose("s", again=False)
    assert exchange.wire.outcomes[0].missing == list(HERE)


def test_a_sample_of_digests_finds_wrong_bytes_but_shows_no_block_to_be_right(exchange: Exchange) -> None:
    """O-02: of a failed receive nothing is kept on its word."""
    for number in range(2):
        exchange.expect(f"r{number}")
        exchange.begin(request_id=f"r{number}")
        exchange.ready(0, 0, 5)
        exchange.wire.complete()
        found = [digest(piece) for piece in pieces(exchange.source.memory, Blocks(0, THERE), None, (0, 20))]
        sample = [each if index == 2 else b"" for index, each in enumerate(found)]
        if number == 1:
            exchange.rank.cells[0, HERE[2], 0, 0, 0] ^= 1
        exchange.reader.digests("s", TransferDigest(handoff_id="h", digests=sample))
        if number == 0:
            exchange.wire.lose("s", again=False)
        outcome = exchange.wire.outcomes.pop()
        assert outcome.corrupt == (number == 1)
        assert outcome.missing == list(HERE)


@pytest.mark.parametrize("lost", [(0,), (3,), (4,), (1, 3)])
def test_the_blocks_that_did_not_arrive_are_named(exchange: Exchange, lost: tuple[int, ...]) -> None:
    """O-02: six blocks there, any of them lost here."""
    exchange.expect()
    exchange.begin()
    exchange.chunks(1, 1, 1, 1, 1)
    exchange.final()
    for number, read in enumerate(exchange.wire.take()):
        if number not in lost:
            read.complete()
    exchange.wire.lose("s", again=False)
    (outcome,) = exchange.wire.outcomes
    assert outcome.failure == "s: connection reset"
    assert outcome.missing == [HERE[index] for index in lost]
    assert outcome.first_token_id == TOKEN
    assert exchange.wire.reads == []


def test_a_source_that_leaves_blocks_out_completes_nothing(exchange: Exchange) -> None:
    """O-02: four blocks are told of as the whole prompt; five are needed."""
    exchange.expect()
    exchange.begin()
    exchange.chunks(4)
    exchange.final(4)
    exchange.wire.complete()
    (outcome,) = exchange.wire.outcomes
    assert outcome.failure == "the source left blocks out"
    assert outcome.missing == [HERE[4]]


def test_a_last_block_that_a_smaller_one_fills_in_part_is_enough() -> None:
    """O-06."""
    exchange = Exchange(source=FakeRank(block_tokens=2))
    exchange.expect()
    exchange.begin(0, HERE[:3])
    exchange.chunks(5)
    exchange.final(5)
    exchange.wire.complete()
    (outcome,) = exchange.wire.outcomes
    assert outcome.failure is None
    assert np.array_equal(exchange.rank.of_prompt(Blocks(0, HERE[:3]))[:, :, :10], cells(2, range(2), range(10)))


def test_a_silent_source_is_given_up_at_its_deadline(exchange: Exchange) -> None:
    """O-33, O-35: and one that answers is not."""
    wire, reader = exchange.wire, exchange.reader
    exchange.expect()
    for _ in range(60):
        wire.now_s += 0.5
        reader.held("s")
        assert reader.tick() == []
    for _ in range(20):
        wire.now_s += 0.5
        assert reader.tick() == []
    wire.now_s += 0.1
    assert reader.tick() == [("s", "s has not answered for 10 s (--kv-stall-s)")]
    wire.lose("s", again=False)
    assert wire.outcomes[0].failure == "s: connection reset"
    assert reader.tick() == []


def test_waiting_renews_four_times_per_deadline(exchange: Exchange) -> None:
    exchange.expect()
    exchange.wire.asked()
    asked = 0
    for _ in range(100):
        exchange.wire.now_s += 0.1
        exchange.reader.tick()
        asked += len(exchange.wire.asked())
    assert asked == 3


def test_every_rank_of_a_source_is_renewed() -> None:
    """O-07: the second one must not go silent while the first is asked."""
    rank = FakeRank()
    wire = Wire(rank)
    halves = [FakeRank(first_head=head, heads=1) for head in range(2)]
    parts = [
        Part(f"s/{head}", half.memory, slice_between(half.memory, rank.memory), 2) for head, half in enumerate(halves)
    ]
    wire.reader.expect(Receive("r", "h", SLOT, GENERATION, parts, wire.now_s))
    for _ in range(200):
        wire.now_s += 0.1
        assert wire.reader.tick() == []
        for name in wire.asked():
            wire.reader.held(name)


def test_a_source_not_heard_of_since_long_ago_has_its_full_time(exchange: Exchange) -> None:
    """O-39: after hours without traffic."""
    exchange.reader.held("s")
    for _ in range(100):
        exchange.wire.now_s += 1.0
        assert exchange.reader.tick() == []
    exchange.expect()
    for _ in range(95):
        exchange.wire.now_s += 0.1
        assert exchange.reader.tick() == []


def test_the_time_in_which_this_process_was_stopped_is_nobodys_silence(exchange: Exchange) -> None:
    exchange.expect()
    exchange.wire.now_s += 1.0
    assert exchange.reader.tick() == []
    exchange.wire.now_s += 60.0
    assert exchange.reader.tick() == []
    for _ in range(90):
        exchange.wire.now_s += 0.1
        assert exchange.reader.tick() == []


def test_a_lost_connection_is_tried_once_more_and_only_what_is_missing_is_fetched(exchange: Exchange) -> None:
    wire = exchange.wire
    exchange.expect()
    exchange.begin()
    exchange.chunks(2, 3)
    arrived, _ = wire.take()
    arrived.complete()
    wire.asked()
    wire.lose("s", again=True)
    assert wire.outcomes == []
    assert wire.asked() == ["s"]
    exchange.chunks(2, 3)
    exchange.final()
    (again,) = wire.take()
    assert int(again.rows[:, 2].sum()) == exchange.rank.cells[:, :3].nbytes
    again.complete()
    wire.complete()
    (outcome,) = wire.outcomes
    assert outcome.failure is None
    assert outcome.nbytes == exchange.rank.cells[:, :5].nbytes
    assert exchange.right()


def test_a_connection_lost_twice_is_a_failure(exchange: Exchange) -> None:
    """O-78: and the second try has only what was left of the source's time."""
    exchange.expect()
    exchange.begin()
    for _ in range(9):
        exchange.wire.now_s += 1.0
        assert exchange.reader.tick() == []
    exchange.wire.lose("s", again=True)
    assert exchange.wire.outcomes == []
    for _ in range(11):
        exchange.wire.now_s += 0.1
        silent = exchange.reader.tick()
    assert [name for name, _ in silent] == ["s"]
    exchange.wire.lose("s", again=True)
    assert exchange.wire.outcomes[0].failure == "s: connection reset"


def test_a_connection_lost_while_the_hold_is_looked_at_is_looked_at_again(exchange: Exchange) -> None:
    """And costs no word of the scratch memory, however often."""
    wire = exchange.wire
    for number in range(SCRATCH_WORDS + 5):
        exchange.expect(f"r{number}")
        exchange.begin(request_id=f"r{number}")
        exchange.chunks(5)
        exchange.final()
        for read in wire.take():
            read.complete()
        assert [read.is_word for read in wire.reads] == [True]
        wire.lose("s", again=True)
        assert wire.reads == []
        exchange.chunks(5)
        wire.complete()
        assert wire.outcomes.pop().failure is None


def test_more_receives_than_scratch_words_end_one_after_the_other() -> None:
    exchange = Exchange(verify=False)
    wire = exchange.wire
    for number in range(SCRATCH_WORDS + 5):
        exchange.expect(f"r{number}", f"h{number}")
        exchange.begin(5, [], f"r{number}")
        exchange.ready(0, 0, 5, f"h{number}")
        exchange.final(handoff_id=f"h{number}")
    assert len(wire.reads) == SCRATCH_WORDS
    wire.complete()
    exchange.reader.held("s")
    exchange.reader.tick()
    wire.complete()
    assert [outcome.failure for outcome in wire.outcomes] == [None] * (SCRATCH_WORDS + 5)


def test_an_abort_while_a_read_is_in_flight_is_over_when_the_read_is(exchange: Exchange) -> None:
    """O-04, O-29: the blocks are not free before."""
    exchange.expect()
    exchange.begin()
    exchange.chunks(2, 3)
    exchange.reader.cancel("r")
    assert exchange.wire.outcomes == []
    first, second = exchange.wire.take()
    first.complete()
    exchange.final()
    assert exchange.wire.outcomes == []
    second.complete()
    (outcome,) = exchange.wire.outcomes
    assert outcome.failure == "cancelled"
    assert exchange.wire.reads == []
    exchange.reader.cancel("r")
    assert len(exchange.wire.outcomes) == 1


def test_an_abort_while_a_read_is_in_flight_is_over_when_the_source_is_fenced(exchange: Exchange) -> None:
    """O-04, O-26."""
    exchange.expect()
    exchange.begin()
    exchange.chunks(5)
    exchange.reader.cancel("r")
    exchange.wire.lose("s", again=True)
    assert exchange.wire.outcomes[0].failure == "cancelled"
    assert exchange.wire.outcomes[0].missing == list(HERE)


def test_an_abort_with_nothing_in_flight_is_over_at_once(exchange: Exchange) -> None:
    """O-30: what comes later about it is ignored."""
    exchange.expect()
    exchange.reader.cancel("r")
    assert exchange.wire.outcomes[0].failure == "cancelled"
    assert not exchange.wire.outcomes[0].missing
    exchange.begin()
    exchange.chunks(5)
    exchange.final()
    assert exchange.wire.reads == []
    assert len(exchange.wire.outcomes) == 1


def test_memory_in_quarantine_is_named_by_those_that_had_reads_in_flight(exchange: Exchange) -> None:
    """O-04: over a backend whose fence does not hold; others of the same source are tried again."""
    exchange.expect("reading", "h")
    exchange.expect("waiting", "h2")
    exchange.begin(request_id="reading")
    exchange.chunks(5)
    ranges = ((4096, 64), (8192, 64))
    exchange.wire.asked()
    exchange.wire.lose("s", again=True, quarantine=Quarantine(ranges))
    (outcome,) = exchange.wire.outcomes
    assert (outcome.request_id, outcome.quarantine) == ("reading", ranges)
    assert exchange.wire.asked() == ["s"]


def test_a_read_that_is_refused_fails_it(exchange: Exchange) -> None:
    exchange.expect()
    exchange.begin()
    exchange.chunks(5)
    exchange.wire.take()[0].over("a row lies outside")
    assert exchange.wire.outcomes[0].failure == "a row lies outside"


def test_what_could_not_be_posted_is_posted_when_the_source_is_there_again(exchange: Exchange) -> None:
    exchange.wire.down.add("s")
    exchange.expect()
    exchange.begin()
    exchange.chunks(5)
    exchange.final()
    assert exchange.wire.reads == []
    exchange.wire.down.clear()
    exchange.wire.lose("s", again=True)
    exchange.chunks(5)
    exchange.wire.complete()
    assert exchange.wire.outcomes[0].failure is None


def test_reads_that_wait_behind_others_have_more_time(exchange: Exchange) -> None:
    """They are worked on in order."""
    exchange.expect()
    exchange.begin()
    exchange.chunks(1, 1, 1, 1, 1)
    block_s = exchange.rank.cells[:, 0].nbytes / SLOWEST_BYTES_PER_S
    deadlines = [read.deadline_s for read in exchange.wire.reads]
    assert deadlines == pytest.approx([10.0 + number * block_s for number in range(1, 6)], abs=1e-12)
    exchange.wire.complete()
    exchange.final()
    assert [read.deadline_s for read in exchange.wire.reads] == [10.0]


def test_after_failures_the_next_handoffs_succeed(exchange: Exchange) -> None:
    """O-80: no mark stays."""
    for number in range(3):
        exchange.expect(f"failed-{number}")
        exchange.begin(request_id=f"failed-{number}")
        exchange.chunks(5)
        exchange.wire.lose("s", again=False)
    assert all(outcome.failure for outcome in exchange.wire.outcomes)
    exchange.wire.outcomes.clear()
    for number in range(50):
        exchange.expect(f"good-{number}")
        exchange.begin(request_id=f"good-{number}")
        exchange.chunks(5)
        exchange.final()
        exchange.wire.complete()
    assert [outcome.failure for outcome in exchange.wire.outcomes] == [None] * 50


def test_asking_twice_is_asking_once(exchange: Exchange) -> None:
    exchange.expect()
    exchange.expect()
    assert exchange.wire.asked() == ["s"]
    assert len(exchange.reader) == 1


def test_two_requests_may_read_one_handoff(exchange: Exchange) -> None:
    exchange.expect("a")
    exchange.expect("b")
    exchange.begin(request_id="a")
    exchange.begin(ids=(1, 2, 4, 5, 7), request_id="b")
    exchange.chunks(5)
    exchange.final()
    exchange.wire.complete()
    assert sorted(outcome.request_id for outcome in exchange.wire.outcomes) == ["a", "b"]
    assert exchange.right()
    assert np.array_equal(exchange.rank.of_prompt(Blocks(0, (1, 2, 4, 5, 7))), cells(2, range(2), range(20)))


def test_a_prompt_from_two_ranks_is_complete_when_both_parts_are() -> None:
    """O-02, O-07."""
    rank = FakeRank()
    wire = Wire(rank, verify=False)
    halves = [FakeRank(first_head=head, heads=1) for head in range(2)]
    for half in halves:
        half.write(Blocks(0, THERE))
        half.table[SLOT] = GENERATION
    parts = [Part(f"s/{n}", half.memory, slice_between(half.memory, rank.memory), 2) for n, half in enumerate(halves)]
    wire.reader.expect(Receive("r", "h", SLOT, GENERATION, parts, wire.now_s))
    wire.reader.begin("r", Blocks(0, HERE))
    for name in ("s/0", "s/1"):
        assert wire.outcomes == []
        wire.reader.ready(name, TransferReady(handoff_id="h", block_ids=THERE))
        wire.reader.final(name, TransferFinal(handoff_id="h", blocks=5, first_token_id=TOKEN))
        wire.complete()
    assert wire.outcomes[0].failure is None
    assert np.array_equal(rank.of_prompt(Blocks(0, HERE)), cells(2, range(2), range(20)))
    assert [name for name, signal in wire.sent if signal.HasField("done")] == ["s/0", "s/1"]


def test_a_part_that_is_missing_makes_all_its_blocks_missing() -> None:
    """O-02, O-07: half of the heads is not a block."""
    rank = FakeRank()
    wire = Wire(rank)
    halves = [FakeRank(first_head=head, heads=1) for head in range(2)]
    parts = [Part(f"s/{n}", half.memory, slice_between(half.memory, rank.memory), 2) for n, half in enumerate(halves)]
    wire.reader.expect(Receive("r", "h", SLOT, GENERATION, parts, wire.now_s))
    wire.reader.begin("r", Blocks(0, HERE))
    halves[0].write(Blocks(0, THERE))
    found = pieces(halves[0].memory, Blocks(0, THERE), parts[0].cut, (0, 20))
    wire.reader.ready("s/0", TransferReady(handoff_id="h", block_ids=THERE, digests_follow=True))
    wire.reader.digests("s/0", TransferDigest(handoff_id="h", digests=[digest(piece) for piece in found]))
    wire.complete()
    wire.lose("s/1", again=False)
    assert wire.outcomes[0].missing == list(HERE)
