"""From what workers say of themselves to what placement counts with."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from twostroke.policy.inflight import Report
from twostroke.policy.snapshot import WorkerSnapshot
from twostroke.policy.spare import Lenders
from twostroke.v1.worker_pb2 import GetInfoResponse, WatchLoadResponse

# The one connector that begins to move KV when prefill has ended.
_AFTERWARDS = "nixl"


def report_of(load: WatchLoadResponse) -> Report:
    """A load report. Prompts that are being computed run, too, and write nothing yet."""
    reading = max(0, load.pending_prompts - load.waiting_requests)
    return Report(
        pending_prompt_tokens=load.pending_prompt_tokens,
        pending_prompts=load.pending_prompts,
        used_blocks=load.used_blocks,
        running_sequences=max(0, load.running_requests - reading),
    )


def kv_bytes_per_token(info: GetInfoResponse) -> int:
    """KV of one token, all layers and ranks; 0 where it is not known."""
    if memories := info.kv_endpoint.memories:
        return sum(len(each.layer_addresses) * each.heads * each.content_bytes for each in memories)
    layout = info.layout
    bits = re.search(r"\d+", layout.dtype)
    return 2 * layout.layers * layout.kv_heads * layout.head_size * (int(bits[0]) if bits else 0) // 8


def lenders(infos: Mapping[str, GetInfoResponse]) -> Lenders:
    """Who lends cores to whom. infos: by the workers' keys."""
    found = {}
    for name, info in infos.items():
        machine, spare = info.cores.machine, set(info.cores.spare)
        if machine and spare:
            found[name] = frozenset(
                other
                for other, its in infos.items()
                if other != name and its.cores.machine == machine and not spare.isdisjoint(its.cores.own)
            )
    return found


def streams_kv(info: GetInfoResponse) -> bool:
    """Whether KV moves while prefill runs."""
    return info.layout.connector != _AFTERWARDS


def trusted(workers: Sequence[WorkerSnapshot], works: Callable[[str], bool]) -> Sequence[WorkerSnapshot]:
    """Without those that fail whatever they are sent, unless none of a kind would be left. works: by their keys."""
    found = [worker for worker in workers if works(worker.worker)]
    return found if _kinds(found) == _kinds(workers) else workers


def _kinds(workers: Sequence[WorkerSnapshot]) -> tuple[bool, bool]:
    return any(each.reads_prompts for each in workers), any(each.writes_answers for each in workers)
