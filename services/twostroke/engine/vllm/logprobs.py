"""Log probabilities of vLLM to and from the wire."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from twostroke.v1 import engine_pb2 as pb


def to_wire(values: Any, first: int = 0) -> pb.Logprobs | None:
    """LogprobsLists or LogprobsTensors, from position `first` on; None for None."""
    if values is None:
        return None
    token_ids, logprobs, ranks = (np.asarray(column)[first:] for column in values[:3])
    if not len(logprobs):
        return None
    return pb.Logprobs(
        columns=logprobs.shape[1],
        token_ids=token_ids.ravel().tolist(),
        logprobs=logprobs.ravel().tolist(),
        ranks=ranks.ravel().tolist(),
    )


def _arrays(wire: pb.Logprobs) -> tuple[Any, Any, Any]:
    shape = (-1, wire.columns)
    return (
        np.fromiter(wire.token_ids, np.int32, len(wire.token_ids)).reshape(shape),
        np.fromiter(wire.logprobs, np.float32, len(wire.logprobs)).reshape(shape),
        np.fromiter(wire.ranks, np.int32, len(wire.ranks)),
    )


def to_lists(wire: pb.Logprobs) -> LogprobsLists:
    """As vLLM's front end takes those of generated tokens."""
    return LogprobsLists(*_arrays(wire))


def to_tensors(wire: pb.Logprobs) -> LogprobsTensors:
    """As vLLM's front end takes those of prompts."""
    return LogprobsTensors(*(torch.from_numpy(column) for column in _arrays(wire)))
