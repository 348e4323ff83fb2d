"""One request on the reference engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from twostroke.engine.base import Stroke
from twostroke.engine.reference_kv import digests
from twostroke.engine.reference_pool import PrefixKey
from twostroke.engine.reference_rules import Rules
from twostroke.kv.shm import Words
from twostroke.policy.block_hash import KvIdentity, block_hashes
from twostroke.policy.turns import Prompt
from twostroke.v1.engine_pb2 import PromptStats
from twostroke.v1.kv_pb2 import Handoff


@dataclass(slots=True, eq=False)
class Sequence:
    """A request, its tokens, and how far they have been computed. Two sequences are equal only if they are the same."""

    request_id: str
    ordinal: int
    """The how-manieth request the engine was asked to admit, counted from 1."""
    stroke: Stroke
    rules: Rules
    identity: KvIdentity
    chunk_tokens: int
    """Most tokens of it that one step computes, before it writes; 0 is no limit."""
    order: tuple[int, int]
    """Priority, then arrival: lower runs earlier."""
    prompt_tokens: int
    tokens: list[int]
    """Prompt and answer so far."""
    admitted_s: float
    handoff: Handoff | None = None
    """KV still to be fetched."""
    early: bool = False
    """Its prompt is offered from the first step on, so it takes all its blocks at once."""
    hashes: list[bytes] = field(default_factory=list)
    """Of its full blocks, as far as they were asked for."""
    digests: Words = field(init=False)
    """Digests of the tokens that were there when computing began, or began again."""
    blocks: list[int] = field(default_factory=list)
    expected_cached_tokens: int = 0
    """Found in the prefix cache when it came."""
    fetch_from: int = 0
    """Blocks before this one were in the prefix cache."""
    computed: int = 0
    """Leading tokens whose KV is in the blocks."""
    digest: int = 0
    """Digest of the last computed token."""
    mixture: int | None = None
    """Sum over the computed tokens' KV; None until the blocks have been read from the first to the last."""
    first_step_s: float | None = None
    ran: bool = False
    """A step that includes this request has been carried out."""
    announced: bool = False
    """`started` has been reported."""
    reported: bool = False
    """The prompt's statistics have been reported."""
    cached_tokens: int = 0
    transferred_tokens: int = 0
    transfer_chunks: int = 0
    computed_tokens: int = 0

    def __post_init__(self) -> None:
        self.digests = digests(self.tokens)

    @property
    def missing(self) -> int:
        """Tokens whose KV is not there yet."""
        return len(self.tokens) - self.computed

    @property
    def decoding(self) -> bool:
        """Whether the next step computes the one token that the last step chose."""
        return self.mixture is not None

    @property
    def generated(self) -> int:
        """Tokens of the answer."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def pending_prompt_tokens(self) -> int:
        """Prompt tokens still to be computed here."""
        return 0 if self.handoff else max(0, self.prompt_tokens - self.computed)

    def prefix_keys(self, block_size_tokens: int, start: int, stop: int) -> list[PrefixKey]:
        """Keys of the full blocks start to stop."""
        if len(self.hashes) < stop:
            tokens = self.tokens[: stop * block_size_tokens]
            self.hashes = block_hashes(tokens, block_size_tokens, self.identity, known=self.hashes)
        return self.hashes[start:stop]

    def reusable_tokens(self) -> int:
        """Leading tokens that may come from the prefix cache."""
        if not self.rules.read_prefix_cache:
            return 0
        if self.handoff:
            return self.prompt_tokens
        # The last prompt token is always computed, so that every hold ends in a block of its own.
        return len(self.tokens) - 1 if self.reported else self.prompt_tokens - 1

    def prompt(self, block_size_tokens: int) -> Prompt:
        """Its place among those that have more than one token to compute. It must hold no blocks while it waits."""
        left = self.missing - (0 if self.blocks else self.expected_cached_tokens)
        return Prompt(
            left,
            self.chunk_tokens,
            self.order[0],
            resumed=self.reported,
            blocks=None if self.blocks else -(-left // block_size_tokens),
        )

    def restart(self) -> None:
        """Forgets all KV, for a sequence whose blocks were taken away; its tokens stay."""
        self.blocks = []
        self.computed = 0
        self.mixture = None
        self.early = False
        self.digests = digests(self.tokens)

    def received(self, first_token: int | None, chunks: int) -> None:
        """The prompt's KV is in the blocks. first_token: prefill's; it counts where there is none yet. chunks: reads
        that it took."""
        self.handoff = None
        self.transfer_chunks = chunks
        self.computed = self.prompt_tokens
        self.transferred_tokens = self.prompt_tokens - self.cached_tokens
        if first_token is not None and not self.generated:
            self.tokens.append(first_token)
            self.digests = digests(self.tokens)

    def prompt_stats(self, now_s: float) -> PromptStats:
        """What the prompt cost, when its first token is chosen at now_s."""
        first_step_s = now_s if self.first_step_s is None else self.first_step_s
        return PromptStats(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            transferred_tokens=self.transferred_tokens,
            computed_tokens=self.computed_tokens,
            queue_ms=(first_step_s - self.admitted_s) * 1e3,
            run_ms=(now_s - first_step_s) * 1e3,
            transfer_chunks=self.transfer_chunks,
        )
