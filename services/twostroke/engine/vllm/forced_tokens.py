"""A logits processor that makes a request choose given tokens first.

This is how decode continues exactly from tokens that the client already has: it takes those steps again with the token
forced. Penalties, min_tokens, grammar, and the request's random numbers then stand as if it had chosen them, and raw
log probabilities stay true, because vLLM computes them before any processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm import SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

FORCED_TOKENS_ARG = "twostroke_forced_token_ids"
BROUGHT_ARG = "twostroke_brought_by"
"""Names the request whose first token came with its KV."""

# The tokens to force, and vLLM's live list of tokens chosen so far.
_Row = tuple[Sequence[int], Sequence[int]]


class ForcedTokens(LogitsProcessor):
    """Forces `extra_args[FORCED_TOKENS_ARG]`, oldest first, or the one token that came with the request's KV."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        """Forcing changes the greedy choice."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follows requests as they join, leave and move within the batch."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, _, output_token_ids in batch_update.added:
            self._rows.pop(index, None)
            if forced := _forced(params):
                self._rows[index] = (forced, output_token_ids)
        for source, target, direction in batch_update.moved:
            moved, displaced = self._rows.pop(source, None), self._rows.pop(target, None)
            if moved is not None:
                self._rows[target] = moved
            if displaced is not None and direction is MoveDirectionality.SWAP:
                self._rows[source] = displaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Leaves only the forced token in the rows that still have one."""
        for index, (forced, chosen) in list(self._rows.items()):
            position = len(chosen)
            if position >= len(forced):
                del self._rows[index]
                continue
            logits[index].fill_(float("-inf"))
            logits[index, forced[position]] = 0.0
        return logits


def _forced(params: SamplingParams) -> Sequence[int] | None:
    if not params.extra_args:
        return None
    if request_id := params.extra_args.get(BROUGHT_ARG):
        token = get_kv_transfer_group().first_token(request_id)
        if token is None:
            raise RuntimeError(f"request {request_id} runs before its first token has come")
        return (token,)
    forced: Sequence[int] | None = params.extra_args.get(FORCED_TOKENS_ARG)
    return forced
